"""Decisions by cosine similarity: which rows an earlier one resembles, and which kept row each other row joins.

Products of all pairs are computed in tiles, so memory grows linearly with N.
Axes: B images, N tokens, M rows of groups, K slots per image, D channels, E projected channels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mmod.ops import tiles
from mmod.ops.backend import Kernel, exporting, kernel_op, op, torch_op
from mmod.ops.casting import without_autocast
from mmod.ops.merging import held_slots
from mmod.ops.rows import take_rows

Constant = TypeVar("Constant")


def signed_sums(x_BND: Tensor, channels: int | None) -> Tensor:
    """Return tokens projected to fewer channels (B, N, E), fp32, without a gradient.

    Distances are kept to a relative error of about `sqrt(2 / channels)`. Channel c goes to sum c modulo `channels`,
    with a sign that a fixed hash of c decides.

    Args:
        channels: Project to this many channels E; None, or at least D, returns the tokens unchanged.

    Source: Johnson and Lindenstrauss, 1984, with the sparse signs of Weinberger et al., arXiv 0902.2206.

    Example:
        >>> signed_sums(torch.ones(1, 2, 12), 3).shape
        torch.Size([1, 2, 3])
    """
    dim = x_BND.shape[-1]
    if x_BND.requires_grad:
        x_BND = x_BND.detach()
    x_BND = x_BND.float()
    if channels is None or dim <= channels:
        return x_BND
    # Random signs before adding up: sums of plain neighbours would cancel or double what channels have in common.
    signed_BND = x_BND * _signs(dim).to(x_BND.device)
    if dim % channels:
        signed_BND = F.pad(signed_BND, (0, -dim % channels))
    # Channels with the same remainder are added, for which the reshape is a view.
    rows = signed_BND.shape[-1] // channels
    return signed_BND.reshape(*x_BND.shape[:-1], rows, channels).sum(dim=-2)


def spread_evenly(tokens: int, device: torch.device) -> Tensor:
    """Return the van der Corput sequence: numbers in (0, 1] whose largest K are evenly spread, whatever K is."""
    position_N1 = torch.arange(tokens, device=device).unsqueeze(1)
    power_W = 2 ** torch.arange(20, device=device)
    bit_NW = position_N1 // power_W % 2
    # The bits of a position in reverse order, as integers, so that sums are exact.
    reversed_N = (bit_NW * power_W.flip(0)).sum(dim=1)
    # Less than 1 by the reversed bits: position 0 comes first, with the number 1.
    return 1 - reversed_N * 2.0**-20


def _made_once(make: Callable[..., Constant]) -> Callable[..., Constant]:
    """Remember constants of a size on the CPU, for eager mode: making them costs more than a small decision."""

    @functools.lru_cache(maxsize=64)
    def remembered(*sizes: int) -> Constant:
        # A constant that was made in inference mode could not be used in training later.
        with torch.inference_mode(False):
            return make(*sizes)

    def constant(*sizes: int) -> Constant:
        # Graphs need their own.
        if not _is_eager() or (torch._C._len_torch_dispatch_stack() and _makes_other_tensors()):
            return make(*sizes)
        return remembered(*sizes)

    return constant


def _makes_other_tensors() -> bool:
    """Return whether a mode such as FakeTensorMode makes tensors that are of no use outside."""
    modes = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) for key in (modes.FAKE, modes.PROXY, modes.FUNCTIONAL))


@_made_once
def _signs(channels: int) -> Tensor:
    """Return a pseudo-random sign for each channel, from the upper bits of a multiplicative hash."""
    # Knuth's multiplier, 2**32 over the golden ratio; the kernel computes the same signs.
    position_D = torch.arange(channels, device="cpu")
    return 1.0 - 2.0 * (((position_D + 1) * 2654435761 >> 19) & 1).float()


@_made_once
def _spread_order(tokens: int, prefix: int) -> tuple[Tensor, Tensor]:
    """Return the tokens after a prefix in spread order (N), and the position of every token in it, 0 for the prefix."""
    order_N = spread_evenly(tokens, torch.device("cpu")).argsort(descending=True)
    return order_N + prefix, F.pad(order_N.argsort(), (prefix, 0))


@_made_once
def _numbers(images: int, slots: int) -> Tensor:
    """Return the number of each slot (images, slots)."""
    return torch.arange(slots, device="cpu").expand(images, -1)


@_made_once
def _one() -> Tensor:
    """Return the number 1. Of a Python number, torch makes a tensor in each call, which takes longer than the sum."""
    return torch.tensor(1.0, device="cpu")


@_made_once
def _hide_later(rows: int, columns: int) -> Tensor:
    """Return what pushes the cosine of the last rows to themselves and to later rows below -1 (rows, columns)."""
    return torch.full((rows, columns), -4.0, dtype=torch.float32, device="cpu").triu(columns - rows)


def _cut(images: int, rows: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Cut B maps (rows, columns) into tiles."""
    if torch.compiler.is_compiling() or not images:
        # Loops over tiles would be unrolled, for one length; and without images there is no tile.
        yield slice(None), slice(None)
        return
    for image, _, row in tiles.cut_map(images, 1, rows, columns, tiles.CHUNK_ELEMENTS):
        yield image, row


def _parts(x: Tensor, size: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Split a tensor into parts of at most a size; one that fits is no view of itself, which would take a call."""
    if x.shape[dim] <= size:
        return (x,)
    return x.split(size, dim)


def _whole(parts: list[Tensor], dim: int = 0) -> Tensor:
    """Put parts together again; a single one is no copy of itself, which would take a call."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim)


def _is_eager() -> bool:
    """Return whether operations run at once: not in graphs, compiled or exported, nor under torch.func transforms."""
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())


def _redundancy_by_rank(unit_BNE: Tensor, prefix: int, valid_BN: Tensor | None) -> Tensor:
    """Definition: rows are masked by their rank in the order."""
    unit_BNE = unit_BNE[:, prefix:]
    images, tokens, _ = unit_BNE.shape
    order_BN = spread_evenly(tokens, unit_BNE.device).expand(images, -1)
    if valid_BN is not None:
        valid_BN = valid_BN[:, prefix:]
        # By rank among the valid rows, so that padding does not move the order.
        order_BN = order_BN.gather(1, (valid_BN.cumsum(1) - 1).clamp(min=0))
    best = []
    for image, row in _cut(images, tokens, tokens):
        alike = unit_BNE[image, row] @ unit_BNE[image].transpose(1, 2)
        hidden = order_BN[image, None] <= order_BN[image, row, None]
        if valid_BN is not None:
            hidden = hidden | ~valid_BN[image, None]
        # -1 is the smallest cosine: a row without an earlier one is as far from others as can be.
        best.append(alike.masked_fill(hidden, -1.0).amax(dim=-1).flatten())
    return F.pad(1 - torch.cat(best).view(images, tokens), (prefix, 0), value=2.0)


def _redundancy_in_order(unit_BNE: Tensor, prefix: int) -> Tensor:
    """Rows are put in order first: a tile then compares its rows with those before them, and no others."""
    images = unit_BNE.shape[0]
    tokens = unit_BNE.shape[1] - prefix
    if not tokens:
        return unit_BNE.new_full((images, prefix), 2.0)
    order_N, position_N = _spread_order(tokens, prefix)
    unit_BNE = unit_BNE.index_select(1, order_N)
    tile = tiles.tile_size(1, tokens, tokens, tiles.CHUNK_ELEMENTS)
    # The fewer rows, the fewer products with later ones: 0.6 to 0.8 of the time at 785 tokens, 0.9 at 197. A tile that
    # saves less than about a million products is not worth its calls.
    products = images * tokens * unit_BNE.shape[1] * unit_BNE.shape[2]
    worthwhile = products >> 22
    count = max(1, min(math.ceil(tokens / tiles.CAUSAL_QUERIES), worthwhile))
    height = min(tile.queries, math.ceil(tokens / count))
    hidden = _hide_later(height, tokens).to(unit_BNE.dtype)
    best = []
    for part_BNE in _parts(unit_BNE, tile.images):
        best_of_rows = []
        for start in range(0, tokens, height):
            rows = before = part_BNE
            later = hidden
            if height < tokens:
                stop = min(start + height, tokens)
                rows = part_BNE[:, start:stop]
                before = part_BNE[:, :stop]
                # The last columns are the tile's own rows, and all others are earlier ones.
                later = hidden[start - stop :, tokens - stop :]
            alike = torch.baddbmm(later, rows, before.transpose(1, 2))
            best_of_rows.append(alike.amax(dim=-1))
        best.append(_whole(best_of_rows, dim=1))
    # A row without an earlier one is as far from others as can be, and so is the prefix, which takes its score.
    best_BN = _whole(best).clamp_(min=-1)
    return _one() - best_BN.index_select(1, position_N)


def _nearest_of_all(unit_BNE: Tensor, row_BK: Tensor, prefix: int, valid_BK: Tensor | None) -> Tensor:
    """Definition: every row is compared with every kept one."""
    images, tokens, _ = unit_BNE.shape
    kept_BKE = take_rows(unit_BNE, row_BK[:, prefix:])
    nearest = []
    for image, row in _cut(images, tokens, row_BK.shape[1]):
        alike = unit_BNE[image, row] @ kept_BKE[image].transpose(1, 2)
        if valid_BK is not None:
            alike = alike.masked_fill(~valid_BK[image, None, prefix:], -torch.inf)
        best, slot = alike.max(dim=-1)
        slot = slot + prefix
        if valid_BK is not None:
            # An image without a valid slot has none to join.
            slot = torch.where(best.isneginf(), -1, slot)
        nearest.append(slot.flatten())
    held_BN = held_slots(row_BK, tokens, valid_BK)
    return torch.where(held_BN >= 0, held_BN, torch.cat(nearest).view(images, tokens))


def _nearest_of_others(unit_BNE: Tensor, row_BK: Tensor, prefix: int, other_BR: Tensor) -> Tensor:
    """Only rows that are not kept are compared with the kept ones."""
    images, tokens, _ = unit_BNE.shape
    slots = row_BK.shape[1]
    other_BRE = take_rows(unit_BNE, other_BR)
    kept_BEK = take_rows(unit_BNE, row_BK[:, prefix:]).transpose(1, 2)
    tile = tiles.tile_size(1, tokens - slots, slots, tiles.CHUNK_ELEMENTS)
    nearest = []
    for others, kept in zip(_parts(other_BRE, tile.images), _parts(kept_BEK, tile.images)):
        slots_of_rows = [torch.bmm(part, kept).max(dim=-1).indices for part in _parts(others, tile.queries, dim=1)]
        nearest.append(_whole(slots_of_rows, dim=1))
    slot_BN = row_BK.new_empty(images, tokens).scatter_(1, row_BK, _numbers(images, slots))
    return slot_BN.scatter_(1, other_BR, _whole(nearest).add_(prefix))


_unit_by_kernel = kernel_op(
    "alike.unit_rows",
    "(Tensor x, SymInt channels) -> Tensor",
    lambda x, channels: x.new_empty(*x.shape[:2], channels, dtype=torch.float32),
)
_redundancy_by_kernel = kernel_op(
    "alike.redundancy",
    "(Tensor unit_BNE, SymInt prefix=0, Tensor? valid_BN=None) -> Tensor",
    lambda unit, *_: unit.new_empty(unit.shape[:2], dtype=torch.float32),
    flops=lambda unit, *_, **__: 2 * unit.numel() * unit.shape[1],
)
_nearest_op = kernel_op(
    "alike.nearest_rows",
    "(Tensor unit, Tensor row, SymInt prefix, Tensor? valid) -> Tensor",
    lambda unit, row, *_: row.new_empty(unit.shape[:2]),
    flops=lambda unit, row, *_, **__: 2 * unit.numel() * row.shape[1],
)


def _nearest_by_kernel(
    unit_BNE: Tensor,
    row_BK: Tensor,
    prefix: int = 0,
    valid_BK: Tensor | None = None,
    real_BN: Tensor | None = None,
    other_BR: Tensor | None = None,
) -> Tensor:
    slot_BN = _nearest_op(unit_BNE, row_BK, prefix, valid_BK)
    if real_BN is None:
        return slot_BN
    # After the kernel, which knows nothing of real rows: padding joins no slot.
    return torch.where(real_BN, slot_BN, -1)


_kernel = functools.partial(Kernel, how="a kernel", why="not yet measured; reason: products of all pairs stay on chip")


@op(
    Kernel(
        _unit_by_kernel,
        "a kernel",
        "not yet measured; reason: one launch, one read",
        takes=lambda x_BND, channels: channels <= 4096,
        where="channels <= 4096",
    ),
    how="torch's product, sum and norm",
    name="unit_rows",
)
def _unit_rows(x_BND: Tensor, channels: int) -> Tensor:
    sums_BNE = signed_sums(x_BND, channels)
    return sums_BNE / torch.linalg.vector_norm(sums_BNE, dim=-1, keepdim=True).clamp_min(1e-12)


def unit_rows(x_BND: Tensor, channels: int | None = None) -> Tensor:
    """Return rows of norm 1 (B, N, E), fp32, without a gradient; rows of zeros stay zeros.

    Args:
        channels: Project to this many channels first, see `signed_sums`; None keeps all.

    Example:
        >>> unit_rows(torch.tensor([[[3.0, 4.0]]]))
        tensor([[[0.6000, 0.8000]]])
    """
    dim = x_BND.shape[-1]
    if channels is None or channels > dim:
        channels = dim
    # A call less where nothing is to be detached.
    if x_BND.requires_grad:
        x_BND = x_BND.detach()
    return _unit_rows(x_BND, channels)


@op(_kernel(_redundancy_by_kernel), how="tiles of rows in spread order, each compared with rows before it")
def redundancy_scores(unit_BNE: Tensor, prefix: int = 0, valid_BN: Tensor | None = None) -> Tensor:
    """Return how far each row is from those before it in an evenly spread order: the smallest cosine distance (B, N).

    The order is that of `spread_evenly`. Of several rows that are alike, only the first in this order scores high.

    Args:
        unit_BNE: Rows of norm 1, see `unit_rows`.
        prefix: Leading rows, which take no part; these and the first row score 2.
        valid_BN: False where a row is padding (B, N), or None. The order then counts valid rows only.

    Example:
        >>> redundancy_scores(unit_rows(torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 0.1], [1.0, 0.0]]])))
        tensor([[2.0000, 0.9005, 0.0050, 0.0000]])
    """
    if torch.compiler.is_compiling() and not exporting():
        return _redundancy_by_tiles(unit_BNE, prefix, valid_BN)
    with without_autocast(unit_BNE):
        if valid_BN is None and unit_BNE.is_cpu and _is_eager():
            return _redundancy_in_order(unit_BNE, prefix)
        return _redundancy_by_rank(unit_BNE, prefix, valid_BN)


@op(_kernel(_nearest_by_kernel), how="tiles of rows that are not kept")
def nearest_rows(
    unit_BNE: Tensor,
    row_BK: Tensor,
    prefix: int = 0,
    valid_BK: Tensor | None = None,
    real_BN: Tensor | None = None,
    other_BR: Tensor | None = None,
) -> Tensor:
    """Return for every row the slot of the most similar kept row (B, N); a kept row has its own slot.

    Args:
        unit_BNE: Rows of norm 1, see `unit_rows`.
        row_BK: Row of each slot.
        prefix: Leading slots that no other row joins.
        valid_BK: False where a slot is empty (B, K), or None.
        real_BN: False where a row is padding, which gets -1 (B, N), or None.
        other_BR: Rows that no slot holds, if they are known, in any order: on a CPU these alone are compared.

    Example:
        >>> unit = unit_rows(torch.tensor([[[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.8]]]))
        >>> nearest_rows(unit, torch.tensor([[0, 2]]))
        tensor([[0, 0, 1, 1]])
    """
    if torch.compiler.is_compiling() and not exporting():
        return _nearest_by_tiles(unit_BNE, row_BK, prefix, valid_BK, real_BN, other_BR)
    with without_autocast(unit_BNE):
        if valid_BK is None and other_BR is not None and unit_BNE.is_cpu and _is_eager():
            slot_BN = _nearest_of_others(unit_BNE, row_BK, prefix, other_BR)
        else:
            slot_BN = _nearest_of_all(unit_BNE, row_BK, prefix, valid_BK)
    if real_BN is None:
        return slot_BN
    return torch.where(real_BN, slot_BN, -1)


def regroup_rows(
    unit_BME: Tensor,
    row_BN: Tensor,
    index_BK: Tensor,
    prefix: int = 0,
    valid_BK: Tensor | None = None,
    real_BM: Tensor | None = None,
    other_BR: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the slot of the most similar kept row for every row (B, M), and for every token by its row (B, N).

    Args:
        unit_BME: Rows of norm 1 that stand for groups of tokens, see `unit_rows`.
        row_BN: Row of each token.
        index_BK: Token of each slot.
        prefix: See `nearest_rows`, as for `valid_BK`.
        real_BM: False where a row stands for no token, see `nearest_rows`.
        other_BR: Tokens of the rows that no slot holds, see `nearest_rows`.

    Example:
        >>> unit = unit_rows(torch.tensor([[[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]]))
        >>> regroup_rows(unit, torch.tensor([[0, 1, 1, 2]]), torch.tensor([[0, 3]]))
        (tensor([[0, 0, 1]]), tensor([[0, 0, 0, 1]]))
    """
    # Triton fuses these gathers with their neighbours. Compilers of C++ would repeat in each step those of all before.
    if torch.compiler.is_compiling() and not exporting() and unit_BME.is_cpu:
        return _regroup_by_tiles(unit_BME, row_BN, index_BK, prefix, valid_BK, real_BM, other_BR)
    row_BK = row_BN.gather(1, index_BK)
    if other_BR is not None:
        other_BR = row_BN.gather(1, other_BR)
    slot_BM = nearest_rows(unit_BME, row_BK, prefix, valid_BK, real_BM, other_BR)
    return slot_BM, slot_BM.gather(1, row_BN)


# The definitions as one operation each for compiled graphs, which gain nothing from compiling large products, for each
# size anew.
_redundancy_by_tiles = torch_op(
    "redundancy_by_tiles",
    "(Tensor unit, SymInt prefix, Tensor? valid) -> Tensor",
    redundancy_scores.__wrapped__,  # type: ignore[attr-defined]
    lambda unit, *_: unit.new_empty(unit.shape[:2]),
    flops=lambda unit, *_, **__: 2 * unit.numel() * unit.shape[1],
)
_nearest_by_tiles = torch_op(
    "nearest_by_tiles",
    "(Tensor unit, Tensor row, SymInt prefix, Tensor? valid, Tensor? real, Tensor? other) -> Tensor",
    nearest_rows.__wrapped__,  # type: ignore[attr-defined]
    lambda unit, row, *_: row.new_empty(unit.shape[:2]),
    flops=lambda unit, row, *_, **__: 2 * unit.numel() * row.shape[1],
)
_regroup_by_tiles = torch_op(
    "regroup_by_tiles",
    "(Tensor unit, Tensor row, Tensor index, SymInt prefix, Tensor? valid, Tensor? real, Tensor? other)"
    " -> (Tensor, Tensor)",
    regroup_rows,
    lambda unit, row, *_: (row.new_empty(unit.shape[:2]), row.new_empty(row.shape)),
    flops=lambda unit, row, index, *_, **__: 2 * unit.numel() * index.shape[1],
)
