"""The rows that a routed block computes: how they are gathered, run and written back.

Axes: B images, N tokens, K slots per image, T packed rows, D channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from mmod.blocks.branches import GATED, Inner, running, weigh_branch
from mmod.blocks.call import Arguments, BlockCall
from mmod.blocks.conversion import Mixin
from mmod.blocks.converted import ConvertedBlock
from mmod.config import RoutingConfig
from mmod.ops import (
    Packing,
    add_updates,
    attend_by_length,
    attend_within,
    backend,
    gather_norm,
    gather_rows,
    lerp_rows,
    mean_rows,
    merge_rows,
    pack_rows,
)
from mmod.ops.casting import autocasts
from mmod.ops.intercept import AttentionIntercept
from mmod.ops.rows import batch_rows, put_rows, take_rows
from mmod.routing import Joined, Routing
from mmod.threads import PerThread


class FusedNorm(Mixin):
    """Mixin of a block's first norm that returns the rows that `gather_kept` has already normalised.

    One kernel gathers kept tokens and normalises them, where there is one. Other inputs are normalised here.
    """

    mod_state: PerThread[Inner]
    mod_optional = True

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of rows (B, K, D)."""
        inner = self.mod_state.value
        # `gather_kept` left the norm of these rows here, if its kernel computed one; other inputs are normalised now.
        if inner.normed is None or inner.normed[0] is not x:
            return super().forward(x)
        _, normed_BKD = inner.normed
        inner.normed = None
        return normed_BKD


def gather_kept(x_BND: Tensor, routing: Routing, norm: nn.Module | None = None) -> Tensor:
    """Return the rows of a decision: kept tokens or means of merged ones (B, K, D), or kept images (S, N, D).

    Args:
        norm: The block's first norm, computed in the gather's kernel if it is a `FusedNorm` and there is one.
    """
    kept = routing.kept
    joined = routing.joined
    if kept.image_S is not None:
        return x_BND.index_select(0, kept.image_S)
    if joined.slot_BN is not None and joined.size_BK is not None:
        return mean_rows(x_BND, joined.slot_BN, joined.size_BK, all_join=joined.all)
    if norm is None or not _fuses(x_BND, norm):
        return gather_rows(x_BND, kept.index_BK, kept.inverse_BN)
    # An RMS norm has the same fields but no bias.
    bias = getattr(norm, "bias", None)
    plain = cast(nn.LayerNorm, norm)
    kind = "layer" if isinstance(norm, nn.LayerNorm) else "rms"
    z_BKD, normed_BKD = gather_norm(x_BND, kept.index_BK, plain.weight, bias, plain.eps, kind)
    cast(FusedNorm, norm).mod_state.value.normed = z_BKD, normed_BKD
    return z_BKD


def _fuses(x_BND: Tensor, norm: nn.Module) -> bool:
    # Under autocast a norm returns fp32, the op the dtype of its rows.
    if not isinstance(norm, FusedNorm) or autocasts(x_BND):
        return False
    return backend.choose("gather_norm", x_BND) is not None


def write_kept(x_BND: Tensor, z_BKD: Tensor, y_BKD: Tensor, routing: Routing) -> Tensor:
    """Return all tokens (B, N, D) with the gated update from rows z to rows y.

    `gather_kept` of the result returns the gated rows, up to rounding.
    """
    kept = routing.kept
    joined = routing.joined
    gate_BK = routing.gate_BK
    skipped_BN = routing.skipped_BN
    if y_BKD.dtype != x_BND.dtype:
        # Under autocast a block may return half precision for tokens in fp32.
        y_BKD = y_BKD.to(x_BND.dtype)
    if joined.slot_BN is not None:
        # Tokens of a group get the update of their row, not the row, so that they still differ.
        update_BKD = lerp_rows(z_BKD, y_BKD, gate_BK) - z_BKD
        return add_updates(x_BND, update_BKD, joined.slot_BN, all_join=joined.all)
    if skipped_BN is not None:
        x_BND = reweigh(x_BND, skipped_BN)
    if kept.image_S is None:
        return merge_rows(x_BND, kept.index_BK, z_BKD, y_BKD, gate_BK, kept.valid_BK, kept.inverse_BN)
    if gate_BK is not None:
        # The rows are those of kept images, and so are their gates.
        gate_BK = gate_BK.index_select(0, kept.image_S)
    return x_BND.index_copy(0, kept.image_S, lerp_rows(z_BKD, y_BKD, gate_BK))


def reweigh(x_BND: Tensor, weight_BN: Tensor | None) -> Tensor:
    """Return tokens times the weights of skipped ones, as in p-MoD; None leaves them unchanged."""
    if weight_BN is None:
        return x_BND
    return x_BND * weight_BN.unsqueeze(-1).to(x_BND.dtype)


class Rows:
    """The rows that blocks run on instead of all tokens.

    Blocks of a span pass on one object: each takes the rows of its decision, and the last writes all of them back.

    Args:
        x_BND: All tokens.
        norm: The first norm of the first block, see `gather_kept`.
        weighs: The gate weighs what is written back; False if it weighs branches inside the block.

    Attributes:
        z: The rows that the first block runs on.
        routing: The last decision.
        selected: The arguments of blocks of a class that get the rows alone.
        packing: Sources of packed rows; None for padded ones.
        filled: The filled ones of padded rows of groups, and their attention, once a block has run on them alone.
    """

    selected: tuple[type, Arguments] | None = None
    packing: Packing | None = None
    filled: tuple[Packing, AttentionIntercept] | None = None
    # The rows numbered over the batch, if they are single tokens and torch copies whole rows.
    _row_T: Tensor | None = None
    # Earlier narrowings, each with the rows before it, the rows that it kept, and its decision about those before.
    _earlier: tuple[tuple[Tensor, Tensor, Routing], ...] = ()

    def __init__(self, x_BND: Tensor, routing: Routing, norm: nn.Module | None = None, weighs: bool = True) -> None:
        self.x_BND = x_BND
        self.routing = routing
        self.weighs = weighs
        # The rows before the last decision, and what it says about those. They differ from `x_BND` and `routing`, which
        # are about all tokens, once a later block has narrowed the rows.
        self._from_BND = x_BND
        self._among = routing if weighs else without_gate(routing)
        kept = routing.kept
        # Eager mode on a CPU copies whole rows, by one index for the gather and the way back.
        single = kept.valid_BK is None and kept.image_S is None and routing.joined.slot_BN is None
        if single and routing.skipped_BN is None and not backend.forced:
            self._row_T = batch_rows(x_BND, kept.index_BK)
        if self._row_T is None:
            self.z = gather_kept(x_BND, routing, norm)
        else:
            self.z = take_rows(x_BND, kept.index_BK, self._row_T)

    @property
    def slots(self) -> int:
        """Number of rows per image."""
        return self.routing.kept.index_BK.shape[1]

    @property
    def shrinks(self) -> bool:
        """Whether there are fewer rows than tokens, and empty ones only where the rows stand for groups."""
        fills = self.routing.kept.valid_BK is None or self.routing.joined.slot_BN is not None
        return fills and self.routing.kept.index_BK.shape[1] < self.x_BND.shape[1]

    def follow(self, rows_BND: Tensor, routing: Routing) -> Tensor:
        """Return the rows of the next block's decision, from the rows after the block before."""
        # A decision of its own, where tokens join others, keeps some of these rows; the same one keeps all.
        if self.routing is not routing:
            return self._narrow(rows_BND, routing)
        gate_BK = self._among.gate_BK
        if gate_BK is None:
            return rows_BND
        # The gate weighs each block's update, not that of all together.
        self.z = lerp_rows(self.z, rows_BND, gate_BK)
        return self.z

    def write_back(self, y_BKD: Tensor) -> Tensor:
        """Return all tokens after the last block, from its rows."""
        among = self._among
        if self._row_T is None:
            y_BKD = write_kept(self._from_BND, self.z, y_BKD, among)
        else:
            gate_BK = among.gate_BK
            if gate_BK is not None or y_BKD.dtype != self.z.dtype:
                y_BKD = lerp_rows(self.z, y_BKD, gate_BK)
            y_BKD = put_rows(self._from_BND, among.kept.index_BK, y_BKD, self._row_T)
        for x_BND, z_BKD, routing in reversed(self._earlier):
            # Each narrowing is undone by its own decision, the last one first.
            y_BKD = write_kept(x_BND, z_BKD, y_BKD, routing)
        return y_BKD

    def fill(self) -> tuple[Packing, AttentionIntercept]:
        """Return the filled slots of the decision as a packed sequence, and what keeps its attention within images.

        Their numbers are read on the host, once for all blocks on the same rows.
        """
        index_BK, valid_BK, total, *_ = self.routing.kept
        assert valid_BK is not None
        assert total is not None
        if self.filled is None:
            packing = pack_rows(index_BK, valid_BK, total, self.x_BND.shape[1])
            lengths = [length for length in packing.cu_seqlens.diff().tolist() if length]
            bias = self.routing.joined.bias
            if bias is not None:
                bias = bias.flatten()[packing.slot_T]
            self.filled = packing, attend_within(packing, attend_by_length(lengths, bias))
        return self.filled

    def select(self, block: ConvertedBlock, arguments: Arguments) -> Arguments:
        """Return a block's arguments for the rows of the last decision."""
        call: BlockCall = block.mod_state.call
        if arguments or call.narrows_always:
            return call.select_tokens(arguments, self.x_BND, self.routing)
        # They follow from the decision alone, and so are the same for all blocks of a class on the same rows.
        if self.selected is None or self.selected[0] is not type(block):
            self.selected = type(block), call.select_tokens(arguments, self.x_BND, self.routing)
        return self.selected[1]

    def _narrow(self, rows_BND: Tensor, routing: Routing) -> Tensor:
        """Return the rows of a decision about all tokens, from rows of the decision before."""
        before = self.routing
        # What is needed to undo the narrowing before, on the way back.
        self._earlier = (*self._earlier, (self._from_BND, self.z, self._among))
        assert before.joined.slot_BN is not None
        assert routing.joined.slot_BN is not None
        slot_BN = routing.joined.slot_BM
        if slot_BN is None:
            # A row goes where the token went that it stands for.
            slot_BN = routing.joined.slot_BN.gather(1, before.kept.index_BK)
        # The decision as one about the rows before, by which the way back undoes it. It is kept between blocks, and
        # torch 2.11 cannot make what `_replace` returns again after a graph of one block.
        joined = Joined(slot_BN, routing.joined.size_BK, routing.joined.all, routing.joined.bias)
        among = Routing(routing.kept, routing.score_BN, routing.gate_BK, routing.skipped_BN, joined)
        size_BK = routing.joined.size_BK
        if size_BK is None:
            self.z = gather_rows(rows_BND, before.joined.slot_BN.gather(1, routing.kept.index_BK))
        else:
            self.z = mean_rows(rows_BND, slot_BN, size_BK, before.joined.size_BK, all_join=routing.joined.all)
        self._from_BND = rows_BND
        self._among = among if self.weighs else without_gate(among)
        # They were made for the rows before.
        self.selected = None
        self.filled = None
        self.routing = routing
        return self.z


def without_gate(routing: Routing) -> Routing:
    """Return a decision without its gate, which is applied elsewhere."""
    return routing._replace(gate_BK=None)


class PackedRows(Rows):
    """Kept tokens of all images as one sequence (1, T, D) without padding."""

    packing: Packing

    def __init__(self, x_BND: Tensor, routing: Routing, weighs: bool = True) -> None:
        self.x_BND = x_BND
        self.routing = routing
        self.weighs = weighs
        index_BK, valid_BK, total, *_ = routing.kept
        assert valid_BK is not None
        assert total is not None
        self.packing = pack_rows(index_BK, valid_BK, total, x_BND.shape[1])
        self._z_TD = x_BND.flatten(0, 1).index_select(0, self.packing.row_T)
        self.z = self._z_TD.unsqueeze(0)

    @property
    def gate_1T(self) -> Tensor | None:
        """Gates of the packed rows (1, T); None for 1."""
        gate_BK = self.routing.gate_BK
        if gate_BK is None:
            return None
        return gate_BK.flatten()[self.packing.slot_T].unsqueeze(0)

    def write_back(self, y_BKD: Tensor) -> Tensor:
        """Return all tokens after the block, from its packed rows."""
        gate = self.gate_1T if self.weighs else None
        if gate is not None:
            gate = gate.squeeze(0)
        new_TD = lerp_rows(self._z_TD, y_BKD.squeeze(0), gate)
        x_BND = reweigh(self.x_BND, self.routing.skipped_BN)
        return x_BND.flatten(0, 1).index_copy(0, self.packing.row_T, new_TD).view_as(x_BND)


Host = Callable[..., Tensor]


class Execution(ABC):
    """How a routed block runs on the rows of a decision, chosen once from its config.

    Attributes:
        between_halves: The block decides between its attention and its MLP.
        scores_norm: The router scores the output of the block's first norm instead of the block's input.
        weighs: The gate weighs the block's update; False if it weighs branches inside the block.
    """

    between_halves = False

    def __init__(self, call: BlockCall, config: RoutingConfig) -> None:
        self.call = call
        self.joins = config.joins
        self.scores_norm = config.language.scored == "norm"
        self.weighs = config.language.gate_on == "update"

    def make_rows(self, block: ConvertedBlock, x: Tensor, arguments: Arguments, routing: Routing) -> Rows:
        """Return the rows that the block runs on: by default the kept tokens."""
        norm = None
        if backend.forced or not x.is_cpu:
            norm = self.first_norm(block)
        return Rows(x, routing, norm, self.weighs)

    @abstractmethod
    def run(self, block: ConvertedBlock, host: Host, z: Tensor, arguments: Arguments, rows: Rows) -> Tensor:
        """Return the rows after the block, from those of the decision; `host` is the host's forward."""

    def first_norm(self, block: ConvertedBlock) -> nn.Module | None:
        """Return the block's first norm, if a kernel may compute it; a CPU has one only where it is forced."""
        if not self.call.fused_norm:
            return None
        return getattr(block, self.call.fused_norm)

    def gated(self, block: ConvertedBlock, gate: Tensor | None) -> AbstractContextManager[None]:
        """Return a context in which the gate weighs the block's branches, if the config says so."""
        if self.weighs:
            return nullcontext()
        return running(block.mod_state.inner, {GATED: partial(weigh_branch, gate)})


class KeptTokens(Execution):
    """The block runs on the kept tokens, which attend to each other."""

    def make_rows(self, block: ConvertedBlock, x: Tensor, arguments: Arguments, routing: Routing) -> Rows:
        """Return packed rows if images keep different numbers and the host can run them, else padded ones."""
        if routing.kept.valid_BK is not None and self.packs(block, arguments, routing):
            return PackedRows(x, routing, self.weighs)
        # As by default, without a call.
        norm = None
        if backend.forced or not x.is_cpu:
            norm = self.first_norm(block)
        return Rows(x, routing, norm, self.weighs)

    def run(self, block: ConvertedBlock, host: Host, z: Tensor, arguments: Arguments, rows: Rows) -> Tensor:
        """Return the rows after the host's block."""
        if rows.packing is not None:
            return self.run_packed(block, host, z, arguments, cast(PackedRows, rows))
        kept = rows.routing.kept
        # Hosts take no empty sequence.
        if not kept.index_BK.shape[1]:
            return z
        if self.joins and kept.valid_BK is not None and kept.total:
            # A bias of keys goes with no causal attention.
            is_plain = not (block.mod_state.inner.value.expects_batch or arguments.get("is_causal"))
            if is_plain and self.call.can_pack(block, arguments):
                return self._run_filled(host, z, arguments, rows)
        plain = kept.valid_BK is None and rows.routing.joined.size_BK is None
        if arguments or not plain or self.call.narrows_always:
            arguments = rows.select(block, arguments)
        return host(z, **arguments)

    def packs(self, block: ConvertedBlock, arguments: Arguments, routing: Routing) -> bool:
        """Return whether all images run as one sequence, because they keep different numbers of tokens."""
        kept = routing.kept
        # Without the total, packing would wait for the device to know its shapes. Rows of groups are packed inside.
        differ = kept.valid_BK is not None and bool(kept.total) and not self.joins
        return differ and self.call.can_pack(block, arguments)

    def _run_filled(self, host: Host, z: Tensor, arguments: Arguments, rows: Rows) -> Tensor:
        """Return rows of groups (B, K, D) after the host's block, which gets no empty ones, in one sequence."""
        packing, attention = rows.fill()
        slot_T = packing.slot_T
        packed = self.call.pack(arguments, rows.x_BND, rows.routing, packing)
        # Each block must attend.
        attention.calls = 0
        z_1TD = z.flatten(0, 1)[slot_T].unsqueeze(0)
        y = attention.run(host, (z_1TD,), packed)
        empty_SD = torch.zeros_like(z, dtype=y.dtype).flatten(0, 1)
        return empty_SD.index_copy(0, slot_T, y.squeeze(0)).view_as(z)

    def run_packed(
        self, block: ConvertedBlock, host: Host, z: Tensor, arguments: Arguments, rows: PackedRows
    ) -> Tensor:
        """Return packed rows (1, T, D) after the host's block, in which each image attends to itself only."""
        assert rows.packing is not None
        packed = self.call.pack(arguments, rows.x_BND, rows.routing, rows.packing)
        self.call.begin_update(arguments, rows.x_BND, rows.routing, rows.packing)
        with self.gated(block, rows.gate_1T):
            y: Tensor = attend_within(rows.packing).run(host, (z,), packed)
        return y
