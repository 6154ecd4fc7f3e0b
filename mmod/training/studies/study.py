"""What the trade-off studies of every kind of model share: their configs, their jobs, and how points are written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import nn

from mmod import is_routed, routed_blocks
from mmod.io.files import write_atomically
from mmod.training.engine.logging import write_csv
from mmod.training.studies.config import StudyConfig
from mmod.training.studies.runs import Job

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Config = TypeVar("Config")
Result = TypeVar("Result")
# The dense model that all fine-tuning starts from; the point shown as dense is fine-tuned like the others.
BASE = "base"
# The series that others are compared with where a study names no other control.
CONTROL = "random"


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


def compared(work: Sequence[Job[Config]]) -> dict[str, Job[Config]]:
    """Return the runs of the first seed that become points, by name.

    Args:
        work: All runs of a study.
    """
    return {job.name: job for job in work if job.seed == 0 and job.router != BASE}


def partners(study: StudyConfig, work: Sequence[Job[Any]]) -> dict[str, str | None]:
    """Return the name of each model's control, the same capacity of another series; None where it has none.

    Args:
        study: The study's config.
        work: Its runs.
    """
    control = {series: study.controls.get(series, CONTROL) for series in study.routers}
    names: dict[tuple[str | None, float], str] = {(job.router, job.capacity): job.name for job in work}
    return {job.name: names.get((control.get(job.router), job.capacity)) for job in work}


def evaluated_before(job: Job[Any], evaluate: Callable[[Any], Result], kind: Callable[..., Result]) -> Result:
    """Evaluate the model of a run as it is before its first step; read again when that was done before.

    Args:
        job: The run; the result is kept beside its folder, with its config.
        evaluate: From the run's config to the result, a dataclass.
        kind: The class of the result.
    """
    path = Path(job.config.output + ".before.json")
    config = {key: value for key, value in job.config.to_dict().items() if key != "output"}
    if path.exists():
        kept = json.loads(path.read_text())
        if kept.get("config") == config:
            return kind(**kept["found"])
    result = evaluate(job.config)
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"config": config, "found": dataclasses.asdict(result)}  # type: ignore[call-overload]
    write_atomically(path, json.dumps(found) + "\n")
    return result


def by_threshold(model: nn.Module) -> bool:
    """Return whether some routed block of a model keeps as many tokens as pass a threshold."""
    return is_routed(model) and any(b.router.config.select != "topk" for b in routed_blocks(model).values())


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
    folder.mkdir(parents=True, exist_ok=True)
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
