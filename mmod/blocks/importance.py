"""A dense block whose importance is read: by the routed blocks of a span behind it, or by another part of the model.

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
from mmod.blocks.converted import ConvertedBlock, trace_as_node
from mmod.blocks.record import recomputing
from mmod.blocks.span import BlockState
from mmod.config import CHANGE
from mmod.routing import Router
from mmod.threads import PerThread


@dataclass(eq=False, kw_only=True)
class ImportanceState(BlockState):
    """Plain state of a dense block whose importance is read: by its span, in which it has position 0, or by others.

    Args:
        routers: The routers of the span.
        importance: What importance is, see `RoutingConfig.importance`.
        noted: Importance of the tokens of each call, until it is taken; None for a block of a span.
    """

    routers: Sequence[Router] = ()
    importance: str
    noted: PerThread[list[object]] | None = None

    @property
    def wanted(self) -> bool:
        """Whether any block reads importance in this forward pass."""
        return self.span is None or not self.span.for_loss or any(router.training for router in self.routers)

    def note(self, importance_BN: Tensor, valid_BN: Tensor | None) -> None:
        """Note importance for others than blocks of a span."""
        if recomputing():
            return
        assert self.noted is not None
        call: Any = self.call
        if call.boundaries and valid_BN is not None:
            # Padding around images that the host runs as one sequence stands for nothing.
            importance_BN = importance_BN[valid_BN]
        self.noted.value.append(importance_BN)


class ImportanceBlock(ConvertedBlock):
    """Mixin that shares the importance of a dense block's tokens with the routed blocks after it, or notes it."""

    mod_state: ImportanceState

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Run the host's block on tokens (B, N, D) and share their importance."""
        if not isinstance(x, Tensor):
            return trace_as_node(self, x, args, kwargs)
        state = self.mod_state
        call = state.call
        arguments: Mapping[str, object] = call.bind(args, kwargs) if args or kwargs else {}
        wanted = state.wanted
        if call.decodes:
            # Where all tokens run nothing reads it, and with a filled cache the map is not square.
            wanted = wanted and call.shares(arguments)
            arguments = call.whole(arguments, x)
        # A loss alone reads the importance, and only in training.
        if not wanted:
            return super().forward(x, **arguments)
        span_pass = None if state.span is None else state.span.enter(x, state)
        tokens = call.masks(arguments, x)
        run = partial(super().forward, x, **arguments)
        y, importance_BN = self.mod_observe(run, x, tokens.queries_BN, state.importance)
        if state.span is None:
            state.note(importance_BN, tokens.valid_BN)
            return y
        assert span_pass is not None
        span_pass.score_BN = importance_BN
        return state.span.leave(y, span_pass, state)


def make_importance(block: nn.Module, state: ImportanceState) -> None:
    """Convert a dense block into one that shares its importance."""
    convert(block, ImportanceBlock, state, state.call.shell)
    if state.importance != CHANGE:
        # The change of a token is measured around the block.
        make_observed(block, state.call, state.inner)
