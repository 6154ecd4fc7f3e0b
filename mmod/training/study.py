"""What the trade-off studies of every kind of model share: their jobs, and how their configs are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import yaml

Config = TypeVar("Config")
# The dense model that all fine-tuning starts from; the point shown as dense is fine-tuned like the others.
BASE = "base"


class Study(Protocol):
    """The fields that configs of all studies have."""

    @property
    def routers(self) -> Mapping[str, Any]:
        """Name of each series to its routing."""
        ...

    @property
    def capacities(self) -> Sequence[float | None]:
        """Capacities of the routed blocks."""
        ...

    @property
    def changes(self) -> Mapping[str, Any]:
        """Fields of the training config to set differently in all runs."""
        ...

    @property
    def finetune(self) -> Mapping[str, Any]:
        """Fields to set differently again in fine-tuning."""
        ...


@dataclass(frozen=True)
class Job(Generic[Config]):
    """One training run of a study.

    Args:
        name: Its name in the study.
        router: Its series.
        capacity: Capacity of its routed blocks; 1 without any.
        seed: Its seed.
        config: How it is trained.
    """

    name: str
    router: str
    capacity: float
    seed: int
    config: Config


def check_study(study: Study, counts: Sequence[str]) -> None:
    """Raise a ValueError unless a study has something to do and leaves to itself what it sets.

    Args:
        study: The study's config.
        counts: Names of its fields that must be at least 1.
    """
    if not study.routers or not study.capacities:
        raise ValueError("a study needs at least one entry in routers and in capacities")
    for name in counts:
        if getattr(study, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(study, name)}")
    for group, given in (("changes", study.changes), ("finetune", study.finetune)):
        taken = sorted({"output", "seed", "routing"} & set(given))
        if taken:
            raise ValueError(f"{group} must not set {', '.join(taken)}: the study sets them")


def is_given(name: str, train_dense: bool, tune_dense: bool) -> bool:
    """Return whether a run stands for weights that are taken as they are.

    Args:
        name: Name of the run.
        train_dense: Whether the study trains its dense model.
        tune_dense: Whether it fine-tunes it like the routed ones.
    """
    return not train_dense and name == (BASE if tune_dense else "dense")


def merged(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested fields with some of them changed.

    Args:
        fields: The fields.
        changes: The changes, nested alike.

    Example:
        >>> merged({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 4}})
        {'a': 1, 'b': {'c': 2, 'd': 4}}
    """
    result = dict(fields)
    for name, value in changes.items():
        old = result.get(name)
        result[name] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def read_yaml(path: str) -> dict[str, Any]:
    """Return the fields of a config file; a FileNotFoundError names one that is not there."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no config file at {path!r}")
    fields = yaml.safe_load(Path(path).read_text())
    if not isinstance(fields, dict):
        raise ValueError(f"{path!r} must hold a mapping of keys to values, got {type(fields).__name__}")
    return fields
