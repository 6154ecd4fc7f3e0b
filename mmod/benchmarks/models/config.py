"""Config and rows of the benchmark of models, and the names of the models that it times."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from mmod.analysis.timing import Spread
from mmod.benchmarks.options import TimedOptions
from mmod.benchmarks.report import ReportRow, number_cell, spread_cell
from mmod.config import RoutingConfig, score
from mmod.values import check_distinct, check_fields


class Variant(NamedTuple):
    """Names a model of a benchmark; fields are those of `BenchmarkRow`.

    Args:
        router: Its router, or "dense" or "free".
        capacity: Share of tokens kept.
        select: "topk" or "threshold".
        context: What kept tokens attend to: "kept" or "all".
        path: "routed", or one of `mmod.benchmarks.models.paths.CONTROLS`.
    """

    router: str
    capacity: float
    select: str = "topk"
    context: str = "kept"
    path: str = "routed"

    @property
    def free(self) -> Variant:
        """The free routing that bounds this model."""
        return Variant("free", self.capacity, context=self.context)

    @property
    def topk(self) -> Variant:
        """The same model routed by top-k."""
        return self._replace(select="topk")

    def __str__(self) -> str:
        """Return the name for messages."""
        return f"{self.router} at capacity {self.capacity:g} ({self.select}, context {self.context}, {self.path})"


DENSE = Variant("dense", 1.0)


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig(TimedOptions):
    """A batch size, an execution and a step make one interleaved run of all models.

    Other options are those of `TimedOptions`.

    Args:
        model: A name of timm's registry.
        model_args: Further arguments of `timm.create_model`.
        routers: Routers to time.
        capacities: Shares of tokens kept, each with every router.
        select: "topk", "threshold" (its thresholds are set so that it keeps as many tokens of the timed images), or
            both.
        context: What kept tokens attend to: "kept", "all", or both.
        blocks: Which blocks are routed: "every_other", "late", "all", or their indices.
        controls: Time other ways to go about the first router's decisions, too: "loop" (image by image), "masked"
            (every token computed), "removed" (the routed blocks left out).
        batch_sizes: Images per call.
        execution: "eager", "compiled" (`torch.compile` with `fullgraph=True`), "cudagraphs" (the same with
            `mode="reduce-overhead"`, on a GPU only), or several of them. Threshold routing is compiled with
            `max_tokens` set to the largest number of tokens that it keeps of an image.
        step: "forward" (inference), "train" (forward, loss and backward, without the optimiser), or both.
        image_size: Side of the image in pixels; None means the model's own.
        dtype: Type of weights and images. Outputs are checked in float32 first, then in this type.

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
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    out: str = "runs/benchmark"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_distinct(self, "routers", "capacities", "select", "context", "batch_sizes", "execution", "step")
        check_fields(self, batch_sizes="[1, inf)")
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


@dataclass(frozen=True)
class BenchmarkRow(ReportRow):
    """One routed model in one run. All ratios are taken round by round; memory is that of the whole batch.

    Args:
        router: Its router.
        select: "topk" or "threshold".
        context: What kept tokens attend to: "kept" or "all".
        path: "routed", or a control: "loop" (the same decisions, image by image), "masked" (every token computed, the
            skipped ones thrown away) or "removed" (no decision, the routed blocks are gone).
        capacity: Its capacity; for "threshold" the share that the threshold was set to keep.
        batch_size: Images per call.
        execution: "eager", "compiled" or "cudagraphs".
        step: "forward" or "train".
        rounds: Rounds timed.
        kept: Tokens kept by a routed block, mean over images and blocks.
        most: The largest number of tokens that one block kept of one image.
        dense_ms: Milliseconds per call of the dense model.
        free_ms: The same of free routing at this capacity.
        routed_ms: The same of this model.
        of_free: Speed of this model as a share of free routing's.
        of_topk: Speed under "threshold" as a share of that of the same model under "topk"; None elsewhere.
        speedup: Speed of this model over the dense one's.
        flop_speedup: FLOPs of the dense model over those of this one.
        dense_peak: Most bytes that a training step of the dense model holds beyond the weights; None for "forward".
        routed_peak: The same of this model.
        peak_bound: `dense_peak` less the share of each routed block's activations that belongs to skipped tokens, or
            the gradients where they are more; None where the graph is compiled, which decides itself what it holds.
    """

    HEADER = (
        "batch", "run", "router", "capacity", "kept (most)", "dense ms", "free ms", "routed ms", "routed / free speed",
        "threshold / top-k speed", "speed-up", "FLOP speed-up", "speed-up / FLOP speed-up", "peak / dense peak",
        "peak / bound",
    )  # fmt: skip

    router: str
    select: str
    context: str
    path: str
    capacity: float
    batch_size: int
    execution: str
    step: str
    rounds: int
    kept: float
    most: int
    dense_ms: Spread
    free_ms: Spread
    routed_ms: Spread
    of_free: Spread
    of_topk: Spread | None
    speedup: Spread
    flop_speedup: float
    dense_peak: int | None = None
    routed_peak: int | None = None
    peak_bound: int | None = None

    @property
    def of_flops(self) -> float:
        """Measured speed-up as a share of what FLOPs promise."""
        return self.speedup.median / self.flop_speedup

    @property
    def peak_of_dense(self) -> float | None:
        """Peak memory as a share of the dense model's."""
        return None if self.dense_peak is None or self.routed_peak is None else self.routed_peak / self.dense_peak

    @property
    def peak_of_bound(self) -> float | None:
        """Peak memory over its bound."""
        return None if self.peak_bound is None or self.routed_peak is None else self.routed_peak / self.peak_bound

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain JSON values, with the ratios that follow from them."""
        derived = {name: getattr(self, name) for name in ("of_flops", "peak_of_dense", "peak_of_bound")}
        return {**asdict(self), **derived}

    def cells(self) -> tuple[str, ...]:
        """Return the line as text."""
        model = self.router if self.path == "routed" else f"{self.router}, {self.path}"
        model += ", threshold" * (self.select == "threshold") + ", context all" * (self.context == "all")
        return (
            str(self.batch_size), f"{self.execution} {self.step}", model, f"{self.capacity:g}",
            f"{self.kept:.1f} ({self.most})", f"{self.dense_ms.median:.2f}", f"{self.free_ms.median:.2f}",
            f"{self.routed_ms.median:.2f}", spread_cell(self.of_free), spread_cell(self.of_topk),
            spread_cell(self.speedup), f"{self.flop_speedup:.3f}", f"{self.of_flops:.3f}",
            number_cell(self.peak_of_dense), number_cell(self.peak_of_bound),
        )  # fmt: skip
