"""The rows that a routed block computes, the ways in and out of them, and what of the host runs on them.

Axes: B images, N tokens, K slots per image, T packed rows, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmod.blocks.call import BlockCall
from mmod.blocks.forward_pass import PassTracker
from mmod.config import RoutingConfig
from mmod.ops import (
    Backend,
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
from mmod.routing import Router, Routing


class FusedNorm(nn.Module):
    """Mixin of a block's first norm that returns rows which were normalised while they were gathered.

    Attributes:
        mod_state: Knows the rows of the running block.
    """

    mod_state: PassTracker

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of rows (B, K, D), precomputed if they are the gathered ones."""
        running = self.mod_state.running
        if running.normed is None or running.normed[0] is not x:
            return super().forward(x)
        normed_BKD, running.normed = running.normed[1], None
        return normed_BKD


def enter_rows(x_BND: Tensor, routing: Routing, norm: nn.Module | None = None) -> Tensor:
    """Return the rows of a decision: kept tokens, means of merged tokens, or all tokens of kept images.

    Args:
        x_BND: All tokens (B, N, D).
        routing: The decision.
        norm: The block's first norm, computed with the gather if it is a `FusedNorm` and a kernel can do it.

    Returns:
        The rows (B, K, D), or those of whole images (S, N, D).
    """
    kept, (slot_BN, size_BK, all_join) = routing.kept, routing.joined
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
    # Under autocast a norm computes and returns fp32; the op keeps the type of its rows. Torch has no answer for meta,
    # where nothing is computed.
    device = x_BND.device.type
    if device == "meta" or torch.is_autocast_enabled(device):
        return False
    return choose("gather_norm", x_BND, channels=x_BND.shape[2]).backend is not Backend.TORCH


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
    """Return the tokens times the weight of skipped ones, as in p-MoD; None leaves them unchanged."""
    return x_BND if weight_BN is None else x_BND * weight_BN.unsqueeze(-1).to(x_BND.dtype)


class Rows:
    """The rows that blocks run on in place of all tokens.

    Blocks of a span hand one object on: each enters the rows of its decision, and the last block leaves all of them.

    Args:
        x_BND: All tokens before the first block.
        norm: The first norm of the first block, see `enter_rows`.
        weighs: The gate weighs what is written back; False where it weighs branches inside the block.

    Attributes:
        routing: The last decision.
        router: The router of the first block, where blocks hand the rows on.
        packing: Where packed rows come from; None where rows are not packed.
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
        """Rows of an image."""
        return self.routing.kept.index_BK.shape[1]

    @property
    def shrinks(self) -> bool:
        """Whether there are fewer rows than tokens, and none is empty."""
        return self.routing.kept.valid_BK is None and self.slots < self.x_BND.shape[1]

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
        if not self._steps:
            among, z_BKD = routing, enter_rows(rows_BND, routing, self.norm)
        elif self.routing is routing:
            return rows_BND
        else:
            among = _among(routing, self.routing)
            slot_BN, size_BK, _ = among.joined
            if size_BK is None or slot_BN is None:
                z_BKD = gather_rows(rows_BND, among.kept.index_BK)
            else:
                z_BKD = mean_rows(rows_BND, slot_BN, size_BK, self.routing.joined.size_BK, all_join=True)
        self._steps.append((rows_BND, z_BKD, among if self.weighs else without_gate(among)))
        self.routing = routing
        return z_BKD

    def leave(self, y_BKD: Tensor) -> Tensor:
        """Return all tokens (B, N, D) after the last block, from its rows (B, K, D)."""
        for x_BND, z_BKD, routing in reversed(self._steps):
            y_BKD = leave_rows(x_BND, z_BKD, y_BKD, routing)
        return y_BKD


def _among(routing: Routing, earlier: Routing) -> Routing:
    """Return a decision about all tokens as one about the rows of the decision before."""
    assert earlier.joined.slot_BN is not None
    assert routing.joined.slot_BN is not None
    kept = routing.kept._replace(index_BK=earlier.joined.slot_BN.gather(1, routing.kept.index_BK), inverse_BN=None)
    slot_BN = routing.joined.slot_BN.gather(1, earlier.kept.index_BK)
    return routing._replace(kept=kept, joined=routing.joined._replace(slot_BN=slot_BN))


def without_gate(routing: Routing) -> Routing:
    """Return a decision whose gate is applied elsewhere."""
    return routing._replace(weights=routing.weights._replace(gate_BK=None))


class AllTokens(Rows):
    """All tokens in their own order, where nothing has to be gathered."""

    def enter(self, rows_BND: Tensor, routing: Routing) -> Tensor:
        """Return the tokens."""
        self.routing = routing
        return rows_BND

    def leave(self, y_BKD: Tensor) -> Tensor:
        """Return the tokens after the block, whose update needs no write-back."""
        return y_BKD


class PackedRows(Rows):
    """Kept tokens of all images as one sequence (1, T, D) without padding."""

    def enter(self, rows_BND: Tensor, routing: Routing) -> Tensor:
        """Return the packed rows (1, T, D) of a decision with a known total of valid slots."""
        index_BK, valid_BK, total, *_ = routing.kept
        assert valid_BK is not None
        assert total is not None
        self.routing = routing
        self.packing = pack_rows(index_BK, valid_BK, total, rows_BND.shape[1])
        self._z_TD = rows_BND.flatten(0, 1).index_select(0, self.packing.row_T)
        return self._z_TD.unsqueeze(0)

    @property
    def gate_1T(self) -> Tensor | None:
        """Gate of each packed row (1, T); None where it is 1."""
        assert self.packing is not None
        gate_BK = self.routing.weights.gate_BK
        return None if gate_BK is None else gate_BK.flatten()[self.packing.slot_T].unsqueeze(0)

    def leave(self, y_BKD: Tensor) -> Tensor:
        """Return all tokens (B, N, D) after the block, from its packed rows (1, T, D)."""
        assert self.packing is not None
        gate_1T = self.gate_1T if self.weighs else None
        new_TD = lerp_rows(self._z_TD, y_BKD.squeeze(0), None if gate_1T is None else gate_1T.squeeze(0))
        x_BND = reweigh(self.x_BND, self.routing.weights.skipped_BN)
        return x_BND.flatten(0, 1).index_copy(0, self.packing.row_T, new_TD).view_as(x_BND)


Host = Callable[..., Tensor]


class Way:
    """How a routed block runs.

    Args:
        call: How the host library calls the block.
        config: How the block is routed.

    Attributes:
        two_halves: The block decides between its attention and its MLP.
        scored_norm: Returns the norm whose output is scored, from the block; None scores the block's input.
    """

    two_halves = False
    scored_norm: Callable[[nn.Module], nn.Module] | None = None

    def __init__(self, call: BlockCall, config: RoutingConfig) -> None:
        self.call: Any = call
        self.operator = str(config.operator)

    def rows(self, block: Any, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Rows:
        """Return the rows that the block runs on, not yet entered."""
        return AllTokens(x)

    def run(self, block: Any, host: Host, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return the rows after the block.

        Args:
            block: The block.
            host: Its host's forward.
            z: The rows, as `rows.enter` returned them.
            arguments: The block's arguments for all tokens.
            rows: The rows that were entered.
        """
        raise NotImplementedError


class KeptAlone(Way):
    """The block runs on the kept tokens, which attend to each other."""

    def rows(self, block: Any, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Rows:
        """Return packed rows where images keep different numbers and the host can run them, else padded ones."""
        if routing.kept.valid_BK is not None and routing.kept.total and self.call.can_pack(block, arguments):
            return PackedRows(x)
        return Rows(x, getattr(block, self.call.fused_norm) if self.call.fused_norm else None)

    def run(self, block: Any, host: Host, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return the rows after the host's block."""
        routing = rows.routing
        if rows.packing is not None:
            return run_packed(host, z, self.call.pack(arguments, rows.x_BND, routing, rows.packing), rows)
        if not routing.kept.index_BK.shape[1]:
            return z
        if arguments or routing.kept.valid_BK is not None or routing.joined.size_BK is not None:
            arguments = self.call.select_tokens(arguments, rows.x_BND, routing)
        return host(z, **arguments)


def run_packed(host: Host, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
    """Return packed rows (1, T, D) after the host's block, in which each image attends to itself alone.

    Raises:
        RuntimeError: The block called no fused attention, so images would have attended to each other.
    """
    assert rows.packing is not None
    attention = attend_within(rows.packing)
    with attention:
        y = host(z, **arguments)
    if not attention.calls:
        raise RuntimeError("packed rows need fused attention: this block called no scaled_dot_product_attention")
    return y


class AmongAll(Way):
    """The block runs on the kept tokens, which attend to all tokens."""

    def rows(self, block: Any, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Rows:
        """Return the kept tokens."""
        return Rows(x, getattr(block, self.call.fused_norm) if self.call.fused_norm else None)

    def run(self, block: Any, host: Host, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return the rows after the host's block."""
        if not rows.slots:
            return z
        y: Tensor = self.call.attend_to_all(block, host, arguments, rows.x_BND, z, rows.routing)
        return y


class TwoHalves(Way):
    """Attention runs on the rows of the decision before; then the block decides, and its MLP runs on fewer rows."""

    two_halves = True

    def rows(self, block: Any, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Rows:
        """Return the kept tokens, or the means of merged ones."""
        return Rows(x)

    def run(self, block: Any, host: Host, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return the rows after the host's MLP."""
        y: Tensor = self.call.halves.feed(block, z)
        return y
