"""Dtypes and heads of the inputs of ops."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

_AS_IT_IS = nullcontext()


def cast_alike(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values in one dtype: under autocast in autocast's, as torch's fused attention does.

    Under autocast, norms of queries and keys return fp32, while values come from a linear layer in half precision.

    Example:
        >>> q = k = v = torch.zeros(1, 1, 2, 8)
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     cast_alike(q, k, v.bfloat16())[0].dtype
        torch.bfloat16
    """
    if autocasts(q) and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(q.device.type)
        # Autocast leaves float64 alone, and so does this.
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    # Here, because fused attention would name an operation that the user has not called.
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"queries, keys and values must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    return q, k, v


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which products of a tensor are computed in its own dtype."""
    if not autocasts(tensor):
        return _AS_IT_IS
    return torch.autocast(tensor.device.type, enabled=False)


def autocasts(tensor: Tensor) -> bool:
    """Return whether autocast is enabled on a tensor's device."""
    # `is_autocast_enabled` raises for the meta device, and `device.type` is slow to read.
    if tensor.is_meta:
        return False
    if tensor.is_cpu:
        return torch.is_autocast_enabled("cpu")
    return torch.is_autocast_enabled(tensor.device.type)


def is_grouped(q: Tensor, k: Tensor) -> bool:
    """Return whether several query heads share a key head; heads are the second axis."""
    # With symbolic shapes the comparison is a symbol, and callers need a bool.
    return True if q.shape[1] != k.shape[1] else False  # noqa: SIM210
