"""Where in a training step NaN or infinity appeared first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mmod.routing import Router
from mmod.training.engine.task import Batch, Task


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all floating-point tensors are finite."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor.is_floating_point())


def find_nonfinite(task: Task, group: Sequence[Batch], device: torch.device) -> str:
    """Repeat the forward passes of a step; name the batch and the module that were not finite first."""
    places = []
    # All passes in every process, because some tasks gather features between them.
    for number, work in enumerate(task.passes(group, device), 1):
        place, loss = _first_nonfinite(task, work.arguments)
        if not all_finite([loss]):
            places.append(f"{place}, batch {number} of {len(group)}")
    return places[0] if places else "another process"


@torch.no_grad()
def _first_nonfinite(task: Task, arguments: tuple[Any, ...]) -> tuple[str, Tensor]:
    """Repeat a forward pass; return what was not finite first (weight, input, output or loss), and the loss."""
    names: list[str] = []

    def note(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        # A router's decision marks tokens that always run, or never, with infinity.
        bad = torch.isnan if isinstance(module, Router) else _is_nonfinite
        if not names and any(bool(bad(tensor).any()) for tensor in _floats(output)):
            names.append(name)

    modules = [(name, module) for name, module in task.model.named_modules() if name]
    handles = [module.register_forward_hook(partial(note, name)) for name, module in modules]
    try:
        loss: Tensor = task(*arguments)["loss"]
    finally:
        for handle in handles:
            handle.remove()
    for name, weight in task.model.named_parameters():
        if not all_finite([weight]):
            return f"the weight {name}", loss
    if not all_finite(_floats(arguments)):
        return "the inputs", loss
    return f"the output of {names[0]}" if names else "the loss", loss


def _floats(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _is_nonfinite(tensor: Tensor) -> Tensor:
    return ~tensor.isfinite()
