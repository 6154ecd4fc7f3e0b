"""Groups of tokens that one row represents: which token joins which, their mean, and the update of the group.

Axes: B images, N tokens, K slots per image, D channels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def first_rows(first_N: Tensor, row_BK: Tensor, valid_BK: Tensor | None = None) -> Tensor:
    """Return for every row the slot of its group's first row; a kept row has its own slot.

    Args:
        first_N: First row of each row's group, which is kept (N,).
        row_BK: Row of each slot (B, K).
        valid_BK: False where a slot is empty (B, K), or None.

    Returns:
        Slots (B, N).

    Example:
        >>> first_rows(torch.tensor([0, 0, 2, 2]), torch.tensor([[0, 2, 3]]))
        tensor([[0, 0, 1, 2]])
    """
    held_BN = held_slots(row_BK, len(first_N), valid_BK)
    return torch.where(held_BN >= 0, held_BN, held_BN[:, first_N])


def held_slots(row_BK: Tensor, rows: int, valid_BK: Tensor | None) -> Tensor:
    """Return the slot that holds each row, -1 where none does (B, N)."""
    slot_BK = torch.arange(row_BK.shape[1], device=row_BK.device).expand_as(row_BK)
    if valid_BK is not None:
        # An empty slot may point at a row that a valid slot holds; "amax" then prefers the valid slot.
        slot_BK = torch.where(valid_BK, slot_BK, -1)
    return slot_BK.new_full((len(row_BK), rows), -1).scatter_reduce(1, row_BK, slot_BK, "amax")


def group_sizes(slot_BN: Tensor, slots: int) -> Tensor:
    """Return how many tokens each slot represents, fp32 (B, K); 0 for an empty slot.

    Args:
        slot_BN: Slot of each token, -1 for none (B, N).
        slots: K.
    """
    counted_BN = (slot_BN >= 0).float()
    return counted_BN.new_zeros(slot_BN.shape[0], slots).scatter_add(1, slot_BN.clamp(min=0), counted_BN)


def mean_rows(
    x_BND: Tensor, slot_BN: Tensor, size_BK: Tensor, weight_BN: Tensor | None = None, *, all_join: bool = False
) -> Tensor:
    """Return the mean row of each group.

    Args:
        x_BND: Rows (B, N, D).
        slot_BN: Slot of each row, -1 for none (B, N).
        size_BK: Sum of the weights of each slot's rows (B, K).
        weight_BN: Weight of each row (B, N), or None for 1.
        all_join: Promise that no slot is -1, which skips the check.

    Returns:
        Means (B, K, D); zeros where a group is empty.

    Example:
        >>> mean_rows(torch.tensor([[[1.0], [3.0], [5.0]]]), torch.tensor([[0, 0, 1]]), torch.tensor([[2.0, 1.0]]))
        tensor([[[2.],
                 [5.]]])
    """
    images, slots = size_BK.shape
    rows_BND = x_BND if weight_BN is None else x_BND * weight_BN.unsqueeze(-1).to(x_BND.dtype)
    if not all_join:
        rows_BND = torch.where((slot_BN >= 0).unsqueeze(-1), rows_BND, 0.0)
    total = x_BND.new_zeros(images * slots, x_BND.shape[2]).index_add(0, _flat(slot_BN, slots), rows_BND.flatten(0, 1))
    return total.view(images, slots, -1) / size_BK.clamp(min=1).unsqueeze(-1).to(x_BND.dtype)


def add_updates(x_BND: Tensor, update_BKD: Tensor, slot_BN: Tensor, *, all_join: bool = False) -> Tensor:
    """Add to each row the update of the slot that represents it.

    Args:
        x_BND: Rows (B, N, D).
        update_BKD: The update of each slot (B, K, D).
        slot_BN: Slot of each row, -1 for none (B, N).
        all_join: Promise that no slot is -1, which skips the check.

    Example:
        >>> add_updates(torch.zeros(1, 3, 1), torch.tensor([[[1.0], [2.0]]]), torch.tensor([[0, 1, -1]])).flatten()
        tensor([1., 2., 0.])
    """
    added_BND = update_BKD.flatten(0, 1).index_select(0, _flat(slot_BN, update_BKD.shape[1])).view_as(x_BND)
    if not all_join:
        added_BND = torch.where((slot_BN >= 0).unsqueeze(-1), added_BND, 0.0)
    return x_BND + added_BND


def _flat(slot_BN: Tensor, slots: int) -> Tensor:
    """Return slots numbered over the batch (B N)."""
    first_B1 = torch.arange(slot_BN.shape[0], device=slot_BN.device).unsqueeze(1) * slots
    return (slot_BN.clamp(min=0) + first_B1).flatten()
