"""What a converted block remembers beside its parameters, in plain objects invisible to state_dict and export."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mmod.blocks.forward_pass import PerThread, ReplayedValue, recomputing
from mmod.ops import Packing
from mmod.routing import Router, Routing


class BlockCall(Protocol):
    """How a host library calls one of its blocks; adapters provide it."""

    @property
    def contexts(self) -> tuple[str, ...]:
        """What kept tokens can attend to in this block, see `RoutingConfig.context`."""
        ...

    @property
    def fused_norm(self) -> str:
        """Name of the norm that the block starts with and that can be fused with gathering rows, or empty."""
        ...

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the block's arguments after the tokens, by name, raising for those mmod cannot narrow."""
        ...

    def valid(self, arguments: Mapping[str, Any], x_BND: Tensor) -> Tensor | None:
        """Return False where a token is padding (B, N), or None when none is."""
        ...

    def protected(self, arguments: Mapping[str, Any], x_BND: Tensor) -> Tensor | None:
        """Return True where a token is always kept (B, N), or None when those are the leading ones."""
        ...

    def can_pack(self, block: nn.Module, arguments: Mapping[str, Any]) -> bool:
        """Return whether the block may run on one sequence of many images whose attention is kept apart."""
        ...

    def pack(
        self, arguments: Mapping[str, Any], x_BND: Tensor, routing: Routing, packing: Packing
    ) -> Mapping[str, Any]:
        """Return the arguments for that one sequence, given where its rows come from."""
        ...

    def select_tokens(self, arguments: Mapping[str, Any], x_BND: Tensor, routing: Routing) -> Mapping[str, Any]:
        """Return the arguments for the kept tokens alone."""
        ...

    def attend_to_all(
        self, block: nn.Module, forward: Callable[..., Any], arguments: Mapping[str, Any], x_BND: Tensor,
        z_BKD: Tensor, routing: Routing,
    ) -> Tensor:  # fmt: skip
        """Return the kept tokens (B, K, D) after the block, in which they attended to all tokens.

        Args:
            block: The block.
            forward: Its host's forward.
            arguments: The arguments of all tokens.
            x_BND: All tokens.
            z_BKD: The kept ones.
            routing: The decision.
        """
        ...


class SharedScore:
    """Scores that all routed blocks of a span read in one forward pass, and what was decided on them so far.

    A span is a run of consecutive routed blocks.

    Args:
        score_BN: Importance in the dense block before the span, or what its first block drew (B, N).
    """

    def __init__(self, score_BN: Tensor) -> None:
        self.score_BN = score_BN
        self._decided: tuple[Router, tuple[object, ...], Routing] | None = None

    def decided(self, router: Router, marks: tuple[object, ...]) -> Routing | None:
        """Return what an earlier block decided on these scores by the same rule, if one did.

        Args:
            router: The block's router.
            marks: What else the decision depends on: which tokens are padding, protected, or in which group.
        """
        if self._decided is None:
            return None
        earlier, seen, routing = self._decided
        alike = earlier.config is router.config and earlier.capacity == router.capacity
        return routing if alike and all(a is b for a, b in zip(seen, marks)) else None

    def remember(self, router: Router, marks: tuple[object, ...], routing: Routing) -> None:
        """Keep a decision for the blocks that follow."""
        self._decided = (router, marks, routing)


class Span(ReplayedValue[SharedScore]):
    """Carries shared scores from where they are computed to the routed blocks of one span."""


class _Record:
    """What one thread has recorded of a block."""

    def __init__(self) -> None:
        self.recording = False
        self.routing: Routing | None = None
        self.fresh = False


class RoutedState:
    """The state of a routed block.

    Args:
        call: How the host calls the block.
        span: Where shared scores come from, or None when neither score nor losses read any.
        first: The block is the first of its span.
        last: The block is the last of its span.
        training_only: Importance serves a loss only, so it is not expected outside training.
    """

    def __init__(
        self, call: BlockCall, span: Span | None, *, first: bool = True, last: bool = True, training_only: bool = False
    ) -> None:
        self.call = call
        self.span = span
        self.first = first
        self.last = last
        self.training_only = training_only
        self._records = PerThread(_Record)

    @property
    def _record(self) -> _Record:
        return self._records.own

    @property
    def routing(self) -> Routing | None:
        """The last decision that this thread recorded."""
        return self._record.routing

    @property
    def fresh(self) -> bool:
        """Whether that decision's losses wait to be collected."""
        return self._record.fresh

    def collect(self) -> None:
        """Take note that the losses of the last decision were collected."""
        self._record.fresh = False

    def start_recording(self) -> None:
        """Record decisions in evaluation, too, and forget those recorded."""
        self._record.recording, self._record.routing = True, None

    def stop_recording(self) -> None:
        """Record decisions in training alone."""
        self._record.recording = False

    def shared(self, x_BND: Tensor, training: bool) -> SharedScore | None:
        """Return the scores that the block's span shares in this forward pass, where they were computed.

        Args:
            x_BND: The block's input (B, N, D).
            training: Whether the block trains.
        """
        if self.span is None or (self.training_only and not training):
            return None
        return self.span.of(x_BND, self.last)

    def decide(
        self,
        router: Router,
        x_BND: Tensor,
        training: bool,
        choose: Callable[[Tensor | None], Routing],
        marks: tuple[object, ...],
    ) -> Routing:
        """Let the router decide; blocks of a span that read the same scores by the same rule decide once.

        Args:
            router: The block's router.
            x_BND: The block's input (B, N, D).
            training: Whether the block trains.
            choose: Calls the router, given the shared scores or None.
            marks: What else the decision depends on, see `SharedScore.decided`.
        """
        draws = self.span is not None and self.first and router.config.router.draws
        shared = None if draws else self.shared(x_BND, training)
        # Compilers find equal calls by themselves, and would guard on which tensor was seen before.
        reuses = shared is not None and router.config.router.shared and not torch.compiler.is_compiling()
        routing = shared.decided(router, marks) if shared is not None and reuses else None
        # The blocks of a span may lie on several devices.
        if routing is None or routing.index_BK.device != x_BND.device:
            routing = choose(None if shared is None else shared.score_BN.to(x_BND.device))
            if draws and not self.last:
                assert self.span is not None
                shared = SharedScore(routing.score_BN)
                self.span.put(shared)
                reuses = not torch.compiler.is_compiling()
            if shared is not None and reuses:
                shared.remember(router, marks, routing)
        self.record(routing, training)
        return routing

    def record(self, routing: Routing, training: bool) -> None:
        """Keep the routing for losses and traces; a recomputation is no new decision."""
        record = self._record
        if (training or record.recording) and not recomputing():
            record.routing, record.fresh = routing, True
