"""The GPU benchmark: its parts, the most valuable first, each in a process and a time box, and their summary."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mmod.analysis.timing import environment
from mmod.benchmarks.generation import GenerationConfig
from mmod.benchmarks.gpu.config import SUMMARY, GpuConfig, UnavailableError, figures_text
from mmod.benchmarks.gpu.machine import benchmark_attention, describe_machine, device_state
from mmod.benchmarks.gpu.programs import check_memory, run_tests
from mmod.benchmarks.gpu.training import compare_training
from mmod.benchmarks.models.benchmark import BenchmarkConfig
from mmod.benchmarks.ops.benchmark import OpBenchmarkConfig
from mmod.benchmarks.ops.case import OpSize
from mmod.benchmarks.report import (
    BenchmarkReport,
    Row,
    Runs,
    identity_of,
    measured_rows,
    run_all,
)
from mmod.benchmarks.suite import SuiteFailedError, describe
from mmod.io.journal import Journal
from mmod.io.progress import say

LONG = [
    {"images": 256, "tokens": 197, "heads": 12},
    {"images": 32, "tokens": 1370, "heads": 16},
    {"images": 4, "tokens": 2928, "heads": 32, "head_channels": 128},
]


@dataclass(frozen=True)
class BenchmarkPart:
    """A part of the GPU benchmark.

    Args:
        runs: Returns what it does.
        seconds: Time box on a GPU.
        figures: Columns that the summary shows; none for rows of `figures_row`.
        where: Values of columns that a row must have to be in the summary.
    """

    runs: Callable[[GpuConfig], Runs]
    seconds: float
    figures: tuple[str, ...] = ()
    where: Mapping[str, Any] = field(default_factory=dict)


def _timing(config: GpuConfig, seconds: float, rounds: int) -> dict[str, Any]:
    quick = {"seconds": 0.0, "rounds": 2} if config.rehearses else {"seconds": seconds, "rounds": rounds}
    return {**quick, "device": config.device, "out": config.out}


def _ops(config: GpuConfig) -> Runs:
    small = [OpSize(images=2, tokens=17, heads=2, head_channels=16)]
    return OpBenchmarkConfig(
        sizes=small if config.rehearses else [OpSize(**size) for size in LONG],
        dtypes=["bfloat16"],
        step=["forward"] if config.rehearses else ["forward", "train"],
        **_timing(config, 0.3, 10),
    ).runs()


def _models(config: GpuConfig, step: Any, execution: Any = "eager") -> Runs:
    options: dict[str, Any] = {"model": "vit_base_patch16_224", "batch_sizes": [1, 256, 32, 8]}
    if step == "train":
        options["batch_sizes"] = [64]
    if config.rehearses:
        options = {"model": "test_vit", "model_args": {"img_size": 64}, "batch_sizes": [1]}
        # CUDA graphs need a GPU.
        execution = "eager"
    return BenchmarkConfig(
        **options, capacities=[0.25], dtype="bfloat16", execution=[execution], step=[step], **_timing(config, 2.0, 10)
    ).runs()


def _llava(config: GpuConfig) -> Runs:
    options: dict[str, Any] = {"hidden": 4096, "intermediate": 11008, "layers": 8, "vocabulary": 32000}
    if config.rehearses:
        options = {"hidden": 64, "layers": 6, "vocabulary": 50, "image_tokens": [24], "text_tokens": 8}
    presets = ["p-mod", "a-mod", "videollm-mod"]
    timing = _timing(config, 2.0, 10)
    return GenerationConfig(presets=presets, **options, batch_sizes=[1], dtype="bfloat16", **timing).runs()


PARTS: dict[str, BenchmarkPart] = {
    "environment": BenchmarkPart(describe_machine, 40, where={"what": "machine"}),
    "tests": BenchmarkPart(run_tests, 240),
    "models": BenchmarkPart(partial(_models, step="forward"), 90, ("speedup", "flop_speedup", "of_free")),
    "attention": BenchmarkPart(benchmark_attention, 40),
    "ops": BenchmarkPart(_ops, 150, ("ms", "of_bound", "of_baseline", "baseline"), {"path": "auto"}),
    "graphs": BenchmarkPart(
        partial(_models, step="forward", execution="cudagraphs"), 240, ("speedup", "flop_speedup", "of_free")
    ),
    "llava": BenchmarkPart(_llava, 120, ("dense_ms", "speedup", "flop_speedup", "cache_share", "decode")),
    "memory": BenchmarkPart(partial(_models, step="train"), 60, ("speedup", "peak_of_dense", "peak_of_bound")),
    "training": BenchmarkPart(compare_training, 290),
    "memcheck": BenchmarkPart(check_memory, 120),
}  # fmt: skip

LEAST_SECONDS = 10.0
"""Time box under which no part is started."""


@dataclass(frozen=True)
class State:
    """The state of a part: why it is not done, seconds and number of its calls.

    Args:
        status: "done", "skipped", "failed", "timed out" or "not run yet".
    """

    status: str = "not run yet"
    why: str = ""
    seconds: float = 0.0
    tries: int = 0

    @property
    def settled(self) -> bool:
        """Whether the part need not run again."""
        return self.status in ("done", "skipped")


def benchmark_gpu(config: GpuConfig, progress: bool = True) -> BenchmarkReport:
    """Run the parts that are not done yet, as far as the time budget goes, and write a summary after each.

    A part runs in a process. One that fails, crashes or outlasts its time box is recorded, and the next one runs; the
    same command tries it again, after the parts that never ran, and continues behind its last finished run.

    Returns:
        The summary. Tables and logs of the parts are in folders with their names.
    """
    folder = Path(config.out)
    identity = {"device": config.device, "tests": config.tests, "environment": environment(config.device)}
    journal = Journal(folder / "journal.jsonl", identity, "GPU benchmark")
    recorded = dict(journal.records)
    states = {name: State(**recorded.get(name, {})) for name in PARTS}
    for name in states.keys() - recorded.keys():
        journal.add([name, asdict(states[name])])
    deadline = time.monotonic() + 60 * config.minutes
    pending = [name for name, state in states.items() if not state.settled and config.only in (None, name)]
    failures = {}
    report = _summarise(config, states)
    for name in sorted(pending, key=lambda name: states[name].tries):
        seconds = min(PARTS[name].seconds, deadline - time.monotonic())
        if seconds < LEAST_SECONDS:
            break
        if progress:
            say(f"{name}: at most {seconds:.0f} s")
        states[name] = _run_part(name, PARTS[name], config, seconds, states[name])
        journal.add([name, asdict(states[name])])
        if progress:
            say(f"{name}: {states[name].status} {states[name].why}".rstrip())
        if states[name].status == "failed":
            failures[name] = states[name].why
        report = _summarise(config, states)
    if failures:
        raise SuiteFailedError(failures, report)
    return report


def _run_part(name: str, part: BenchmarkPart, config: GpuConfig, seconds: float, before: State) -> State:
    """Run a part for at most some seconds and return its state."""
    folder = Path(config.out) / name
    folder.mkdir(parents=True, exist_ok=True)
    # Options without influence on the results may differ when the part continues.
    options = replace(config, out=str(folder), minutes=GpuConfig.minutes, only=None)
    context = multiprocessing.get_context("forkserver")
    # Imported once for all parts; each starts without a CUDA context, so a crash of one leaves the others alone.
    context.set_forkserver_preload(["mmod.benchmarks.gpu.benchmark"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(part.runs, options, sender), name=name)
    process.start()
    sender.close()
    begun = time.monotonic()
    try:
        # Its first message says that its imports are done.
        receiver.recv()
        status, why = receiver.recv() if receiver.poll(seconds) else ("timed out", f"after {seconds:.0f} s")
        if status != "timed out":
            process.join(LEAST_SECONDS)
    except EOFError:
        process.join()
        status, why = "failed", f"its process ended with exit code {process.exitcode}; see {folder / 'log.txt'}"
    finally:
        _end(process)
    return State(status, why, before.seconds + time.monotonic() - begun, before.tries + 1)


def _end(process: Any) -> None:
    """Kill the process group of a part that did not end by itself: the part and the programs that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
    process.join()


def _work(runs: Callable[[GpuConfig], Runs], options: GpuConfig, sender: Connection) -> None:
    """Run a part in this process, its output in a log, and send status and reason."""
    os.setsid()
    with (Path(options.out) / "log.txt").open("a") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    sender.send(None)
    try:
        run_all(options, partial(runs, options), progress=False)
        sender.send(("done", ""))
    except UnavailableError as error:
        sender.send(("skipped", str(error)))
    except Exception as error:
        traceback.print_exc()
        sender.send(("failed", f"{type(error).__name__}: {error}"))


def _summarise(config: GpuConfig, states: Mapping[str, State]) -> BenchmarkReport:
    folder, rows = Path(config.out), list[Row]()
    for name, state in states.items():
        shown = _results(PARTS[name], measured_rows(folder / name))
        if state.why or not shown:
            shown.insert(0, ("", state.why))
        for place, (what, figures) in enumerate(shown):
            row = {"part": name, "status": state.status, "what": what, "figures": figures}
            rows.append(row if place else {**row, "seconds": state.seconds})
    clocks = ", ".join(f"{name} {value}" for name, value in device_state().items())
    notes = [f"Clocks and driver: {clocks}."] * bool(clocks) + [f"Command: `{config.command}`"]
    report = BenchmarkReport("GPU benchmark", SUMMARY, **identity_of(config), rows=rows, notes=notes)
    report.save(folder)
    return report


def _results(part: BenchmarkPart, rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return subject and figures of a part's rows, as text."""
    counted = [row for row in rows if all(row[name] == value for name, value in part.where.items())]
    figures = [{name: row[name] for name in part.figures} if part.figures else row["figures"] for row in counted]
    return [(describe(row), figures_text(values)) for row, values in zip(counted, figures)]
