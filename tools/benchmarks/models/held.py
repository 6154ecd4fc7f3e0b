"""Memory that blocks hold for the backward pass."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmod.adapters import find_stack
from mmod.analysis.memory import ActivationMemory
from mmod.analysis.modes import in_mode


class HeldBytes(NamedTuple):
    """Bytes that a block holds for the backward pass when it returns, and those of its output, which they include."""

    block: int
    stream: int


def held_by_blocks(model: nn.Module, images: Tensor) -> dict[str, HeldBytes]:
    """Run a forward pass in training mode and return the memory held for the backward pass, by block."""
    stack = find_stack(model)
    memory = ActivationMemory([images, *model.parameters(), *model.buffers()])
    names = dict(zip(stack.blocks, stack.names))
    before = dict[nn.Module, int]()
    held = dict[str, HeldBytes]()

    def enter(block: nn.Module, args: Any) -> None:
        before[block] = memory.live

    def leave(block: nn.Module, args: Any, out: Tensor) -> None:
        held[names[block]] = HeldBytes(memory.live - before[block], out.untyped_storage().nbytes())

    with ExitStack() as hooks, in_mode(True, model), torch.enable_grad():
        for block in names:
            hooks.enter_context(block.register_forward_pre_hook(enter))
            hooks.enter_context(block.register_forward_hook(leave))
        with memory:
            output = model(images)
        del output
    return held
