"""The models of a benchmark: dense, routed, freely routed and controls, all on the same weights.

Axes: B images, N tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmod.analysis.calibrate import match_topk_
from mmod.analysis.flops import flops
from mmod.analysis.memory import held_by_blocks
from mmod.analysis.trace import Trace, trace
from mmod.benchmarks.models.config import DENSE, BenchmarkConfig, Variant
from mmod.benchmarks.models.paths import control, free_routing, sharing_copy
from mmod.benchmarks.models.steps import Step, check_compiled
from mmod.benchmarks.oracle import PLAIN_TOLERANCE, check_dense, check_reference, clear_images
from mmod.model import route_

CHECKED_IMAGES = 2
# Of whole models in float32, whose errors average out over many sums.
EXACT_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Decided:
    """Decisions of a model on some images, in numbers.

    Args:
        kept: Tokens that a routed block keeps, mean over images and blocks.
        most: The largest number that one keeps of one image.
        flop_speedup: FLOPs of the dense model over those of this one.
    """

    kept: float
    most: int
    flop_speedup: float


class Variants:
    """The models of a benchmark.

    Args:
        config: What to time.

    Attributes:
        models: Every model by name, in evaluation.
        routed: Names of those that are compared with dense and free ones.
    """

    def __init__(self, config: BenchmarkConfig) -> None:
        import timm
        from timm.data import resolve_model_data_config

        self.device = torch.device(config.device)
        self.dtype = torch.float32
        arguments = dict(config.model_args)
        if config.image_size is not None:
            arguments["img_size"] = config.image_size
        dense = timm.create_model(config.model, **arguments).to(self.device).eval()
        channels, height, width = resolve_model_data_config(dense)["input_size"]
        side = arguments.get("img_size")
        self.size = (arguments.get("in_chans", channels), side or height, side or width)
        self.routed = config.routed()
        self.models: dict[Variant, nn.Module] = {DENSE: dense}
        for name in self.routed:
            routed = route_(sharing_copy(dense), config.routing(name))
            self.models[name] = routed if name.path == "routed" else control(routed, name.path)
            if name.free not in self.models:
                fixed = routed if name.select == "topk" else route_(sharing_copy(dense), config.routing(name.topk))
                self.models[name.free] = free_routing(fixed)

    def to(self, dtype: torch.dtype) -> Variants:
        """Return copies of the models in another type, again on the same weights."""
        converted = copy.copy(self)
        # One copy of all of them together: they go on sharing their weights.
        converted.models = copy.deepcopy(self.models)
        converted.dtype = dtype
        for model in converted.models.values():
            model.to(dtype)
        return converted

    def images(self, count: int) -> Tensor:
        """Return random images."""
        return torch.randn(count, *self.size, device=self.device, dtype=self.dtype)

    def check(self) -> None:
        """Raise unless every routed model computes what it must."""
        tolerance = EXACT_TOLERANCE if self.dtype == torch.float32 else PLAIN_TOLERANCE[self.dtype]
        for name in self.routed:
            if name.path != "removed":
                model, images = self.models[name], self._images_for(name, CHECKED_IMAGES, static=False)
                with _full_precision():
                    if name.path == "routed":
                        check_dense(model, images, tolerance)
                    check_reference(model, images, tolerance)

    def check_compiled(self, batch_size: int, execution: str, step: str) -> None:
        """Raise unless every model computes the same compiled as it does eagerly.

        Args:
            batch_size: Images per call.
            execution: How to compile, see `Step`.
            step: "forward" or "train".
        """
        images = self.prepare(batch_size, static=True)
        for name, model in self.models.items():
            with _full_precision():
                check_compiled(str(name), Step(model, step, execution), Step(model, step, "eager"), images[name])
            # What was compiled for a check is in the way of what is timed.
            torch.compiler.reset()

    def prepare(self, batch_size: int, static: bool) -> dict[Variant, Tensor]:
        """Return images for every model, and set thresholds so that they keep of them as many tokens as top-k.

        Args:
            batch_size: Images per call.
            static: Threshold routing gets a static maximum.
        """
        return {name: self._images_for(name, batch_size, static) for name in self.models}

    def _images_for(self, name: Variant, count: int, static: bool) -> Tensor:
        model = self.models[name].eval()
        if name not in self.routed or name.path == "removed":
            return self.images(count)
        if name.select == "threshold":
            images = self.images(count)
            match_topk_(model, images, static)
            return images
        # In lower precision no two paths are compared that decide by themselves.
        return clear_images(model, self.images, count) if self.dtype == torch.float32 else self.images(count)

    def decided(self, name: Variant, images: Tensor) -> Decided:
        """Return what a routed model makes of the images it was timed on.

        Args:
            name: One of `routed`.
            images: Images (B, C, height, width).
        """
        if name.path == "removed":
            dense, removed = (flops(self.models[which], self.size).routed for which in (DENSE, name))
            return Decided(0.0, 0, dense / removed)
        decisions = self._decisions(name, images)
        counts = torch.stack([routing.keep_BN.sum(dim=1) for routing in decisions.values()])
        report = flops(self.models[name], self.size, kept=decisions if name.select == "threshold" else None)
        return Decided(float(counts.float().mean()), int(counts.max()), report.speedup)

    @torch.no_grad()
    def _decisions(self, name: Variant, images: Tensor) -> Trace:
        with trace(self.models[name].eval()) as decisions:
            self.models[name](images)
        return decisions

    def saved_bytes(self, images: Mapping[Variant, Tensor]) -> dict[Variant, int]:
        """Return how much of the dense model's memory in training belongs to tokens that a routed model skips.

        It is the skipped share of what each routed block holds for the backward pass, less the tokens it hands on,
        which are all there whatever is skipped. Keys and values of all tokens are no part of this, nor are controls.

        Args:
            images: Images of every model (B, C, height, width).
        """
        held = held_by_blocks(self.models[DENSE], images[DENSE])
        saved = {}
        for name in self.routed:
            if name.path == "routed" and name.context == "kept":
                shares = self._decisions(name, images[name]).kept_shares()
                saved[name] = int(sum((held[b].block - held[b].stream) * (1 - share) for b, share in shares.items()))
        return saved


@contextmanager
def _full_precision() -> Iterator[None]:
    """Convolutions in float32 on a GPU are rounded to fewer bits unless they are told not to be."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before
