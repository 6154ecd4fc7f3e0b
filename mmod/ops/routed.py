"""Attention of kept tokens that reads their rows through the index.

Axes: B images, H heads, N tokens, K kept slots per image, E channels of a head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from mmod.ops.backend import Backend, choose
from mmod.ops.casting import cast_alike
from mmod.ops.importance import is_grouped

CONTEXTS = ("kept", "all")


def routed_attention(
    q_BHNE: Tensor,
    k_BHNE: Tensor,
    v_BHNE: Tensor,
    index_BK: Tensor,
    context: str = "kept",
    *,
    valid: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attend from the kept tokens to the kept ones, or to all.

    On a GPU the kernel reads the named rows where they are; elsewhere they are gathered.

    Args:
        q_BHNE: Queries of all tokens (B, H, N, E).
        k_BHNE: Keys, of as many heads or of a divisor of that (grouped queries) (B, H or fewer, N, E).
        v_BHNE: Values, like keys.
        index_BK: Kept tokens, unique for each image (B, K).
        context: "kept" attends to the tokens that `index_BK` names, "all" to all N.
        valid: False where nobody attends: empty slots (B, K) for "kept", padding (B, N) for "all"; None means nowhere.
        is_causal: A token sees those of its own or an earlier position.
        scale: Factor of the products; None means 1 / sqrt(E).

    Returns:
        The output of the kept tokens, zero for one that sees no key (B, H, K, E).

    Raises:
        ValueError: Unknown context, a forced backend that cannot serve these inputs, or types that differ outside
            autocast.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 6, 8)
        >>> index = torch.tensor([[0, 2, 5]])
        >>> every = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> bool(torch.allclose(routed_attention(q, k, v, index, "all"), every[:, :, index[0]], atol=1e-6))
        True
    """
    if context not in CONTEXTS:
        raise ValueError(f"context must be one of {', '.join(map(repr, CONTEXTS))}, got {context!r}")
    scale = 1 / math.sqrt(q_BHNE.shape[-1]) if scale is None else scale
    q_BHNE, k_BHNE, v_BHNE = cast_alike(q_BHNE, k_BHNE, v_BHNE)
    if choose("routed_attention", q_BHNE, head_dim=q_BHNE.shape[-1]) is Backend.TRITON:
        return _through_index(q_BHNE, k_BHNE, v_BHNE, index_BK, context, valid, is_causal, scale)
    images, _, tokens, _ = q_BHNE.shape
    position_BK = torch.arange(tokens, device=index_BK.device).expand(images, -1)
    if context == "kept":
        k_BHNE, v_BHNE, position_BK = _take(k_BHNE, index_BK), _take(v_BHNE, index_BK), index_BK
    mask = None if valid is None else valid[:, None, None, :]
    if is_causal:
        earlier = position_BK[:, None, None, :] <= index_BK[:, None, :, None]
        mask = earlier if mask is None else mask & earlier
    out_BHKE = F.scaled_dot_product_attention(
        _take(q_BHNE, index_BK), k_BHNE, v_BHNE, attn_mask=mask, scale=scale,
        enable_gqa=is_grouped(q_BHNE, k_BHNE),
    )  # fmt: skip
    if mask is None:
        return out_BHKE
    return torch.where(mask.any(dim=-1, keepdim=True), out_BHKE, 0.0)


def _take(x_BHNE: Tensor, index_BK: Tensor) -> Tensor:
    index = index_BK[:, None, :, None].expand(-1, x_BHNE.shape[1], -1, x_BHNE.shape[3])
    return x_BHNE.gather(2, index)


def _through_index(
    q_BHNE: Tensor,
    k_BHNE: Tensor,
    v_BHNE: Tensor,
    index_BK: Tensor,
    context: str,
    valid: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Tensor:
    from mmod.ops.triton.attend import attend_rows

    tokens, (images, slots) = q_BHNE.shape[2], index_BK.shape
    image_B = torch.arange(images + 1, dtype=torch.int32, device=index_BK.device)
    row_T = (index_BK + image_B[:-1, None] * tokens).flatten()
    rows = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHNE, k_BHNE, v_BHNE))
    keys = (slots, row_T) if context == "kept" else (tokens, None)
    out_THE, _ = attend_rows(
        *rows, image_B * slots, image_B * keys[0], slots, keys[0], row_T, keys[1],
        None if valid is None else valid.flatten(), is_causal, scale,
    )  # fmt: skip
    return out_THE.unflatten(0, (images, slots)).transpose(1, 2)
