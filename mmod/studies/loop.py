"""Studies whose runs the training loop does."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeVar

from torch import nn

from mmod.blocks import deciding_modules
from mmod.studies.jobs import Tick
from mmod.studies.study import Study
from mmod.training.engine.config import LoopConfig
from mmod.training.engine.evaluate import RoutedResult
from mmod.training.engine.loop import run
from mmod.training.engine.recipe import Recipe

__all__ = ["LoopStudy", "by_data", "kept_shares"]

Config = TypeVar("Config", bound=LoopConfig)
Found = TypeVar("Found", bound=RoutedResult)


class LoopStudy(Study[Config, Found]):
    """A study of a kind of training that has a recipe; see `Study`.

    Attributes:
        recipe: The kind of training.
    """

    recipe: ClassVar[type[Recipe[Any, Any]]]

    def create(self, config: Config) -> nn.Module:
        """Make the model that a run starts from, routed as its config says."""
        return self.recipe(config).create_models()[0]

    def start_from(self, config: Config, folder: str) -> Config:
        """Return the config of the same run from the final weights of the run in `folder`."""
        return dataclasses.replace(config, model=config.model.started_from(folder))

    def train(self, config: Config, tick: Tick) -> Found:
        """Do a run, or read the result of one that is finished."""
        found: Found = run(self.recipe(config), progress=False, tick=tick).best
        return found

    def work(self, config: Config) -> float:
        """Return the epochs of a run."""
        return config.epochs


def by_data(model: nn.Module) -> bool:
    """Return whether the data decides what a pass of a model costs."""
    return any(module.cost_follows_data for module in deciding_modules(model).values())


def kept_shares(model: nn.Module, found: RoutedResult) -> dict[str, Any]:
    """Return the argument `kept` of `mmod.flops` where what a model costs follows from the data."""
    return {"kept": found.kept} if by_data(model) else {}
