"""How fast is a routed model, against the dense one and against free routing, on this machine?"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from mmod.analysis.memory import peak_bytes
from mmod.analysis.timing import Spread, interleave, ratios
from mmod.benchmarks.models.steps import Step
from mmod.benchmarks.models.variants import DENSE, Variant, Variants
from mmod.benchmarks.report import BenchmarkReport, BenchmarkRow
from mmod.benchmarks.resume import run_all
from mmod.config import RoutingConfig, score


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """What to time. Every combination of batch size, execution and step is one interleaved run of all models.

    Args:
        model: A name of timm's registry.
        model_args: Further arguments of `timm.create_model`.
        routers: Routers to time.
        capacities: Shares of tokens kept, each with every router.
        select: "topk", "threshold" (its thresholds are set so that it keeps as many tokens of the timed images), or
            both.
        context: What kept tokens attend to: "kept", "all", or both.
        blocks: Which blocks are routed: "every_other", "all", or their indices.
        controls: Time other ways to go about the first router's decisions, too: "loop" (image by image), "masked"
            (every token computed), "removed" (the routed blocks left out).
        batch_sizes: Images per call.
        execution: "eager", "compiled" (`torch.compile` with `fullgraph=True`), "cudagraphs" (the same with
            `mode="reduce-overhead"`, on a GPU only), or several of them. Threshold routing is compiled with
            `max_tokens` set to the largest number of tokens that it keeps of an image.
        step: "forward" (inference), "train" (forward, loss and backward, without the optimiser), or both.
        image_size: Side of the image in pixels; None means the model's own.
        seconds: Each run goes on for at least this long,
        rounds: and for at least this many rounds, in which each model is called once.
        threads: CPU threads; None leaves torch's choice.
        device: "cpu" or "cuda".
        dtype: Type of weights and images. Outputs are checked in float32 first, then in this type.
        seed: Seed of weights, images and order.
        out: Folder for `benchmark.json` and `benchmark.md`, which are never overwritten. A benchmark that was killed
            goes on in the same folder.

    Raises:
        ValueError: Nothing to time, a model that is timed against itself, or CUDA graphs without a GPU.
    """

    model: str = "vit_small_patch16_224"
    model_args: dict[str, Any] = field(default_factory=dict)
    routers: list[str] = field(default_factory=lambda: ["linear", "attention"])
    capacities: list[float] = field(default_factory=lambda: [0.125, 0.5])
    select: list[Literal["topk", "threshold"]] = field(default_factory=lambda: ["topk"])
    context: list[Literal["kept", "all"]] = field(default_factory=lambda: ["kept"])
    blocks: str | list[int] = "every_other"
    controls: list[Literal["loop", "masked", "removed"]] = field(default_factory=list)
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8, 32])
    execution: list[Literal["eager", "compiled", "cudagraphs"]] = field(default_factory=lambda: ["eager", "compiled"])
    step: list[Literal["forward", "train"]] = field(default_factory=lambda: ["forward", "train"])
    image_size: int | None = None
    seconds: float = 30.0
    rounds: int = 5
    threads: int | None = None
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    seed: int = 0
    out: str = "runs/benchmark"

    def __post_init__(self) -> None:
        for name in ("routers", "capacities", "select", "context", "batch_sizes", "execution", "step"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name} must name at least one value, and each once, got {values}")
        if min(self.batch_sizes) < 1:
            raise ValueError(f"batch_sizes must be positive, got {self.batch_sizes}")
        if "cudagraphs" in self.execution and torch.device(self.device).type != "cuda":
            raise ValueError(f"execution 'cudagraphs' needs device 'cuda', got {self.device!r}")

    def routing(self, variant: Variant) -> RoutingConfig:
        """Return the routing config of one of the timed models."""
        return RoutingConfig(
            router=score(variant.router, seed=self.seed) if variant.router == "random" else variant.router,
            capacity=variant.capacity,
            select=variant.select,
            context=variant.context,
            blocks=self.blocks if isinstance(self.blocks, str) else tuple(self.blocks),
        )

    def routed(self) -> list[Variant]:
        """Return the routed models to time, the controls last."""
        options = itertools.product(self.capacities, self.routers, self.select, self.context)
        found = [Variant(router, capacity, select, context) for capacity, router, select, context in options]
        controls = itertools.product(self.capacities, self.controls)
        return found + [Variant(self.routers[0], capacity, path=path) for capacity, path in controls]


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
