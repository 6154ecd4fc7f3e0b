"""Ops in plain torch: the definition that kernels are tested against, and the fallback without them.

Axes: B images, N tokens, K slots per image, D channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmod.ops.backend import Backend, choose

HASH_CHANNELS = 8
# Odd 32-bit multipliers, one for each channel of the fingerprint.
MULTIPLIERS = (
    0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F, 0x165667B1, 0xD3A2646D, 0xFD7046C5, 0xB55A4F09,
)  # fmt: skip
MIX = 0x45D9F3B


def gather_rows(x_BND: Tensor, index_BK: Tensor) -> Tensor:
    """Gather rows, see `mmod.ops.gather_rows`."""
    rows: Tensor = choose("gather_rows", x_BND, Backend.TORCH).run(x_BND, index_BK)
    return rows


def scatter_rows(x_BND: Tensor, index_BK: Tensor, y_BKD: Tensor) -> Tensor:
    """Scatter rows, see `mmod.ops.scatter_rows`."""
    rows: Tensor = choose("scatter_rows", x_BND, Backend.TORCH).run(x_BND, index_BK, y_BKD)
    return rows


def gather_elements(x_BND: Tensor, index_BK: Tensor, inverse_BN: Tensor | None = None) -> Tensor:
    """Gather rows element by element, which every kind of graph supports."""
    return torch.gather(x_BND, 1, index_BK.unsqueeze(-1).expand(-1, -1, x_BND.shape[-1]).long())


def scatter_elements(x_BND: Tensor, index_BK: Tensor, y_BKD: Tensor, inverse_BN: Tensor | None = None) -> Tensor:
    """Scatter rows element by element, which every kind of graph supports."""
    return torch.scatter(x_BND, 1, index_BK.unsqueeze(-1).expand_as(y_BKD).long(), y_BKD)


def gather_contiguous(x_BND: Tensor, index_BK: Tensor, inverse_BN: Tensor | None = None) -> Tensor:
    """Gather rows by their index in the batch; torch then copies rows instead of elements."""
    if torch.is_grad_enabled() and x_BND.requires_grad:
        return _TakeRows.apply(x_BND, index_BK)
    return _take_rows(x_BND, index_BK)


def scatter_contiguous(x_BND: Tensor, index_BK: Tensor, y_BKD: Tensor, inverse_BN: Tensor | None = None) -> Tensor:
    """Scatter rows by their index in the batch; torch then copies rows instead of elements."""
    if torch.is_grad_enabled() and (x_BND.requires_grad or y_BKD.requires_grad):
        return _PutRows.apply(x_BND, index_BK, y_BKD)
    return _put_rows(x_BND.clone(), index_BK, y_BKD)


def has_contiguous_rows(x_BND: Tensor, facts: Mapping[str, int]) -> bool:
    """Return whether rows can be indexed over the batch; compiled, exported and traced graphs gather elements."""
    return not torch.compiler.is_compiling() and not torch.jit.is_tracing() and x_BND.is_contiguous()


def _take_rows(x_BND: Tensor, index_BK: Tensor) -> Tensor:
    return x_BND.flatten(0, 1).index_select(0, _flat(index_BK, x_BND.shape[1])).unflatten(0, index_BK.shape)


def _put_rows(out_BND: Tensor, index_BK: Tensor, y_BKD: Tensor) -> Tensor:
    """Write rows into a fresh tensor, in place."""
    flat, rows = _flat(index_BK, out_BND.shape[1]), y_BKD.flatten(0, 1)
    size = out_BND.element_size()
    aligned = out_BND.shape[2] * size % 16 == 0 and rows.storage_offset() * size % 16 == 0
    # Torch 2.11 has no batching rule for a view with another dtype.
    batched = any(torch._C._functorch.is_batchedtensor(x) for x in (out_BND, rows))
    if aligned and not batched and rows.is_contiguous() and rows.dtype == out_BND.dtype:
        # Torch looks the index up once per element: copying 16 bytes per element is 4 to 5 times faster.
        out_BND.flatten(0, 1).view(torch.complex128).index_copy_(0, flat, rows.view(torch.complex128))
    else:
        out_BND.flatten(0, 1).index_copy_(0, flat, rows)
    return out_BND


class _TakeRows(torch.autograd.Function):
    """Gather whose gradient is a copy, because indices are unique; torch's gradient would accumulate."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_BND: Tensor, index_BK: Tensor) -> Tensor:
        return _take_rows(x_BND, index_BK)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.shape = inputs[0].shape
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad_BKD: Tensor) -> tuple[Tensor, None]:
        move = scatter_rows if torch.is_grad_enabled() else _put_rows
        return move(grad_BKD.new_zeros(ctx.shape), ctx.saved_tensors[0], grad_BKD), None


class _PutRows(torch.autograd.Function):
    """Scatter whose gradients are two row copies: zeros for replaced rows, a gather for new rows."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x_BND: Tensor, index_BK: Tensor, y_BKD: Tensor) -> Tensor:
        return _put_rows(x_BND.clone(), index_BK, y_BKD)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, grad_BND: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (index_BK,) = ctx.saved_tensors
        grad_BND = grad_BND.contiguous()
        grad_x, grad_y = None, None
        if ctx.needs_input_grad[0]:
            grad_x = scatter_rows(grad_BND, index_BK, grad_BND.new_zeros(*index_BK.shape, grad_BND.shape[2]))
        if ctx.needs_input_grad[2]:
            grad_y = gather_rows(grad_BND, index_BK)
        return grad_x, None, grad_y


def _flat(index_BK: Tensor, tokens: int) -> Tensor:
    images = index_BK.shape[0]
    if images == 1:
        return index_BK.flatten().long()
    return (index_BK + torch.arange(0, images * tokens, tokens, device=index_BK.device).unsqueeze(1)).flatten()


def lerp_rows(z_BKD: Tensor, y_BKD: Tensor, gate_BK: Tensor | None) -> Tensor:
    """Return the gated update from z to y: `z + gate * (y - z)`.

    `torch.lerp` returns y exactly at gate 1, in half precision too; the formula does not.

    Args:
        z_BKD: Rows before the block (B, K, D) or packed (T, D).
        y_BKD: Rows after it.
        gate_BK: Weight of the update (B, K) or (T), or None for 1.

    Returns:
        The weighted rows, like z.

    Source: Raposo et al., arXiv 2404.02258, Eq. 1, with f the residual update.

    Example:
        >>> lerp_rows(torch.zeros(1, 1, 1), torch.ones(1, 1, 1), torch.tensor([[0.25]])).item()
        0.25
    """
    y_BKD = y_BKD.to(z_BKD.dtype)
    if gate_BK is None:
        return y_BKD
    return torch.lerp(z_BKD, y_BKD, gate_BK.unsqueeze(-1).to(z_BKD.dtype))


def gather_norm(
    x_BND: Tensor, index_BK: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, kind: str
) -> tuple[Tensor, Tensor]:
    """Gather rows and normalise them, see `mmod.ops.gather_norm`."""
    z_BKD = gather_rows(x_BND, index_BK)
    if kind == "layer":
        return z_BKD, F.layer_norm(z_BKD, z_BKD.shape[-1:], weight, bias, eps)
    normed_BKD = F.rms_norm(z_BKD, z_BKD.shape[-1:], weight, eps)
    return z_BKD, normed_BKD if bias is None else normed_BKD + bias


def merge_rows(
    x_BND: Tensor, index_BK: Tensor, z_BKD: Tensor, y_BKD: Tensor, gate_BK: Tensor | None, valid_BK: Tensor | None,
    inverse_BN: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write the gated update of the kept rows back, see `mmod.ops.merge_rows`."""
    new_BKD = lerp_rows(z_BKD, y_BKD, gate_BK)
    if valid_BK is not None:
        new_BKD = torch.where(valid_BK.unsqueeze(-1), new_BKD, gather_rows(x_BND, index_BK))
    return scatter_rows(x_BND, index_BK, new_BKD)


def inverse_rows(index_BK: Tensor, tokens: int) -> Tensor:
    """Return the slot of each token, -1 for tokens that are not kept.

    Args:
        index_BK: Token of each slot, unique within an image (B, K).
        tokens: All tokens N of an image.

    Returns:
        The inverse map (B, N), int32.

    Example:
        >>> inverse_rows(torch.tensor([[1, 3]]), 4).tolist()
        [[-1, 0, -1, 1]]
    """
    slot_BK = torch.arange(index_BK.shape[1], dtype=torch.int32, device=index_BK.device).expand(index_BK.shape)
    none_BN = torch.full((index_BK.shape[0], tokens), -1, dtype=torch.int32, device=index_BK.device)
    return none_BN.scatter(1, index_BK.long(), slot_BK)


def mix(value: Tensor) -> Tensor:
    """Scatter the low 32 bits of an int64 tensor; multiplications stay below 2**63."""
    value = value & 0xFFFFFFFF
    value = ((value >> 16) ^ value) * MIX & 0xFFFFFFFF
    value = ((value >> 16) ^ value) * MIX & 0xFFFFFFFF
    return (value >> 16) ^ value


def random_scores(x_BND: Tensor, salt: int, valid_BN: Tensor | None) -> Tensor:
    """Hash position and fingerprint of the image, see `mmod.ops.random_scores`."""
    x_BND = x_BND[..., :HASH_CHANNELS].float()
    tokens, channels = x_BND.shape[1:]
    count_B1: Tensor | int = tokens
    if valid_BN is not None:
        x_BND = x_BND * valid_BN.unsqueeze(-1)
        count_B1 = valid_BN.sum(dim=1, keepdim=True).clamp(min=1)
    mean_BD = x_BND.sum(dim=1) / count_B1
    square_B1 = x_BND.square().sum(dim=(1, 2)).unsqueeze(1) / (count_B1 * channels)
    deviation_B1 = (square_B1 / count_B1).clamp(min=1e-30).sqrt()
    step_B1 = torch.exp2(torch.floor(torch.log2(deviation_B1)) - 2)
    coarse_BD = (mean_BD / step_B1).round().to(torch.int64)
    multiplier_D = torch.tensor(MULTIPLIERS[:channels], device=x_BND.device)
    # Steps fit in 31 bits, so that no product overflows.
    key_B1 = mix(((coarse_BD & 0x7FFFFFFF) * multiplier_D & 0xFFFFFFFF).sum(dim=1, keepdim=True) + salt)
    bits_BN = mix(key_B1 + torch.arange(tokens, device=x_BND.device))
    return (bits_BN & 0xFFFFFF).float() / 2.0**24
