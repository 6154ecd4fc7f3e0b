"""Suites: several benchmarks by one command, checked against thresholds."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from mmod.io.files import read_text
from mmod.io.progress import say
from mmod.io.store import STORE, Store
from mmod.io.tables import Column
from mmod.values import refuse_unknown
from tools.benchmarks import generation, models, ops
from tools.benchmarks.generation import GenerationConfig
from tools.benchmarks.models.benchmark import BenchmarkConfig
from tools.benchmarks.ops.benchmark import OpBenchmarkConfig
from tools.benchmarks.program import ProgramConfig
from tools.benchmarks.report import (
    HIDDEN,
    NAME,
    BenchmarkReport,
    Options,
    Row,
    UnavailableError,
    benchmark,
    earlier_report,
    identity_of,
    read_report,
)


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """A limit on a column of benchmark rows, lower or upper.

    Args:
        name: The requirement in words.
        parts: Folders of the benchmarks that it applies to.
        where: Values of columns that select rows; a list has alternatives.
        column: The limited column; of a spread, the median counts.
    """

    name: str
    parts: list[str]
    column: str
    where: dict[str, Any] = field(default_factory=dict)
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if (self.at_least is None) == (self.at_most is None):
            raise ValueError(f"the threshold {self.name!r} needs either at_least or at_most")

    def check(self, rows: Sequence[Row]) -> Row:
        """Return whether rows meet the limit, and the margin of the worst row: negative if it is missed.

        Example:
            >>> fast = Criterion(name="fast", parts=["ops"], column="of_bound", at_least=0.85)
            >>> row = fast.check([{"op": "merge_rows", "of_bound": {"median": 0.8}}])
            >>> row["met"], round(row["margin"], 2)
            (False, -0.05)
        """
        is_lower = self.at_least is not None
        limit = self.at_least if is_lower else self.at_most
        assert limit is not None
        sign = 1.0 if is_lower else -1.0
        counted = []
        for row in rows:
            value = self._value(row) if self._counts(row) else None
            if value is not None:
                counted.append((row, value))
        about = {"name": self.name, "rows": len(counted), "limit": limit}
        if not counted:
            return {**about, "met": False, "verdict": "not measured"}
        row, worst = min(counted, key=lambda pair: sign * pair[1])
        margin = sign * (worst - limit)
        verdict = "met" if margin >= 0 else f"missed by {-margin:.3g}"
        about |= {"met": margin >= 0, "verdict": verdict, "margin": margin}
        return {**about, "worst": worst, "worst_row": describe(row)}

    def _counts(self, row: Row) -> bool:
        for name, valid in self.where.items():
            alternatives = valid if isinstance(valid, list) else [valid]
            if row[name] not in alternatives:
                return False
        return True

    def _value(self, row: Row) -> float | None:
        value = row.get(self.column)
        return value["median"] if isinstance(value, Mapping) else value


COLUMNS: dict[str, Column] = {
    "name": ("threshold", ""),
    "verdict": ("verdict", ""),
    "limit": ("limit", "g"),
    "worst": ("worst", ".4g"),
    "rows": ("rows", ""),
    "worst_row": ("worst row", ""),
    "margin": HIDDEN,
    "met": HIDDEN,
}


@dataclass(frozen=True, kw_only=True)
class SuiteConfig:
    """Benchmarks and the thresholds that they must keep.

    Args:
        ops: Benchmarks of ops; `out` names the folder of each within that of the suite.
        models: Benchmarks of models, likewise.
        generation: Benchmarks of generation, likewise.
        programs: Programs such as tests, likewise.
        first: Names of the parts that run first, in this order.
        thresholds: Limits that their rows must keep.
        minutes: Time of this call; parts that do not fit run in the next one. None for no limit.
        only: Run this part alone.
        out: Folder for all results. A suite that was killed goes on in the same folder.
    """

    ops: list[OpBenchmarkConfig] = field(default_factory=list)
    models: list[BenchmarkConfig] = field(default_factory=list)
    generation: list[GenerationConfig] = field(default_factory=list)
    programs: list[ProgramConfig] = field(default_factory=list)
    first: list[str] = field(default_factory=list)
    thresholds: list[Criterion] = field(default_factory=list)
    minutes: float | None = None
    only: str | None = None
    out: str = "runs/benchmark_suite"

    def __post_init__(self) -> None:
        names = [member.out for member in self.benchmarks]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a suite needs at least one part, each with an out folder of its own, got {names}")
        named = [*self.first, self.only] if self.only else self.first
        refuse_unknown("part in first or only", named, names)
        columns: dict[str, set[str]] = {}
        columns |= {member.out: set(ops.benchmark.COLUMNS) for member in self.ops}
        columns |= {member.out: set(models.benchmark.COLUMNS) for member in self.models}
        columns |= {member.out: set(generation.COLUMNS) for member in self.generation}
        for threshold in self.thresholds:
            for name in threshold.parts:
                if name not in columns:
                    raise ValueError(
                        f"the threshold {threshold.name!r} is set for {name!r}; parts are {', '.join(names)}"
                    )
                unknown = sorted({threshold.column, *threshold.where} - columns[name])
                if unknown:
                    raise ValueError(
                        f"the threshold {threshold.name!r} names columns {unknown}; "
                        f"{name} has {', '.join(sorted(columns[name]))}"
                    )

    @property
    def device(self) -> str:
        """The device of the first benchmark."""
        return str(self.benchmarks[0].device)

    @property
    def benchmarks(self) -> list[Options]:
        """All benchmarks, in the order in which they run."""
        position = {name: number for number, name in enumerate(self.first)}
        members = [*self.programs, *self.ops, *self.models, *self.generation]
        return sorted(members, key=lambda member: position.get(member.out, len(position)))


LEAST_SECONDS = 10.0
"""Time left under which no benchmark is started."""


@dataclass(frozen=True)
class State:
    """The state of a benchmark in a suite: why it is not done, seconds and number of its calls."""

    status: Literal["not run yet", "done", "skipped", "failed", "timed out"] = "not run yet"
    why: str = ""
    seconds: float = 0.0
    tries: int = 0

    @property
    def is_done(self) -> bool:
        """Whether it need not run again."""
        return self.status in ("done", "skipped")

    def __str__(self) -> str:
        text: str = self.status
        if self.tries:
            text += f", {self.seconds:.0f} s"
        if self.why:
            text += f", {self.why}"
        return text


class SuiteFailedError(RuntimeError):
    """Benchmarks of a suite failed; the others were measured and checked, and the report names the failures."""

    def __init__(self, failures: Mapping[str, str], report: BenchmarkReport) -> None:
        reasons = "; ".join(f"{name}: {why}" for name, why in failures.items())
        super().__init__(f"parts of the suite failed: {reasons}")
        self.report = report


def benchmark_suite(config: SuiteConfig, progress: bool = True) -> BenchmarkReport:
    """Run all benchmarks of a suite that are not finished yet, as far as its time goes, and check its thresholds.

    Each runs in a process. One that fails, crashes or outlasts its limit is recorded, and the next one runs; the same
    command tries it again, after those that never ran, and it continues behind its last finished run.

    Returns:
        A row for each threshold; notes with the state and the table of every benchmark.

    Raises:
        ValueError: The output folder holds another suite.
        SuiteFailedError: Benchmarks failed. The report is written all the same.
    """
    folder = Path(config.out)
    identity = identity_of(config)
    earlier_report(folder, identity)
    store = Store(folder / STORE)
    members = {member.out: replace(member, out=str(folder / member.out)) for member in config.benchmarks}
    known = {name: {"work": "suite", "config": identity["config"], "part": name} for name in members}
    states = {name: store.get(known[name], State, timed_on=config.device) or State() for name in members}
    deadline = math.inf if config.minutes is None else time.monotonic() + 60 * config.minutes
    pending = [name for name, state in states.items() if config.only in (None, name) and not state.is_done]
    failures: dict[str, str] = {}
    report = _report(config, identity, states)
    for name in sorted(pending, key=lambda name: states[name].tries):
        seconds = min(members[name].limit or math.inf, deadline - time.monotonic())
        if seconds < LEAST_SECONDS:
            break
        states[name] = _run_part(members[name], seconds, states[name], progress)
        store.put(known[name], states[name], timed_on=config.device)
        if progress:
            say(f"{name}: {states[name]}")
        if states[name].status == "failed":
            failures[name] = states[name].why
        report = _report(config, identity, states)
    if failures:
        raise SuiteFailedError(failures, report)
    return report


def _run_part(member: Options, seconds: float, before: State, progress: bool) -> State:
    """Run a benchmark for at most some seconds and return its state."""
    folder = Path(member.out)
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    # Imported once for all parts; each starts without a CUDA context, so a crash of one leaves the others alone.
    context.set_forkserver_preload(["tools.benchmarks.suite"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(member, sender, progress), name=folder.name)
    process.start()
    sender.close()
    begun = time.monotonic()
    try:
        # Its first message says that its imports are done.
        receiver.recv()
        if receiver.poll(None if math.isinf(seconds) else seconds):
            status, why = receiver.recv()
            process.join(LEAST_SECONDS)
        else:
            status = "timed out"
            why = f"after {seconds:.0f} s"
    except EOFError:
        process.join()
        status = "failed"
        why = f"its process ended with exit code {process.exitcode}; see {folder / 'log.txt'}"
    finally:
        _end(process)
    return State(status, why, before.seconds + time.monotonic() - begun, before.tries + 1)


def _end(process: BaseProcess) -> None:
    """Kill the process group of a part that did not end by itself: the part and the programs that it started."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
    process.join()


def _work(member: Options, sender: Connection, progress: bool) -> None:
    """Run a benchmark in this process, its output in a log, and send status and reason."""
    os.setsid()
    with (Path(member.out) / "log.txt").open("a", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        # Bars of progress, which go to the other stream, stay on the terminal.
        if not progress:
            os.dup2(log.fileno(), 2)
        sender.send(None)
        try:
            benchmark(member, progress)
            sender.send(("done", ""))
        except UnavailableError as error:
            sender.send(("skipped", str(error)))
        except Exception as error:
            traceback.print_exc(file=log)
            sender.send(("failed", f"{type(error).__name__}: {error}"))


def _report(config: SuiteConfig, identity: Mapping[str, Any], states: Mapping[str, State]) -> BenchmarkReport:
    """Check the thresholds on what is measured, and write the report."""
    folder = Path(config.out)
    measured = {name: read_report(folder / name) for name in states}

    def rows_of(parts: Sequence[str]) -> list[Row]:
        """Return the rows of all parts; none unless all are finished."""
        rows: list[Row] = []
        for name in parts:
            part = measured[name]
            if part is None:
                return []
            rows += part.rows
        return rows

    checked = [threshold.check(rows_of(threshold.parts)) for threshold in config.thresholds]
    tables = {name: folder / name / f"{NAME}.md" for name in states}
    notes = [f"{name}: {state}" for name, state in states.items()]
    notes += [f"## {name}\n\n{read_text(table)}" for name, table in tables.items() if table.exists()]
    report = BenchmarkReport("thresholds", COLUMNS, **identity, rows=checked, notes=notes)
    report.save(folder)
    return report


def describe(row: Row) -> str:
    """Return what a row is about: its texts and counts, without what was measured."""
    about = []
    for name, value in row.items():
        if name in _ABOUT and value is not None:
            about.append(f"{value:g}" if isinstance(value, float) else str(value))
    return " ".join(about)


_ABOUT = (
    "op",
    "images",
    "tokens",
    "kept",
    "dtype",
    "path",
    "router",
    "select",
    "context",
    "capacity",
    "batch_size",
    "execution",
    "step",
    "preset",
    "image_tokens",
    "what",
)
