"""Groups of tokens that one row represents: which token joins which, their mean, and the update of the group.

Axes: B images, N tokens, K slots per image, D channels.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mmod.ops.backend import Kernel, exporting, kernel_op, op, torch_op, transforming
from mmod.ops.rows import flat_rows, take_rows


def held_slots(row_BK: Tensor, rows: int, valid_BK: Tensor | None) -> Tensor:
    """Return the slot that holds each row, -1 where none does (B, N).

    Args:
        row_BK: Row of each slot.
        valid_BK: False where a slot is empty (B, K), or None.

    Example:
        >>> held_slots(torch.tensor([[0, 2, 3]]), 4, None)
        tensor([[ 0, -1,  1,  2]])
    """
    slot_BK = torch.arange(row_BK.shape[1], device=row_BK.device).expand_as(row_BK)
    if valid_BK is not None:
        # An empty slot may point at a row that a valid slot holds; "amax" then prefers the valid slot.
        slot_BK = torch.where(valid_BK, slot_BK, -1)
    return slot_BK.new_full((row_BK.shape[0], rows), -1).scatter_reduce(1, row_BK, slot_BK, "amax")


def group_sizes(slot_BN: Tensor, slots: int, *, all_join: bool = False) -> Tensor:
    """Return how many tokens each slot represents, fp32 (B, K); 0 for an empty slot.

    Args:
        slot_BN: Slot of each token, -1 for none (B, N).
        all_join: Promise that no slot is -1, which skips the check.
    """
    if all_join:
        joined_BN = torch.ones(slot_BN.shape, dtype=torch.float32, device=slot_BN.device)
    else:
        joined_BN = (slot_BN >= 0).float()
        slot_BN = slot_BN.clamp(min=0)
    return joined_BN.new_zeros(slot_BN.shape[0], slots).scatter_add(1, slot_BN, joined_BN)


def _aligned(bias_BK: Tensor) -> Tensor:
    """Return a bias of keys (B, 1, 1, K), whose rows start at multiples of eight elements on a GPU."""
    slots = bias_BK.shape[1]
    if not bias_BK.is_cuda:
        return bias_BK.view(bias_BK.shape[0], 1, 1, slots)
    # Padded and cut again: the rows are aligned in memory, and the shape is K.
    padded_BP = torch.nn.functional.pad(bias_BK, (0, -slots % 8))
    return padded_BP.view(bias_BK.shape[0], 1, 1, -1)[..., :slots]


def _flat(slot_BN: Tensor, slots: int, all_join: bool) -> Tensor:
    """Return slots numbered over the batch (B N)."""
    if not all_join:
        # What belongs to no slot goes to the first one; callers make it count as zeros.
        slot_BN = slot_BN.clamp(min=0)
    return flat_rows(slot_BN, slots)


def _spread(update_BKD: Tensor, slot_BN: Tensor, all_join: bool) -> Tensor:
    """Return the update of each row's slot, zeros for rows without one (B, N, D)."""
    added_BND = take_rows(update_BKD, slot_BN, _flat(slot_BN, update_BKD.shape[1], all_join))
    if all_join:
        return added_BND
    return torch.where((slot_BN >= 0).unsqueeze(-1), added_BND, 0.0)


def _size_by_kernel(
    slot_BN: Tensor, slots: int, dtype: torch.dtype = torch.float32, *, all_join: bool = False
) -> tuple[Tensor, Tensor]:
    size_BK, bias = _size_op(slot_BN, slots, dtype)
    return size_BK, bias[..., :slots]


def _empty_sizes(slot: Tensor, slots: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    size = slot.new_empty(slot.shape[0], slots, dtype=torch.float32)
    # Rows of the bias start at multiples of eight elements; fused attention would copy others.
    return size, slot.new_empty(slot.shape[0], 1, 1, -(-slots // 8) * 8, dtype=dtype)


def _mean_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    slot, size, weight = ctx.saved_tensors
    if size is not None:
        grad = grad / size.clamp(min=1).unsqueeze(-1).to(grad.dtype)
    grad = _spread(grad, slot, False)
    if weight is not None:
        grad = grad * weight.unsqueeze(-1).to(grad.dtype)
    return grad, None, None, None, None


def _save_for_add(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    _x, update, slot = inputs
    ctx.slots = update.shape[1]
    ctx.dtype = update.dtype
    ctx.save_for_backward(slot)


def _add_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return grad, _mean_op(grad, ctx.saved_tensors[0], ctx.slots, None, None).to(ctx.dtype), None


_size_op = kernel_op(
    "merging.size_groups", "(Tensor slot, SymInt slots, ScalarType dtype) -> (Tensor, Tensor)", _empty_sizes
)
# Means of groups, or their sums where no size is given.
_mean_op = kernel_op(
    "merging.mean_rows",
    "(Tensor x, Tensor slot, SymInt slots, Tensor? size, Tensor? weight) -> Tensor",
    lambda x, slot, slots, *_: x.new_empty(x.shape[0], slots, x.shape[2]),
    lambda ctx, inputs, output: ctx.save_for_backward(inputs[1], *inputs[3:]),
    _mean_backward,
)
_add_op = kernel_op(
    "merging.add_updates",
    "(Tensor x, Tensor update, Tensor slot) -> Tensor",
    lambda x, *_: x.new_empty(x.shape),
    _save_for_add,
    _add_backward,
)
# Not inside compiled graphs, where Inductor fuses torch's operations with their neighbours.
_kernel = functools.partial(Kernel, how="a kernel", compiled=False)


@op(
    _kernel(_size_by_kernel, dtypes=None, why="not yet measured; reason: one launch instead of nine"),
    how="torch's scatter_add and log",
)
def size_groups(
    slot_BN: Tensor, slots: int, dtype: torch.dtype = torch.float32, *, all_join: bool = False
) -> tuple[Tensor, Tensor]:
    """Return how many tokens each slot represents, and the bias by which a key of attention counts as that many.

    Args:
        slot_BN: Slot of each token, -1 for none (B, N).
        all_join: Promise that no slot is -1 and no group empty, which skips the checks.

    Returns:
        The sizes (B, K), fp32, and their logarithms (B, 1, 1, K); both are 0 for an empty slot. The logarithms are
        aligned in memory as fused attention needs them, so that it makes no copy.

    Source: proportional attention of ToMe, Bolya et al., arXiv 2210.09461, Eq. 1.

    Example:
        >>> size_groups(torch.tensor([[0, 0, 1, -1]]), 2)
        (tensor([[2., 1.]]), tensor([[[[0.6931, 0.0000]]]]))
    """
    # Triton fuses these with their neighbours; C++ is compiled for every size anew.
    if torch.compiler.is_compiling() and not exporting() and slot_BN.is_cpu:
        return _sizes_in_graph(slot_BN, slots, dtype, all_join)
    size_BK = group_sizes(slot_BN, slots, all_join=all_join)
    # Of an empty slot the logarithm of 1, which is 0.
    counted_BK = size_BK if all_join else size_BK.clamp(min=1)
    # The logarithm of a size added to a key's score makes it count as so many equal keys.
    return size_BK, _aligned(counted_BK.log().to(dtype))


def _run_sizes(slot: Tensor, slots: int, dtype: torch.dtype, all_join: bool) -> tuple[Tensor, Tensor]:
    return size_groups(slot, slots, dtype, all_join=all_join)


_sizes_in_graph = torch_op(
    "sizes_in_graph",
    "(Tensor slot, SymInt slots, ScalarType dtype, bool all_join) -> (Tensor, Tensor)",
    _run_sizes,
    lambda slot, slots, dtype, all_join: (
        slot.new_empty(slot.shape[0], slots, dtype=torch.float32),
        slot.new_empty(slot.shape[0], 1, 1, slots, dtype=dtype),
    ),
)


@op(
    _kernel(
        lambda x_BND, slot_BN, size_BK, weight_BN=None, all_join=False: _mean_op(
            x_BND, slot_BN, size_BK.shape[1], size_BK, weight_BN
        ),
        # Every slot is compared with every token: the work is quadratic.
        takes=lambda x_BND, *_, **__: x_BND.shape[1] <= 4096,
        where="tokens <= 4096",
        why="not yet measured; reason: one launch instead of eight",
    ),
    how="torch's index_add",
)
def mean_rows(
    x_BND: Tensor, slot_BN: Tensor, size_BK: Tensor, weight_BN: Tensor | None = None, *, all_join: bool = False
) -> Tensor:
    """Return the mean row of each group (B, K, D), zeros for an empty group.

    Args:
        slot_BN: Slot of each row, -1 for none (B, N).
        size_BK: Sum of the weights of each slot's rows; no gradient.
        weight_BN: Weight of each row (B, N), or None for 1; no gradient.
        all_join: Promise that no slot is -1 and no group empty, which skips the checks.

    Example:
        >>> mean_rows(torch.tensor([[[1.0], [3.0], [5.0]]]), torch.tensor([[0, 0, 1]]), torch.tensor([[2.0, 1.0]]))
        tensor([[[2.],
                 [5.]]])
    """
    images, slots = size_BK.shape
    rows_BND = x_BND
    if weight_BN is not None:
        rows_BND = x_BND * weight_BN.unsqueeze(-1).to(x_BND.dtype)
    if not all_join:
        rows_BND = torch.where((slot_BN >= 0).unsqueeze(-1), rows_BND, 0.0)
        # An empty group has a sum of zeros, which no size may divide by 0.
        size_BK = size_BK.clamp(min=1)
    index = _flat(slot_BN, slots, all_join)
    # Sums of half precision would stop to grow where a row is less than half of their last digit.
    dtype = torch.float32 if x_BND.dtype in (torch.float16, torch.bfloat16) else x_BND.dtype
    # All rows as those of one image, which needs no view of a single one.
    total = x_BND.new_zeros(1, images * slots, x_BND.shape[2], dtype=dtype)
    rows_BND = rows_BND.to(dtype)
    if images != 1:
        rows_BND = rows_BND.flatten(0, 1).unsqueeze(0)
    if transforming():
        # Transforms have no rule for a tensor that becomes a batch in place.
        total = total.index_add(1, index, rows_BND)
    else:
        total.index_add_(1, index, rows_BND)
    if images != 1:
        total = total.view(images, slots, x_BND.shape[2])
    return total.div_(size_BK.unsqueeze(-1).to(dtype)).to(x_BND.dtype)


@op(
    _kernel(
        lambda x_BND, update_BKD, slot_BN, all_join=False: _add_op(x_BND, update_BKD, slot_BN),
        why="not yet measured; reason: one launch instead of six",
    ),
    how="torch's index_select",
)
def add_updates(x_BND: Tensor, update_BKD: Tensor, slot_BN: Tensor, *, all_join: bool = False) -> Tensor:
    """Add to each row the update of the slot that represents it.

    Args:
        slot_BN: Slot of each row, -1 for none (B, N).
        all_join: Promise that no slot is -1, which skips the check.

    Example:
        >>> add_updates(torch.zeros(1, 3, 1), torch.tensor([[[1.0], [2.0]]]), torch.tensor([[0, 1, -1]])).flatten()
        tensor([1., 2., 0.])
    """
    added_BND = _spread(update_BKD, slot_BN, all_join)
    if transforming() or added_BND.dtype != x_BND.dtype:
        return x_BND + added_BND
    # The spread updates are a new tensor, whose memory holds the result too.
    return added_BND.add_(x_BND)
