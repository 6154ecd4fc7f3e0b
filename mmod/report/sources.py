"""What a report is made from: the folders that studies and audits have written."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mmod.analysis.audit.generation import Generation
from mmod.analysis.audit.result import Audit, read_audit
from mmod.analysis.plots import RoutingMaps
from mmod.analysis.statistics import read_published
from mmod.io.files import parse_json
from mmod.values import check_value

__all__ = ["PAGE", "AuditRecord", "RunRecord", "Sources", "StudyRecord", "read_sources"]

_STUDY, _AUDIT, _RUN = "tradeoff.json", "audit/audit.json", "routers.csv"
PAGE = "report.html"
"""The file of a report."""


@dataclass(frozen=True)
class StudyRecord:
    """A study.

    Args:
        name: Name of its folder.
        folder: The folder.
        config: Its config as plain values.
        rows: Its points, one mapping for each model: texts and numbers by column.
        table: The same as the study shows them, a row of cells for each, the header first.
        score: The column by which models are compared; `SCORE_std` is its standard deviation over seeds.
        measure: What the score is.
        costs: Columns of costs to the titles of their axes, of those that were measured.
        told: What the study says of its models.
        environment: What it ran on.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    rows: Sequence[Mapping[str, str | float | None]]
    table: Sequence[Sequence[str]]
    score: str
    measure: str
    costs: Mapping[str, str]
    told: str
    environment: Mapping[str, Any]


@dataclass(frozen=True)
class AuditRecord:
    """An audit.

    Args:
        name: Where its run lies.
        folder: Folder of the audit.
        command: The command that made it.
        environment: What it ran on.
        audit: What it found.
        flops: FLOPs of an image, see `mmod.analysis.FlopReport.to_dict`; None where they were not counted.
        maps: Sample images and what blocks keep of them; None where none were drawn.
        beside_flops: FLOPs of an image in other models that were judged too, by name, None where they were not counted.
        generation: How a language model decides while it writes long texts; None where that was not asked for.
    """

    name: str
    folder: Path
    command: str
    environment: Mapping[str, Any]
    audit: Audit
    flops: Mapping[str, Any] | None
    maps: RoutingMaps | None
    beside_flops: Mapping[str, float | None] | None = None
    generation: Generation | None = None


@dataclass(frozen=True)
class RunRecord:
    """A training run of a routed model.

    Args:
        name: Where it lies.
        rows: What its routers did at logged steps, see `mmod.training.engine.health`.
    """

    name: str
    rows: Sequence[Mapping[str, Any]]


Record = TypeVar("Record", StudyRecord, AuditRecord, RunRecord)


class Sources(NamedTuple):
    """What was found in some folders.

    Args:
        studies: The studies.
        audits: The audits.
        runs: The training runs of routed models.
    """

    studies: list[StudyRecord]
    audits: list[AuditRecord]
    runs: list[RunRecord]


def read_sources(folders: Sequence[Path]) -> Sources:
    """Read the studies, audits and runs in some folders, at any depth.

    Args:
        folders: Folders of studies, of runs, or of several of them.

    Raises:
        FileNotFoundError: If a folder is not there.
        ValueError: If one holds none of them, or a file holds something else.
    """
    found = Sources([], [], [])
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"no folder {str(folder)!r}")
        # A report holds a figure of that name.
        runs = [path for path in sorted(folder.rglob(_RUN)) if not (path.parent / PAGE).exists()]
        studies = sorted(folder.rglob(_STUDY))
        audits = sorted(path for path in folder.rglob("audit.json") if path.parent.name == "audit")
        if not studies and not audits and not runs:
            raise ValueError(
                f"{str(folder)!r} holds neither a study ({_STUDY}), an audit ({_AUDIT}) nor a training run of a routed "
                f"model ({_RUN}): run `mmod tradeoff`, `mmod audit` or `mmod train` first"
            )
        found.studies.extend(map(_read_study, studies))
        found.audits.extend(_read_audit(path, folder) for path in audits)
        found.runs.extend(RunRecord(_run_name(path.parent, folder), _read_run(path)) for path in runs)
    return Sources(_numbered(found.studies), _numbered(found.audits), _numbered(found.runs))


def _read_study(path: Path) -> StudyRecord:
    record = parse_json(path.read_bytes(), str(path))
    try:
        rows = _read_table(path.with_suffix(".csv"))
        axes = {name: record["picture"][name] for name in ("score", "measure", "costs")}
        axes["costs"] = {name: title for name, title in axes["costs"].items() if name in rows[0]}
        if missing := {"name", "series", axes["score"]} - set(rows[0]):
            raise ValueError(f"the table lacks {', '.join(sorted(missing))}")
        config = record["config"]
        table, _, told = path.with_suffix(".md").read_text().rpartition("|\n\n")
        header, _, *cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()]
    except (KeyError, IndexError, TypeError, ValueError, OSError) as error:
        raise ValueError(
            f"{str(path)!r} is no study with its table beside it ({type(error).__name__}: {error})"
        ) from error
    environment = {
        name: value for name, value in record.items() if name in ("torch", "threads", "cores", "cpu_seconds")
    }
    return StudyRecord(
        path.parent.name,
        path.parent,
        config,
        rows,
        [header, *cells],
        **axes,
        told=told.strip(),
        environment=environment,
    )


def _read_audit(path: Path, root: Path) -> AuditRecord:
    record = parse_json(path.read_bytes(), str(path))
    name = _run_name(path.parent.parent, root)
    try:
        fields = {field: record[field] for field in ("command", "environment", "flops")}
        maps = None if record["maps"] is None else RoutingMaps.from_dict(record["maps"])
        # The last two are not there in what earlier versions wrote.
        audit, beside, told = read_audit(record["audit"]), record.get("beside_flops"), record.get("generation")
        generation = None if told is None else read_published(Generation, told)
        return AuditRecord(
            name, path.parent, audit=audit, maps=maps, beside_flops=beside, generation=generation, **fields
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{str(path)!r} is no audit of `mmod audit` ({type(error).__name__}: {error})") from error


def _read_run(path: Path) -> list[dict[str, Any]]:
    rows = _read_table(path)
    for row in rows:
        try:
            check_value("step", int(row["step"]), int, "[0, inf)")
            for name in set(row) - {"step", "data", "block"}:
                check_value(name, row[name], float | None)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{str(path)!r} holds no figures of routers ({type(error).__name__}: {error})") from error
    return rows


def _run_name(run: Path, root: Path) -> str:
    return run.name if run == root else f"{root.name}/{run.relative_to(root).as_posix()}"


def _numbered(records: Sequence[Record]) -> list[Record]:
    """Return records whose names are numbered where they were there before.

    Example:
        >>> [run.name for run in _numbered([RunRecord("a", []), RunRecord("b", []), RunRecord("a", [])])]
        ['a', 'b', 'a (2)']
    """
    names = [own.name for own in records]
    counts = [names[: place + 1].count(name) for place, name in enumerate(names)]
    named = [name if count == 1 else f"{name} ({count})" for name, count in zip(names, counts)]
    return [dataclasses.replace(own, name=name) for own, name in zip(records, named)]


def _read_table(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="") as file:
        return [{name: _value(cell) for name, cell in row.items()} for row in csv.DictReader(file)]


def _value(cell: str) -> str | float | None:
    try:
        return float(cell) if cell else None
    except ValueError:
        return cell
