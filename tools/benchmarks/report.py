"""Benchmarks: their common options, runs that are kept when they end, and the table and files of their rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch

from mmod.analysis.table import Look
from mmod.analysis.timing import Spread
from mmod.io.environment import environment
from mmod.io.files import parse_json, write_atomically
from mmod.io.jobs import Callback, Runner
from mmod.io.records import check_same
from mmod.io.store import STORE, Store
from mmod.io.tables import Column, table_of
from mmod.values import Checked

NAME = "benchmark"
Row = dict[str, Any]
"""A line of a report: values by column. One with a reason in `left_out` is in the file alone."""
HIDDEN: Column = ("", "")
"""A column that is in the file, and not in the table."""


class UnavailableError(RuntimeError):
    """A benchmark lacks what it needs here; a suite records it as skipped."""


class Runs(NamedTuple):
    """The runs of a benchmark by name, which return rows; `notes` returns sentences below the table."""

    title: str
    columns: Mapping[str, Column]
    calls: Mapping[str, Callable[[], Sequence[Row]]]
    notes: Callable[[Sequence[Row]], Sequence[str]] = lambda rows: ()


@dataclass(frozen=True, kw_only=True)
class Options(Checked):
    """Options of every benchmark.

    Args:
        threads: CPU threads; None leaves torch's choice.
        device: "cpu" or "cuda".
        out: Folder for `benchmark.json` and `benchmark.md`. A benchmark that was killed goes on there, and a finished
            one is read.
        limit: Seconds after which a suite ends it, to continue in its next call; None for no limit.
    """

    threads: Annotated[int | None, "[1, inf)"] = None
    device: str = "cpu"
    limit: Annotated[float | None, "(0, inf)"] = None
    out: str

    def runs(self) -> Runs:
        """Return the runs that these options ask for."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TimedOptions(Options):
    """Options of a benchmark that times its paths in turns; the others are those of `Options`.

    Args:
        seconds: Each run goes on for at least this long,
        rounds: and for at least this many rounds, in which each path is called once.
        seed: Seed of weights, inputs and order.
    """

    seconds: Annotated[float, "[0, inf)"] = 30.0
    rounds: Annotated[int, "[1, inf)"] = 5
    seed: Annotated[int, "[0, inf)"] = 0


@dataclass(frozen=True)
class BenchmarkReport:
    """The rows of a benchmark, with its options as plain values and the machine."""

    title: str
    columns: Mapping[str, Column]
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    rows: Sequence[Row]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        """Return the rows as a Markdown table: medians, quartiles in brackets, no columns without a value."""
        shown = {name: column for name, column in self.columns.items() if column != HIDDEN}
        rows = []
        for row in self.rows:
            if row.get("left_out") is None:
                rows.append({name: _spread(row.get(name)) for name in shown})
        table = table_of(shown, rows) if rows else ""
        named = ", ".join(f"{name} {value}" for name, value in self.environment.items())
        notes = "".join(f"\n{note}\n" for note in self.notes)
        return f"{self.title}; {named}.\n\n{table}\n{notes}"

    def save(self, folder: Path, is_finished: bool = True) -> None:
        """Write `benchmark.md` into a folder and, of a finished benchmark, `benchmark.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{NAME}.md", self.markdown())
        if not is_finished:
            return
        # This file marks the benchmark as finished.
        write_atomically(folder / f"{NAME}.json", json.dumps(vars(self), indent=2) + "\n")


def _spread(value: Any) -> Any:
    """Return the spread that a value read from a file describes; other values as they are."""
    if isinstance(value, dict) and value.keys() == {"median", "low", "high"}:
        return Spread(**value)
    return value


def benchmark(config: Options, progress: bool = True) -> BenchmarkReport:
    """Check and time all runs that a config asks for, and write the results; what an earlier call did is read.

    Raises:
        ValueError: The output folder holds a benchmark with other options or of another machine.
        WrongOutputError: A path computes something wrong; it is not timed then.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    folder = Path(config.out)
    identity = identity_of(config)
    finished = earlier_report(folder, identity)
    if finished is not None:
        return finished
    runs = config.runs()
    store = Store(folder / STORE)
    done: dict[str, Sequence[Row]] = {}

    def identity_of_run(name: str) -> dict[str, Any]:
        return {"work": "benchmark", "config": identity["config"], "run": name}

    def measure(job: Look[None], callback: Callback) -> Sequence[Row]:
        return store.once(identity_of_run(job.name), runs.calls[job.name], timed_on=config.device)

    def report_so_far() -> BenchmarkReport:
        rows: list[Row] = []
        for name in runs.calls:
            rows += done.get(name, ())
        return BenchmarkReport(runs.title, runs.columns, **identity, rows=rows, notes=runs.notes(rows))

    for job, measured in Runner(1, progress, "benchmark").run(
        [Look(name=name, seed=0, part=None) for name in runs.calls], measure
    ):
        done[job.name] = measured
        report_so_far().save(folder, is_finished=False)
    report = report_so_far()
    report.save(folder)
    # The report holds the rows.
    store.remove()
    return report


def identity_of(config: Any) -> dict[str, dict[str, Any]]:
    """Return what the results of a benchmark or suite depend on: options as plain values, and the machine."""
    options: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    free = ("out", "limit", "minutes", "only")
    options = {name: value for name, value in options.items() if name not in free}
    return {"config": options, "environment": environment(config.device)}


def earlier_report(folder: Path, identity: Mapping[str, Any]) -> BenchmarkReport | None:
    """Return the report in a folder, if there is one; raise a FolderTakenError where that is of another benchmark."""
    report = read_report(folder)
    if report is not None:
        check_same(folder, {name: getattr(report, name) for name in identity}, identity, kind="a benchmark")
    return report


def read_report(folder: Path) -> BenchmarkReport | None:
    """Return the report in a folder; None without one."""
    path = folder / f"{NAME}.json"
    if not path.exists():
        return None
    saved = parse_json(path.read_bytes(), str(path))
    # JSON has no tuples.
    saved["columns"] = {name: tuple(column) for name, column in saved["columns"].items()}
    return BenchmarkReport(**saved)
