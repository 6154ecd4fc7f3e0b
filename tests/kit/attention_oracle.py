"""Attention by its definition, for the tests of everything that attends: loops over sequences and the whole map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def by_the_map(q_MHE: Tensor, k_NHE: Tensor, v_NHE: Tensor, seen_MN: Tensor, scale: float) -> Tensor:
    """Attend as the formula says; a query that sees no key gets zeros."""
    group = q_MHE.shape[1] // k_NHE.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (k_NHE, v_NHE))
    score = torch.einsum("mhe,nhe->hmn", q_MHE, keys) * scale
    share = score.masked_fill(~seen_MN, -torch.inf).softmax(dim=-1)
    share = torch.where(seen_MN.any(dim=-1, keepdim=True), share, 0.0)
    return torch.einsum("hmn,nhe->mhe", share, values)


def by_torch(q_MHE: Tensor, k_NHE: Tensor, v_NHE: Tensor, seen_MN: Tensor, scale: float) -> Tensor:
    """Attend by torch's own operation, the measure of precision."""
    rows = (x.transpose(0, 1).unsqueeze(0) for x in (q_MHE, k_NHE, v_NHE))
    # A row that sees nothing is no attention; it is let see everything, and left out afterwards.
    some_M1 = seen_MN.any(dim=-1, keepdim=True)
    mask = None if bool(seen_MN.all()) else seen_MN | ~some_M1
    gqa = q_MHE.shape[1] != k_NHE.shape[1]
    out = F.scaled_dot_product_attention(*rows, attn_mask=mask, scale=scale, enable_gqa=gqa)
    return torch.where(some_M1.unsqueeze(-1), out.squeeze(0).transpose(0, 1), 0.0)


def attend_by_loops(
    attend: Attend,
    q_THE: Tensor,
    k_THE: Tensor,
    v_THE: Tensor,
    lengths: Sequence[int],
    *,
    valid: Tensor | None = None,
    is_causal: bool = False,
    scale: float = 0.3,
) -> Tensor:
    """Attend sequence by sequence; the arguments are those of the kernel."""
    valid_T = torch.ones_like(q_THE[:, 0, 0], dtype=torch.bool) if valid is None else valid
    outs = []
    for q, k, v, keep in zip(*(x.split(list(lengths)) for x in (q_THE, k_THE, v_THE, valid_T)), strict=True):
        visible = keep.expand(len(keep), -1)
        if is_causal:
            visible = visible.tril()
        if len(keep):
            outs.append(attend(q, k, v, visible, scale))
    return torch.cat(outs) if outs else q_THE[:0]


def starts(lengths: Sequence[int], device: str = "cpu") -> Tensor:
    """Return where sequences of these lengths begin and, last, end."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def full_map(
    q: Tensor, k: Tensor, mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Return the softmax of the scores of all heads in float64."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    score = torch.einsum("bhqe,bhke->bhqk", q.double(), k.double()) * scale
    if is_causal:
        score = score.masked_fill(torch.ones(score.shape[-2:]).triu(1).bool(), -torch.inf)
    if mask is not None:
        score = score.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else score + mask
    return score.softmax(-1)


def attention_of(
    block: Any, x_ND: Tensor, bias: float | Tensor = 0.0, source_ND: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the update of the attention of a plain timm block, and each head's queries and keys (H, N, E).

    Args:
        bias: Added to the scores of all heads, (N,) by key or (N, N) by query and key.
        source_ND: The tokens that are attended to; None for the tokens themselves.
    """
    q_HNE, k_HNE, v_HNE = (
        block.attn.qkv(block.norm1(rows_ND)).unflatten(1, (3, block.attn.num_heads, -1)).permute(1, 2, 0, 3)[part]
        for part, rows_ND in enumerate((x_ND, *[x_ND if source_ND is None else source_ND] * 2))
    )
    share_HNN = (q_HNE @ k_HNE.mT * k_HNE.shape[-1] ** -0.5 + bias).softmax(dim=-1)
    return block.ls1(block.attn.proj((share_HNN @ v_HNE).transpose(0, 1).flatten(1))), q_HNE, k_HNE
