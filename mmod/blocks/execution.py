"""How a routed block runs on the rows of a decision.

Axes: B images or samples, N tokens, K slots per image or sample, T packed rows, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmod.blocks.branches import GATED, AttendsToAll, run_on_kept, weigh_branch
from mmod.blocks.call import BlockCall
from mmod.blocks.converted import ConvertedBlock
from mmod.blocks.inner import running
from mmod.blocks.rows import AllTokens, PackedRows, Rows, RowsInPlace, in_order
from mmod.config import RoutingConfig
from mmod.ops import attend_within, backend
from mmod.ops.intercept import unseen_attention
from mmod.routing import Routing

Host = Callable[..., Tensor]


class Execution:
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

    def make_rows(self, block: ConvertedBlock, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Rows:
        """Return the rows that the block runs on."""
        return AllTokens(x, routing)

    def run(self, block: ConvertedBlock, host: Host, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return the rows after the block, from those of the decision; `host` is the host's forward."""
        raise NotImplementedError

    def first_norm(self, block: ConvertedBlock) -> nn.Module | None:
        """Return the block's first norm, if a kernel may compute it; a CPU has one only where it is forced."""
        return getattr(block, self.call.fused_norm) if self.call.fused_norm else None

    def gated(self, block: ConvertedBlock, gate: Tensor | None) -> AbstractContextManager[None]:
        """Return a context in which the gate weighs the block's branches, if the config says so."""
        if self.weighs:
            return nullcontext()
        return running(block.mod_state.inner, {GATED: partial(weigh_branch, gate)})


class KeptTokens(Execution):
    """The block runs on the kept tokens, which attend to each other."""

    def make_rows(self, block: ConvertedBlock, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Rows:
        """Return packed rows if images keep different numbers and the host can run them, else padded ones."""
        if routing.kept.valid_BK is not None and self.packs(block, arguments, routing):
            return PackedRows(x, routing, self.weighs)
        norm = self.first_norm(block) if backend.forced or not x.is_cpu else None
        return Rows(x, routing, norm, self.weighs)

    def run(self, block: ConvertedBlock, host: Host, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
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
            arguments = self._narrowed(block, arguments, rows)
        return host(z, **arguments)

    def packs(self, block: ConvertedBlock, arguments: Mapping[str, Any], routing: Routing) -> bool:
        """Return whether all images run as one sequence, because they keep different numbers of tokens."""
        kept = routing.kept
        # Without the total, packing would wait for the device to know its shapes. Rows of groups are packed inside.
        differ = kept.valid_BK is not None and bool(kept.total) and not self.joins
        return differ and self.call.can_pack(block, arguments)

    def _run_filled(self, host: Host, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return rows of groups (B, K, D) after the host's block, which gets no empty ones, in one sequence."""
        attention = rows.fill()
        slot_T = attention.packing.slot_T
        packed = self.call.pack(arguments, rows.x_BND, rows.routing, attention.packing)
        y = attention.run(host, (z.flatten(0, 1)[slot_T].unsqueeze(0),), packed)
        check_seen(attention)
        empty_SD = torch.zeros_like(z, dtype=y.dtype).flatten(0, 1)
        return empty_SD.index_copy(0, slot_T, y.squeeze(0)).view_as(z)

    def _narrowed(self, block: ConvertedBlock, arguments: Mapping[str, Any], rows: Rows) -> Mapping[str, Any]:
        """Return the block's arguments for the rows."""
        call = self.call
        routing = rows.routing
        if arguments or call.narrows_always:
            return call.select_tokens(arguments, rows.x_BND, routing)
        # They follow from the decision alone, and so are the same for all blocks of a class on the same rows.
        if rows.selected is None or rows.selected[0] is not type(block):
            rows.selected = type(block), call.select_tokens(arguments, rows.x_BND, routing)
        return rows.selected[1]

    def run_packed(
        self, block: ConvertedBlock, host: Host, z: Tensor, arguments: Mapping[str, Any], rows: PackedRows
    ) -> Tensor:
        """Return packed rows (1, T, D) after the host's block, in which each image attends to itself only."""
        assert rows.packing is not None
        packed = self.call.pack(arguments, rows.x_BND, rows.routing, rows.packing)
        self.call.begin_update(arguments, rows.x_BND, rows.routing, rows.packing)
        attention = attend_within(rows.packing)
        with self.gated(block, rows.gate_1T):
            y: Tensor = attention.run(host, (z,), packed)
        check_seen(attention)
        return y


class CachedTokens(KeptTokens):
    """The block has a cache: kept tokens also attend to those in it, and it is told what its next update receives."""

    def make_rows(self, block: ConvertedBlock, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Rows:
        """Return all tokens where they are if each sample has one, else as without a cache."""
        alone = getattr(routing.tokens, "alone", False) or (x.shape[1] == 1 and in_order(x, routing))
        if alone and not self.packs(block, arguments, routing):
            return RowsInPlace(x, routing, self.weighs)
        return super().make_rows(block, x, arguments, routing)

    def run(self, block: ConvertedBlock, host: Host, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return the rows after the host's block."""
        if rows.packing is not None:
            return self.run_packed(block, host, z, arguments, cast(PackedRows, rows))
        call = self.call
        routing = rows.routing
        # With one token per sample, all kept, the arguments need no change.
        unchanged = isinstance(rows, RowsInPlace) and routing.kept.valid_BK is None
        narrowed_to = None if unchanged else routing
        # The mask joins the cache's keys with the new ones, so it is narrowed before the cache hears of these.
        selected = call.select_tokens(arguments, rows.x_BND, narrowed_to)
        call.begin_update(arguments, rows.x_BND, narrowed_to)
        # Hosts take no empty sequence.
        if not rows.slots:
            call.record_no_attention(rows.x_BND)
            return z
        with self.gated(block, routing.gate_BK):
            return host(z, **selected)


class AmongAll(Execution):
    """The block runs on the kept tokens, which attend to all tokens; a cache receives all."""

    def make_rows(self, block: ConvertedBlock, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Rows:
        """Return all tokens where they are if a block with a cache keeps them all, else the kept ones."""
        if self.call.caches and in_order(x, routing):
            return RowsInPlace(x, routing, self.weighs)
        norm = self.first_norm(block) if backend.forced or not x.is_cpu else None
        return Rows(x, routing, norm, self.weighs)

    def run(self, block: ConvertedBlock, host: Host, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return the kept tokens after the host's block."""
        call = self.call
        routing = rows.routing
        if not call.caches and not rows.slots:
            return z
        with self.gated(block, routing.gate_BK):
            if not isinstance(rows, RowsInPlace):
                return cast(Tensor, call.attend_to_all(block, host, arguments, rows.x_BND, z, routing))
            selected = call.select_tokens(arguments, rows.x_BND, None)
            call.begin_update(arguments, rows.x_BND, routing, all_tokens=True)
            return host(z, **selected)


class MlpOfKept(Execution):
    """Attention runs on the rows of the previous decision; then the block decides, and its MLP runs on fewer rows."""

    between_halves = True

    def make_rows(self, block: ConvertedBlock, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Rows:
        """Return the means of merged tokens."""
        return Rows(x, routing)

    def run(self, block: ConvertedBlock, host: Host, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return the rows after the host's MLP."""
        halves = self.call.halves
        assert halves is not None
        if halves.fed and arguments:
            # Rows that stand for several tokens have the arguments of the one that was kept.
            arguments = self.call.select_tokens(arguments, rows.x_BND, rows.routing)
        return halves.feed(block, z, arguments)


class OneBranch(Execution):
    """The block runs on all tokens, except for one branch, which runs on the kept tokens."""

    def __init__(self, call: BlockCall, config: RoutingConfig) -> None:
        super().__init__(call, config)
        self.operator = str(config.operator)
        self.among_all = config.context == "all"

    def run(self, block: ConvertedBlock, host: Host, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return all tokens after the host's block."""
        call = self.call
        routing = rows.routing
        selected = arguments
        attends: AttendsToAll | None = None
        if self.operator == "attention" and not self.among_all:
            selected = call.select_tokens(arguments, z, routing)
            call.begin_update(arguments, z, routing)
            if not rows.slots:
                # Recorded attention maps keep the index of their layer.
                call.record_no_attention(z)
        elif self.operator == "attention" and not (call.caches and in_order(z, routing)):
            attends = partial(call.attend_to_all, block, routing=routing)
        elif call.caches:
            selected = call.select_tokens(arguments, z, None)
            call.begin_update(arguments, z, routing, all_tokens=True)
        branch = partial(run_on_kept, routing, attends, self.operator in call.tuples)
        with running(block.mod_state.inner, {call.operators[self.operator]: branch}):
            return host(z, **selected)


def check_seen(attention: attend_within) -> None:
    """Raise an error if no attention ran on packed rows, whose images then attended to each other."""
    if not attention.calls:
        raise unseen_attention("images in one sequence of packed rows cannot be told apart in it", maps=False)
