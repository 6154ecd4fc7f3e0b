"""The ops as they are timed: inputs, definition in float64, other implementations, and the work nobody can do without.

Axes: B images, N tokens, K slots per image, M keys, T packed rows, D channels, H heads, E channels of a head.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmod.config import rational
from mmod.measuring.bounds import Work
from mmod.measuring.op_rivals import Result, packed_rivals
from mmod.ops import (
    attention_with_importance,
    capture_importance,
    gather_norm,
    gather_rows,
    merge_rows,
    packed_attention,
    routed_attention,
    scatter_rows,
)
from mmod.routing import kept_count

Heads = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class OpSize:
    """Sizes that an op is timed at.

    Args:
        images: Images in the batch (B).
        tokens: Tokens of an image (N).
        heads: Heads of attention (H).
        head_channels: Channels of a head (E); a token has `heads * head_channels` (D).
        capacity: Share of tokens kept.
    """

    images: int
    tokens: int
    heads: int = 6
    head_channels: int = 64
    capacity: float = 0.5

    def __post_init__(self) -> None:
        for name in ("images", "tokens", "heads", "head_channels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        rational(self.capacity)

    @property
    def channels(self) -> int:
        """Channels of a token (D)."""
        return self.heads * self.head_channels

    @property
    def kept(self) -> int:
        """Tokens kept of an image (K)."""
        return kept_count(self.tokens, rational(self.capacity))


@dataclass(frozen=True, kw_only=True)
class OpCase:
    """One op at one size.

    Args:
        op: The public function.
        inputs: Its arguments.
        learns: Names of the arguments that get a gradient in a training step, beside the parameters of modules.
        exact: The definition, called with the same arguments in float64.
        rivals: Other implementations with the same arguments; one may return the first of the results alone.
        forward: Work of the call.
        backward: Work of its gradients.
        moves: Results are moved, not computed: they must equal torch's bit for bit.
        choice: The op's name where backends are chosen, if it is another one.
    """

    op: Callable[..., Result]
    inputs: Mapping[str, object]
    learns: tuple[str, ...]
    exact: Callable[..., Result]
    rivals: Mapping[str, Callable[..., Result]]
    forward: Work
    backward: Work = field(default_factory=lambda: Work(0))
    moves: bool = False
    choice: str | None = None


class _Maker:
    """Draws the inputs of a case."""

    def __init__(self, size: OpSize, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.size, self.dtype, self.device = size, dtype, device
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype or self.dtype)

    def rows(self, tokens: int) -> Tensor:
        return self.normal(self.size.images, tokens, self.size.channels)

    def heads(self, tokens: int) -> Tensor:
        """Return what a host's projection gives attention: heads are a view, not contiguous."""
        shape = (self.size.images, tokens, self.size.heads, self.size.head_channels)
        return self.normal(*shape).transpose(1, 2)

    def index(self) -> Tensor:
        order_BN = torch.rand(self.size.images, self.size.tokens, generator=self.generator, device=self.device)
        return order_BN.argsort(dim=1)[:, : self.size.kept].sort(dim=1).values

    def row_bytes(self, tokens: int) -> int:
        return self.size.images * tokens * self.size.channels * self.dtype.itemsize

    @property
    def index_bytes(self) -> int:
        return self.size.images * self.size.kept * 8


def _flat(index_BK: Tensor, tokens: int) -> Tensor:
    first_B1 = torch.arange(index_BK.shape[0], device=index_BK.device).unsqueeze(1) * tokens
    return (index_BK + first_B1).flatten()


def _select_rows(x_BND: Tensor, index_BK: Tensor) -> Tensor:
    return x_BND.flatten(0, 1).index_select(0, _flat(index_BK, x_BND.shape[1])).view(*index_BK.shape, -1)


def _copy_rows(x_BND: Tensor, index_BK: Tensor, y_BKD: Tensor) -> Tensor:
    flat = _flat(index_BK, x_BND.shape[1])
    return x_BND.flatten(0, 1).index_copy(0, flat, y_BKD.flatten(0, 1)).view_as(x_BND)


def _gather_rows(make: _Maker) -> OpCase:
    all_rows, kept_rows = make.row_bytes(make.size.tokens), make.row_bytes(make.size.kept)
    return OpCase(
        op=gather_rows,
        inputs={"x_BND": make.rows(make.size.tokens), "index_BK": make.index()},
        learns=("x_BND",),
        exact=lambda x_BND, index_BK: torch.stack([x[i] for x, i in zip(x_BND, index_BK)]),
        rivals={"index_select": _select_rows},
        forward=Work(2 * kept_rows + make.index_bytes),
        backward=Work(kept_rows + all_rows + make.index_bytes),
        moves=True,
    )


def _scatter_rows(make: _Maker) -> OpCase:
    def exact(x_BND: Tensor, index_BK: Tensor, y_BKD: Tensor) -> Tensor:
        return torch.stack([x.index_copy(0, i, y) for x, i, y in zip(x_BND, index_BK, y_BKD)])

    all_rows, kept_rows = make.row_bytes(make.size.tokens), make.row_bytes(make.size.kept)
    inputs = {"x_BND": make.rows(make.size.tokens), "index_BK": make.index(), "y_BKD": make.rows(make.size.kept)}
    return OpCase(
        op=scatter_rows,
        inputs=inputs,
        learns=("x_BND", "y_BKD"),
        exact=exact,
        rivals={"index_copy": _copy_rows},
        forward=Work(2 * all_rows + make.index_bytes),
        backward=Work(2 * all_rows + kept_rows + make.index_bytes),
        moves=True,
    )


def _gather_norm(make: _Maker) -> OpCase:
    def definition(x_BND: Tensor, index_BK: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        z_BKD = _select_rows(x_BND, index_BK)
        return z_BKD, F.layer_norm(z_BKD, z_BKD.shape[-1:], weight, bias, 1e-6)

    channels = make.size.channels
    all_rows, kept_rows = make.row_bytes(make.size.tokens), make.row_bytes(make.size.kept)
    return OpCase(
        op=gather_norm,
        inputs={
            "x_BND": make.rows(make.size.tokens),
            "index_BK": make.index(),
            "weight": make.normal(channels),
            "bias": make.normal(channels),
        },
        learns=("x_BND", "weight", "bias"),
        exact=definition,
        rivals={"index_select, norm": definition},
        forward=Work(3 * kept_rows + make.index_bytes),
        backward=Work(3 * kept_rows + all_rows + make.index_bytes),
    )


def _merge_rows(make: _Maker) -> OpCase:
    def definition(x_BND: Tensor, index_BK: Tensor, z_BKD: Tensor, y_BKD: Tensor, gate_BK: Tensor) -> Tensor:
        return _copy_rows(x_BND, index_BK, torch.lerp(z_BKD, y_BKD, gate_BK.unsqueeze(-1).to(z_BKD.dtype)))

    size, x_BND, index_BK = make.size, make.rows(make.size.tokens), make.index()
    all_rows, kept_rows = make.row_bytes(size.tokens), make.row_bytes(size.kept)
    gate_BK = 1 + 0.2 * torch.tanh(make.normal(size.images, size.kept, dtype=torch.float32))
    return OpCase(
        op=merge_rows,
        inputs={
            "x_BND": x_BND,
            "index_BK": index_BK,
            "z_BKD": _select_rows(x_BND, index_BK),
            "y_BKD": make.rows(size.kept),
            "gate_BK": gate_BK,
        },
        learns=("x_BND", "z_BKD", "y_BKD", "gate_BK"),
        exact=definition,
        rivals={"lerp, index_copy": definition},
        forward=Work(2 * all_rows + kept_rows + make.index_bytes + gate_BK.nbytes),
        backward=Work(2 * all_rows + 4 * kept_rows + make.index_bytes + 2 * gate_BK.nbytes),
    )


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


def _attention_with_importance(make: _Maker) -> OpCase:
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
        rivals={
            "attention alone": lambda q_BHNE, k_BHNE, v_BHNE: F.scaled_dot_product_attention(q_BHNE, k_BHNE, v_BHNE),
            "map of all pairs": by_map,
        },
        forward=forward + Work(size.images * size.tokens * 4),
        backward=backward,
    )


def _routed_attention(make: _Maker, context: str = "kept") -> OpCase:
    def take(x_BHNE: Tensor, index_BK: Tensor) -> Tensor:
        return torch.take_along_dim(x_BHNE, index_BK[:, None, :, None], dim=2)

    def kept_only(q_BHNE: Tensor, k_BHNE: Tensor, v_BHNE: Tensor, index_BK: Tensor) -> Heads:
        if context == "all":
            return take(q_BHNE, index_BK), k_BHNE, v_BHNE
        return take(q_BHNE, index_BK), take(k_BHNE, index_BK), take(v_BHNE, index_BK)

    def gathered(**inputs: Tensor) -> Tensor:
        q_BHKE, k_BHME, v_BHME = kept_only(**inputs)
        return F.scaled_dot_product_attention(q_BHKE, k_BHME, v_BHME)

    def every_query(q_BHNE: Tensor, k_BHNE: Tensor, v_BHNE: Tensor, index_BK: Tensor) -> Tensor:
        return take(F.scaled_dot_product_attention(q_BHNE, k_BHNE, v_BHNE), index_BK)

    size, rows, kept_rows = make.size, make.row_bytes(make.size.tokens), make.row_bytes(make.size.kept)
    keys, key_rows = (size.tokens, rows) if context == "all" else (size.kept, kept_rows)
    forward, backward = _attention_work(
        kept_rows, key_rows, size.images * size.heads * size.kept * keys, size.head_channels
    )
    rivals: dict[str, Callable[..., Result]] = {"take_along_dim, attention": gathered}
    return OpCase(
        op=functools.partial(routed_attention, context=context),
        inputs={**{name: make.heads(size.tokens) for name in ("q_BHNE", "k_BHNE", "v_BHNE")}, "index_BK": make.index()},
        learns=("q_BHNE", "k_BHNE", "v_BHNE"),
        exact=lambda **inputs: _attend_by_image(*kept_only(**inputs))[0],
        rivals={**rivals, "attention of all tokens": every_query} if context == "all" else rivals,
        forward=forward,
        # Gradients of skipped rows are zeros that must be written.
        backward=backward + Work((rows - kept_rows) + 2 * (rows - key_rows)),
        choice="routed_attention",
    )


def _packed_attention(make: _Maker) -> OpCase:
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
        rivals=packed_rivals(lengths, make.device, make.dtype),
        forward=forward,
        backward=backward,
    )


def _attend_by_lengths(q_THE: Tensor, k_THE: Tensor, v_THE: Tensor, lengths: list[int]) -> Tensor:
    parts = zip(*(x_THE.transpose(0, 1).split(lengths, dim=1) for x_THE in (q_THE, k_THE, v_THE)))
    found = [checkpoint(_attend_exactly, *part, use_reentrant=False)[0] for part in parts]
    return torch.cat(found, dim=1).transpose(0, 1)


def _importance_block(make: _Maker) -> OpCase:
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
        rivals={"block without importance": lambda x_BND, block: block(x_BND)},
        forward=Work(2 * rows, flops),
        # Gradients of tokens and of weights.
        backward=Work(2 * rows, 2 * flops),
        choice="attention_with_importance",
    )


CASES: dict[str, Callable[[_Maker], OpCase]] = {
    "gather_rows": _gather_rows,
    "scatter_rows": _scatter_rows,
    "gather_norm": _gather_norm,
    "merge_rows": _merge_rows,
    "attention_with_importance": _attention_with_importance,
    "importance_block": _importance_block,
    "packed_attention": _packed_attention,
    "routed_attention": _routed_attention,
    "routed_attention_all": functools.partial(_routed_attention, context="all"),
}


def make_case(op: str, size: OpSize, dtype: torch.dtype, device: torch.device, seed: int = 0) -> OpCase:
    """Return an op with inputs of a size.

    Args:
        op: One of `CASES`.
        size: Sizes.
        dtype: Type of the inputs.
        device: Where they are.
        seed: Seed of their values.

    Raises:
        ValueError: Unknown op.

    Example:
        >>> case = make_case("gather_rows", OpSize(images=2, tokens=8), torch.float32, torch.device("cpu"))
        >>> case.op(**case.inputs).shape
        torch.Size([2, 4, 384])
    """
    if op not in CASES:
        raise ValueError(f"unknown op {op!r}; valid are {', '.join(CASES)}")
    return CASES[op](_Maker(size, dtype, device, seed))
