"""The dtype in which ops compute."""

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
    device = q.device.type
    # `is_autocast_enabled` raises for the meta device.
    if device != "meta" and torch.is_autocast_enabled(device) and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"queries, keys and values must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    return q, k, v


def without_autocast(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which products of a tensor are computed in its own dtype."""
    device = tensor.device.type
    # `is_autocast_enabled` raises for the meta device.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return _AS_IT_IS
    return torch.autocast(device, enabled=False)
