"""Type in which attention computes."""

from __future__ import annotations

import torch
from torch import Tensor


def cast_alike(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values in one type: under autocast in its own, as torch's fused attention casts them.

    Norms of queries and keys give fp32 under autocast, while values come from a linear layer in half precision.

    Args:
        q: Queries.
        k: Keys.
        v: Values.

    Raises:
        ValueError: Their types differ outside autocast.

    Example:
        >>> q = k = v = torch.zeros(1, 1, 2, 8)
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     cast_alike(q, k, v.bfloat16())[0].dtype
        torch.bfloat16
    """
    device = q.device.type
    # Torch has no answer for meta, where nothing is computed.
    if device != "meta" and torch.is_autocast_enabled(device) and q.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"queries, keys and values must be of one type, got {q.dtype}, {k.dtype} and {v.dtype}")
    return q, k, v
