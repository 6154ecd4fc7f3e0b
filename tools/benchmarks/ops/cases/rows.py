"""Cases of row movement and selection.

Axes: B images, N tokens, K slots per image, D channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mmod.config import rational
from mmod.ops import gather_norm, gather_rows, merge_rows
from mmod.ops.select import select_topk
from tools.benchmarks.ops.case import Maker, OpCase, Work, register_case

# The gate of routers that learn, by default.
GATE_SCALE = 0.2


def _flat(index_BK: Tensor, tokens: int) -> Tensor:
    first_B1 = torch.arange(index_BK.shape[0], device=index_BK.device).unsqueeze(1) * tokens
    return (index_BK + first_B1).flatten()


def _select_rows(x_BND: Tensor, index_BK: Tensor) -> Tensor:
    return x_BND.flatten(0, 1).index_select(0, _flat(index_BK, x_BND.shape[1])).view(*index_BK.shape, -1)


def _copy_rows(x_BND: Tensor, index_BK: Tensor, y_BKD: Tensor) -> Tensor:
    flat = _flat(index_BK, x_BND.shape[1])
    return x_BND.flatten(0, 1).index_copy(0, flat, y_BKD.flatten(0, 1)).view_as(x_BND)


@register_case("gather_rows")
def gather_rows_case(make: Maker) -> OpCase:
    """Return the case of rows that enter a routed block."""
    all_rows = make.row_bytes(make.size.tokens)
    kept_rows = make.row_bytes(make.size.kept)
    return OpCase(
        op=gather_rows,
        inputs={"x_BND": make.rows(make.size.tokens), "index_BK": make.index()},
        learns=("x_BND",),
        exact=lambda x_BND, index_BK: torch.stack([x[i] for x, i in zip(x_BND, index_BK)]),
        baselines={"index_select": _select_rows},
        forward=Work(2 * kept_rows + make.index_bytes),
        backward=Work(kept_rows + all_rows + make.index_bytes),
        moves=True,
    )


@register_case("gather_norm")
def gather_norm_case(make: Maker) -> OpCase:
    """Return the case of rows that enter a block with its first norm."""

    def definition(x_BND: Tensor, index_BK: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        z_BKD = _select_rows(x_BND, index_BK)
        return z_BKD, F.layer_norm(z_BKD, z_BKD.shape[-1:], weight, bias, 1e-6)

    channels = make.size.channels
    all_rows = make.row_bytes(make.size.tokens)
    kept_rows = make.row_bytes(make.size.kept)
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
        baselines={"index_select, norm": definition},
        forward=Work(3 * kept_rows + make.index_bytes),
        backward=Work(3 * kept_rows + all_rows + make.index_bytes),
    )


@register_case("merge_rows")
def merge_rows_case(make: Maker) -> OpCase:
    """Return the case of gated updates written back."""

    def definition(x_BND: Tensor, index_BK: Tensor, z_BKD: Tensor, y_BKD: Tensor, gate_BK: Tensor) -> Tensor:
        return _copy_rows(x_BND, index_BK, torch.lerp(z_BKD, y_BKD, gate_BK.unsqueeze(-1).to(z_BKD.dtype)))

    size = make.size
    x_BND = make.rows(make.size.tokens)
    index_BK = make.index()
    all_rows = make.row_bytes(size.tokens)
    kept_rows = make.row_bytes(size.kept)
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
        baselines={"lerp, index_copy": definition},
        forward=Work(2 * all_rows + kept_rows + make.index_bytes + gate_BK.nbytes),
        backward=Work(2 * all_rows + 4 * kept_rows + make.index_bytes + 2 * gate_BK.nbytes),
    )


@register_case("select_topk")
def select_topk_case(make: Maker) -> OpCase:
    """Return the case of scores that become indices and gates."""
    size = make.size
    capacity = rational(make.size.capacity)

    def select(score_BN: Tensor) -> tuple[Tensor, ...]:
        kept, gate_BK = select_topk(score_BN, capacity, gate="tanh", scale=GATE_SCALE)
        assert gate_BK is not None
        return kept.index_BK, gate_BK

    def exact(score_BN: Tensor) -> tuple[Tensor, ...]:
        order_BN = score_BN.sort(dim=1, descending=True, stable=True).indices
        index_BK = order_BN[:, : size.kept].sort(dim=1).values
        return index_BK, 1 + GATE_SCALE * torch.tanh(score_BN.gather(1, index_BK))

    def by_topk(score_BN: Tensor) -> tuple[Tensor, ...]:
        index_BK = score_BN.topk(size.kept, dim=1, sorted=False).indices.sort(dim=1).values
        return index_BK, 1 + GATE_SCALE * torch.tanh(score_BN.gather(1, index_BK))

    score_BN = make.normal(size.images, size.tokens, dtype=torch.float32)
    slots = size.images * size.kept
    return OpCase(
        op=select,
        inputs={"score_BN": score_BN},
        learns=("score_BN",),
        exact=exact,
        baselines={"topk, sort": by_topk},
        # Indices are of 8 bytes, gates of 4.
        forward=Work(score_BN.nbytes + 12 * slots),
        backward=Work(score_BN.nbytes + 16 * slots),
    )
