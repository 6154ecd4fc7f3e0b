"""The rows that a routed block computes: the way in from all tokens, and the way out again.

Axes: B images, N tokens, K slots per image, T packed rows, D channels.
"""

from __future__ import annotations

from torch import Tensor, nn

from mmod.blocks.fused_norm import gather_kept
from mmod.ops import Packing, add_updates, gather_rows, lerp_rows, mean_rows, merge_rows, pack_rows
from mmod.routing import Router, Routing


def enter_rows(x_BND: Tensor, routing: Routing, norm: nn.Module | None = None) -> Tensor:
    """Return the rows of a decision: kept tokens, means of merged tokens, or all tokens of kept images.

    Args:
        x_BND: All tokens (B, N, D).
        routing: The decision.
        norm: The block's first norm, which is computed with the gather if it is a `FusedNorm`.

    Returns:
        The rows (B, K, D), or those of whole images (S, N, D).
    """
    if routing.image_S is not None:
        return x_BND.index_select(0, routing.image_S)
    if routing.join_BN is None or routing.size_BK is None:
        return gather_kept(x_BND, routing, norm)
    return mean_rows(x_BND, routing.join_BN, routing.size_BK, all_join=routing.all_join)


def leave_rows(x_BND: Tensor, z_BKD: Tensor, y_BKD: Tensor, routing: Routing) -> Tensor:
    """Write the gated update of the rows back to all tokens.

    Args:
        x_BND: All tokens before the block (B, N, D).
        z_BKD: The rows before the block, from `enter_rows`.
        y_BKD: The rows after the block.
        routing: The decision.

    Returns:
        All tokens after the block (B, N, D). `enter_rows` of them returns the gated rows, up to rounding.
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


def reweigh_skipped(x_BND: Tensor, routing: Routing) -> Tensor:
    """Return the tokens multiplied by the skip weight, as in p-MoD, or unchanged where there is none.

    Args:
        x_BND: All tokens before the block (B, N, D).
        routing: The decision.
    """
    if routing.skip_weight_BN is None:
        return x_BND
    return x_BND * routing.skip_weight_BN.unsqueeze(-1).to(x_BND.dtype)


class Rows:
    """The rows that blocks run on in place of all tokens.

    Blocks of a span hand one object on: each enters the rows of its decision, and the last block leaves all of them.

    Args:
        x_BND: All tokens before the first block.
        norm: The first norm of the first block, see `enter_rows`.
        weighs: The gate weighs what is written back; False where it weighs branches inside the block.

    Attributes:
        routing: The last decision; None before the first.
        router: The router of the first block, where blocks hand the rows on.
        packing: Where packed rows come from; None where rows are not packed.
    """

    routing: Routing | None = None
    router: Router | None = None
    packing: Packing | None = None

    def __init__(self, x_BND: Tensor, norm: nn.Module | None = None, weighs: bool = True) -> None:
        self.x_BND = x_BND
        self.norm = norm
        self.weighs = weighs
        self._steps: list[tuple[Tensor, Tensor, Routing]] = []

    @property
    def slots(self) -> int:
        """Rows of an image."""
        assert self.routing is not None
        return self.routing.index_BK.shape[1]

    @property
    def shrinks(self) -> bool:
        """Whether there are fewer rows than tokens, and none is empty."""
        routing = self.routing
        assert routing is not None
        return routing.valid_BK is None and self.slots < routing.score_BN.shape[1]

    def serves(self, router: Router) -> bool:
        """Return whether a block can choose among the rows, or keeps all of them."""
        assert self.router is not None
        return router.config.joins or router.capacity == self.router.capacity

    def enter(self, rows_BND: Tensor, routing: Routing) -> Tensor:
        """Return the rows of a decision.

        Args:
            rows_BND: All tokens, or the rows of the decision before.
            routing: The decision about all tokens.
        """
        if self.routing is routing:
            return rows_BND
        if self.routing is None:
            among, z_BKD = routing, enter_rows(rows_BND, routing, self.norm)
        else:
            among = _among(routing, self.routing)
            if among.size_BK is None or among.join_BN is None:
                z_BKD = gather_rows(rows_BND, among.index_BK)
            else:
                z_BKD = mean_rows(rows_BND, among.join_BN, among.size_BK, self.routing.size_BK, all_join=True)
        self._steps.append((rows_BND, z_BKD, among if self.weighs else among._replace(gate_BK=None)))
        self.routing = routing
        return z_BKD

    def leave(self, y_BKD: Tensor) -> Tensor:
        """Return all tokens (B, N, D) after the last block, from its rows (B, K, D)."""
        for x_BND, z_BKD, routing in reversed(self._steps):
            y_BKD = leave_rows(x_BND, z_BKD, y_BKD, routing)
        return y_BKD


def _among(routing: Routing, earlier: Routing) -> Routing:
    """Return a decision about all tokens as one about the rows of the decision before."""
    assert earlier.join_BN is not None
    assert routing.join_BN is not None
    index_BK = earlier.join_BN.gather(1, routing.index_BK)
    return routing._replace(index_BK=index_BK, join_BN=routing.join_BN.gather(1, earlier.index_BK), inverse_BN=None)


class AllTokens(Rows):
    """All tokens, where the block's update needs no write-back."""

    def enter(self, rows_BND: Tensor, routing: Routing) -> Tensor:
        """Return the tokens."""
        self.routing = routing
        return rows_BND

    def leave(self, y_BKD: Tensor) -> Tensor:
        """Return the tokens after the block."""
        return y_BKD


class PackedRows(Rows):
    """Kept tokens of all images as one sequence (1, T, D) without padding."""

    def enter(self, rows_BND: Tensor, routing: Routing) -> Tensor:
        """Return the packed rows (1, T, D) of a decision with a known total of valid slots."""
        assert routing.valid_BK is not None
        assert routing.total is not None
        self.routing = routing
        self.packing = pack_rows(routing.index_BK, routing.valid_BK, routing.total, rows_BND.shape[1])
        self._z_TD = rows_BND.flatten(0, 1).index_select(0, self.packing.row_T)
        return self._z_TD.unsqueeze(0)

    @property
    def gate_1T(self) -> Tensor | None:
        """Gate of each packed row (1, T); None where it is 1."""
        assert self.routing is not None
        assert self.packing is not None
        gate_BK = self.routing.gate_BK
        return None if gate_BK is None else gate_BK.flatten()[self.packing.slot_T].unsqueeze(0)

    def leave(self, y_BKD: Tensor) -> Tensor:
        """Return all tokens (B, N, D) after the block, from its packed rows (1, T, D)."""
        assert self.routing is not None
        assert self.packing is not None
        gate_1T = self.gate_1T if self.weighs else None
        new_TD = lerp_rows(self._z_TD, y_BKD.squeeze(0), None if gate_1T is None else gate_1T.squeeze(0))
        x_BND = reweigh_skipped(self.x_BND, self.routing)
        return x_BND.flatten(0, 1).index_copy(0, self.packing.row_T, new_TD).view_as(x_BND)
