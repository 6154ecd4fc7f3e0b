"""Sums of attention's columns, from queries, keys and the rows' log-sum-exp: no map of all pairs.

Axes: B images, H heads, N tokens, E channels of a head.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmod.ops.packed import attend_rows
from mmod.ops.triton.attention import LOG2_E, choose_tiles, load_rows
from mmod.ops.triton.compat import launch, side_by_side


@triton.jit
def column_kernel(  # type: ignore[no-untyped-def]
    q,
    k,
    lse,
    valid_q,
    valid_k,
    sums,
    q_image,
    q_head,
    q_row,
    k_image,
    k_head,
    k_row,
    lse_image,
    lse_head,
    valid_q_image,
    valid_k_image,
    tokens,
    heads,
    group,
    blocks,
    scale,
    width: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Sum the attention that one block of keys receives from all queries of one head."""
    program = tl.program_id(0)
    image = (program // blocks // heads).to(tl.int64)
    head = ((program // blocks) % heads).to(tl.int64)
    offset_n = program % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_n = offset_n < tokens
    x_k = load_rows(
        k + image * k_image + head // group * k_head, offset_n.to(tl.int64), k_row, inside_n, width, BLOCK_E
    )
    visible_n = inside_n
    if valid_k is not None:
        visible_n = visible_n & (tl.load(valid_k + image * valid_k_image + offset_n, mask=inside_n, other=0) != 0)
    q += image * q_image + head * q_head
    lse += image * lse_image + head * lse_head
    received = tl.zeros([BLOCK_N], tl.float32)
    begin = 0
    if CAUSAL:
        begin = program % blocks * BLOCK_N // BLOCK_M * BLOCK_M
    for start in range(begin, tokens, BLOCK_M):
        offset_m = start + tl.arange(0, BLOCK_M)
        inside_m = offset_m < tokens
        if valid_q is not None:
            inside_m = inside_m & (tl.load(valid_q + image * valid_q_image + offset_m, mask=inside_m, other=0) != 0)
        x_q = load_rows(q, offset_m.to(tl.int64), q_row, inside_m, width, BLOCK_E)
        # A query that is not counted, or that sees no key, gives nothing to anyone.
        norm = tl.load(lse + offset_m, mask=inside_m, other=float("inf")) * LOG2_E
        norm = tl.where(norm == -float("inf"), float("inf"), norm)
        score = tl.dot(x_k, tl.trans(x_q), input_precision="ieee") * (scale * LOG2_E)
        if CAUSAL:
            score = tl.where(offset_m[None, :] >= offset_n[:, None], score, -float("inf"))
        received += tl.sum(tl.exp2(score - norm[None, :]), 1)
    received = tl.where(visible_n, received, 0.0)
    tl.store(sums + (image * heads + head) * tokens + offset_n, received, mask=inside_n)


def column_sums(
    out: Tensor,
    q_BHNE: Tensor,
    k_BHNE: Tensor,
    lse_BHN: Tensor,
    valid_q_BN: Tensor | None,
    valid_k_BN: Tensor | None,
    is_causal: bool,
    scale: float,
) -> None:
    """Compute the attention each key receives, summed over heads and queries (B, N), fp32, without a gradient.

    `lse_BHN` is the natural logarithm of each row's sum of exponentials. Heads are summed last, so that few images
    still fill a GPU; that takes H numbers for each token.
    """
    q_BHNE, k_BHNE, lse_BHN = map(side_by_side, (q_BHNE, k_BHNE, lse_BHN))
    valid_q_image = 0
    if valid_q_BN is not None:
        valid_q_BN = valid_q_BN.contiguous()
        valid_q_image = valid_q_BN.stride(0)
    valid_k_image = 0
    if valid_k_BN is not None:
        valid_k_BN = valid_k_BN.contiguous()
        valid_k_image = valid_k_BN.stride(0)
    images, heads, tokens, width = q_BHNE.shape
    sums_BHN = q_BHNE.new_empty(images, heads, tokens, dtype=torch.float32)
    tile = choose_tiles(width, q_BHNE.dtype, backward=False)
    # Keys stay in registers and queries stream by, so the longer side is the keys'.
    options = {**tile.options(), "BLOCK_M": tile.keys, "BLOCK_N": tile.queries}
    blocks = triton.cdiv(tokens, tile.queries)
    launch(
        column_kernel,
        (blocks * heads * images,),
        q_BHNE,
        k_BHNE,
        lse_BHN,
        valid_q_BN,
        valid_k_BN,
        sums_BHN,
        *q_BHNE.stride()[:3],
        *k_BHNE.stride()[:3],
        *lse_BHN.stride()[:2],
        valid_q_image,
        valid_k_image,
        tokens,
        heads,
        heads // k_BHNE.shape[1],
        blocks,
        scale,
        width=width,
        CAUSAL=is_causal,
        **options,
    )
    torch.sum(sums_BHN, dim=1, out=out)


def attend_fused(
    q_BHNE: Tensor, k_BHNE: Tensor, v_BHNE: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend by torch's fused kernel that returns the rows' log-sum-exp.

    Returns:
        The output (B, H, N, E), and the natural logarithm of each row's sum of exponentials (B, H, N or more).
    """
    if q_BHNE.dtype == torch.float32:
        fused = torch.ops.aten._scaled_dot_product_efficient_attention
        return fused(q_BHNE, k_BHNE, v_BHNE, None, True, 0.0, is_causal, scale=scale)[:2]
    fused = torch.ops.aten._scaled_dot_product_flash_attention
    return fused(q_BHNE, k_BHNE, v_BHNE, 0.0, is_causal, False, scale=scale)[:2]


def attend_batch(
    q_BHNE: Tensor, k_BHNE: Tensor, v_BHNE: Tensor, visible_BN: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend to visible keys by our own kernel; return the output and the rows' log-sum-exp (B, H, N)."""
    images, _, tokens, _ = q_BHNE.shape
    rows = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHNE, k_BHNE, v_BHNE))
    start = torch.arange(images + 1, dtype=torch.int32, device=q_BHNE.device) * tokens
    valid = None if visible_BN is None else visible_BN.flatten()
    out, lse = attend_rows(*rows, start, tokens, valid, is_causal, scale)
    # Our kernel's log-sum-exps are in base 2, torch's in base e.
    lse_BHN = lse.unflatten(1, (images, tokens)).transpose(0, 1) * math.log(2)
    return out.unflatten(0, (images, tokens)).transpose(1, 2), lse_BHN
