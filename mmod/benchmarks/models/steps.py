"""Timed steps of a model: inference or training; eager, compiled, or replayed as a CUDA graph."""

from __future__ import annotations

import types
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.benchmarks.oracle import WrongOutputError, check_close

# The compiler fuses and reorders; its error is a few units of the last place for outputs, more for summed gradients.
COMPILED_TOLERANCE = 1e-4
COMPILED_GRADIENT_TOLERANCE = 1e-3


class Step:
    """One timed call: inference, or a training step up to the gradients."""

    def __init__(self, model: nn.Module, step: str, execution: str) -> None:
        self.model = model
        self.trains = step == "train"
        self.replays = execution == "cudagraphs"
        self.forward: Callable[[Tensor], Tensor] = model if execution == "eager" else _compiled(model, self.replays)

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
