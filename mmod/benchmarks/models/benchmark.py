"""Benchmark of routed models beside dense ones and free routing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from mmod.analysis.memory import peak_bytes
from mmod.analysis.timing import Spread, interleave, ratios
from mmod.benchmarks.models.config import DENSE, BenchmarkConfig, BenchmarkRow, Variant
from mmod.benchmarks.models.steps import Step
from mmod.benchmarks.models.variants import Variants
from mmod.benchmarks.report import BenchmarkReport
from mmod.benchmarks.resume import run_all


def benchmark(config: BenchmarkConfig, progress: bool = True) -> BenchmarkReport:
    """Check and time dense, routed and freely routed models side by side, and write the results.

    Args:
        config: What to time.
        progress: Show a progress bar on stderr.

    Returns:
        The rows, with the environment they were measured in.

    Raises:
        FileExistsError: The output folder holds a benchmark already.
        ValueError: The output folder holds an unfinished benchmark with other options or of another machine.
        WrongOutputError: A path computes something wrong; nothing is timed then.
    """
    checked = functools.cache(functools.partial(_Bench, config))
    runs: dict[str, Callable[[], list[BenchmarkRow]]] = {
        "batch {}, {} {}".format(*run): functools.partial(_run, checked, *run)
        for run in itertools.product(config.batch_sizes, config.execution, config.step)
    }
    size = f" at {config.image_size} px" if config.image_size else ""
    return run_all(config, f"{config.model}{size}, {config.dtype}", BenchmarkRow, runs, progress)


def _run(checked: Callable[[], _Bench], batch_size: int, execution: str, step: str) -> list[BenchmarkRow]:
    """Time all models, which are made and checked at the first run."""
    return checked().run(batch_size, execution, step)


class _Bench:
    """Times the models of a benchmark; made only if their outputs are right."""

    def __init__(self, config: BenchmarkConfig) -> None:
        self.config = config
        self.device = torch.device(config.device)
        torch.manual_seed(config.seed)
        self.exact = Variants(config)
        self.exact.check()
        self.timed = self.exact if config.dtype == "float32" else self.exact.to(getattr(torch, config.dtype))
        if self.timed is not self.exact:
            self.timed.check()

    def run(self, batch_size: int, execution: str, step: str) -> list[BenchmarkRow]:
        """Time all models at one batch size."""
        if execution != "eager":
            self.exact.check_compiled(batch_size, execution, step)
        images = self.timed.prepare(batch_size, static=execution != "eager")
        steps = {name: Step(model, step, execution) for name, model in self.timed.models.items()}
        calls: dict[Variant, Callable[[], Tensor]] = {
            name: functools.partial(call, images[name]) for name, call in steps.items()
        }
        config = self.config
        times = interleave(calls, seconds=config.seconds, rounds=config.rounds, device=self.device, seed=config.seed)
        peaks = self._peaks(steps, calls) if step == "train" else {}
        saved = self.timed.saved_bytes(images) if peaks and execution == "eager" else {}
        rows = [
            self._row(times, name, images[name], batch_size, execution, step, peaks, saved)
            for name in self.timed.routed
        ]
        torch.compiler.reset()
        return rows

    def _peaks(self, steps: dict[Variant, Step], calls: dict[Variant, Callable[[], Tensor]]) -> dict[Variant, int]:
        peaks = {}
        for name, step in steps.items():
            step.clear()
            peaks[name] = peak_bytes(calls[name], self.device)
            step.clear()
        return peaks

    def _row(
        self,
        times: dict[Variant, list[float]],
        name: Variant,
        images: Tensor,
        batch_size: int,
        execution: str,
        step: str,
        peaks: dict[Variant, int],
        saved: dict[Variant, int],
    ) -> BenchmarkRow:
        dense, routed, free = times[DENSE], times[name], times[name.free]
        topk = times[name.topk] if name.select == "threshold" and name.topk in times else None
        decided = self.timed.decided(name, images)
        dense_peak = peaks.get(DENSE)
        gradients = sum(p.numel() * p.element_size() for p in self.timed.models[name].parameters())
        return BenchmarkRow(
            **name._asdict(),
            batch_size=batch_size,
            execution=execution,
            step=step,
            rounds=len(routed),
            kept=decided.kept,
            most=decided.most,
            dense_ms=Spread.of(dense),
            free_ms=Spread.of(free),
            routed_ms=Spread.of(routed),
            of_free=ratios(free, routed),
            of_topk=None if topk is None else ratios(topk, routed),
            speedup=ratios(dense, routed),
            flop_speedup=decided.flop_speedup,
            dense_peak=dense_peak,
            routed_peak=peaks.get(name),
            peak_bound=None if dense_peak is None or name not in saved else max(dense_peak - saved[name], gradients),
        )
