"""The slow definition of operators: dense blocks on all tokens, in which hooks weigh the update of a branch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import mmod
from mmod.blocks import parameters_of


class Layers:
    """Record what routed layers were given and returned, and with which arguments."""

    def __init__(self, model: nn.Module) -> None:
        self.recorded: dict[str, tuple[Tensor, dict[str, Any], Tensor]] = {}
        for name, block in mmod.routed_blocks(model).items() if mmod.is_routed(model) else ():
            block.register_forward_hook(self._of(name), with_kwargs=True)

    def _of(self, name: str) -> Any:
        def record(module: nn.Module, args: Any, kwargs: dict[str, Any], out: Tensor) -> None:
            named = dict(zip(list(parameters_of(module))[1:], args[1:]))
            self.recorded[name] = args[0].detach(), {**named, **kwargs}, out.detach()

        return record


def weighed(block: Any, x: Tensor, routing: mmod.Routing, branch: str | None, arguments: dict[str, Any]) -> Tensor:
    """Return what a dense block makes of tokens of which those kept alone get the update of a branch, by their gate.

    Args:
        branch: Name of a module in the block; None for the whole block.
    """
    chosen = routing.keep_BN.unsqueeze(-1)
    gate = torch.ones_like(x[..., :1])
    if routing.gate_BK is not None:
        gate = gate.squeeze(-1).scatter(1, routing.kept.index_BK, routing.gate_BK.to(x.dtype)).unsqueeze(-1)

    def weigh(module: nn.Module, args: Any, output: Any) -> Any:
        update = output[0] if isinstance(output, tuple) else output
        update = torch.where(chosen, gate * update, 0)
        return (update, *output[1:]) if isinstance(output, tuple) else update

    if branch is None:
        return torch.where(chosen, x + gate * (block(x, **arguments) - x), x)
    handle = block.get_submodule(branch).register_forward_hook(weigh)
    y: Tensor = block(x, **arguments)
    handle.remove()
    return y
