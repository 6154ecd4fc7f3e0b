"""The models of an isoFLOP study: what they cost, and how long each budget trains them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmod.analysis.prefill import training_flops
from mmod.data.readers.text import create_train_text
from mmod.io.yaml import merged, read_yaml
from mmod.studies.isoflop.config import IsoflopConfig
from mmod.studies.jobs import Job
from mmod.studies.rates import with_rate
from mmod.training.engine.loop import steps_of_epoch
from mmod.training.text.config import TrainConfig
from mmod.training.text.model import create_models, window_flops

__all__ = ["Place", "count_flops", "plan"]


@dataclass(frozen=True)
class Place:
    """One model of the grid, trained with one budget.

    Args:
        series: Name of its routing.
        size: Name of its size.
        budget: FLOPs of its training that were asked for.
        parameters: Its parameters, routers included.
        forward: FLOPs of the forward pass of a window.
        steps: Optimiser steps of its training.
        spent: FLOPs of these steps.
        config: Training config, but for learning rate, seed and folder.
    """

    series: str
    size: str
    budget: float
    parameters: int
    forward: int
    steps: int
    spent: float
    config: TrainConfig

    @property
    def name(self) -> str:
        """What its runs are called."""
        return f"{self.series}-{self.size}-{self.budget:g}"

    def job(self, rate: float, seed: int, folder: Path) -> Job[TrainConfig]:
        """Return one of its runs.

        Args:
            rate: The learning rate.
            seed: The seed.
            folder: Where the run goes, in a folder named after the place.
        """
        config = dataclasses.replace(self.config, output=str(folder / self.name), seed=seed)
        config = with_rate(config, rate / config.optim.lr)
        return Job(f"{self.name} at rate {rate:g}", seed, config, work=self.spent)


def plan(config: IsoflopConfig) -> list[Place]:
    """Return the models of a study, by budget, series and size.

    Args:
        config: The study.

    Raises:
        ValueError: A budget is too small for a step of each part of a run, or takes more text than there is.
    """
    recipe = merged(merged(read_yaml(config.dense), config.changes), {"output": config.output})
    places = []
    for series, routing in config.routings.items():
        for size, fields in config.sizes.items():
            ways = routing if routing is not None and "method" in routing else {"routing": routing}
            changes = {"model": {"config": fields}, **ways}
            own = TrainConfig.from_dict(merged(recipe, changes))
            model, _ = create_models(own)
            parameters = sum(parameter.numel() for parameter in model.parameters())
            forward, window = count_flops(model, own.data.length)
            places += [_place(own, series, size, budget, parameters, forward, window) for budget in config.budgets]
    _check_text(places)
    return sorted(places, key=lambda place: place.budget)


def count_flops(model: Any, length: int) -> tuple[int, int]:
    """Count a window as training runs it, with logits of every token and the top-k of routed layers.

    Args:
        model: A causal language model.
        length: Tokens of the window.

    Returns:
        FLOPs of the forward pass, and of forward and backward pass.

    Raises:
        ValueError: A model routed by threshold, whose cost follows from the text.
    """
    return window_flops(model, length), training_flops(model, length)


def _place(
    config: TrainConfig, series: str, size: str, budget: float, parameters: int, forward: int, window: int
) -> Place:
    of_step = window * config.data.batch_size * config.accumulate
    paid, parts = budget / of_step, range(config.epochs, 2 * config.epochs)
    if paid < config.epochs:
        raise ValueError(
            f"budget {budget:g} pays for {paid:.1f} steps of {series} {size}, and its run has {config.epochs} parts: "
            "give a larger budget, or smaller batches"
        )
    # The number of parts whose whole steps come nearest to what is paid for.
    epochs = min(parts, key=lambda number: abs(number * round(paid / number) - paid))
    steps = epochs * round(paid / epochs)
    own = dataclasses.replace(config, epochs=epochs, epoch_steps=steps // epochs, eval_every=epochs)
    return Place(series, size, budget, parameters, forward, steps, float(of_step * steps), own)


def _check_text(places: list[Place]) -> None:
    longest = max(places, key=lambda place: place.steps)
    stream = create_train_text(longest.config.data, seed=0)
    there = steps_of_epoch(dataclasses.replace(longest.config, epoch_steps=None), stream)
    if longest.steps > there:
        raise ValueError(
            f"budget {longest.budget:g} trains {longest.series} {longest.size} for {longest.steps} steps, and the text "
            f"has {there}: give a smaller budget, or smaller batches"
        )
