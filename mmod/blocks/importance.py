"""A dense block in front of a span, whose importance the routed blocks read.

Axes: B images or samples, N tokens, D channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from mmod.blocks.branches import make_observed
from mmod.blocks.conversion import convert
from mmod.blocks.converted import ConvertedBlock
from mmod.blocks.span import BlockState, Span
from mmod.blocks.symbolic import trace_as_node
from mmod.config import CHANGE
from mmod.routing import Router


@dataclass(eq=False, kw_only=True)
class ImportanceState(BlockState):
    """Plain state of the dense block at position 0 of a span, whose importance the others read.

    Args:
        routers: The routers of the span.
        importance: What importance is, see `RoutingConfig.importance`.
    """

    span: Span
    routers: Sequence[Router]
    importance: str

    @property
    def wanted(self) -> bool:
        """Whether any block reads importance in this forward pass."""
        return not self.span.for_loss or any(router.training for router in self.routers)


class ImportanceBlock(ConvertedBlock):
    """Mixin that shares the importance of a dense block's tokens with the routed blocks after it."""

    mod_state: ImportanceState

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the host's block on tokens (B, N, D) and share their importance."""
        if not isinstance(x, Tensor):
            return trace_as_node(self, x, args, kwargs)
        state = self.mod_state
        call = state.call
        arguments: Mapping[str, Any] = call.bind(args, kwargs)
        wanted = state.wanted
        if call.decodes:
            # Where all tokens run nothing reads it, and with a filled cache the map is not square.
            wanted = wanted and call.shares(arguments)
            arguments = call.whole(arguments, x)
        # A loss alone reads the importance, and only in training.
        if not wanted:
            return super().forward(x, **arguments)
        span_pass = state.span.enter(x, state)
        assert span_pass is not None
        queries_BN = call.masks(arguments, x).queries_BN
        run = partial(super().forward, x, **arguments)
        y, span_pass.score_BN = self.observe(run, x, queries_BN, state.importance)
        return state.span.leave(y, span_pass, state)


def make_importance(block: nn.Module, state: ImportanceState) -> None:
    """Convert a dense block into one that shares its importance."""
    convert(block, ImportanceBlock, state, state.call.shell)
    if state.importance != CHANGE:
        # The change of a token is measured around the block.
        make_observed(block, state.call, state.inner)
