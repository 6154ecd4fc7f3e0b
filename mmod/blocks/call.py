"""How a host library calls one of its blocks: what adapters provide and blocks rely on.

Axes: B images or samples, N tokens, K slots per image or sample, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from mmod.blocks.forward_pass import ForwardPass
from mmod.ops import Packing
from mmod.routing import Routing, TokenGroups, TokenMarks


class Halves(NamedTuple):
    """The two halves of a block, each with its residual sum.

    Attributes:
        attend: From a block, tokens (B, N, D) and the block's arguments by name to the tokens after its attention.
        feed: From a block and what `attend` returned to the tokens after its MLP.
    """

    attend: Callable[[nn.Module, Tensor, Mapping[str, Any]], Tensor]
    feed: Callable[[nn.Module, Tensor], Tensor]


class BlockCall(Protocol):
    """How a host library calls one of its blocks."""

    @property
    def contexts(self) -> tuple[str, ...]:
        """What kept tokens can attend to in this block, see `RoutingConfig.context`."""
        ...

    @property
    def operators(self) -> Mapping[str, str]:
        """Names of the modules of the block that are its residual branches, by `RoutingConfig.operator`."""
        ...

    @property
    def tuples(self) -> tuple[str, ...]:
        """Operators whose branch returns a tuple, its output first."""
        ...

    @property
    def halves(self) -> Halves | None:
        """The two halves of the block, or None where it can only be run as a whole."""
        ...

    @property
    def fused_norm(self) -> str:
        """Name of the norm that the block starts with and that can be fused with gathering rows, or empty."""
        ...

    @property
    def weighs_keys(self) -> bool:
        """Whether attention in the block takes a bias, by which a row can count as several tokens."""
        ...

    @property
    def needs_prefix(self) -> bool:
        """Whether the block expects its prefix tokens first, whatever else it is given."""
        ...

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the block's arguments after the tokens, by name, raising for those mmod cannot narrow."""
        ...

    def marks(
        self, arguments: Mapping[str, Any], x_BND: Tensor, forward_pass: ForwardPass | None
    ) -> TokenMarks | TokenGroups:
        """Return which tokens are padding and which are always kept, as far as the arguments or the pass tell."""
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
        """Return the arguments for the kept tokens alone; not asked where there are none and every slot is filled."""
        ...

    def attend_to_all(
        self, block: nn.Module, forward: Callable[..., Any], arguments: Mapping[str, Any], x_BND: Tensor,
        z_BKD: Tensor, routing: Routing,
    ) -> Any:  # fmt: skip
        """Return what the host's forward makes of the kept tokens (B, K, D), which attend to all tokens in it.

        Args:
            block: The block.
            forward: The host's forward of the block, or of its attention.
            arguments: The arguments of all tokens.
            x_BND: All tokens.
            z_BKD: The kept ones.
            routing: The decision.
        """
        ...


class DecoderCall(BlockCall, Protocol):
    """How a host library calls a decoder layer, whose cache is told which tokens it is about to be given."""

    def groups(self, arguments: Mapping[str, Any]) -> TokenGroups | None:
        """Return the groups of the tokens, or None when all of them run."""
        ...

    def hides_nothing(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether all tokens run and see all tokens before them, so that the arguments are right as they are."""
        ...

    def has_static_cache(self, arguments: Mapping[str, Any]) -> bool:
        """Return whether the cache gives a layer keys of tokens to come, too."""
        ...

    def open_cache(self, arguments: Mapping[str, Any]) -> None:
        """Make the layer's cache, if it has one, one that can hold kept tokens alone."""
        ...

    def select_tokens(self, arguments: Mapping[str, Any], x_BND: Tensor, routing: Routing | None) -> Mapping[str, Any]:
        """Return the arguments for the kept tokens, or for all of them where there is no decision."""
        ...

    def begin_update(
        self, arguments: Mapping[str, Any], x_BND: Tensor, routing: Routing | None, packing: Packing | None = None,
        whole: bool = False,
    ) -> None:  # fmt: skip
        """Tell the layer's cache, if it has one, which tokens it is about to be given.

        Args:
            arguments: The arguments of all tokens.
            x_BND: All tokens.
            routing: The decision; None keeps all of them.
            packing: Where the rows come from, where they are given as one sequence.
            whole: It is given all tokens, whatever was decided.
        """
        ...

    def record_no_attention(self, x_BND: Tensor) -> None:
        """Do for the host what it would find done after a call of the layer, which keeps no token of this pass."""
        ...

    def branches(self, layer: nn.Module, which: str) -> Sequence[nn.Module]:
        """Return the modules whose outputs are added to the residual stream: the "mlp" branch, or all "branches"."""
        ...

    def first_norm(self, layer: nn.Module) -> nn.Module:
        """Return the norm at the entry of the layer."""
        ...
