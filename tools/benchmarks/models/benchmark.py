"""Benchmark of routed models beside dense ones and free routing."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from mmod.adapters import find_stack
from mmod.analysis.memory import peak_bytes
from mmod.analysis.timing import Spread, interleave, ratios
from mmod.config import Preset, RoutingConfig, score
from mmod.io.tables import Column
from mmod.methods.resolve import resolve_routing
from mmod.opening.open import open_model
from mmod.values import check_distinct
from tools.benchmarks.models.variants import DENSE, Step, Variant, Variants
from tools.benchmarks.report import HIDDEN, Row, Runs, TimedOptions

Execution = Literal["eager", "compiled", "exported", "cudagraphs"]


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(TimedOptions):
    """A batch size, an execution and a step make one interleaved run of all models.

    Args:
        model: A name of timm's registry.
        model_args: Further arguments of `timm.create_model`.
        routers: Routers to time, each at every capacity.
        routings: Further models by name: fields of `RoutingConfig`, or `preset: NAME` with its arguments. Where skipped
            tokens join others, outputs are checked at capacity 1 alone.
        capacities: Shares of tokens kept, each with every router.
        select: "topk", "threshold" (its thresholds are set so that it keeps as many tokens of the timed images), or
            both.
        context: What kept tokens attend to: "kept", "all", or both.
        blocks: Which blocks are routed: "every_other", "late", "all", or their indices.
        controls: Also time other implementations of the first router's decisions: "loop" (image by image), "masked"
            (every token computed), "removed" (the routed blocks left out).
        batch_sizes: Images per call.
        execution: "eager", "compiled" (`torch.compile` with `fullgraph=True`), "exported" (the program of
            `torch.export`, inference only), "cudagraphs" (compiled with `mode="reduce-overhead"`, on a GPU only), or
            several of them. Threshold routing is compiled and exported with `max_tokens` set to the largest number of
            tokens that it keeps of an image.
        step: "forward" (inference), "train" (forward, loss and backward, without the optimiser), or both.
        image_size: Side of the image in pixels; None for the model's default.
        dtype: Type of weights and images. Outputs are checked in float32 first, then in this type.
    """

    model: str = "vit_small_patch16_224"
    model_args: dict[str, Any] = field(default_factory=dict)
    routers: list[str] = field(default_factory=lambda: ["linear", "attention"])
    routings: dict[str, dict[str, Any]] = field(default_factory=dict)
    capacities: list[float] = field(default_factory=lambda: [0.125, 0.5])
    select: list[Literal["topk", "threshold"]] = field(default_factory=lambda: ["topk"])
    context: list[Literal["kept", "all"]] = field(default_factory=lambda: ["kept"])
    blocks: str | list[int] = "every_other"
    controls: list[Literal["loop", "masked", "removed"]] = field(default_factory=list)
    batch_sizes: Annotated[list[int], "[1, inf)"] = field(default_factory=lambda: [1, 8, 32])
    execution: list[Execution] = field(default_factory=lambda: ["eager", "compiled"])
    step: list[Literal["forward", "train"]] = field(default_factory=lambda: ["forward", "train"])
    image_size: int | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    out: str = "runs/benchmark"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.routings:
            check_distinct(self, "routers")
        check_distinct(self, "capacities", "select", "context", "batch_sizes", "execution", "step")
        if "cudagraphs" in self.execution and torch.device(self.device).type != "cuda":
            raise ValueError(f"execution 'cudagraphs' needs device 'cuda', got {self.device!r}")
        if "exported" in self.execution and "train" in self.step:
            raise ValueError("execution 'exported' is inference alone: set step to ['forward']")

    def routing(self, variant: Variant) -> RoutingConfig:
        """Return the routing config of one of the timed models."""
        if variant.router in self.routings:
            return self.named_routing(variant.router)
        seeded = {"seed": self.seed} if variant.router == "random" else {}
        return RoutingConfig(
            router=score(variant.router, **seeded),
            capacity=variant.capacity,
            select=variant.select,
            context=variant.context,
            blocks=self.blocks if isinstance(self.blocks, str) else tuple(self.blocks),
        )

    def routed(self) -> list[Variant]:
        """Return the routed models to time, the controls last."""
        options = itertools.product(self.capacities, self.routers, self.select, self.context)
        routed = [Variant(router, capacity, select, context) for capacity, router, select, context in options]
        controls = itertools.product(self.capacities, self.controls)
        routed += [Variant(self.routers[0], capacity, path=path) for capacity, path in controls]
        return [*routed, *(Variant(name, _mean_capacity(self.named_routing(name))) for name in self.routings)]

    def named_routing(self, name: str) -> RoutingConfig:
        """Return one of `routings`; presets take the depth from the model."""
        routing = resolve_routing(self.routings[name])
        return routing.at_depth(self.depth) if isinstance(routing, Preset) else routing

    @functools.cached_property
    def depth(self) -> int:
        """Number of blocks of the model."""
        arguments = {name: value for name, value in self.model_args.items() if name != "pretrained"}
        with torch.device("meta"):
            return len(find_stack(open_model(self.model, pretrained=False, args=arguments).model).blocks)

    def runs(self) -> Runs:
        """Return a run of all models for every batch size, execution and step."""
        # Models are made and checked at the first run.
        checked = functools.cache(functools.partial(_Bench, self))
        calls: dict[str, Callable[[], list[Row]]] = {}

        def measure(batch_size: int, execution: str, step: str) -> list[Row]:
            return checked().run(batch_size, execution, step)

        for batch_size, execution, step in itertools.product(self.batch_sizes, self.execution, self.step):
            name = f"batch {batch_size}, {execution} {step}"
            calls[name] = functools.partial(measure, batch_size, execution, step)
        size = f" at {self.image_size} px" if self.image_size else ""
        return Runs(f"{self.model}{size}, {self.dtype}", COLUMNS, calls)


COLUMNS: dict[str, Column] = {
    "batch_size": ("batch", ""),
    "run": ("run", ""),
    "model": ("router", ""),
    "capacity": ("capacity", "g"),
    "kept_most": ("kept (most)", ""),
    "dense_ms": ("dense ms", ".2f"),
    "free_ms": ("free ms", ".2f"),
    "routed_ms": ("routed ms", ".2f"),
    "of_free": ("routed / free speed", "[.3f"),
    "of_topk": ("threshold / top-k speed", "[.3f"),
    "speedup": ("speed-up", "[.3f"),
    "flop_speedup": ("FLOP speed-up", ".3f"),
    "of_flops": ("speed-up / FLOP speed-up", ".3f"),
    "peak_of_dense": ("peak / dense peak", ".3f"),
    "peak_of_bound": ("peak / bound", ".3f"),
    **dict.fromkeys(("router", "select", "context", "path", "execution", "step", "rounds", "kept", "most"), HIDDEN),
    **dict.fromkeys(("dense_peak", "routed_peak", "peak_bound"), HIDDEN),
}
"""Columns of a routed model in one run. Ratios are taken round by round.

Under "threshold", `capacity` is the share that the threshold was set to keep. Peaks are bytes of a training step on the
whole batch, beyond the weights. `peak_bound` is the dense model's peak less the activations of skipped tokens in routed
blocks, or the gradients where they are more; None for compiled graphs, where the compiler decides what is held."""


class _Bench:
    """Times the models of a benchmark, after their outputs were checked."""

    def __init__(self, config: BenchmarkConfig) -> None:
        self.config = config
        self.device = torch.device(config.device)
        torch.manual_seed(config.seed)
        self.exact = Variants(*_dense(config), {name: config.routing(name) for name in config.routed()})
        self.exact.check()
        self.timed = self.exact
        if config.dtype != "float32":
            self.timed = self.exact.to(getattr(torch, config.dtype))
            self.timed.check()

    def run(self, batch_size: int, execution: str, step: str) -> list[Row]:
        """Time all models at one batch size."""
        config = self.config
        timed = self.timed
        if execution != "eager":
            self.exact.check_compiled(batch_size, execution, step)
        images = timed.prepare(batch_size, static=execution != "eager")
        steps = {name: Step(model, step, execution) for name, model in timed.models.items()}
        calls: dict[Variant, Callable[[], Tensor]] = {}
        for name, call in steps.items():
            calls[name] = functools.partial(call, images[name])
        times = interleave(calls, seconds=config.seconds, rounds=config.rounds, device=self.device, seed=config.seed)
        peaks = self._peaks(steps, calls) if step == "train" else {}
        saved = timed.saved_bytes(images) if peaks and execution == "eager" else {}
        rows = []
        for name in timed.routed:
            dense = times[DENSE]
            routed = times[name]
            free = times[timed.free[name]]
            topk = times[name.topk] if name.select == "threshold" and name.topk in times else None
            gradients = sum(p.numel() * p.element_size() for p in timed.models[name].parameters())
            bound = max(peaks[DENSE] - saved[name], gradients) if name in saved else None
            speedup = ratios(dense, routed)
            decided = timed.decided(name, images[name])
            row = {
                **name._asdict(),
                **decided,
                "batch_size": batch_size,
                "execution": execution,
                "step": step,
                "run": f"{execution} {step}",
                "model": name.title,
                "rounds": len(routed),
                "kept_most": f"{decided['kept']:.1f} ({decided['most']})",
                "dense_ms": Spread.of(dense),
                "free_ms": Spread.of(free),
                "routed_ms": Spread.of(routed),
                "of_free": ratios(free, routed),
                "of_topk": None if topk is None else ratios(topk, routed),
                "speedup": speedup,
                "of_flops": speedup.median / decided["flop_speedup"],
                "dense_peak": peaks.get(DENSE),
                "routed_peak": peaks.get(name),
                "peak_of_dense": peaks[name] / peaks[DENSE] if peaks else None,
                "peak_bound": bound,
                "peak_of_bound": None if bound is None else peaks[name] / bound,
            }
            rows.append(row)
        torch.compiler.reset()
        return rows

    def _peaks(self, steps: dict[Variant, Step], calls: dict[Variant, Callable[[], Tensor]]) -> dict[Variant, int]:
        peaks = {}
        for name, step in steps.items():
            step.clear()
            peaks[name] = peak_bytes(calls[name], self.device)
            step.clear()
        return peaks


def _mean_capacity(routing: RoutingConfig) -> float:
    """Return the capacity of a routing, the mean over its blocks where they differ."""
    capacity = routing.capacity
    shares = capacity if isinstance(capacity, tuple) else (capacity,)
    return round(float(sum(shares)) / len(shares), 3)


def _dense(config: BenchmarkConfig) -> tuple[nn.Module, tuple[int, int, int]]:
    """Return the dense model and the size of an image (C, height, width)."""
    from timm.data import resolve_model_data_config

    arguments = dict(config.model_args)
    pretrained = arguments.pop("pretrained", False)
    if config.image_size is not None:
        arguments["img_size"] = config.image_size
    model = open_model(config.model, pretrained=pretrained, args=arguments).model.to(config.device)
    channels, height, width = resolve_model_data_config(model)["input_size"]
    side = arguments.get("img_size")
    return model, (arguments.get("in_chans", channels), side or height, side or width)
