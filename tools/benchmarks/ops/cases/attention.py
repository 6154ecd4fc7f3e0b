"""Cases of attention: with importance, and over rows of different numbers.

Axes: B images, N tokens, K slots per image, T packed rows, H heads, E channels of a head.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmod.ops import attention_with_importance, capture_importance, packed_attention
from tools.benchmarks.ops.case import Maker, OpCase, Result, Work, register_case


def _attend_exactly(q_HNE: Tensor, k_HNE: Tensor, v_HNE: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention of one image, and the mean attention that each of its tokens receives."""
    map_HNN = torch.softmax(q_HNE @ k_HNE.transpose(-2, -1) / math.sqrt(q_HNE.shape[-1]), dim=-1)
    return map_HNN @ v_HNE, map_HNN.detach().mean(dim=(0, 1))


def _attend_by_image(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Return `_attend_exactly` of a batch with the maps of one image at a time, in the backward pass too."""
    outputs = [checkpoint(_attend_exactly, *image, use_reentrant=False) for image in zip(*tensors)]
    return torch.stack([out for out, _ in outputs]), torch.stack([importance for _, importance in outputs])


def _attention_work(query_bytes: int, key_bytes: int, pairs: int, channels: int) -> tuple[Work, Work]:
    """Return the work of attention: two matrix products forward; five backward, one of them the scores again."""
    forward = Work(2 * query_bytes + 2 * key_bytes, 4 * pairs * channels)
    return forward, Work(4 * query_bytes + 4 * key_bytes, 10 * pairs * channels)


@register_case("attention_with_importance")
def importance_case(make: Maker) -> OpCase:
    """Return the case of attention that records the attention received by every token."""

    def by_map(q_BHNE: Tensor, k_BHNE: Tensor, v_BHNE: Tensor) -> tuple[Tensor, Tensor]:
        scores = q_BHNE @ k_BHNE.transpose(-2, -1) / math.sqrt(q_BHNE.shape[-1])
        attention = torch.softmax(scores, dim=-1, dtype=torch.float32)
        return attention.to(v_BHNE.dtype) @ v_BHNE, attention.detach().mean(dim=(1, 2))

    size = make.size
    rows = make.row_bytes(size.tokens)
    pairs = size.images * size.heads * size.tokens**2
    forward, backward = _attention_work(rows, rows, pairs, size.head_channels)
    return OpCase(
        op=attention_with_importance,
        inputs={name: make.heads(size.tokens) for name in ("q_BHNE", "k_BHNE", "v_BHNE")},
        learns=("q_BHNE", "k_BHNE", "v_BHNE"),
        exact=lambda q_BHNE, k_BHNE, v_BHNE: _attend_by_image(q_BHNE, k_BHNE, v_BHNE),
        baselines={
            "attention alone": lambda q_BHNE, k_BHNE, v_BHNE: F.scaled_dot_product_attention(q_BHNE, k_BHNE, v_BHNE),
            "map of all pairs": by_map,
        },
        forward=forward + Work(size.images * size.tokens * 4),
        backward=backward,
    )


@register_case("packed_attention")
def packed_case(make: Maker) -> OpCase:
    """Return the case of images that keep different numbers of tokens."""
    size = make.size
    drawn_B = torch.randint(2 * size.kept + 1, (size.images,), generator=make.generator, device=make.device)
    # On average as many rows as top-k keeps, and an image that keeps nothing.
    length_B = drawn_B.clamp(max=size.tokens)
    length_B[0] = size.kept
    if size.images > 1:
        length_B[-1] = 0
    lengths = length_B.tolist()
    shape = (sum(lengths), size.heads, size.head_channels)
    inputs: dict[str, object] = {name: make.normal(*shape) for name in ("q_THE", "k_THE", "v_THE")}
    inputs["cu_seqlens"] = F.pad(length_B.cumsum(0, dtype=torch.int32), (1, 0))
    rows = sum(lengths) * size.channels * make.dtype.itemsize
    pairs = size.heads * sum(length**2 for length in lengths)
    forward, backward = _attention_work(rows, rows, pairs, size.head_channels)
    return OpCase(
        op=packed_attention,
        inputs={**inputs, "max_seqlen": max(lengths)},
        learns=("q_THE", "k_THE", "v_THE"),
        exact=lambda q_THE, k_THE, v_THE, cu_seqlens, max_seqlen: _attend_by_lengths(q_THE, k_THE, v_THE, lengths),
        baselines=packed_baselines(lengths, make.device, make.dtype),
        forward=forward,
        backward=backward,
    )


def _attend_by_lengths(q_THE: Tensor, k_THE: Tensor, v_THE: Tensor, lengths: list[int]) -> Tensor:
    images = zip(*(x_THE.transpose(0, 1).split(lengths, dim=1) for x_THE in (q_THE, k_THE, v_THE)))
    outputs = [checkpoint(_attend_exactly, *image, use_reentrant=False)[0] for image in images]
    return torch.cat(outputs, dim=1).transpose(0, 1)


def packed_baselines(lengths: list[int], device: torch.device, dtype: torch.dtype) -> dict[str, Callable[..., Result]]:
    """Return other implementations of `mmod.ops.packed_attention` that run here, for images of some numbers of rows.

    By name: padding with a key mask, a call for each image, and on a GPU in half precision torch's `varlen_attn` and,
    where it is installed, the attention of xformers.
    """
    baselines: dict[str, Callable[..., Result]] = {"padded": _padded, "loop": _loop_over(lengths)}
    if device.type == "cuda" and dtype != torch.float32:
        baselines["varlen_attn"] = _varlen
        if importlib.util.find_spec("xformers"):
            baselines["xformers"] = _xformers_of(lengths)
    return baselines


def _padded(q_THE: Tensor, k_THE: Tensor, v_THE: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    images = cu_seqlens.shape[0] - 1
    total = q_THE.shape[0]
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
        images = zip(*(x_THE.transpose(0, 1).split(lengths, dim=1) for x_THE in (q_THE, k_THE, v_THE)))
        outputs = [F.scaled_dot_product_attention(*image) for image in images if image[0].shape[1]]
        return torch.cat(outputs, dim=1).transpose(0, 1)

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


@register_case("importance_block")
def importance_block_case(make: Maker) -> OpCase:
    """Return the case of a ViT block that records the attention received by every token."""
    from timm.models.vision_transformer import Block

    def with_importance(x_BND: Tensor, block: nn.Module) -> tuple[Tensor, Tensor]:
        with capture_importance() as captured:
            y_BND = block(x_BND)
        assert captured.importance_BN is not None
        return y_BND, captured.importance_BN

    def exact(x_BND: Tensor, block: Any) -> tuple[Tensor, Tensor]:
        qkv = block.attn.qkv(block.norm1(x_BND)).detach()
        q, k, v = qkv.unflatten(-1, (3, size.heads, size.head_channels)).permute(2, 0, 3, 1, 4)
        return block(x_BND), _attend_by_image(q, k, v)[1]

    size = make.size
    block = Block(size.channels, size.heads, qkv_bias=True).to(make.device, make.dtype).eval()
    rows = make.row_bytes(size.tokens)
    pairs = size.images * size.heads * size.tokens**2
    # Projections and MLP: 12 D^2 multiply-adds for each token.
    flops = 4 * pairs * size.head_channels + 24 * size.images * size.tokens * size.channels**2
    return OpCase(
        op=with_importance,
        inputs={"x_BND": make.rows(size.tokens), "block": block},
        learns=("x_BND",),
        exact=exact,
        baselines={"block without importance": lambda x_BND, block: block(x_BND)},
        forward=Work(2 * rows, flops),
        # Gradients of tokens and weights.
        backward=Work(2 * rows, 2 * flops),
        choice="attention_with_importance",
    )
