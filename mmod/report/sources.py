"""The sources of a report: folders that studies, audits and training runs have written."""

from __future__ import annotations

import csv
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mmod.analysis.flop_report import FlopReport
from mmod.audits.generation import Generation
from mmod.audits.result import Audit
from mmod.io.files import near_paths, open_rows, parse_json, read_text
from mmod.plain import from_plain, without
from mmod.values import check_value

_STUDIES = ("tradeoff.json", "isoflop.json")
_AUDIT = "audit/audit.json"
_RUN = "routers.csv"
# What says which row of it is which.
_KEYS = ("step", "data", "block")
PAGE = "report.html"
"""The file of a report."""
TableCells = Sequence[Sequence[str]]
"""A table as rows of cells, the header first."""


@dataclass(frozen=True)
class StudyRecord:
    """A study: its picture, its models as `rows`, its tables as rows of cells with the header first, its verdict.

    `kind` is "tradeoff" or "isoflop"; `command` is the line that made it, empty for a call in Python; `summary` is the
    table that fits a page, empty where the only one does; `verdict` has sentences and tables of what they name;
    `recommended` are the models that it recommends, and `code` how to apply them.
    """

    name: str
    folder: Path
    kind: str
    command: str
    config: Mapping[str, object]
    title: str
    svg: str
    rows: Sequence[Mapping[str, str | float | None]]
    tables: Sequence[TableCells]
    verdict: Sequence[str | TableCells]
    environment: Mapping[str, object]
    summary: TableCells = ()
    recommended: Sequence[str] = ()
    code: str = ""


@dataclass(frozen=True)
class AuditRecord:
    """An audit, with FLOPs and decisions in long texts where it has them, and the FLOPs of other models."""

    name: str
    folder: Path
    command: str
    environment: Mapping[str, object]
    audit: Audit
    flops: FlopReport | None
    baseline_flops: Mapping[str, float | None]
    generation: Generation | None


class RouterFigures(NamedTuple):
    """The figures of a block's router at a logged step, see `mmod.training.engine.health`; `data` is what it read."""

    step: float
    data: str
    block: str
    kept: float
    figures: Mapping[str, float | None]


@dataclass(frozen=True)
class RunRecord:
    """A training run of a routed model: its path, and its routers at logged steps."""

    name: str
    rows: Sequence[RouterFigures]


AnyRecord = TypeVar("AnyRecord", StudyRecord, AuditRecord, RunRecord)


class Sources(NamedTuple):
    """The studies, audits and training runs of routed models in some folders."""

    studies: list[StudyRecord]
    audits: list[AuditRecord]
    runs: list[RunRecord]


def read_sources(folders: Sequence[Path]) -> Sources:
    """Read the studies, audits and runs in some folders, at any depth; raise where a folder holds none of them."""
    sources = Sources([], [], [])
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"no folder {str(folder)!r}{near_paths(folder)}")
        # The figures of a report have such names too.
        runs = [path for path in sorted(folder.rglob(_RUN)) if not (path.parent / PAGE).exists()]
        studies: list[Path] = []
        for name in _STUDIES:
            studies += folder.rglob(name)
        audits = sorted(path for path in folder.rglob("audit.json") if path.parent.name == "audit")
        if not studies and not audits and not runs:
            raise ValueError(
                f"{str(folder)!r} holds neither a study ({' or '.join(_STUDIES)}), an audit ({_AUDIT}) nor a training "
                f"run of a routed model ({_RUN}): run `mmod tradeoff`, `mmod isoflop`, `mmod audit` or `mmod train` "
                "first"
            )
        sources.studies.extend(map(_read_study, sorted(studies)))
        sources.audits.extend(_read_audit(path, folder) for path in audits)
        sources.runs.extend(RunRecord(_run_name(path.parent, folder), _read_run(path)) for path in runs)
    return Sources(_numbered(sources.studies), _numbered(sources.audits), _numbered(sources.runs))


def _read_study(path: Path) -> StudyRecord:
    record = parse_json(path.read_bytes(), str(path))
    try:
        config = record["config"]
        title = record["title"]
        rows = _read_table(path.with_suffix(".csv"))
        svg = read_text(path.with_suffix(".svg"))
        page = record["page"]
        check_value("page", page, list[str | list[list[str]]])
        # Behind the tables of all models stands what is said of them, perhaps with tables of its own.
        tables = list(itertools.takewhile(lambda part: not isinstance(part, str), page))
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise ValueError(
            f"{str(path)!r} is no study of this version with its table and picture beside it ({type(error).__name__}: "
            f"{error}); the command of the study, run again, writes them"
        ) from error
    return StudyRecord(
        name=path.parent.name,
        folder=path.parent,
        kind=path.stem,
        command=record.get("command", ""),
        config=config,
        title=title,
        svg=svg,
        rows=rows,
        tables=tables,
        verdict=page[len(tables) :],
        environment={name: record[name] for name in ("torch", "threads", "cores", "cpu_seconds") if name in record},
        summary=record.get("summary", ()),
        recommended=record.get("recommended", ()),
        code=record.get("code", ""),
    )


def _read_audit(path: Path, root: Path) -> AuditRecord:
    record = parse_json(path.read_bytes(), str(path))
    try:
        generation = record["generation"]
        if generation is not None:
            generation = from_plain(Generation, generation, "generation", limit=None)
        counted = record["flops"]
        if counted is not None:
            counted = FlopReport.from_dict(counted)
        return AuditRecord(
            name=_run_name(path.parent.parent, root),
            folder=path.parent,
            command=record["command"],
            environment=record["environment"],
            audit=Audit.from_dict(record["audit"]),
            flops=counted,
            baseline_flops=record["baseline_flops"],
            generation=generation,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        command = record.get("command") if isinstance(record, dict) else None
        raise ValueError(
            f"{str(path)!r} is no audit of `mmod audit` of this version ({type(error).__name__}: {error}). Delete the "
            f"folder {str(path.parent)!r} and run {command or 'mmod audit RUN'}, which makes it anew"
        ) from error


def _read_run(path: Path) -> list[RouterFigures]:
    try:
        rows = _read_table(path)
        # Training writes the table where it has rows.
        if not rows:
            raise ValueError("it is empty")
        for row in rows:
            for name in (*_KEYS, "kept"):
                if row[name] is None:
                    raise ValueError(f"{name} is empty")
            check_value("step", int(row["step"]), int, "[0, inf)")
            for name in set(row) - set(_KEYS):
                check_value(name, row[name], float | None)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{str(path)!r} holds no figures of routers ({type(error).__name__}: {error})") from error
    return [RouterFigures(row["step"], row["data"], row["block"], row["kept"], without(row, _KEYS)) for row in rows]


def _run_name(run: Path, root: Path) -> str:
    if run == root:
        return run.name
    return f"{root.name}/{run.relative_to(root).as_posix()}"


def _numbered(records: Sequence[AnyRecord]) -> list[AnyRecord]:
    """Return records with numbers behind repeated names, as in "a", "b", "a (2)"."""
    names = [record.name for record in records]
    numbered = []
    for position, record in enumerate(records):
        # How often the name occurred up to here.
        count = names[: position + 1].count(record.name)
        if count > 1:
            record = dataclasses.replace(record, name=f"{record.name} ({count})")
        numbered.append(record)
    return numbered


def _read_table(path: Path) -> list[dict[str, Any]]:
    with open_rows(path, newline="") as file:
        return [{name: _value(cell) for name, cell in row.items()} for row in csv.DictReader(file)]


def _value(cell: str) -> str | float | None:
    try:
        return float(cell) if cell else None
    except ValueError:
        return cell
