"""Importance: the attention a token receives, without ever storing the map of all pairs.

Axes: B images, H heads, N tokens, E channels of a head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# Probabilities held at once, in elements: 4 MB of fp32, which stays within a core's cache.
CHUNK_ELEMENTS = 1 << 20
# Where the map serves the output as well: 8 MB. On two CPU threads, ViT-S at N = 197 and batch 32, this costs 5 % more
# than fused attention alone, 1 MB 60 % more.
GROUP_ELEMENTS = 1 << 21


def attention_importance(
    q_BHNE: Tensor,
    k_BHNE: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    valid_BN: Tensor | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """Return the mean attention each token receives, over heads and queries, without a gradient.

    Queries are taken in chunks, so memory grows with N and not with its square. Compiled and exported graphs take all
    queries at once, since the number of chunks would fix their batch size.

    Args:
        q_BHNE: Queries (B, H, N, E).
        k_BHNE: Keys, of as many heads or of a divisor of that (grouped queries) (B, H or fewer, N, E).
        mask: True where a pair may attend, or a bias to add, broadcastable to (B, H, N, N).
        is_causal: A query sees keys up to its own position.
        scale: Factor of the products; None means 1 / sqrt(E).
        valid_BN: False where a token is padding: its query is not counted (B, N).
        chunk_elements: Probabilities held at once.

    Returns:
        Importance (B, N), fp32 or better; it sums to 1 over the tokens of an image.

    Source: A-MoD, Gadhikar et al., arXiv 2412.20875 (mean over heads and queries of the preceding layer's map).

    Example:
        >>> q = k = torch.zeros(1, 2, 4, 8)
        >>> attention_importance(q, k)
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    with torch.no_grad():
        images, heads, tokens, width = q_BHNE.shape
        scale = 1 / math.sqrt(width) if scale is None else scale
        if k_BHNE.shape[1] != heads:
            k_BHNE = k_BHNE.repeat_interleave(heads // k_BHNE.shape[1], dim=1)
        keys = k_BHNE.transpose(-2, -1)
        total_BN = torch.zeros(images, tokens, dtype=_accumulator(q_BHNE), device=q_BHNE.device)
        for part in _chunks(images, heads, tokens, chunk_elements):
            score = (q_BHNE[:, :, part] * scale) @ keys
            score = _masked(score.to(total_BN.dtype), mask, is_causal, part)
            attention = torch.softmax(score, dim=-1)
            if valid_BN is not None:
                attention = torch.where(valid_BN[:, None, part, None], attention, 0.0)
            total_BN = total_BN + attention.sum(dim=(1, 2))
        queries = tokens if valid_BN is None else valid_BN.sum(dim=1, keepdim=True).clamp(min=1)
        return total_BN / (heads * queries)


def attention_with_importance(
    q_BHNE: Tensor,
    k_BHNE: Tensor,
    v_BHNE: Tensor,
    mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    valid_BN: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return attention's output and, beside it, the mean attention each token receives.

    The output is that of `scaled_dot_product_attention` and carries its gradient; importance carries none and is
    taken before dropout. Small fp32 inference on a CPU computes the probabilities once for both, some images at a time.

    Args:
        q_BHNE: Queries (B, H, N, E).
        k_BHNE: Keys (B, H, N, E).
        v_BHNE: Values (B, H, N, E).
        mask: True where a pair may attend, or a bias to add, broadcastable to (B, H, N, N).
        dropout: Share of probabilities dropped in the output.
        is_causal: A query sees keys up to its own position.
        scale: Factor of the products; None means 1 / sqrt(E).
        valid_BN: False where a token is padding (B, N).

    Returns:
        The output (B, H, N, E) and importance (B, N).

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8)
        >>> out, importance = attention_with_importance(q, k, v)
        >>> bool(torch.allclose(importance.sum(), torch.tensor(1.0)))
        True
    """
    plain = mask is None and valid_BN is None and not is_causal and not dropout
    if plain and _shares_probabilities(q_BHNE, k_BHNE, v_BHNE):
        return _shared_probabilities(q_BHNE, k_BHNE, v_BHNE, scale)
    out = F.scaled_dot_product_attention(
        q_BHNE, k_BHNE, v_BHNE, attn_mask=mask, dropout_p=dropout, is_causal=is_causal, scale=scale,
        enable_gqa=k_BHNE.shape[1] != q_BHNE.shape[1],
    )  # fmt: skip
    return out, attention_importance(q_BHNE, k_BHNE, mask, is_causal=is_causal, scale=scale, valid_BN=valid_BN)


def importance_of_map(attention: Tensor, valid_BN: Tensor | None = None) -> Tensor:
    """Return the mean attention each token receives, from a map that a host has computed anyway.

    Args:
        attention: Probabilities after softmax, rows are queries (B, H, N, N).
        valid_BN: False where a token is padding (B, N).

    Returns:
        Importance (B, N), without a gradient.
    """
    attention = attention.detach()
    attention = attention.to(_accumulator(attention))
    if valid_BN is None:
        return attention.mean(dim=(1, 2))
    attention = torch.where(valid_BN[:, None, :, None], attention, 0.0)
    return attention.sum(dim=(1, 2)) / (attention.shape[1] * valid_BN.sum(dim=1, keepdim=True).clamp(min=1))


def _accumulator(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _chunks(images: int, heads: int, tokens: int, chunk_elements: int) -> list[slice]:
    """Return the queries to take at a time."""
    if torch.compiler.is_compiling():
        # Chunks that depend on a size would pin it; the compiler fuses the softmax instead.
        return [slice(None)]
    rows = max(1, min(tokens, chunk_elements // max(1, images * heads * tokens)))
    return [slice(start, start + rows) for start in range(0, tokens, rows)]


def _masked(score: Tensor, mask: Tensor | None, is_causal: bool, part: slice) -> Tensor:
    if is_causal:
        tokens = score.shape[-1]
        position = torch.arange(tokens, device=score.device)
        score = score.masked_fill(position > position[part, None], -torch.inf)
    if mask is None:
        return score
    if mask.ndim >= 2 and mask.shape[-2] > 1:
        mask = mask[..., part, :]
    if mask.dtype == torch.bool:
        return score.masked_fill(~mask, -torch.inf)
    return score + mask


def _shares_probabilities(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether computing the map once for output and importance beats fused attention and a second pass.

    Measured on two CPU threads, ViT-S, fp32: at N = 197 it adds 1 to 4 % to a block against 10 to 16 % for the second
    pass, at N = 1025 7 to 10 % against 27 to 37 %. The map of one image must stay small, hence the bound.
    """
    small = q.shape[1] * q.shape[2] * q.shape[2] <= 1 << 23
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return (
        small
        and q.device.type == "cpu"
        and q.dtype == torch.float32
        and q.shape == k.shape == v.shape
        and not grad
        and not torch.compiler.is_exporting()
    )


def _shared_probabilities(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    images, heads, tokens, width = q.shape
    scale = 1 / math.sqrt(width) if scale is None else scale
    if torch.compiler.is_compiling():
        # Groups would fix the batch size.
        attention = torch.softmax(q @ k.transpose(-2, -1) * scale, dim=-1)
        return attention @ v, attention.sum(dim=(1, 2)) / (heads * tokens)
    group = max(1, min(images, GROUP_ELEMENTS // (heads * tokens * tokens)))
    # Channels-last like fused attention's own result, so that the host's transpose and reshape stay free.
    out = torch.empty(images, tokens, heads, width).transpose(1, 2)
    importance_BN = torch.empty(images, tokens)
    attention = torch.empty(group * heads, tokens, tokens)
    for start in range(0, images, group):
        part = slice(start, min(images, start + group))
        rows = [x[part].reshape(-1, tokens, width) for x in (q, k, v)]
        some = attention[: rows[0].shape[0]]
        torch.baddbmm(some, rows[0], rows[1].transpose(1, 2), beta=0, alpha=scale, out=some)
        torch.softmax(some, dim=-1, out=some)
        out[part] = torch.bmm(some, rows[2]).unflatten(0, (-1, heads))
        torch.sum(some.unflatten(0, (-1, heads)), dim=(1, 2), out=importance_BN[part])
    return out, importance_BN / (heads * tokens)
