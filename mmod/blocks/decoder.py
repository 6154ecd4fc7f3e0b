"""Decoder layers of language models: routed among groups of tokens, with a cache of the kept ones.

Axes: B samples, N tokens, K slots per sample, D channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from mmod.blocks.call import BlockCall, DecoderCall
from mmod.blocks.decoder_ways import AmongAll, KeptAlone, OneBranchOfLayer
from mmod.blocks.forward_pass import ForwardPass
from mmod.blocks.routed import ImportanceBlock, RoutedBlock
from mmod.blocks.ways import Way
from mmod.config import RoutingConfig
from mmod.routing import Routing, TokenGroups


class RoutedDecoderBlock(RoutedBlock):
    """Mixin that runs a decoder layer on the tokens its router keeps, and caches their keys and values alone."""

    @staticmethod
    def choose_way(call: BlockCall, config: RoutingConfig) -> Way:
        """Return how a layer runs that is routed by a config."""
        if config.operator != "block":
            return OneBranchOfLayer(call, config)
        return KeptAlone(call, config) if config.context == "kept" else AmongAll(call, config)

    @property
    def _call(self) -> DecoderCall:
        return cast(DecoderCall, self.mod_state.call)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Route tokens (B, N, D) as `RoutedBlock` does, among those that may be skipped."""
        call = self._call
        # Fast path for decoding, which is bound by Python overhead.
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
        """Return the forward pass that the layer runs in; it shares nothing where no token may be skipped."""
        return super().enter(x, arguments) if self._groups(arguments).skips else None

    def decide(self, x: Tensor, arguments: Mapping[str, Any], forward_pass: ForwardPass | None) -> Routing:
        """Return the decision about all tokens."""
        scored = self._call.first_norm(self)(x) if self.router.config.language.scored == "norm" else x
        return self.mod_state.decide(self.router, scored, self._groups(arguments), forward_pass, self.training)

    def _groups(self, arguments: Mapping[str, Any]) -> TokenGroups:
        groups = self._call.groups(arguments)
        assert groups is not None
        return groups


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
            return self.run_host(x, **arguments)
        return super().forward(x, **arguments)
