"""What a converted block remembers beside its parameters, in plain objects invisible to state_dict and export."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mmod.config import RoutingConfig
from mmod.ops import Packing
from mmod.routing import Router, Routing


class BlockHost(Protocol):
    """How a host library calls one of its blocks; adapters provide it."""

    @property
    def contexts(self) -> tuple[str, ...]:
        """What kept tokens can attend to in this block, see `RoutingConfig.context`."""
        ...

    @property
    def entry(self) -> str:
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

    def packs(self, block: nn.Module, arguments: Mapping[str, Any]) -> bool:
        """Return whether the block may run on one sequence of many images whose attention is kept apart."""
        ...

    def pack(
        self, arguments: Mapping[str, Any], x_BND: Tensor, routing: Routing, packing: Packing
    ) -> Mapping[str, Any]:
        """Return the arguments for that one sequence, given where its rows come from."""
        ...

    def narrow(self, arguments: Mapping[str, Any], x_BND: Tensor, routing: Routing) -> Mapping[str, Any]:
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


class Handover:
    """Carries importance from the dense block that computes it to the routed blocks that read it."""

    def __init__(self) -> None:
        self.importance_BN: Tensor | None = None
        self._decided: tuple[Tensor, RoutingConfig, Fraction, Routing] | None = None

    def decided(self, router: Router) -> Routing | None:
        """Return what an earlier block decided on this very importance by the same rule, if one did."""
        if self._decided is None or self._decided[0] is not self.importance_BN:
            return None
        _, config, capacity, routing = self._decided
        return routing if router.config is config and router.capacity == capacity else None

    def remember(self, router: Router, routing: Routing) -> None:
        """Keep a decision for the blocks that follow."""
        if self.importance_BN is not None:
            self._decided = (self.importance_BN, router.config, router.capacity, routing)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the tensors of the last forward pass out of copies and pickles."""
        return {"importance_BN": None, "_decided": None}


class RoutedState:
    """The state of a routed block.

    Args:
        host: How the host calls the block.
        source: Where importance comes from, or None when neither score nor losses read it.
        teaches: Importance serves a loss only, so it is not expected outside training.
    """

    def __init__(self, host: BlockHost, source: Handover | None, teaches: bool = False) -> None:
        self.host = host
        self.source = source
        self.teaches = teaches
        self.recording = False
        self.routing: Routing | None = None
        self.fresh = False
        self._input_address = 0

    def __getstate__(self) -> dict[str, Any]:
        """Leave the routing of the last forward pass, and an open trace, out of copies and pickles."""
        return {**self.__dict__, "recording": False, "routing": None, "fresh": False, "_input_address": 0}

    def importance(self, x_BND: Tensor, training: bool) -> Tensor | None:
        """Return the importance handed over for this forward pass.

        Raises:
            RuntimeError: Under gradient checkpointing, another forward pass has replaced it in the meantime.
        """
        if self.source is None or (self.teaches and not training):
            return None
        if not torch.compiler.is_compiling():
            address = x_BND.data_ptr()
            if not recomputing():
                self._input_address = address
            elif address != self._input_address:
                raise RuntimeError(
                    "gradient checkpointing recomputes a routed block after another forward pass has replaced its "
                    "importance: run backward() before the next forward pass, or turn checkpointing off"
                )
        return self.source.importance_BN

    def decide(self, router: Router, x_BND: Tensor, training: bool, arguments: Mapping[str, Any]) -> Routing:
        """Let the router decide; blocks in a row that read the same importance by the same rule decide once.

        Args:
            router: The block's router.
            x_BND: The block's input (B, N, D).
            training: Whether the block trains.
            arguments: The block's arguments after the tokens, by name.
        """
        importance_BN = self.importance(x_BND, training)
        valid_BN, protect_BN = self.host.valid(arguments, x_BND), self.host.protected(arguments, x_BND)
        # Compilers find equal calls by themselves, and would guard on which tensor was seen before.
        alike = router.score is None and valid_BN is None and protect_BN is None and not torch.compiler.is_compiling()
        source = self.source if alike else None
        routing = None if source is None else source.decided(router)
        if routing is None:
            routing = router(x_BND, importance_BN, valid_BN, protect_BN)
            if source is not None:
                source.remember(router, routing)
        self.record(routing, training)
        return routing

    def record(self, routing: Routing, training: bool) -> None:
        """Keep the routing for losses and traces; a recomputation is no new decision."""
        if (training or self.recording) and not recomputing():
            self.routing = routing
            self.fresh = True


def recomputing() -> bool:
    """Whether this code runs inside a backward pass, that is, recomputes a checkpointed forward."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1
