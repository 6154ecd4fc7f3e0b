"""Weights in 8 bits as a subclass of tensors that can do little else, as those of torchao."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

aten = torch.ops.aten
_PRODUCTS = {aten.t.default, aten.mm.default, aten.addmm.default}


class Int8Weight(Tensor):
    """A matrix in 8 bits with a scale for each row, which says to be of the scale's type."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Int8Weight:
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, requires_grad=False)

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.data_int8, self.scale = data, scale

    @classmethod
    def quantize(cls, weight: Tensor) -> Int8Weight:
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is aten.detach.default:
            return cls(args[0].data_int8, args[0].scale)
        if func not in _PRODUCTS:
            raise NotImplementedError(func)
        plain = [a.data_int8 * a.scale if isinstance(a, Int8Weight) else a for a in args]
        return func(*plain, **(kwargs or {}))


def quantize_(model: nn.Module) -> None:
    """Give the linear layers of a model's blocks weights in 8 bits."""
    quantize_linear_(model.blocks)


def quantize_linear_(model: nn.Module) -> None:
    """Give the linear layers of a module weights in 8 bits."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.weight = nn.Parameter(Int8Weight.quantize(module.weight.detach()), requires_grad=False)
