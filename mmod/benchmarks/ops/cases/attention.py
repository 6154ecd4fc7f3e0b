"""Cases of attention: with importance, and over rows of different numbers.

Axes: B images, N tokens, T packed rows, H heads, E channels of a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmod.benchmarks.ops.baselines import packed_baselines
from mmod.benchmarks.ops.case import Maker, OpCase, register_case
from mmod.benchmarks.ops.roofline import Work
from mmod.ops import attention_with_importance, capture_importance, packed_attention


def _attend_exactly(q_HNE: Tensor, k_HNE: Tensor, v_HNE: Tensor) -> tuple[Tensor, Tensor]:
    """Return attention of one image, and the mean attention that each of its tokens receives."""
    map_HNN = torch.softmax(q_HNE @ k_HNE.transpose(-2, -1) / math.sqrt(q_HNE.shape[-1]), dim=-1)
    return map_HNN @ v_HNE, map_HNN.detach().mean(dim=(0, 1))


def _attend_by_image(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Return `_attend_exactly` of a batch; the maps of one image are held at a time, in the backward pass too."""
    found = [checkpoint(_attend_exactly, *image, use_reentrant=False) for image in zip(*tensors)]
    return torch.stack([out for out, _ in found]), torch.stack([importance for _, importance in found])


def _attention_work(query_bytes: int, key_bytes: int, pairs: int, channels: int) -> tuple[Work, Work]:
    """Return the work of attention: two matrix products forward; five backward, one of them the scores again."""
    forward = Work(2 * query_bytes + 2 * key_bytes, 4 * pairs * channels)
    return forward, Work(4 * query_bytes + 4 * key_bytes, 10 * pairs * channels)


@register_case("attention_with_importance")
def importance_case(make: Maker) -> OpCase:
    """Return the case of attention that notes what each token receives."""

    def by_map(q_BHNE: Tensor, k_BHNE: Tensor, v_BHNE: Tensor) -> tuple[Tensor, Tensor]:
        scores = q_BHNE @ k_BHNE.transpose(-2, -1) / math.sqrt(q_BHNE.shape[-1])
        attention = torch.softmax(scores, dim=-1, dtype=torch.float32)
        return attention.to(v_BHNE.dtype) @ v_BHNE, attention.detach().mean(dim=(1, 2))

    size = make.size
    rows, pairs = make.row_bytes(size.tokens), size.images * size.heads * size.tokens**2
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
    # As many rows as top-k keeps in the mean, and an image that keeps nothing.
    length_B = drawn_B.clamp(max=size.tokens)
    length_B[0], length_B[1:][-1:] = size.kept, 0
    lengths = length_B.tolist()
    inputs: dict[str, object] = {
        name: make.normal(sum(lengths), size.heads, size.head_channels) for name in ("q_THE", "k_THE", "v_THE")
    }
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
    parts = zip(*(x_THE.transpose(0, 1).split(lengths, dim=1) for x_THE in (q_THE, k_THE, v_THE)))
    found = [checkpoint(_attend_exactly, *part, use_reentrant=False)[0] for part in parts]
    return torch.cat(found, dim=1).transpose(0, 1)


@register_case("importance_block")
def importance_block_case(make: Maker) -> OpCase:
    """Return the case of a whole ViT block that notes what each token receives."""
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
    rows, pairs = make.row_bytes(size.tokens), size.images * size.heads * size.tokens**2
    # Projections and MLP: 12 D^2 multiply-adds for each token.
    flops = 4 * pairs * size.head_channels + 24 * size.images * size.tokens * size.channels**2
    return OpCase(
        op=with_importance,
        inputs={"x_BND": make.rows(size.tokens), "block": block},
        learns=("x_BND",),
        exact=exact,
        baselines={"block without importance": lambda x_BND, block: block(x_BND)},
        forward=Work(2 * rows, flops),
        # Gradients of tokens and of weights.
        backward=Work(2 * rows, 2 * flops),
        choice="attention_with_importance",
    )
