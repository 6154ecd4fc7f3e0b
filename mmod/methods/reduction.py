"""Blocks that reduce the number of tokens between their attention and their MLP, by its queries, keys or importance.

Axes: B images, H heads, N tokens, K tokens after a reduction, D channels, E channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.adapters import BlockStack
from mmod.adapters.base import NamedArguments
from mmod.blocks import (
    KEY_BIAS,
    BlockOwner,
    Deciding,
    OwnerState,
    Pass,
    Passes,
    ReadBlocks,
    Records,
    StackCalls,
    WholeBatchHook,
    attach,
    convert,
    detach_hooks,
    disown,
    host_class,
    make_halves,
    make_observed,
    own_,
)
from mmod.blocks.hook import runs_code_of
from mmod.blocks.inner import Inner
from mmod.blocks.passes import StackCall, recomputing
from mmod.blocks.routed import ConvertedBlock
from mmod.blocks.symbolic import check_tokens
from mmod.methods.base import Method
from mmod.ops import capture_inputs, gather_rows
from mmod.routing import Evidence, Joined, Kept, Routing
from mmod.threads import PerThread


class Remaining(NamedTuple):
    """Tokens between attention and MLP, prefix first, the input token that each represents, and how many it represents.

    `place_BN` is the first or most important of several input tokens, None if not needed; `size_BN` is None for one
    each.
    """

    x_BND: Tensor
    place_BN: Tensor | None
    size_BN: Tensor | None


@dataclass(frozen=True)
class Restore:
    """Returns all tokens (B, N, D) in the order before a reduction, from the reduced ones after later blocks.

    Args:
        x_BND: The tokens before the reduction; dropped ones keep this state.
        find_slots: Returns the slot of each token after the reduction (B, N), -1 for a dropped one.
        drops: Tokens are dropped.
    """

    x_BND: Tensor
    find_slots: Callable[[], Tensor]
    drops: bool

    def __call__(self, y_BKD: Tensor) -> Tensor:
        """Return all tokens."""
        return _spread(y_BKD, self.find_slots(), self.x_BND if self.drops else None)


class AttentionInputs(NamedTuple):
    """What an attention read: its keys (B, H, N, E), and the attention that tokens receive, where a reduction needs it.

    Args:
        key: Keys of every head, after norms and rotary embeddings; None where `importance_BN` was captured instead.
        class_attention: Returns the class token's attention to all tokens (B, N), averaged over heads.
        importance_BN: The mean attention that tokens receive, if captured.
    """

    key: Tensor | None
    class_attention: Callable[[], Tensor]
    importance_BN: Tensor | None = None


Reduction = Callable[[Remaining, AttentionInputs, int], tuple[Remaining, Restore] | None]
"""Returns fewer tokens, of which the last argument counts the prefix, and how to restore all; None keeps all tokens."""


@dataclass(frozen=True)
class Reducing(Method):
    """A method after whose blocks fewer tokens remain.

    Blocks pass on the remaining tokens only where the host's own code runs them in sequence, see `BlockOwner`. All
    other code, such as `forward_intermediates`, hooks and subclasses, gets the full grid from each block: a merged
    token at each of its places, and a pruned one as it was when dropped. So does what follows the blocks, except for a
    head in a call of the model.
    """

    def restore(self, model: nn.Module) -> None:
        """Restore the host's classes, and remove the hooks."""
        detach_hooks(model, WholeBatchHook)
        disown(model)
        super().restore(model)


class ReducedCall(StackCall):
    """A call of a model whose blocks reduce tokens.

    Args:
        is_reduced_for_head: The head reads the remaining tokens, so no block restores the grid.

    Attributes:
        began: The host's code has run a block.
    """

    def __init__(
        self,
        outer: StackCall,
        uninterrupted: bool,
        read_blocks: ReadBlocks | None,
        awaits_features: bool,
        is_reduced_for_head: bool,
    ) -> None:
        super().__init__(outer, uninterrupted, read_blocks, awaits_features)
        self.is_reduced_for_head = is_reduced_for_head
        self.began = False


class Passage(Pass):
    """What the blocks of a model share in one forward pass; uninterrupted, they pass on the remaining tokens alone.

    Attributes:
        is_reduced_for_head: See `ReducedCall`.
        tokens: Number of tokens of the full grid.
        slot_BN: Slot of each token of the grid, -1 for a dropped one; None if no block has to restore the grid.
        y_BKD: The remaining tokens after the previous block.
        grid_BND: The full grid with the last states of dropped tokens, where blocks pass on the remaining ones alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_reduced_for_head = False
        self.drops = False
        self.tokens = 0
        self.place_BN: Tensor | None = None
        self.size_BN: Tensor | None = None
        self.slot_BN: Tensor | None = None
        self.y_BKD: Tensor | None = None
        self.grid_BND: Tensor | None = None

    def enter(self, x: Tensor) -> Tensor:
        """Return the remaining tokens of a block's input."""
        if self.uninterrupted or self.slot_BN is None:
            return x
        for what, number, first in zip(("images", "tokens"), x.shape, self.shape):
            if number != first:
                raise ValueError(
                    f"a block of a pruned or merged model got {number} {what}, and the first block {first}: {what} "
                    "cannot be added or removed between the blocks"
                )
        assert self.place_BN is not None
        z_BKD = gather_rows(x, self.place_BN)
        if self.drops:
            assert self.y_BKD is not None
            # A fused token has no place in the grid.
            stands_BK = torch.zeros_like(self.place_BN, dtype=torch.bool)
            stands_BK = F.pad(stands_BK, (1, 0)).scatter(1, self.slot_BN + 1, True)[:, 1:]
            z_BKD = torch.where(stands_BK.unsqueeze(-1), z_BKD, self.y_BKD)
        return z_BKD

    def leave(self, y_BKD: Tensor, grid_BND: Tensor) -> Tensor:
        """Return the full grid after a block, from the grid in which dropped tokens have their last state."""
        if self.slot_BN is None:
            return y_BKD
        self.y_BKD = y_BKD
        return _spread(y_BKD, self.slot_BN, grid_BND if self.drops else None)

    def add(self, restore: Restore, grid_BND: Tensor) -> Tensor:
        """Note what is needed to restore the grid after a reduction; return the grid with the tokens dropped now."""
        if self.uninterrupted and self.is_reduced_for_head:
            return grid_BND
        if restore.drops:
            grid_BND = self.leave(restore.x_BND, grid_BND)
            self.drops = True
        slot_BN = restore.find_slots()
        if self.slot_BN is not None:
            slot_BN = torch.where(self.slot_BN >= 0, slot_BN.gather(1, self.slot_BN.clamp(min=0)), -1)
        self.slot_BN = slot_BN
        return grid_BND


class _ReducedState(NamedTuple):
    """Plain state of a block that reduces tokens, or follows such a block.

    `reads_importance` says of the model whether the reduction does.
    """

    call: NamedArguments
    passes: Passes[Passage]
    inner: PerThread[Inner]
    prefix: int
    owner: nn.Module
    reduction: Reduction | None
    reads_importance: Callable[[nn.Module], bool]
    place: int
    records: Records


class ReducedBlock(Deciding, ConvertedBlock):
    """Mixin of a block that reduces tokens, or follows such a block."""

    mod_state: _ReducedState

    def places(self) -> tuple[str, ...]:
        """Return one name if the block reduces tokens, else none."""
        return () if self.mod_state.reduction is None else ("",)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the host's block on the remaining tokens, and reduce them if it has a reduction."""
        state = self.mod_state
        if not isinstance(x, Tensor):
            check_tokens(self, x)
        if recomputing():
            raise RuntimeError(
                "gradient checkpointing runs blocks twice, which pruning and merging do not support: turn it off"
            )
        passage = self._passage(x)
        z = passage.enter(x)
        arguments = self._narrowed(state.call.bind(args, kwargs), passage)
        grid_BND = x if passage.grid_BND is None else passage.grid_BND
        if state.reduction is None:
            y = self.run_host(z, **arguments)
        else:
            y, grid_BND = self._reduce(z, arguments, passage, grid_BND)
            if passage.uninterrupted and passage.drops:
                passage.grid_BND = grid_BND
        passage.busy = False
        is_last = state.place == state.passes.last
        is_reduced = passage.is_reduced_for_head if is_last else passage.uninterrupted
        if is_reduced:
            return y
        y = passage.leave(y, grid_BND)
        if not is_last and not passage.uninterrupted:
            state.passes.hand_on(passage, y)
        return y

    def _passage(self, x: Tensor) -> Passage:
        """Return what the blocks share in this pass; the first block begins it, or one that is called directly."""
        state = self.mod_state
        passes = state.passes
        passage = passes.find(x, state.place) if state.place else None
        if passage is None:
            passage = passes.begin(x)
            passage.tokens = x.shape[1]
            call = passes.calls.value.running
            if isinstance(call, ReducedCall):
                # Of two passes in a call, none is known to be the host's.
                call.is_reduced_for_head = passage.is_reduced_for_head = call.is_reduced_for_head and passage.is_first
                call.began = True
        passage.busy = True
        return passage

    def _narrowed(self, arguments: dict[str, Any], passage: Passage) -> dict[str, Any]:
        """Return the block's arguments for the remaining tokens."""
        call = self.mod_state.call
        known = {*call.rows, call.index_argument}
        unknown = sorted(name for name, value in arguments.items() if name not in known and isinstance(value, Tensor))
        if unknown or arguments.get("is_causal"):
            names = [call.boundaries if name == KEY_BIAS else name for name in unknown]
            hint = ", which hides padding: pass images of one size" if call.mask in unknown else ""
            raise ValueError(
                f"pruning and merging do not support the arguments {', '.join(names) or 'is_causal'}{hint}"
            )
        if passage.place_BN is not None:
            arguments = call.narrow_rows(arguments, passage.place_BN)
        # Proportional attention: a merged token counts as the tokens that it represents.
        bias = None if passage.size_BN is None else passage.size_BN.log()[:, None, None, :]
        return call.with_mask(arguments, bias)

    def _reduce(
        self, x: Tensor, arguments: Mapping[str, Any], passage: Passage, grid_BND: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the remaining tokens after the block, and the full grid in which the others have their last state."""
        state = self.mod_state
        assert state.reduction is not None
        call = state.call
        assert call.halves is not None
        attend = partial(call.halves.attend, self, x, arguments)
        if state.reads_importance(state.owner):
            x, importance_BN = self.observe(attend, x, None, "mean")
            inputs = AttentionInputs(None, no_attention, importance_BN)
        else:
            captured = capture_inputs()
            x = self.run_observed(attend, captured)
            inputs = AttentionInputs(captured.key, captured.class_attention)
        place_BN = passage.place_BN
        needs_place = call.index_argument or any(name in arguments for name in call.rows)
        if place_BN is None and (not passage.uninterrupted or needs_place or self.record.traced):
            place_BN = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        reduced = state.reduction(Remaining(x, place_BN, passage.size_BN), inputs, state.prefix)
        if reduced is not None:
            (x, passage.place_BN, passage.size_BN), restore = reduced
            grid_BND = passage.add(restore, grid_BND)
        if self.record.traced:
            # Without a reduction every token is at its place.
            self._trace(place_BN if reduced is None else passage.place_BN, passage)
        return call.halves.feed(self, x), grid_BND

    def _trace(self, place_BN: Tensor | None, passage: Passage) -> None:
        """Record the remaining input tokens and their group sizes."""
        assert place_BN is not None
        index_BK, order_BK = place_BN.sort(dim=1)
        size_BK = None if passage.size_BN is None else passage.size_BN.gather(1, order_BK)
        score_BN = torch.zeros(index_BK.shape[0], passage.tokens, device=index_BK.device)
        self.record.keep("", Routing(Kept(index_BK), Evidence(score_BN), joined=Joined(size_BK=size_BK)))


@dataclass(eq=False)
class ReducingState(OwnerState):
    """Plain state of a model whose blocks reduce tokens.

    Args:
        heads: What a head may read for which the grid is not restored, see `head_reads`.
    """

    heads: tuple[str, ...] = ()


class ReducingModel(BlockOwner):
    """Mixin of a model whose blocks reduce tokens: decides whether its head reads the remaining ones, or the grid."""

    mod_owner: ReducingState

    def new_call(self, name: str, outer: StackCall) -> ReducedCall:
        """Return a call in which the head reads the remaining tokens, or the grid."""
        state = self.mod_owner
        uninterrupted = self.is_uninterrupted(name)
        reduced = False
        if name == "forward" and state.host == "timm":
            reads = head_reads(self)
            # A hook on a block sees the grid; what is pooled does not depend on it.
            known = self.runs_in_order() if reads == "patches" else uninterrupted and not _tokens_are_read(self, "norm")
            reduced = known and reads in state.heads
        return ReducedCall(outer, uninterrupted, state.read_blocks, name == "forward", reduced)


def _all_or_none(read_blocks: ReadBlocks) -> Collection[int] | None:
    """Return that all blocks are read if any is: then every block returns the full grid."""
    read = read_blocks()
    return () if read is not None and not read else None


def _tokens_are_read(module: nn.Module, name: str) -> bool:
    """Return whether a hook reads what a module inside another one gets or returns."""
    inner = module._modules.get(name)
    return inner is not None and bool(inner._forward_hooks or inner._forward_pre_hooks)


def reduce_(
    stack: BlockStack,
    owner: nn.Module,
    reductions: Mapping[int, Reduction],
    heads: tuple[str, ...],
    reads_importance: Callable[[nn.Module], bool],
    mixin: type[ReducingModel] = ReducingModel,
) -> None:
    """Convert the blocks of a stack from the first reduction on, and the model that owns them.

    Args:
        owner: The model that holds the blocks.
        heads: What a head may read for which the grid is not restored, see `head_reads`.
    """
    first = min(reductions)
    last = len(stack.blocks) - 1
    passes = Passes(stack.calls, Passage, last - first)
    for index in range(first, last + 1):
        block = stack.blocks[index]
        call = stack.call_of(block, None)
        assert isinstance(call, NamedArguments)
        inner = PerThread(Inner)
        if index in reductions:
            make_halves(block, call, inner)
            make_observed(block, call, inner)
        state = _ReducedState(
            call=call,
            passes=passes,
            inner=inner,
            prefix=stack.prefix,
            owner=owner,
            reduction=reductions.get(index),
            reads_importance=reads_importance,
            place=index - first,
            records=Records(),
        )
        convert(block, ReducedBlock, state, call.shell)
    block_list = stack.names[0].split(".")[-2]
    read_blocks = None if stack.read_blocks is None else partial(_all_or_none, stack.read_blocks)
    owner_state = ReducingState(stack.calls, block_list, tuple(stack.blocks), stack.host, read_blocks, heads=heads)
    own_(owner, owner_state, mixin)
    stack.watch_grid(stack.converted)
    if stack.dividing:
        attach(owner, WholeBatchHook(stack.dividing))


def pools_remaining(calls: PerThread[StackCalls]) -> bool:
    """Return whether a call of the model runs, in which the head gets the remaining tokens."""
    call = calls.value.running
    return isinstance(call, ReducedCall) and call.is_reduced_for_head and call.began


def head_reads(model: nn.Module) -> str:
    """Return which tokens a model's head reads: "prefix", also "patches", or "all" where code other than timm's may."""
    functions = [name for name in ("forward_head", "pool", "_pool") if hasattr(type(model), name)]
    if not all(runs_code_of("timm", model, name) for name in functions) or pooling(model) == "":
        return "all"
    return "prefix" if pooling(model) == "token" and getattr(model, "attn_pool", None) is None else "patches"


def pooling(model: nn.Module) -> str:
    """Return the pooling of a timm model: "token" for the prefix, "" for an output per token, or a mean's name."""
    return str(getattr(model, "global_pool", "token"))


def no_attention() -> Tensor:
    """Stand for the class token's attention where the mean attention was captured."""
    raise AssertionError("importance was captured instead of the class token's attention")


def never(model: nn.Module) -> bool:
    """Return False, for any model."""
    return False


def _spread(y_BKD: Tensor, slot_BN: Tensor, base_BND: Tensor | None) -> Tensor:
    """Return the row of each token's slot; a token without one (-1) keeps its row of the base."""
    # Tokens share slots, so the gradient of a gather must add up.
    index = slot_BN.clamp(min=0).unsqueeze(-1).expand(-1, -1, y_BKD.shape[-1])
    rows_BND = y_BKD.gather(1, index)
    return rows_BND if base_BND is None else torch.where((slot_BN >= 0).unsqueeze(-1), rows_BND, base_BND)


def check_halves(stack: BlockStack, index: int) -> None:
    """Raise a ValueError that says why a block's halves cannot run separately."""
    block = stack.blocks[index]
    call: Any = stack.call_of(block, None)
    title = f"{stack.names[index]} is a {host_class(block).__name__}"
    if call.halves is None:
        raise ValueError(f"{title}, whose attention and MLP cannot run separately")
    if call.mask == "shared_rel_pos_bias":
        raise ValueError(f"{title}, which gets a bias for each pair of positions, so its keys cannot be read")
    if getattr(call, "attention_calls", 1) != 1:
        raise ValueError(f"{title}, which attends {call.attention_calls} times, so its keys are those of several maps")
    if not call.weighs_keys:
        raise ValueError(f"{title}, whose attention takes no bias for group sizes")
