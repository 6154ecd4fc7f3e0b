"""Decoder layers of language models: routed among groups of tokens, with a cache of the kept ones.

Axes: B samples, N tokens, D channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from mmod.blocks.call import DecoderCall
from mmod.blocks.routed import ImportanceBlock, RoutedBlock, SpannedBlock


class RoutedDecoderBlock(RoutedBlock):
    """Mixin that runs a decoder layer on the tokens that its router keeps, and caches only their keys and values."""

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


class SpannedDecoderBlock(RoutedDecoderBlock, SpannedBlock):
    """Mixin of a routed decoder layer in a span."""

    title = "RoutedDecoder"

    def shares(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether the layer shares scores in a call: only where some tokens may be skipped."""
        groups = cast(DecoderCall, self.mod_state.call).groups(arguments)
        return groups is not None and groups.skips


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
