"""How a host library calls its blocks: what adapters provide to routed blocks.

Axes: B images or samples, N tokens, K slots per image or sample, D channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor, nn

from mmod.blocks.conversion import NO_SHELL, Shell
from mmod.ops import Packing
from mmod.routing import Routing, TokenGroups, TokenMasks

Arguments = Mapping[str, Any]
"""Arguments of a host's block or model, by name."""


def name_arguments(names: Iterable[str], args: tuple[object, ...], kwargs: Arguments) -> dict[str, Any]:
    """Return the arguments of a call by name.

    Args:
        names: What the arguments in order are called.

    Raises:
        TypeError: An argument is given in order and by name.
    """
    arguments = dict(zip(names, args))
    for name in kwargs:
        if name in arguments:
            # As Python says it: what runs between a caller and the host must hide no mistake.
            raise TypeError(f"forward() got multiple values for argument {name!r}")
    return {**arguments, **kwargs}


class Halves(ABC):
    """The two halves of a block, each with its residual sum; adapters derive from it.

    Attributes:
        fed: Arguments of the block that its MLP half reads, such as a time embedding.
        attends_twice: Attention is computed in both.
    """

    fed: tuple[str, ...] = ()
    attends_twice: bool = False

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules of a block that become a `Branch` where its halves run separately."""
        return ()

    @abstractmethod
    def attend(self, block: nn.Module, x_BND: Tensor, arguments: Arguments) -> Tensor:
        """Return tokens (B, N, D) after a block's attention, from the block's arguments by name."""

    @abstractmethod
    def feed(self, block: nn.Module, x_BND: Tensor, arguments: Arguments) -> Tensor:
        """Return tokens (B, N, D) after a block's MLP, from those after its attention; see `fed` for arguments."""


@dataclass(frozen=True)
class CallForm:
    """The form in which blocks take their arguments, which a trial shows (`Proof`), or an adapter knows.

    Args:
        mask: The argument that hides or weighs keys, as a mask or bias of pairs of tokens; empty if the block takes
            none, so that its attention is intercepted.
        rows: Arguments with one row per token, such as rotary embeddings: a tensor, or a tuple of them.
        images: Arguments with one value per image: rows of each image, or no rows, as text states and time embeddings.
        shared: Arguments that are the same for all tokens and images.
        cross: See `BlockCall`.
        rope_prefix: Number of leading tokens without such a row.
        layout: How the block takes rows that differ by image:
            - "heads": as (B, 1, K, E);
            - "batch": as (B, K, E) or (B, K, ...);
            - "flat": not at all, so that all images run as one sequence (1, T, D), see `FlatBlock`;
            - "bare": not at all, and the sequence is (T, D).
        boundaries: The argument that says where images begin, of a host that runs all images as one sequence, see
            `SegmentsBlock`; empty for a host with a batch.
        index_argument: The argument that takes the index (B, K) of tokens that are not all of them; empty for none.
        suffix: Tokens at the end that are no patches, see `FormBlock`.
        tokens: Name by which the block gets its tokens; empty where they come first.
        in_tuple: The block returns a tuple that begins with the tokens.
        fused: Attention is computed by `scaled_dot_product_attention`.
        attention_calls: Calls of `scaled_dot_product_attention` among the tokens in a forward pass of the block.
    """

    mask: str = ""
    rows: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    cross: tuple[int, ...] = ()
    rope_prefix: int = 0
    layout: str = "heads"
    boundaries: str = ""
    index_argument: str = ""
    suffix: int = 0
    tokens: str = ""
    in_tuple: bool = False
    fused: bool = False
    attention_calls: int = 1


class BlockCall(Protocol):
    """How a host library calls one of its blocks; the calls of adapters derive from it.

    Attributes:
        operators: Names of residual branches by `RoutingConfig.operator`, if a branch that returns zero adds nothing.
        tuples: Operators whose branch returns a tuple, its output first.
        halves: The block's attention and MLP halves, or None if they cannot run separately.
        fused_norm: Name of the block's first norm if it can be fused with gathering rows, else empty.
        caches: The block has a cache, which is told what its next update receives.
        decodes: The block is a decoder layer, and some of its calls run all tokens.
        masks_always: `masks` says something even if the block gets the tokens alone.
        narrows_always: `select_tokens` is needed for kept tokens even if the block gets the tokens alone.
        cross: The block's calls of attention, numbered in order, whose keys are not the block's tokens.
        shell: Classes around a method's mixin that give the host's block the interface that methods expect.
    """

    operators: Mapping[str, str] = MappingProxyType({})
    tuples: tuple[str, ...] = ()
    halves: Halves | None = None
    fused_norm: str = ""
    caches: bool = False
    decodes: bool = False
    masks_always: bool = False
    narrows_always: bool = False
    cross: tuple[int, ...] = ()
    shell: Shell = NO_SHELL

    @property
    def contexts(self) -> tuple[str, ...]:
        """What kept tokens can attend to, see `RoutingConfig.context`."""

    @property
    def weighs_keys(self) -> bool:
        """Whether attention takes a bias, by which a row can count as several tokens."""
        return False

    @property
    def needs_prefix(self) -> bool:
        """Whether the block always needs its prefix tokens first."""
        return False

    def bind(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, object]:
        """Return the block's arguments after the tokens by name; raise for those that cannot be narrowed."""

    def masks(self, arguments: Arguments, x_BND: Tensor) -> TokenMasks | TokenGroups:
        """Return which tokens are padding and which are always kept."""

    def can_pack(self, block: nn.Module, arguments: Arguments) -> bool:
        """Return whether the block can run on packed rows of many images, each of which attends to itself."""

    def pack(self, arguments: Arguments, x_BND: Tensor, routing: Routing, packing: Packing) -> Arguments:
        """Return the arguments for the packed rows."""

    def select_tokens(self, arguments: Arguments, x_BND: Tensor, routing: Routing | None) -> Arguments:
        """Return the arguments for the kept tokens, or without a decision for all tokens of a block with a cache.

        Without a cache, it is called only if there are arguments, `narrows_always`, or a slot is empty or a group.
        """

    def attend_to_all(
        self,
        block: nn.Module,
        forward: Callable[..., object],
        arguments: Arguments,
        x_BND: Tensor,
        z_BKD: Tensor,
        routing: Routing,
    ) -> Any:
        """Return the output of the host's forward, of a block or attention, for kept tokens that attend to all."""

    def begin_update(
        self,
        arguments: Arguments,
        x_BND: Tensor,
        routing: Routing | None,
        packing: Packing | None = None,
        all_tokens: bool = False,
    ) -> None:
        """Announce to the block's cache, if any, which tokens its next update receives.

        Args:
            routing: The decision; None keeps all tokens.
        """
        return

    def record_no_attention(self, x_BND: Tensor) -> None:
        """Record an empty attention map for a block that keeps no token, if the host collects maps."""
        return

    def begin_whole(self, args: tuple[object, ...], kwargs: Arguments, x_BND: Tensor) -> Arguments | None:
        """Open the cache; if all tokens run, announce them to it and return the arguments by name, else None."""
        return None

    def whole(self, arguments: Arguments, x_BND: Tensor) -> Arguments:
        """Return the arguments of a dense block whose importance is read; a static cache becomes one of kept tokens."""
        return arguments

    def shares(self, arguments: Arguments) -> bool:
        """Return whether blocks share scores in a call: in decoder layers, only where some tokens may be skipped."""
        return True

    def branches(self, block: nn.Module, which: str) -> Sequence[nn.Module]:
        """Return a decoder layer's modules that add to the residual stream: the "mlp" branch, or all "branches"."""
        return ()

    def first_norm(self, block: nn.Module) -> nn.Module:
        """Return the norm at the entry of the block."""
        return block.get_submodule(self.fused_norm)
