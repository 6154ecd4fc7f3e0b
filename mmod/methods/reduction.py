"""Blocks that reduce the number of tokens between their attention and their MLP.

Axes: B images, N tokens, K tokens after a reduction, D channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmod.adapters import BlockStack
from mmod.adapters.base import NamedArguments
from mmod.adapters.halves import attend, feed
from mmod.adapters.masks import narrow_rope
from mmod.blocks import Deciding, Records, convert
from mmod.blocks.forward_pass import PassTracker, recomputing
from mmod.blocks.routed import ConvertedBlock
from mmod.methods.halves import AttentionInputs, take_inputs, watch
from mmod.ops import capture_importance
from mmod.routing import Evidence, Joined, Kept, Routing


class Grid(NamedTuple):
    """Tokens between attention and MLP, prefix first, the input token that each represents, and how many it represents.

    `place_BN` is the first or most important of several input tokens, None if not needed; `size_BN` is None for one
    each.
    """

    x_BND: Tensor
    place_BN: Tensor | None
    size_BN: Tensor | None


Restore = Callable[[Tensor], Tensor]
"""Returns all tokens (B, N, D) in the order before a reduction, from the reduced ones after the blocks."""


class Reduction(ABC):
    """A rule that reduces the number of tokens."""

    reads_importance: bool = False

    @abstractmethod
    def __call__(self, grid: Grid, inputs: AttentionInputs, prefix: int) -> tuple[Grid, Restore] | None:
        """Return fewer tokens and the inverse of the reduction; None keeps all tokens."""


class _Passage:
    """What the blocks of a model share in one forward pass."""

    def __init__(self) -> None:
        self.tokens = 0
        self.place_BN: Tensor | None = None
        self.size_BN: Tensor | None = None
        self.undone: list[Restore] = []


class _ReducedState(NamedTuple):
    """Plain state of a block that reduces tokens, or follows such a block; the last one may restore all tokens."""

    call: NamedArguments
    tracker: PassTracker
    prefix: int
    reduction: Reduction | None
    begins: bool
    ends: bool
    restores: bool
    records: Records


class ReducedBlock(Deciding, ConvertedBlock):
    """Mixin of a timm block that reduces tokens, or follows such a block."""

    mod_state: _ReducedState

    def places(self) -> tuple[str, ...]:
        """Return one name if the block reduces tokens, else none."""
        return () if self.mod_state.reduction is None else ("",)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the host's block on the remaining tokens, and reduce them if it has a reduction."""
        state = self.mod_state
        if recomputing():
            raise RuntimeError(
                "gradient checkpointing runs blocks twice, which pruning and merging do not support: turn it off"
            )
        passage = (state.tracker.begin() if state.begins else state.tracker.running).slot(_Passage)
        if state.begins:
            passage.tokens = x.shape[1]
        arguments = self._narrowed(state.call.bind(args, kwargs), passage)
        y = self.run_host(x, **arguments) if state.reduction is None else self._reduce(x, arguments, passage)
        if state.ends:
            for restore in reversed(passage.undone) if state.restores else ():
                y = restore(y)
            state.tracker.leave(None)
        return y

    def _narrowed(self, arguments: dict[str, Any], passage: _Passage) -> dict[str, Any]:
        """Return the block's arguments for the remaining tokens."""
        unknown = sorted(arguments.keys() - {"rope"})
        if unknown:
            raise ValueError(f"pruning and merging do not support the arguments {', '.join(unknown)}")
        if "rope" in arguments and passage.place_BN is not None:
            arguments["rope"] = narrow_rope(arguments["rope"], passage.place_BN, self.mod_state.call.rope_prefix)
        if passage.size_BN is not None:
            # Proportional attention: a merged token counts as the tokens that it represents.
            arguments["attn_mask"] = passage.size_BN.log()[:, None, None, :]
        return arguments

    def _reduce(self, x: Tensor, arguments: Mapping[str, Any], passage: _Passage) -> Tensor:
        reduction, prefix = self.mod_state.reduction, self.mod_state.prefix
        assert reduction is not None
        captured = capture_importance() if reduction.reads_importance else None
        with captured or nullcontext():
            x = attend(self, x, arguments)
        place_BN = passage.place_BN
        if place_BN is None and ("rope" in arguments or self.record.traced):
            place_BN = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        inputs = take_inputs(self, arguments, None if captured is None else captured.importance_BN)
        reduced = reduction(Grid(x, place_BN, passage.size_BN), inputs, prefix)
        if reduced is not None:
            (x, passage.place_BN, passage.size_BN), restore = reduced
            passage.undone.append(restore)
        if self.record.traced:
            self._trace(passage)
        return feed(self, x)

    def _trace(self, passage: _Passage) -> None:
        """Record the remaining input tokens and their group sizes."""
        assert passage.place_BN is not None
        index_BK, order_BK = passage.place_BN.sort(dim=1)
        size_BK = None if passage.size_BN is None else passage.size_BN.gather(1, order_BK)
        score_BN = torch.zeros(len(index_BK), passage.tokens, device=index_BK.device)
        self.record.keep("", Routing(Kept(index_BK), Evidence(score_BN), joined=Joined(size_BK=size_BK)))


def reduce_(stack: BlockStack, reductions: Mapping[int, Reduction], restores: bool) -> None:
    """Convert the blocks of a stack from the first reduction on."""
    tracker, first, last = PassTracker(), min(reductions), len(stack.blocks) - 1
    for index in range(first, last + 1):
        block, call = stack.blocks[index], stack.call_of(stack.blocks[index], None)
        assert isinstance(call, NamedArguments)
        if index in reductions:
            watch(block, tracker)
        place = index == first, index == last, restores
        state = _ReducedState(call, tracker, stack.prefix, reductions.get(index), *place, Records())
        convert(block, ReducedBlock, state)


def pooling(model: nn.Module) -> str:
    """Return the pooling of a timm model: "token" for the prefix, "" for an output per token, or a mean's name."""
    return str(getattr(model, "global_pool", "token"))
