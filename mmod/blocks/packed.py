"""The packed path of a routed block: kept tokens of the whole batch as one sequence, so nothing is padded.

Axes: B images, N tokens, K slots per image, T packed rows, D channels.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mmod.ops import Packing, attend_within, lerp_rows, pack_rows
from mmod.routing import Routing


def reweigh_skipped(x_BND: Tensor, routing: Routing) -> Tensor:
    """Return the state that skipped tokens leave a block with: their own, or weighed by the gate as in p-MoD.

    Args:
        x_BND: All tokens before the block (B, N, D).
        routing: The decision.
    """
    if routing.skip_weight_BN is None:
        return x_BND
    return x_BND * routing.skip_weight_BN.unsqueeze(-1).to(x_BND.dtype)


def run_packed(x_BND: Tensor, routing: Routing, block: Callable[[Tensor, Packing], Tensor]) -> Tensor:
    """Run a block on the kept rows of a batch, packed, and write them back.

    Args:
        x_BND: All tokens (B, N, D).
        routing: A decision with a known total of valid slots.
        block: The host block's forward, from (1, T, D) to (1, T, D), given where the rows come from.

    Returns:
        All tokens after the block (B, N, D).

    Raises:
        RuntimeError: The block called no fused attention, so images would have attended to each other.
    """
    assert routing.valid_BK is not None
    assert routing.total is not None
    packing = pack_rows(routing.index_BK, routing.valid_BK, routing.total, x_BND.shape[1])
    rest_BND = reweigh_skipped(x_BND, routing)
    z_TD = x_BND.flatten(0, 1).index_select(0, packing.row_T)
    attention = attend_within(packing)
    with attention:
        y_TD = block(z_TD.unsqueeze(0), packing).squeeze(0)
    if not attention.calls:
        raise RuntimeError("packed rows need fused attention: this block called no scaled_dot_product_attention")
    gate_T = None if routing.gate_BK is None else routing.gate_BK.flatten()[packing.slot_T]
    new_TD = lerp_rows(z_TD, y_TD, gate_T)
    return rest_BND.flatten(0, 1).index_copy(0, packing.row_T, new_TD).view_as(x_BND)
