"""Decoder layers of language models: routed by the groups of tokens, with a cache of the kept ones.

Axes: B samples, N tokens, K slots per sample, D channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mmod.blocks.forward_pass import PassValue
from mmod.blocks.packed import reweigh_skipped, run_packed
from mmod.blocks.routed import ImportanceBlock, RoutedBlock, merge
from mmod.blocks.state import BlockCall
from mmod.ops import Packing, gather_rows, lerp_rows
from mmod.routing import Routing, TokenGroups


class DecoderCall(BlockCall, Protocol):
    """How a host library calls a decoder layer; adapters provide it."""

    def groups(self, arguments: Mapping[str, Any]) -> TokenGroups | None:
        """Return the groups of the tokens, or None when all of them run."""
        ...

    def try_append_all(self, arguments: Mapping[str, Any], x_BND: Tensor) -> bool:
        """Return whether the arguments already are those of all tokens; the layer's cache is told of them then."""
        ...

    def select_tokens(
        self, arguments: Mapping[str, Any], x_BND: Tensor, routing: Routing | None, compact: bool = False
    ) -> Mapping[str, Any]:
        """Return the arguments for the kept tokens, and tell the layer's cache which tokens it is about to be given.

        Args:
            arguments: The arguments of all tokens.
            x_BND: All tokens.
            routing: The decision; None keeps all of them.
            compact: Count rotary positions among kept tokens.
        """
        ...

    def pack(
        self,
        arguments: Mapping[str, Any],
        x_BND: Tensor,
        routing: Routing,
        packing: Packing,
        compact: bool = False,
    ) -> dict[str, Any]:
        """Return the arguments for kept tokens of all samples in one sequence, and tell the layer's cache of them.

        Args:
            arguments: The arguments of all tokens.
            x_BND: All tokens.
            routing: The decision.
            packing: Where the rows come from.
            compact: Count rotary positions among kept tokens.
        """
        ...

    def record_no_attention(self, x_BND: Tensor) -> None:
        """Do for the host what it would find done after a call of the layer, which keeps no token of this pass."""
        ...

    def is_static(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether the cache gives a layer keys of tokens to come, too, as a static one does."""
        ...

    def branches(self, layer: nn.Module, which: str) -> Sequence[nn.Module]:
        """Return the modules whose outputs are added to the residual stream: the "mlp" branch, or all "branches"."""
        ...

    def first_norm(self, layer: nn.Module) -> nn.Module:
        """Return the norm at the entry of the layer."""
        ...


class RoutedDecoderBlock(RoutedBlock):
    """Mixin that runs a decoder layer on the tokens its router keeps, and caches their keys and values alone."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Route as `RoutedBlock` does, among the tokens that may be skipped.

        Args:
            x: Tokens (B, N, D).
            args: Further arguments of the host layer.
            kwargs: The same by name.
        """
        call: DecoderCall = self.mod_state.call  # type: ignore[assignment]
        config = self.router.config.language
        compact = config.positions == "compact"
        # The way of decoding, where calls of small functions decide.
        if not args and not compact and call.try_append_all(kwargs, x):
            return super(RoutedBlock, self).forward(x, **kwargs)
        arguments = call.bind(args, kwargs)
        groups = call.groups(arguments)
        if groups is None:
            return super(RoutedBlock, self).forward(x, **call.select_tokens(arguments, x, None, compact))
        scored = call.first_norm(self)(x) if config.scored == "norm" else x
        routing = self._decide(x, scored, groups)
        # A gate on the branches has weighed them when their sum is written back.
        written = routing if config.gate_on == "update" else routing._replace(gate_BK=None)
        if routing.valid_BK is not None and routing.total and call.can_pack(self, arguments):
            return run_packed(x, written, partial(self._run_packed, x=x, arguments=arguments, routing=routing))
        # A decoded token that every sample keeps is in its place already.
        moved = None if x.shape[1] == routing.index_BK.shape[1] == 1 and routing.valid_BK is None else routing
        z_BKD = x if moved is None or groups.alone else gather_rows(x, routing.index_BK)
        narrowed = call.select_tokens(arguments, x, moved, compact)
        if not routing.index_BK.shape[1]:
            call.record_no_attention(x)
            return merge(x, z_BKD, z_BKD, routing)
        y_BKD = self._run(z_BKD, narrowed, routing.gate_BK)
        return merge_alone(x, y_BKD, written) if groups.alone else merge(x, z_BKD, y_BKD, written)

    def _decide(self, x: Tensor, scored: Tensor, groups: TokenGroups) -> Routing:
        if groups.skips or self.mod_state.span is None:
            return self.mod_state.decide(
                self.router,
                x,
                self.training,
                lambda shared_BN: self.router(scored, shared_BN, groups=groups),
                (groups,),
            )
        # With nothing to choose among, no importance was computed: any scores will do.
        routing: Routing = self.router(scored, x.new_zeros(x.shape[:2], dtype=torch.float32), groups=groups)
        self.mod_state.record(routing, self.training)
        return routing

    def _run_packed(
        self, z_1TD: Tensor, packing: Packing, x: Tensor, arguments: Mapping[str, Any], routing: Routing
    ) -> Tensor:
        call: DecoderCall = self.mod_state.call  # type: ignore[assignment]
        packed = call.pack(arguments, x, routing, packing, self.router.config.language.positions == "compact")
        gate_BK = routing.gate_BK
        return self._run(z_1TD, packed, None if gate_BK is None else gate_BK.flatten()[packing.slot_T].unsqueeze(0))

    def _run(self, z: Tensor, arguments: Mapping[str, Any], gate: Tensor | None) -> Tensor:
        """Run the host layer on kept tokens, its branches weighed where that is where the gate is."""
        call: DecoderCall = self.mod_state.call  # type: ignore[assignment]
        gate_on = self.router.config.language.gate_on
        if gate_on == "update":
            return super(RoutedBlock, self).forward(z, **arguments)
        with weighed_branches(call.branches(self, gate_on), gate):
            return super(RoutedBlock, self).forward(z, **arguments)


def merge_alone(x_B1D: Tensor, y_B1D: Tensor, routing: Routing) -> Tensor:
    """Write the weighed update back where each sample has one token, in its place already.

    Args:
        x_B1D: The tokens before the layer (B, 1, D).
        y_B1D: The same after the layer (B, 1, D).
        routing: The decision.
    """
    assert routing.valid_BK is not None
    new_B1D = lerp_rows(x_B1D, y_B1D.to(x_B1D.dtype), routing.gate_BK)
    return torch.where(routing.valid_BK.unsqueeze(-1), new_B1D, reweigh_skipped(x_B1D, routing))


class ImportanceDecoderBlock(ImportanceBlock):
    """Mixin that hands the importance of a dense decoder layer over, where tokens may be skipped."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the host layer and hand over the attention each token received in it.

        Args:
            x: Tokens (B, N, D).
            args: Further arguments of the host layer.
            kwargs: The same by name.
        """
        call: DecoderCall = self.mod_state.call
        arguments: Mapping[str, Any] = call.bind(args, kwargs)
        groups = call.groups(arguments)
        if call.is_static(arguments):
            # Importance is that of the tokens seen: a cache of kept tokens, here of all, gives no others.
            arguments = call.select_tokens(arguments, x, None)
        if groups is None or not groups.skips:
            # Every token runs in the layers that would read it, and behind a filled cache the map is no square.
            return super(ImportanceBlock, self).forward(x, **arguments)
        return super().forward(x, **arguments)


class WeighedBranch(nn.Module):
    """Mixin for a module whose output is added to the residual stream, and weighed before.

    A part of the module's class rather than a hook for the time of a call, which compilers cannot trace.

    Attributes:
        mod_state: Plain state: the weights of the running call.
    """

    mod_state: BranchState

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns, weighed; of a tuple, the first element is.

        Args:
            args: Arguments of the module.
            kwargs: The same by name.
        """
        output, gate_BK = super().forward(*args, **kwargs), self.mod_state.gate.get()
        if gate_BK is None:
            return output
        first = output[0] if isinstance(output, tuple) else output
        first = first * gate_BK.unsqueeze(-1).to(first.dtype)
        return (first, *output[1:]) if isinstance(output, tuple) else first


class BranchState:
    """The state of a branch: its output's weights (B, K) while a routed layer runs on kept tokens, else None."""

    def __init__(self) -> None:
        self.gate: PassValue[Tensor] = PassValue()


@contextmanager
def weighed_branches(branches: Sequence[nn.Module], gate_BK: Tensor | None) -> Iterator[None]:
    """Weigh what some modules return, before it is added to the residual stream.

    Args:
        branches: The modules, each a `WeighedBranch`.
        gate_BK: The weights (B, K), or None for 1.
    """
    states: list[BranchState] = [branch.mod_state for branch in branches]  # type: ignore[misc]
    for state in states:
        state.gate.put(gate_BK)
    try:
        yield
    finally:
        for state in states:
            state.gate.put(None)
