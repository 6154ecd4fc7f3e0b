"""The way into a routed block and out of it: which rows it computes, and what its update changes.

Axes: B images, N tokens, K slots per image, D channels.
"""

from __future__ import annotations

from torch import Tensor, nn

from mmod.blocks.fused_norm import gather_kept
from mmod.blocks.packed import reweigh_skipped
from mmod.ops import add_updates, lerp_rows, mean_rows, merge_rows
from mmod.routing import Routing


def enter_rows(x_BND: Tensor, routing: Routing, norm: nn.Module | None = None) -> Tensor:
    """Return the rows that a block computes: kept tokens, the means of those that merge, or all of kept images.

    Args:
        x_BND: All tokens (B, N, D).
        routing: The decision.
        norm: The block's first norm if it is a `FusedNorm`, else None.

    Returns:
        The rows (B, K, D), or those of whole images (S, N, D).
    """
    if routing.image_S is not None:
        return x_BND.index_select(0, routing.image_S)
    if routing.join_BN is None or routing.size_BK is None:
        return gather_kept(x_BND, routing, norm)
    return mean_rows(x_BND, routing.join_BN, routing.size_BK, all_join=routing.all_join)


def leave_rows(x_BND: Tensor, z_BKD: Tensor, y_BKD: Tensor, routing: Routing) -> Tensor:
    """Write the weighed update of a block's rows back among all tokens.

    Entering again with the result returns the rows as they left, up to rounding, so blocks that share a decision need
    to enter and leave only once.

    Args:
        x_BND: All tokens before the block (B, N, D).
        z_BKD: The block's rows among them, as `enter_rows` returned them.
        y_BKD: The same after the block.
        routing: The decision.

    Returns:
        All tokens after the block (B, N, D).
    """
    y_BKD = y_BKD.to(x_BND.dtype)
    if routing.image_S is not None:
        gate_SN = None if routing.gate_BK is None else routing.gate_BK.index_select(0, routing.image_S)
        return reweigh_skipped(x_BND, routing).index_copy(0, routing.image_S, lerp_rows(z_BKD, y_BKD, gate_SN))
    if routing.join_BN is None:
        places = (routing.valid_BK, routing.inverse_BN)
        return merge_rows(reweigh_skipped(x_BND, routing), routing.index_BK, z_BKD, y_BKD, routing.gate_BK, *places)
    update_BKD = lerp_rows(z_BKD, y_BKD, routing.gate_BK) - z_BKD
    return add_updates(x_BND, update_BKD, routing.join_BN, all_join=routing.all_join)
