"""The rows that a routed block computes: how they are gathered, run and written back.

Axes: B images, N tokens, K slots per image, T packed rows, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, nn

from mmod.blocks.call import BlockCall
from mmod.blocks.forward_pass import PassTracker
from mmod.config import RoutingConfig
from mmod.ops import (
    Packing,
    add_updates,
    attend_within,
    gather_norm,
    gather_rows,
    lerp_rows,
    mean_rows,
    merge_rows,
    pack_rows,
)
from mmod.ops.backend import choose
from mmod.ops.casting import autocasts
from mmod.routing import Router, Routing


class FusedNorm(nn.Module):
    """Mixin of a block's first norm, for rows that were normalised in the kernel that gathered them."""

    mod_state: PassTracker

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of rows (B, K, D)."""
        running = self.mod_state.thread.value.running
        if running.normed is None or running.normed[0] is not x:
            return super().forward(x)
        normed_BKD, running.normed = running.normed[1], None
        return normed_BKD


def enter_rows(x_BND: Tensor, routing: Routing, norm: nn.Module | None = None) -> Tensor:
    """Return the rows of a decision: kept tokens or means of merged ones (B, K, D), or kept images (S, N, D).

    Args:
        norm: The block's first norm, computed in the gather's kernel if it is a `FusedNorm` and there is one.
    """
    kept, (slot_BN, size_BK, all_join, _) = routing.kept, routing.joined
    if kept.image_S is not None:
        return x_BND.index_select(0, kept.image_S)
    if slot_BN is not None and size_BK is not None:
        return mean_rows(x_BND, slot_BN, size_BK, all_join=all_join)
    if not isinstance(norm, FusedNorm) or not _fuses(x_BND):
        return gather_rows(x_BND, kept.index_BK, kept.inverse_BN)
    # An RMS norm has the same fields but no bias.
    bias, plain = getattr(norm, "bias", None), cast(nn.LayerNorm, norm)
    kind = "layer" if isinstance(norm, nn.LayerNorm) else "rms"
    z_BKD, normed_BKD = gather_norm(x_BND, kept.index_BK, plain.weight, bias, plain.eps, kind)
    norm.mod_state.running.normed = z_BKD, normed_BKD
    return z_BKD


def _fuses(x_BND: Tensor) -> bool:
    # Under autocast a norm returns fp32, the op the dtype of its rows.
    return not autocasts(x_BND) and choose("gather_norm", x_BND, channels=x_BND.shape[2]) is not None


def leave_rows(x_BND: Tensor, z_BKD: Tensor, y_BKD: Tensor, routing: Routing) -> Tensor:
    """Return all tokens (B, N, D) with the gated update from rows z to rows y.

    `enter_rows` of the result returns the gated rows, up to rounding.
    """
    kept, joined, (gate_BK, skipped_BN) = routing.kept, routing.joined, routing.weights
    y_BKD = y_BKD.to(x_BND.dtype)
    if joined.slot_BN is not None:
        update_BKD = lerp_rows(z_BKD, y_BKD, gate_BK) - z_BKD
        return add_updates(x_BND, update_BKD, joined.slot_BN, all_join=joined.all)
    if skipped_BN is not None:
        x_BND = reweigh(x_BND, skipped_BN)
    if kept.image_S is None:
        return merge_rows(x_BND, kept.index_BK, z_BKD, y_BKD, gate_BK, kept.valid_BK, kept.inverse_BN)
    gate_SN = None if gate_BK is None else gate_BK.index_select(0, kept.image_S)
    return x_BND.index_copy(0, kept.image_S, lerp_rows(z_BKD, y_BKD, gate_SN))


def reweigh(x_BND: Tensor, weight_BN: Tensor | None) -> Tensor:
    """Return tokens times the weights of skipped ones, as in p-MoD; None leaves them unchanged."""
    return x_BND if weight_BN is None else x_BND * weight_BN.unsqueeze(-1).to(x_BND.dtype)


class Rows:
    """The rows that blocks run on instead of all tokens.

    Blocks of a span pass on one object: each enters the rows of its decision, and the last block leaves all of them.

    Args:
        norm: The first norm of the first block, see `enter_rows`.
        weighs: The gate weighs what is written back; False if it weighs branches inside the block.

    Attributes:
        routing: The last decision.
        router: The router of the first block, if blocks pass on the rows.
        packing: Sources of packed rows; None for padded ones.
    """

    routing: Routing
    router: Router | None = None
    packing: Packing | None = None

    def __init__(self, x_BND: Tensor, norm: nn.Module | None = None, weighs: bool = True) -> None:
        self.x_BND = x_BND
        self.norm = norm
        self.weighs = weighs
        self._steps: list[tuple[Tensor, Tensor, Routing]] = []

    @property
    def slots(self) -> int:
        """Number of rows per image."""
        return self.routing.kept.index_BK.shape[1]

    @property
    def shrinks(self) -> bool:
        """Whether there are fewer rows than tokens, and no empty ones."""
        return self.routing.kept.valid_BK is None and self.slots < self.x_BND.shape[1]

    def serves(self, router: Router) -> bool:
        """Return whether a block can select among the rows, or keeps all of them."""
        assert self.router is not None
        return router.config.joins or router.capacity == self.router.capacity

    def enter(self, rows_BND: Tensor, routing: Routing) -> Tensor:
        """Return the rows of a decision about all tokens, from these or from the rows of the previous decision."""
        if not self._steps:
            among, z_BKD = routing, enter_rows(rows_BND, routing, self.norm)
        elif self.routing is routing:
            before_BND, z_BKD, among = self._steps[-1]
            if among.weights.gate_BK is None:
                return rows_BND
            # The gate weighs each block's update, not that of all together.
            z_BKD = lerp_rows(z_BKD, rows_BND, among.weights.gate_BK)
            self._steps[-1] = before_BND, z_BKD, among
            return z_BKD
        else:
            before, size_BK = self.routing, routing.joined.size_BK
            assert before.joined.slot_BN is not None
            assert routing.joined.slot_BN is not None
            # A decision about all tokens, as one about the rows of the decision before.
            slot_BN = routing.joined.slot_BN.gather(1, before.kept.index_BK)
            among = routing._replace(joined=routing.joined._replace(slot_BN=slot_BN))
            if size_BK is None:
                z_BKD = gather_rows(rows_BND, before.joined.slot_BN.gather(1, routing.kept.index_BK))
            else:
                z_BKD = mean_rows(rows_BND, slot_BN, size_BK, before.joined.size_BK, all_join=True)
        self._steps.append((rows_BND, z_BKD, among if self.weighs else without_gate(among)))
        self.routing = routing
        return z_BKD

    def leave(self, y_BKD: Tensor) -> Tensor:
        """Return all tokens after the last block, from its rows."""
        for x_BND, z_BKD, routing in reversed(self._steps):
            y_BKD = leave_rows(x_BND, z_BKD, y_BKD, routing)
        return y_BKD


def without_gate(routing: Routing) -> Routing:
    """Return a decision without its gate, which is applied elsewhere."""
    return routing._replace(weights=routing.weights._replace(gate_BK=None))


class AllTokens(Rows):
    """All tokens in order, so nothing is gathered."""

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
        """Return the packed rows of a decision whose total of valid slots is known."""
        index_BK, valid_BK, total, *_ = routing.kept
        assert valid_BK is not None
        assert total is not None
        self.routing = routing
        self.packing = pack_rows(index_BK, valid_BK, total, rows_BND.shape[1])
        self._z_TD = rows_BND.flatten(0, 1).index_select(0, self.packing.row_T)
        return self._z_TD.unsqueeze(0)

    @property
    def gate_1T(self) -> Tensor | None:
        """Gates of the packed rows (1, T); None for 1."""
        assert self.packing is not None
        gate_BK = self.routing.weights.gate_BK
        return None if gate_BK is None else gate_BK.flatten()[self.packing.slot_T].unsqueeze(0)

    def leave(self, y_BKD: Tensor) -> Tensor:
        """Return all tokens after the block, from its packed rows."""
        assert self.packing is not None
        gate_1T = self.gate_1T if self.weighs else None
        new_TD = lerp_rows(self._z_TD, y_BKD.squeeze(0), None if gate_1T is None else gate_1T.squeeze(0))
        x_BND = reweigh(self.x_BND, self.routing.weights.skipped_BN)
        return x_BND.flatten(0, 1).index_copy(0, self.packing.row_T, new_TD).view_as(x_BND)


Host = Callable[..., Tensor]


class Way:
    """How a routed block runs, chosen once from its config.

    Attributes:
        two_halves: The block decides between its attention and its MLP.
        scored_norm: From the block to the norm whose output is scored; None scores the block's input.
    """

    two_halves = False
    scored_norm: Callable[[nn.Module], nn.Module] | None = None

    def __init__(self, call: BlockCall, config: RoutingConfig) -> None:
        self.call: Any = call
        self.operator = str(config.operator)
        self.among_all = config.context == "all"

    def rows(self, block: Any, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Rows:
        """Return the rows that the block runs on, not yet entered."""
        return AllTokens(x)

    def run(self, block: Any, host: Host, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return the rows after the block, from those that `rows.enter` returned; `host` is the host's forward."""
        raise NotImplementedError


class KeptRows(Way):
    """The block runs on the kept tokens, which attend to each other or to all tokens."""

    def rows(self, block: Any, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Rows:
        """Return packed rows if images keep different numbers and the host can run them, else padded ones."""
        kept, call = routing.kept, self.call
        if kept.valid_BK is not None and kept.total and not self.among_all and call.can_pack(block, arguments):
            return PackedRows(x)
        return Rows(x, getattr(block, call.fused_norm) if call.fused_norm else None)

    def run(self, block: Any, host: Host, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return the rows after the host's block."""
        routing = rows.routing
        if rows.packing is not None:
            return run_packed(host, z, self.call.pack(arguments, rows.x_BND, routing, rows.packing), rows)
        if not routing.kept.index_BK.shape[1]:
            return z
        if self.among_all:
            return self.call.attend_to_all(block, host, arguments, rows.x_BND, z, routing)
        if arguments or routing.kept.valid_BK is not None or routing.joined.size_BK is not None:
            arguments = self.call.select_tokens(arguments, rows.x_BND, routing)
        return host(z, **arguments)


def run_packed(host: Host, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
    """Return packed rows (1, T, D) after the host's block, in which each image attends to itself only."""
    assert rows.packing is not None
    attention = attend_within(rows.packing)
    y: Tensor = attention.run(host, (z,), arguments)
    if not attention.calls:
        raise RuntimeError("packed rows need fused attention: this block called no scaled_dot_product_attention")
    return y


class TwoHalves(Way):
    """Attention runs on the rows of the previous decision; then the block decides, and its MLP runs on fewer rows."""

    two_halves = True

    def rows(self, block: Any, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Rows:
        """Return the means of merged tokens."""
        return Rows(x)

    def run(self, block: Any, host: Host, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return the rows after the host's MLP."""
        return self.call.halves.feed(block, z)
