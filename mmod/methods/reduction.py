"""Blocks that reduce the number of tokens between their attention and their MLP, by its queries, keys or importance.

Axes: B images, H heads, N tokens, K tokens after a reduction, D channels, E channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from timm.layers import apply_rot_embed_cat
from torch import Tensor, nn

from mmod.adapters import BlockStack
from mmod.adapters.base import NamedArguments
from mmod.adapters.masks import narrow_rope
from mmod.adapters.timm import SPLIT, attend, feed
from mmod.blocks import Deciding, Records, convert, host_class
from mmod.blocks.forward_pass import PassTracker
from mmod.blocks.routed import ConvertedBlock
from mmod.blocks.span import recomputing
from mmod.ops import capture_importance
from mmod.routing import Evidence, Joined, Kept, Routing

# The last modules that queries and keys pass before attention, in a block.
_NORMS = ("attn.q_norm", "attn.k_norm")


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


class AttentionInputs(NamedTuple):
    """Rotated queries and keys of an attention (B, H, N, E), and the tokens' importance, if captured."""

    query: Tensor
    key: Tensor
    importance_BN: Tensor | None = None


Reduction = Callable[[Grid, AttentionInputs, int], tuple[Grid, Restore] | None]
"""Returns fewer tokens, of which the last argument counts the prefix, and how to restore all; None keeps all tokens."""


class _Passage:
    """What the blocks of a model share in one forward pass."""

    def __init__(self) -> None:
        self.tokens = 0
        self.place_BN: Tensor | None = None
        self.size_BN: Tensor | None = None
        self.undo_steps: list[Restore] = []


class _ReducedState(NamedTuple):
    """Plain state of a block that reduces tokens, or follows such a block; the last one may restore all tokens."""

    call: NamedArguments
    tracker: PassTracker
    prefix: int
    reduction: Reduction | None
    reads_importance: bool
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
            for restore in reversed(passage.undo_steps) if state.restores else ():
                y = restore(y)
            state.tracker.end()
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
        captured = capture_importance() if self.mod_state.reads_importance else None
        with captured or nullcontext():
            x = attend(self, x, arguments)
        place_BN = passage.place_BN
        if place_BN is None and ("rope" in arguments or self.record.traced):
            place_BN = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        inputs = _take_inputs(self, arguments, None if captured is None else captured.importance_BN)
        reduced = reduction(Grid(x, place_BN, passage.size_BN), inputs, prefix)
        if reduced is not None:
            (x, passage.place_BN, passage.size_BN), restore = reduced
            passage.undo_steps.append(restore)
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


def reduce_(
    stack: BlockStack, reductions: Mapping[int, Reduction], restores: bool, reads_importance: bool = False
) -> None:
    """Convert the blocks of a stack from the first reduction on; the last one may restore all tokens."""
    tracker, first, last = PassTracker(), min(reductions), len(stack.blocks) - 1
    for index in range(first, last + 1):
        block, call = stack.blocks[index], stack.call_of(stack.blocks[index], None)
        assert isinstance(call, NamedArguments)
        if index in reductions:
            for norm in _NORMS:
                convert(block.get_submodule(norm), _Watched, tracker)
        place = index == first, index == last, restores
        state = _ReducedState(call, tracker, stack.prefix, reductions.get(index), reads_importance, *place, Records())
        convert(block, ReducedBlock, state)


def pooling(model: nn.Module) -> str:
    """Return the pooling of a timm model: "token" for the prefix, "" for an output per token, or a mean's name."""
    return str(getattr(model, "global_pool", "token"))


class _NormOutputs(dict[nn.Module, Tensor]):
    """The last outputs of the watched modules of a stack."""


class _Watched(nn.Module):
    """Mixin of a module of `_NORMS` that stores its output."""

    mod_state: PassTracker

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        self.mod_state.running.slot(_NormOutputs)[self] = y
        return y


def check_halves(name: str, block: nn.Module) -> None:
    """Raise a ValueError that says why a block's halves cannot run separately."""
    if not isinstance(block, SPLIT):
        raise ValueError(
            f"{name} is a {host_class(block).__name__}, whose attention and MLP cannot run separately; supported are "
            f"{', '.join(dict.fromkeys(block_type.__name__ for block_type in SPLIT))}"
        )
    attention = block.get_submodule("attn")
    if not all(hasattr(attention, norm) for norm in ("q_norm", "k_norm")) or hasattr(attention, "lambda_init"):
        raise ValueError(f"{name} has a {type(attention).__name__}, whose queries and keys cannot be read")


def _take_inputs(block: ReducedBlock, arguments: Mapping[str, Any], importance_BN: Tensor | None) -> AttentionInputs:
    """Return and drop the last queries and keys of a block's attention, with its importance if captured."""
    outputs = block.mod_state.tracker.running.slot(_NormOutputs)
    query, key = (outputs.pop(block.get_submodule(norm)) for norm in _NORMS)
    if key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    if "rope" in arguments:
        query, key = (_rotated(x, arguments["rope"], block.get_submodule("attn")) for x in (query, key))
    return AttentionInputs(query, key, importance_BN)


def _rotated(x: Tensor, rope: Tensor, attention: Any) -> Tensor:
    prefix = attention.num_prefix_tokens
    rotated = apply_rot_embed_cat(x[:, :, prefix:], rope, half=getattr(attention, "rotate_half", False))
    return torch.cat([x[:, :, :prefix], rotated], dim=2).type_as(x)
