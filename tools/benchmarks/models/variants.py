"""The models of a benchmark, on the same weights, and their timed steps: inference or training, eager or compiled.

Axes: B images, N tokens.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.analysis.flop_count import flops
from mmod.analysis.tracing import Trace, trace
from mmod.config import RoutingConfig
from mmod.lab import match_topk_
from mmod.methods.route import routed_blocks
from mmod.model import route_
from tools.benchmarks.checks import (
    PLAIN_TOLERANCE,
    WrongOutputError,
    check_close,
    check_dense,
    check_reference,
    clear_images,
)
from tools.benchmarks.models.held import held_by_blocks
from tools.benchmarks.models.paths import control, free_routing, sharing_copy

CHECKED_IMAGES = 2
# Of models in float32, whose errors average out over many sums.
EXACT_TOLERANCE = 1e-5
# The compiler fuses and reorders; its error is a few units of the last place for outputs, more for summed gradients.
COMPILED_TOLERANCE = 1e-4
COMPILED_GRADIENT_TOLERANCE = 1e-3


class Variant(NamedTuple):
    """Names a model of a benchmark: a router or routing, "dense" or "free", and how it is routed."""

    router: str
    capacity: float
    select: str = "topk"
    context: str = "kept"
    path: str = "routed"

    @property
    def topk(self) -> Variant:
        """The same model routed by top-k."""
        return self._replace(select="topk")

    @property
    def title(self) -> str:
        """The name in tables, which leave out what is common."""
        parts = [self.router]
        if self.path != "routed":
            parts.append(self.path)
        if self.select == "threshold":
            parts.append("threshold")
        if self.context == "all":
            parts.append("context all")
        return ", ".join(parts)

    def __str__(self) -> str:
        return f"{self.router} at capacity {self.capacity:g} ({self.select}, context {self.context}, {self.path})"


DENSE = Variant("dense", 1.0)


class Variants:
    """The models of a benchmark, in evaluation mode by name.

    Attributes:
        routed: Names of the models that are compared with the dense and the free ones.
        free: Names of the free routing that bounds each of them; models that keep equally many in each block share it.
    """

    def __init__(self, dense: nn.Module, size: tuple[int, int, int], routings: Mapping[Variant, RoutingConfig]) -> None:
        self.size = size
        self.device = next(dense.parameters()).device
        self.dtype = torch.float32
        self.routed = list(routings)
        self.models: dict[Variant, nn.Module] = {DENSE: dense}
        self.free: dict[Variant, Variant] = {}
        self._joining = {name for name, routing in routings.items() if routing.joins}
        bounds: dict[object, Variant] = {}
        for name, routing in routings.items():
            routed = route_(sharing_copy(dense), routing)
            self.models[name] = routed if name.path == "routed" else control(routed, name.path)
            # Free routing keeps a fixed number of tokens, that of top-k at the same capacity.
            fixed = routed
            if name.select != "topk":
                fixed = route_(sharing_copy(dense), routing.replace(select="topk"))
            kept = tuple((place, block.router.capacity) for place, block in routed_blocks(fixed).items())
            runs_alike = (kept, name.context, routing.merges_inside)
            free = bounds.setdefault(runs_alike, name._replace(router=f"free, as {name.router}"))
            self.free[name] = free
            if free not in self.models:
                self.models[free] = free_routing(fixed)

    def to(self, dtype: torch.dtype) -> Variants:
        """Return copies of the models in another type, again on the same weights."""
        converted = copy.copy(self)
        # One copy of all models together, so that they still share their weights.
        converted.models = copy.deepcopy(self.models)
        converted.dtype = dtype
        for model in converted.models.values():
            model.to(dtype)
        return converted

    def images(self, count: int) -> Tensor:
        """Return random images."""
        return torch.randn(count, *self.size, device=self.device, dtype=self.dtype)

    def check(self) -> None:
        """Raise unless every routed model computes correct outputs."""
        tolerance = EXACT_TOLERANCE if self.dtype == torch.float32 else PLAIN_TOLERANCE[self.dtype]
        for name in self.routed:
            if name.path == "removed":
                continue
            model = self.models[name]
            images = self._images_for(name, CHECKED_IMAGES, static=False)
            with _full_precision():
                if name.path == "routed":
                    check_dense(model, images, tolerance)
                if name not in self._joining:
                    check_reference(model, images, tolerance)

    def check_compiled(self, batch_size: int, execution: str, step: str) -> None:
        """Raise unless every model computes the same compiled as eagerly; see `Step` for execution and step."""
        images = self.prepare(batch_size, static=True)
        for name, model in self.models.items():
            with _full_precision():
                check_compiled(str(name), Step(model, step, execution), Step(model, step, "eager"), images[name])
            # Code that was compiled for a check would interfere with the timed code.
            torch.compiler.reset()

    def prepare(self, batch_size: int, static: bool) -> dict[Variant, Tensor]:
        """Return images for every model, and set thresholds so that they keep as many of their tokens as top-k.

        `static` gives threshold routing a static maximum.
        """
        return {name: self._images_for(name, batch_size, static) for name in self.models}

    def _images_for(self, name: Variant, count: int, static: bool) -> Tensor:
        model = self.models[name].eval()
        if name not in self.routed or name.path == "removed" or name in self._joining:
            return self.images(count)
        if name.select == "threshold":
            # Thresholds are set on the very images that are timed, so that both paths keep equally many tokens.
            images = self.images(count)
            match_topk_(model, images, static)
            return images
        # Paths that decide separately are only compared in float32.
        if self.dtype != torch.float32:
            return self.images(count)
        return clear_images(model, self.images, count)

    def decided(self, name: Variant, images: Tensor) -> dict[str, float]:
        """Return the columns that follow from a routed model's decisions on the images (B, C, height, width)."""
        if name.path == "removed":
            dense = flops(self.models[DENSE], self.size).routed
            removed = flops(self.models[name], self.size).routed
            return {"kept": 0.0, "most": 0, "flop_speedup": dense / removed}
        decisions = self._decisions(name, images)
        counts = torch.stack([routing.keep_BN.sum(dim=1) for routing in decisions.values()])
        report = flops(self.models[name], self.size, kept=decisions if name.select == "threshold" else None)
        kept = float(counts.float().mean())
        most = int(counts.max())
        return {"kept": kept, "most": most, "flop_speedup": 1 / report.share}

    @torch.no_grad()
    def _decisions(self, name: Variant, images: Tensor) -> Trace:
        with trace(self.models[name].eval()) as decisions:
            self.models[name](images)
        return decisions

    def saved_bytes(self, images: Mapping[Variant, Tensor]) -> dict[Variant, int]:
        """Return the bytes of the dense model's training memory that belong to tokens a routed model skips.

        It is the skipped share of the memory that a routed block holds for the backward pass, except its output tokens,
        which are always there. Models with context "all" and controls are left out.
        """
        held = held_by_blocks(self.models[DENSE], images[DENSE])
        saved = {}
        for name in self.routed:
            if name.path == "routed" and name.context == "kept":
                bytes_of_skipped = 0.0
                for block, share in self._decisions(name, images[name]).kept_shares().items():
                    bytes_of_skipped += (held[block].block - held[block].stream) * (1 - share)
                saved[name] = int(bytes_of_skipped)
        return saved


@contextmanager
def _full_precision() -> Iterator[None]:
    """Turn off TF32, to which cuDNN rounds float32 convolutions by default."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


class Step:
    """One timed call: inference, or a training step up to the gradients."""

    def __init__(self, model: nn.Module, step: str, execution: str) -> None:
        self.model = model
        self.trains = step == "train"
        self.replays = execution == "cudagraphs"
        self.forward: Callable[[Tensor], Tensor] = model
        if execution == "exported":
            self.forward = _Exported(model)
        elif execution != "eager":
            self.forward = _compiled(model, self.replays)

    def __call__(self, images: Tensor) -> Tensor:
        """Run the step on images (B, C, height, width) and return the model's output."""
        if self.model.training != self.trains:
            # A walk through all modules takes as long as a small model's call.
            self.model.train(self.trains)
        if self.replays:
            # The last call's outputs may be overwritten from here on.
            torch.compiler.cudagraph_mark_step_begin()
        if not self.trains:
            with torch.no_grad():
                return self.forward(images)
        self.clear()
        output = self.forward(images)
        F.cross_entropy(output.float(), torch.zeros_like(output[:, 0], dtype=torch.long)).backward()
        return output.detach()

    def clear(self) -> None:
        """Drop the gradients that the last call left."""
        self.model.zero_grad(set_to_none=True)

    def gradients(self) -> dict[str, Tensor]:
        """Return a copy of the gradients that the last call left."""
        gradients = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        return {name: gradient.clone() for name, gradient in gradients.items() if gradient is not None}


class _Exported:
    """A model whose exported program runs, of the shape of the first images."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.program: nn.Module | None = None

    def __call__(self, images: Tensor) -> Tensor:
        if self.program is None:
            self.program = torch.export.export(self.model, (images,)).module()
        output: Tensor = self.program(images)
        return output


def _compiled(model: nn.Module, replays: bool) -> Callable[[Tensor], Tensor]:
    def forward(images: Tensor) -> Tensor:
        return model(images)

    # Compiled code is cached by code object. A new one keeps other models' guards out of this model's calls.
    copied = types.FunctionType(forward.__code__.replace(), globals(), closure=forward.__closure__)
    return torch.compile(copied, fullgraph=True, dynamic=False, mode="reduce-overhead" if replays else None)


def check_compiled(name: str, compiled: Step, eager: Step, images: Tensor) -> None:
    """Raise a WrongOutputError unless a compiled step gives the outputs and gradients of the eager one."""
    expected = eager(images).clone()
    gradients = eager.gradients() if eager.trains else {}
    check_close(f"{name}, compiled against eager", compiled(images), expected, COMPILED_TOLERANCE)
    if not eager.trains:
        return
    observed = compiled.gradients()
    if set(observed) != set(gradients):
        raise WrongOutputError(
            f"{name}: gradients reach {sorted(set(observed) ^ set(gradients))} compiled or eager only"
        )
    for parameter, gradient in gradients.items():
        what = f"{name}, the gradient of {parameter} compiled against eager"
        check_close(what, observed[parameter], gradient, COMPILED_GRADIENT_TOLERANCE)
