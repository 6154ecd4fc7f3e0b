"""The former class of plans, which are routing configs whose blocks are written out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmod.config.parts import Gate, Score
from mmod.config.plan import fields_of_plan
from mmod.config.routing import RoutingConfig


class Plan:
    """The former name of a `RoutingConfig` whose blocks are written out; a call returns one.

    Example:
        >>> Plan((1, 2), (0.5, 0.25), 4, router="norm")
        RoutingConfig(router='norm', capacity=(0.5, 0.25), blocks=(1, 2), depth=4)
    """

    def __new__(  # type: ignore[misc]  # an alias that takes the former names of the fields
        cls,
        blocks: tuple[int, ...],
        capacities: tuple[float, ...],
        depth: int,
        operators: tuple[str, ...] = (),
        contexts: tuple[str, ...] = (),
        router: str | Score | Mapping[str, Any] | None = None,
        gate: str | Gate | Mapping[str, Any] | None = None,
        protect_prefix: bool = True,
    ) -> RoutingConfig:
        """Return the routing config."""
        _warn("mmod.Plan(blocks, capacities, depth, ...)", "mmod.RoutingConfig(blocks=..., capacity=..., depth=...)")
        fields = {
            "blocks": blocks,
            "capacities": capacities,
            "depth": depth,
            "operators": operators,
            "contexts": contexts,
            "router": router,
            "gate": gate,
            "protect_prefix": protect_prefix,
        }
        return RoutingConfig.from_dict(fields_of_plan(fields)).resolved()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RoutingConfig:
        """Return the routing config of a plan's plain values."""
        _warn("mmod.Plan.from_dict", "mmod.RoutingConfig.from_dict")
        return RoutingConfig.from_dict(fields_of_plan(values)).resolved()

    @classmethod
    def load(cls, path: str | Path) -> RoutingConfig:
        """Read a saved plan, or a saved routing config."""
        _warn("mmod.Plan.load", "mmod.RoutingConfig.load")
        return RoutingConfig.load(path)


def _warn(before: str, now: str) -> None:
    warnings.warn(f"{before} is now {now}", DeprecationWarning, stacklevel=3)
