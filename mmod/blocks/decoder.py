"""Decoder layers of language models: routed among groups of tokens, with a cache of the kept ones.

Axes: B samples, N tokens, K slots per sample, D channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from mmod.blocks.branches import BranchRows, OneBranch, WeighedBranch, running_branch
from mmod.blocks.call import BlockCall, DecoderCall
from mmod.blocks.forward_pass import ForwardPass
from mmod.blocks.routed import ImportanceBlock, RoutedBlock
from mmod.blocks.rows import AllTokens, Host, PackedRows, Rows, Way, leave_rows, reweigh, run_packed, without_gate
from mmod.config import RoutingConfig
from mmod.ops import lerp_rows
from mmod.routing import Routing, TokenGroups


class RowsInPlace(AllTokens):
    """All tokens in order, because all are kept or each sample has one token."""

    def leave(self, y_BKD: Tensor) -> Tensor:
        """Return the tokens after the layer; skipped ones are unchanged, or weighed."""
        x_BND, routing = self.x_BND, self.routing if self.weighs else without_gate(self.routing)
        if routing.kept.valid_BK is None:
            return leave_rows(x_BND, x_BND, y_BKD, routing)
        new_B1D = lerp_rows(x_BND, y_BKD.to(x_BND.dtype), routing.weights.gate_BK)
        return torch.where(routing.kept.valid_BK.unsqueeze(-1), new_B1D, reweigh(x_BND, routing.weights.skipped_BN))


def _in_order(x_BND: Tensor, routing: Routing) -> bool:
    """Return whether the rows of a decision are all tokens in order, kept or not."""
    tokens = x_BND.shape[1]
    return routing.kept.index_BK.shape[1] == tokens and (routing.kept.valid_BK is None or tokens == 1)


class _LayerWay(Way):
    """A layer announces tokens to its cache; its gate weighs the update of the layer, or of branches inside."""

    def __init__(self, call: BlockCall, config: RoutingConfig) -> None:
        super().__init__(call, config)
        self.weighs = config.language.gate_on == "update"
        if config.language.scored == "norm":
            self.scored_norm = self.call.first_norm

    def gated(self, block: Any, gate: Tensor | None) -> AbstractContextManager[None]:
        """Return a context in which the gate weighs the layer's branches, if the config says so."""
        return nullcontext() if self.weighs else running_branch(block.mod_state.tracker, WeighedBranch(gate))


class KeptAloneInLayer(_LayerWay):
    """The layer runs on the kept tokens, which attend to each other and to those in its cache."""

    def rows(self, block: Any, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Rows:
        """Return packed rows if samples keep different numbers and the host can run them, else padded ones."""
        if routing.kept.valid_BK is not None and routing.kept.total and self.call.can_pack(block, arguments):
            return PackedRows(x, weighs=self.weighs)
        groups = cast(TokenGroups, routing.evidence.tokens)
        in_place = groups.alone or (x.shape[1] == 1 and _in_order(x, routing))
        return (RowsInPlace if in_place else Rows)(x, weighs=self.weighs)

    def run(self, block: Any, host: Host, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return the rows after the host's layer."""
        call, x, routing = self.call, rows.x_BND, rows.routing
        if isinstance(rows, PackedRows):
            packed = call.pack(arguments, x, routing, rows.packing)
            call.begin_update(arguments, x, routing, rows.packing)
            with self.gated(block, rows.gate_1T):
                return run_packed(host, z, packed, rows)
        # With one token per sample, all kept, the arguments need no change.
        narrows = None if isinstance(rows, RowsInPlace) and routing.kept.valid_BK is None else routing
        selected = call.select_tokens(arguments, x, narrows)
        call.begin_update(arguments, x, narrows)
        if not rows.slots:
            call.record_no_attention(x)
            return z
        with self.gated(block, routing.weights.gate_BK):
            return host(z, **selected)


class AmongAllInLayer(_LayerWay):
    """The layer runs on the kept tokens, which attend to all tokens; its cache receives all of them."""

    def rows(self, block: Any, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Rows:
        """Return the kept tokens."""
        return (RowsInPlace if _in_order(x, routing) else Rows)(x, weighs=self.weighs)

    def run(self, block: Any, host: Host, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return the rows after the host's layer."""
        call, x, routing = self.call, rows.x_BND, rows.routing
        with self.gated(block, routing.weights.gate_BK):
            if not isinstance(rows, RowsInPlace):
                return cast(Tensor, call.attend_to_all(block, host, arguments, x, z, routing))
            selected = call.select_tokens(arguments, x, None)
            call.begin_update(arguments, x, routing, all_tokens=True)
            return host(x, **selected)


class OneBranchOfLayer(OneBranch, _LayerWay):
    """The layer runs on all tokens, except for one branch, which runs on the kept tokens."""

    def run(self, block: Any, host: Host, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return all tokens after the host's layer."""
        call, routing, attends, selected = self.call, rows.routing, None, arguments
        if self.operator == "attention" and not self.among_all:
            selected = call.select_tokens(arguments, z, routing)
            call.begin_update(arguments, z, routing)
            if not rows.slots:
                call.record_no_attention(z)
        elif self.operator == "mlp" or _in_order(z, routing):
            selected = call.select_tokens(arguments, z, None)
            call.begin_update(arguments, z, routing, all_tokens=True)
        else:
            attends = partial(call.attend_to_all, block, routing=routing)
        with running_branch(block.mod_state.tracker, BranchRows(routing, attends, self.operator in call.tuples)):
            return host(z, **selected)


class RoutedDecoderBlock(RoutedBlock):
    """Mixin that runs a decoder layer on the tokens that its router keeps, and caches only their keys and values."""

    @staticmethod
    def choose_way(call: BlockCall, config: RoutingConfig) -> Way:
        """Return how a layer with this config runs."""
        if config.operator != "block":
            return OneBranchOfLayer(call, config)
        return (KeptAloneInLayer if config.context == "kept" else AmongAllInLayer)(call, config)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Route the tokens (B, N, D) that may be skipped, see `RoutedBlock.forward`."""
        call = cast(DecoderCall, self.mod_state.call)
        # Python overhead dominates decoding.
        if not args and call.hides_nothing(kwargs):
            call.begin_update(kwargs, x, None)
            return self.run_host(x, **kwargs)
        arguments = call.bind(args, kwargs)
        groups = call.groups(arguments)
        call.open_cache(arguments)
        if groups is not None:
            return super().forward(x, **arguments)
        selected = call.select_tokens(arguments, x, None)
        call.begin_update(arguments, x, None)
        return self.run_host(x, **selected)

    def enter(self, x: Tensor, arguments: Mapping[str, Any]) -> ForwardPass | None:
        """Return the layer's forward pass, or None if no token may be skipped."""
        groups = cast(DecoderCall, self.mod_state.call).groups(arguments)
        return None if groups is None or not groups.skips else super().enter(x, arguments)


class ImportanceDecoderBlock(ImportanceBlock):
    """Mixin that shares the importance in a dense decoder layer, if tokens may be skipped."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the host's layer on tokens (B, N, D) and share their importance."""
        call = cast(DecoderCall, self.mod_state.call)
        arguments: Mapping[str, Any] = call.bind(args, kwargs)
        groups = call.groups(arguments)
        if call.has_static_cache(arguments):
            # A static cache also returns unused slots; a cache of kept tokens, here all, returns no others.
            call.open_cache(arguments)
            selected = call.select_tokens(arguments, x, None)
            call.begin_update(arguments, x, None)
            arguments = selected
        if groups is None or not groups.skips:
            # All tokens run in the layers that would read it, and with a filled cache the map is not square.
            return self.run_host(x, **arguments)
        return super().forward(x, **arguments)
