"""Decoder layers of language models: routed among groups of tokens, with a cache of the kept ones.

Axes: B samples, N tokens, K slots per sample, D channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from mmod.blocks.branches import BranchRows, branch_on_rows, weighed_branches
from mmod.blocks.call import DecoderCall
from mmod.blocks.forward_pass import ForwardPass
from mmod.blocks.packed import reweigh_skipped, run_packed
from mmod.blocks.routed import ImportanceBlock, RoutedBlock
from mmod.blocks.rows import leave_rows
from mmod.ops import Packing, gather_rows, lerp_rows
from mmod.routing import Routing, TokenGroups


class RoutedDecoderBlock(RoutedBlock):
    """Mixin that runs a decoder layer on the tokens its router keeps, and caches their keys and values alone."""

    @property
    def _call(self) -> DecoderCall:
        return cast(DecoderCall, self.mod_state.call)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Route tokens (B, N, D) as `RoutedBlock` does, among those that may be skipped."""
        call = self._call
        # Fast path for decoding, which is bound by Python overhead.
        if not args and call.hides_nothing(kwargs):
            call.begin_update(kwargs, x, None)
            return self.run_host(x, kwargs)
        arguments = call.bind(args, kwargs)
        groups = call.groups(arguments)
        call.open_cache(arguments)
        if groups is not None:
            return super().forward(x, **arguments)
        selected = call.select_tokens(arguments, x, None)
        call.begin_update(arguments, x, None)
        return self.run_host(x, selected)

    def enter(self, x: Tensor, arguments: Mapping[str, Any]) -> ForwardPass | None:
        """Return the forward pass that the layer runs in; it shares nothing where there is nothing to choose among."""
        return super().enter(x, arguments) if self._groups(arguments).skips else None

    def decide(self, x: Tensor, arguments: Mapping[str, Any], forward_pass: ForwardPass | None) -> Routing:
        """Return which tokens run."""
        scored = self._call.first_norm(self)(x) if self.router.config.language.scored == "norm" else x
        return self.mod_state.decide(self.router, scored, self._groups(arguments), forward_pass, self.training)

    def run_routed(self, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Tensor:
        """Return all tokens after the layer, given the decision."""
        call, alone, config = self._call, self._groups(arguments).alone, self.router.config
        if config.operator != "block":
            return self._run_operator(x, arguments, routing)
        # With gate_on="mlp" or "branches" the gate was applied inside the layer.
        written = routing if config.language.gate_on == "update" else routing._replace(gate_BK=None)
        if config.context == "all":
            return self._run_among_all(x, arguments, routing, written)
        if routing.valid_BK is not None and routing.total and call.can_pack(self, arguments):
            return run_packed(x, written, partial(self.run_packed, x, arguments, routing))
        # One token per sample, all kept: nothing to gather.
        stays = x.shape[1] == routing.index_BK.shape[1] == 1 and routing.valid_BK is None
        z_BKD = x if stays or alone else gather_rows(x, routing.index_BK)
        selected = call.select_tokens(arguments, x, None if stays else routing)
        call.begin_update(arguments, x, None if stays else routing)
        if not routing.index_BK.shape[1]:
            call.record_no_attention(x)
            return leave_rows(x, z_BKD, z_BKD, routing)
        y_BKD = self._run_gated(z_BKD, selected, routing.gate_BK)
        return merge_alone(x, y_BKD, written) if alone else leave_rows(x, z_BKD, y_BKD, written)

    def _run_among_all(self, x: Tensor, arguments: Mapping[str, Any], routing: Routing, written: Routing) -> Tensor:
        """Return all tokens after the layer, in which the kept ones attended to all."""
        call = self._call
        if _in_place(x, routing):
            selected = call.select_tokens(arguments, x, None)
            call.begin_update(arguments, x, routing, whole=True)
            y = self._run_gated(x, selected, routing.gate_BK)
            return merge_alone(x, y, written) if routing.valid_BK is not None else leave_rows(x, x, y, written)
        z = gather_rows(x, routing.index_BK)
        with weighed_branches(self.mod_state.tracker, routing.gate_BK if written.gate_BK is None else None):
            y = call.attend_to_all(self, self._forward_host, arguments, x, z, routing)
        return leave_rows(x, z, y, written)

    def _forward_host(self, z: Tensor, **arguments: Any) -> Tensor:
        return self.run_host(z, arguments)

    def _run_operator(self, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Tensor:
        call, config = self._call, self.router.config
        among_all, attends = _in_place(x, routing), None
        if config.operator == "attention" and config.context == "kept":
            arguments, given = call.select_tokens(arguments, x, routing), arguments
            call.begin_update(given, x, routing)
            if not routing.index_BK.shape[1]:
                call.record_no_attention(x)
        elif config.operator == "mlp" or among_all:
            arguments, given = call.select_tokens(arguments, x, None), arguments
            call.begin_update(given, x, routing, whole=True)
        else:
            attends = partial(call.attend_to_all, self, routing=routing)
        with branch_on_rows(self.mod_state.tracker, BranchRows(routing, attends, config.operator in call.tuples)):
            return self.run_host(x, arguments)

    def run_packed(
        self, x: Tensor, arguments: Mapping[str, Any], routing: Routing, z_1TD: Tensor, packing: Packing
    ) -> Tensor:
        """Return kept tokens of the whole batch after the layer, packed as one sequence (1, T, D)."""
        packed = self._call.pack(arguments, x, routing, packing)
        self._call.begin_update(arguments, x, routing, packing)
        gate_BK = routing.gate_BK
        gate_1T = None if gate_BK is None else gate_BK.flatten()[packing.slot_T].unsqueeze(0)
        return self._run_gated(z_1TD, packed, gate_1T)

    def _run_gated(self, z: Tensor, arguments: Mapping[str, Any], gate: Tensor | None) -> Tensor:
        """Run the host layer on kept tokens, its branches weighed where that is where the gate is."""
        gate_on = self.router.config.language.gate_on
        if gate_on == "update":
            return self.run_host(z, arguments)
        with weighed_branches(self.mod_state.tracker, gate):
            return self.run_host(z, arguments)

    def _groups(self, arguments: Mapping[str, Any]) -> TokenGroups:
        groups = self._call.groups(arguments)
        assert groups is not None
        return groups


def _in_place(x_BND: Tensor, routing: Routing) -> bool:
    """Return whether the rows of a decision are all tokens in their own order, kept or not."""
    return routing.index_BK.shape[1] == x_BND.shape[1] and (routing.valid_BK is None or x_BND.shape[1] == 1)


def merge_alone(x_B1D: Tensor, y_B1D: Tensor, routing: Routing) -> Tensor:
    """Write the weighed update back where each sample has one token, which was not gathered.

    Args:
        x_B1D: The tokens before the layer (B, 1, D).
        y_B1D: The same after the layer (B, 1, D).
        routing: The decision.
    """
    assert routing.valid_BK is not None
    new_B1D = lerp_rows(x_B1D, y_B1D.to(x_B1D.dtype), routing.gate_BK)
    return torch.where(routing.valid_BK.unsqueeze(-1), new_B1D, reweigh_skipped(x_B1D, routing))


class ImportanceDecoderBlock(ImportanceBlock):
    """Mixin that shares the importance of a dense decoder layer, where tokens may be skipped."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the host layer on tokens (B, N, D) and share the attention each of them received in it."""
        call = cast(DecoderCall, self.mod_state.call)
        arguments: Mapping[str, Any] = call.bind(args, kwargs)
        groups = call.groups(arguments)
        if call.has_static_cache(arguments):
            # A static cache also returns unused slots, and importance is that of the tokens seen: a cache of kept
            # tokens, here of all, returns no others.
            call.open_cache(arguments)
            selected = call.select_tokens(arguments, x, None)
            call.begin_update(arguments, x, None)
            arguments = selected
        if groups is None or not groups.skips:
            # Every token runs in the layers that would read it, and behind a filled cache the map is no square.
            return self.run_host(x, arguments)
        return super().forward(x, **arguments)
