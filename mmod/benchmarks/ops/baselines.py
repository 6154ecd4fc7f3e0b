"""Baselines of variable-length attention.

Axes: B images, K slots per image, T packed rows, H heads, E channels of a head.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmod.benchmarks.ops.case import Result


def packed_baselines(lengths: list[int], device: torch.device, dtype: torch.dtype) -> dict[str, Callable[..., Result]]:
    """Return other implementations of `mmod.ops.packed_attention` that run here.

    Args:
        lengths: Rows of each image.
        device: Where they run.
        dtype: Type of queries, keys and values.

    Returns:
        By name: padding with a key mask, a call for each image, and on a GPU in half precision torch's `varlen_attn`
        and, where it is installed, the attention of xformers.
    """
    found: dict[str, Callable[..., Result]] = {"padded": _padded, "loop": _loop_over(lengths)}
    if device.type == "cuda" and dtype != torch.float32:
        found["varlen_attn"] = _varlen
        if importlib.util.find_spec("xformers"):
            found["xformers"] = _xformers_of(lengths)
    return found


def _padded(q_THE: Tensor, k_THE: Tensor, v_THE: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    images, total = cu_seqlens.shape[0] - 1, q_THE.shape[0]
    slot_K = torch.arange(max_seqlen, device=q_THE.device)
    valid_BK = slot_K < cu_seqlens.diff().unsqueeze(1)
    slot_T = torch.nonzero_static(valid_BK.flatten(), size=total).squeeze(1)

    def pad(x_THE: Tensor) -> Tensor:
        empty = x_THE.new_zeros(images * max_seqlen, *x_THE.shape[1:])
        return empty.index_copy(0, slot_T, x_THE).unflatten(0, (images, max_seqlen)).transpose(1, 2)

    # An image that keeps nothing still needs a key: a softmax over nothing is NaN.
    mask = (valid_BK | (slot_K == 0))[:, None, None, :]
    out_BHKE = F.scaled_dot_product_attention(pad(q_THE), pad(k_THE), pad(v_THE), attn_mask=mask)
    return out_BHKE.transpose(1, 2).flatten(0, 1).index_select(0, slot_T)


def _loop_over(lengths: list[int]) -> Callable[..., Result]:
    def loop(q_THE: Tensor, k_THE: Tensor, v_THE: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        parts = zip(*(x_THE.transpose(0, 1).split(lengths, dim=1) for x_THE in (q_THE, k_THE, v_THE)))
        found = [F.scaled_dot_product_attention(*part) for part in parts if part[0].shape[1]]
        return torch.cat(found, dim=1).transpose(0, 1)

    return loop


def _varlen(q_THE: Tensor, k_THE: Tensor, v_THE: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Any:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(q_THE, k_THE, v_THE, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)


def _xformers_of(lengths: list[int]) -> Callable[..., Result]:
    def attend(q_THE: Tensor, k_THE: Tensor, v_THE: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Any:
        from xformers.ops import memory_efficient_attention
        from xformers.ops.fmha.attn_bias import BlockDiagonalMask

        bias = BlockDiagonalMask.from_seqlens([length for length in lengths if length], device=q_THE.device)
        return memory_efficient_attention(q_THE[None], k_THE[None], v_THE[None], attn_bias=bias)[0]

    return attend
