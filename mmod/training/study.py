"""What the trade-off studies of every kind of model share: their configs, their jobs, and how points are written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import stdev
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import torch
from torch import nn
from tqdm import tqdm

from mmod import is_routed, routed_blocks
from mmod.config import rational
from mmod.data.files import write_atomically
from mmod.training.logging import write_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Config = TypeVar("Config")
Result = TypeVar("Result")
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
        capacity: Capacity that the study gives its routed blocks; 1 where it gives none.
        seed: Its seed.
        config: How it is trained.
    """

    name: str
    router: str
    capacity: float
    seed: int
    config: Config


class Outcome(Protocol):
    """What a study found."""

    @property
    def folder(self) -> str:
        """The study's folder."""
        ...

    @property
    def points(self) -> Sequence[Any]:
        """Its points, dataclasses of one kind."""
        ...

    def table(self) -> str:
        """Return the points as a Markdown table."""
        ...


def check_study(study: Study, counts: Sequence[str]) -> None:
    """Raise a ValueError unless a study has something to do and leaves to itself what it sets.

    Args:
        study: The study's config.
        counts: Names of its fields that must be at least 1.
    """
    if not study.routers or not study.capacities:
        raise ValueError("a study needs at least one entry in routers and in capacities")
    for capacity in study.capacities:
        if capacity is not None:
            rational(capacity)
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


def in_order(work: Sequence[Job[Config]], progress: bool) -> Iterator[Job[Config]]:
    """Yield the runs of a study under a bar that names the one being done.

    Args:
        work: The runs.
        progress: Show the bar.
    """
    with tqdm(work, desc="study", unit="run", disable=not progress) as bar:
        for job in bar:
            bar.set_postfix_str(f"{job.name}, seed {job.seed}")
            yield job


def compared(work: Sequence[Job[Config]]) -> dict[str, Job[Config]]:
    """Return the runs of the first seed that become points, by name.

    Args:
        work: All runs of a study.
    """
    return {job.name: job for job in work if job.seed == 0 and job.router != BASE}


def evaluated_before(job: Job[Any], evaluate: Callable[[Any], Result], kind: Callable[..., Result]) -> Result:
    """Evaluate the model of a run as it is before its first step; read again when that was done before.

    Args:
        job: The run; the result is kept beside its folder.
        evaluate: From the run's config to the result, a dataclass.
        kind: The class of the result.
    """
    path = Path(job.config.output + ".before.json")
    if path.exists():
        return kind(**json.loads(path.read_text()))
    result = evaluate(job.config)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(dataclasses.asdict(result)) + "\n")  # type: ignore[call-overload]
    return result


def by_threshold(model: nn.Module) -> bool:
    """Return whether some routed block of a model keeps as many tokens as pass a threshold."""
    return is_routed(model) and any(b.router.config.select == "threshold" for b in routed_blocks(model).values())


def deviation(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation over seeds; None for a single one."""
    return stdev(values) if len(values) > 1 else None


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table.

    Args:
        head: Names of the columns.
        rows: Cells of each row.

    Example:
        >>> print(markdown_table(["model", "top-1 %"], [["dense", "95.8"]]))
        | model | top-1 % |
        |---|---|
        | dense | 95.8 |
    """
    head_line, *lines = ["| " + " | ".join(cells) + " |" for cells in (head, *rows)]
    return "\n".join([head_line, "|" + "---|" * len(head), *lines])


def write_outcome(
    config: Any, outcome: Outcome, draw: Callable[[list[dict[str, Any]]], Figure], **facts: object
) -> None:
    """Write what a study found as `tradeoff.{json,csv,md,png}`.

    Args:
        config: The study's config, a dataclass.
        outcome: What it found. A field that holds several figures becomes a column `FIELD/NAME` for each in the CSV.
        draw: From the fields of the points to their picture.
        facts: What the JSON file says beyond config and points.
    """
    folder = Path(outcome.folder)
    points = [dataclasses.asdict(point) for point in outcome.points]
    record = {"config": dataclasses.asdict(config), "torch": torch.__version__, **facts, "points": points}
    write_atomically(folder / "tradeoff.json", json.dumps(record, indent=2) + "\n")
    write_csv(folder / "tradeoff.csv", [_flat(point) for point in points])
    write_atomically(folder / "tradeoff.md", outcome.table() + "\n")
    draw(points).savefig(folder / "tradeoff.png", dpi=150)


def _flat(point: Mapping[str, Any]) -> dict[str, Any]:
    nested = {name: parts for name, parts in point.items() if isinstance(parts, Mapping)}
    flat = {name: value for name, value in point.items() if name not in nested}
    return flat | {f"{name}/{part}": value for name, parts in nested.items() for part, value in parts.items()}


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
