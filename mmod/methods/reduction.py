"""Blocks after whose attention fewer tokens remain, by its queries, keys or importance.

Blocks pass on the remaining tokens only where the host's own code runs them in sequence, see `BlockOwner`. All other
code, such as `forward_intermediates`, hooks and subclasses, gets the full grid from each block. A merged token then
stands at each of its places, and a pruned one is as it was when dropped. What follows the blocks gets the full grid
too, except for a head in a call of the model.

Axes: B images, N tokens, K tokens after a reduction, D channels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from mmod.adapters import BlockStack
from mmod.adapters.base import NamedArguments
from mmod.blocks import (
    KEY_BIAS,
    BlockOwner,
    BlockState,
    Deciding,
    Reduced,
    Remaining,
    Span,
    SpanPass,
    convert,
    host_class,
    make_halves,
    make_observed,
    warn_of_halves,
)
from mmod.blocks.calls import StackCall
from mmod.blocks.converted import ConvertedBlock, check_once
from mmod.blocks.hook import runs_code_of
from mmod.methods.base import Method, owner_of
from mmod.ops.intercept import AttentionIntercept
from mmod.routing import Joined, Kept, Routing


class Reduction(NamedTuple):
    """A rule of what remains between a block's attention and its MLP.

    Args:
        watch: Returns what reads the attention.
        reduce: Returns what remains of the rows; None for all of them. It gets the rows (B, N, D), the number of tokens
            that each represents (B, N) or None for one each, and what was read.
    """

    watch: Callable[[], AttentionIntercept]
    reduce: Callable[[Tensor, Tensor | None, object], Reduced | None]


@dataclass(eq=False, kw_only=True)
class ReducedState(BlockState):
    """Plain state of a block that reduces tokens, or follows such a block, where the reduction is None."""

    call: NamedArguments
    span: Span
    reduction: Reduction | None


class ReducedBlock(Deciding, ConvertedBlock):
    """Mixin of a block that reduces tokens, or follows such a block."""

    mod_state: ReducedState

    def mod_decision_names(self) -> tuple[str, ...]:
        """Return one name if the block reduces tokens, else none."""
        if self.mod_state.reduction is None:
            return ()
        return ("",)

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Run the host's block on the remaining tokens, and reduce them if it has a reduction."""
        state = self.mod_state
        check_once(self, x)
        # The first block begins a pass, or one that is called directly.
        span_pass = state.span.enter(x, state) or state.span.begin(x)
        span_pass.busy = True
        # Known only in the pass: whether the head reads rows depends on who called the model.
        if span_pass.remaining is None:
            reaches_head = span_pass.uninterrupted and span_pass.ends_for_head
            span_pass.remaining = Remaining(restores=not reaches_head)
        rows = span_pass.remaining
        z = rows.gather(x)
        bound = state.call.bind(args, kwargs)
        if state.reduction is None:
            y = self.mod_run_host(z, **self._mod_narrowed(bound, rows))
        else:
            y = self._mod_reduce(z, bound, span_pass, rows)
        span_pass.busy = False
        if self._mod_passes_on(span_pass):
            return y
        return state.span.leave(rows.restore(y), span_pass, state)

    def _mod_passes_on(self, span_pass: SpanPass) -> bool:
        """Return whether what follows takes the remaining tokens alone."""
        state = self.mod_state
        if state.ends:
            return span_pass.ends_for_head
        return span_pass.uninterrupted and state.number not in span_pass.read_blocks

    def _mod_narrowed(self, arguments: dict[str, object], rows: Remaining) -> dict[str, object]:
        """Return the block's arguments for the remaining tokens."""
        call = self.mod_state.call
        known = {*call.rows, *call.images, *call.shared, call.index_argument}
        unknown = sorted(name for name, value in arguments.items() if name not in known and isinstance(value, Tensor))
        if unknown or arguments.get("is_causal"):
            # Padding of a batch comes by a name of mmod's; users know the argument that it was made from.
            names = [call.boundaries if name == KEY_BIAS else name for name in unknown]
            named = ", ".join(names) or "is_causal"
            hint = ""
            if call.mask in unknown:
                hint = ", which hides padding: pass images of one size"
            raise ValueError(f"pruning and merging do not support the arguments {named}{hint}")
        if rows.token_BK is not None:
            arguments = call.narrow_rows(arguments, rows.token_BK)
        bias = None
        if rows.size_BK is not None:
            # Proportional attention: a merged token counts as the tokens that it represents.
            bias = rows.size_BK.log()[:, None, None, :]
        return call.with_mask(arguments, bias)

    def _mod_reduce(self, x: Tensor, bound: dict[str, object], span_pass: SpanPass, rows: Remaining) -> Tensor:
        """Return the remaining tokens after the block."""
        state = self.mod_state
        call = state.call
        assert state.reduction is not None
        assert call.halves is not None
        arguments = self._mod_narrowed(bound, rows)
        watch = state.reduction.watch()
        x = self.mod_run_observed(partial(call.halves.attend, self, x, arguments), watch)
        step = state.reduction.reduce(x, rows.size_BK, watch)
        if step is not None:
            x = rows.take(step, x)
        if self.mod_record.traced:
            self._mod_trace(rows, span_pass.shape, x.device)
        if call.halves.fed:
            # From the block's own arguments again, because fewer rows go on to the MLP.
            arguments = self._mod_narrowed(bound, rows)
        return call.halves.feed(self, x, arguments)

    def _mod_trace(self, rows: Remaining, shape: tuple[int, ...], device: torch.device) -> None:
        """Record the remaining ones of input tokens (B, N), and their group sizes."""
        score_BN = torch.zeros(shape, device=device)
        token_BK = rows.token_BK
        if token_BK is None:
            token_BK = torch.arange(shape[1], device=device).expand(shape)
        index_BK, order_BK = token_BK.sort(dim=1)
        size_BK = rows.size_BK
        if size_BK is not None:
            size_BK = size_BK.gather(1, order_BK)
        self.mod_record.keep("", Routing(Kept(index_BK), score_BN, joined=Joined(size_BK=size_BK)))


class ReducedModel(BlockOwner):
    """Mixin of a timm model whose blocks reduce tokens: decides if its head reads the remaining ones, or the grid."""

    mod_method: Reducing

    def mod_new_call(self, name: str, outer: StackCall) -> StackCall:
        """Return a call in which the head reads the remaining tokens, or the grid."""
        call = super().mod_new_call(name, outer)
        reads = ""
        # Other methods of the host return the tokens and run no head.
        if name == "forward":
            reads = head_reads(self)
        if reads not in self.mod_method.heads:
            return call
        if reads == "patches":
            # A hook on a block sees the grid; what is pooled does not depend on it.
            call.ends_for_head = self.mod_runs_in_order()
        else:
            call.ends_for_head = call.uninterrupted and not _tokens_are_read(self, "norm")
        return call

    def forward_head(self, *args: object, **kwargs: object) -> object:
        """Run the host's head, unless it pools patches of the full grid, of which it cannot tell the dropped ones."""
        call = self.mod_owner.calls.value.running
        restored = not (call.ends_for_head and call.has_begun)
        if restored and "patches" in self.mod_method.heads and head_reads(self) == "patches":
            raise ValueError(
                f"forward_head of a pruned {type(self).__name__} with global_pool={pooling(self)!r} pools patches, and "
                "knows which of them remain only in a call of the model with timm's own forward: call the model, after "
                "reset_classifier(0) if you want its pooled features"
            )
        host: Any = super()
        return host.forward_head(*args, **kwargs)


def _tokens_are_read(module: nn.Module, name: str) -> bool:
    """Return whether a hook reads what a module inside another one gets or returns."""
    inner = module._modules.get(name)
    return inner is not None and bool(inner._forward_hooks or inner._forward_pre_hooks)


@dataclass(frozen=True)
class Reducing(Method):
    """A method by which fewer tokens remain after the attention of some blocks: a rule for each of them.

    Attributes:
        heads: What a timm model's head may read for which the grid is not restored, see `head_reads`.
    """

    heads: ClassVar[tuple[str, ...]] = ("prefix",)

    @abstractmethod
    def rules(self, model: nn.Module, stack: BlockStack) -> Mapping[int, Reduction]:
        """Return the rules by number of the block; a ValueError says why the model has no such blocks."""

    def check(self, model: nn.Module, stack: BlockStack) -> None:
        """Raise a ValueError unless the model has the blocks and their halves can run separately."""
        for index in self.rules(model, stack):
            _check_halves(stack, index)

    def change(self, model: nn.Module, stack: BlockStack) -> None:
        """Convert the blocks from the first one with a rule on, and the module that owns them."""
        rules = self.rules(model, stack)
        if not rules:
            return
        # Blocks without a rule behind one with a rule get fewer tokens too.
        first = min(rules)
        span = Span(stack.calls, stack.names[first:])
        halved: dict[str, NamedArguments] = {}
        for index in range(first, len(stack.blocks)):
            block = stack.blocks[index]
            call = stack.call_of(block, None)
            assert isinstance(call, NamedArguments)
            state = ReducedState(call=call, span=span, position=index - first, number=index, reduction=rules.get(index))
            if index in rules:
                halved[stack.names[index]] = call
                make_halves(block, call, state.inner)
                make_observed(block, call, state.inner)
            convert(block, ReducedBlock, state, call.shell)
        owner = owner_of(model, stack)
        mixin = ReducedModel if stack.host == "timm" else BlockOwner
        stack.own_(owner, mixin)
        stack.watch_grid(stack.converted)
        stack.refuse_divided(owner)
        warn_of_halves(halved, len(stack.blocks))


def head_reads(model: nn.Module) -> str:
    """Return which tokens a model's head reads: "prefix", also "patches", or "all" where code other than timm's may."""
    functions = [name for name in ("forward_head", "pool", "_pool") if hasattr(type(model), name)]
    if not all(runs_code_of("timm", model, name) for name in functions) or pooling(model) == "":
        return "all"
    if pooling(model) == "token" and getattr(model, "attn_pool", None) is None:
        return "prefix"
    return "patches"


def pooling(model: nn.Module) -> str:
    """Return the pooling of a timm model: "token" for the prefix, "" for an output per token, or a mean's name."""
    return str(getattr(model, "global_pool", "token"))


def _check_halves(stack: BlockStack, index: int) -> None:
    """Raise a ValueError that says why a block's halves cannot run separately."""
    block = stack.blocks[index]
    call: Any = stack.call_of(block, None)
    maps = getattr(call, "attention_calls", 1)
    reason = ""
    if call.halves is None:
        reason = "whose attention and MLP cannot run separately"
    elif call.mask == "shared_rel_pos_bias":
        reason = "which gets a bias for each pair of positions, so its keys cannot be read"
    elif maps != 1:
        reason = f"which attends {maps} times, so its keys are those of several maps"
    elif not call.weighs_keys:
        reason = "whose attention takes no bias for group sizes"
    if reason:
        raise ValueError(f"{stack.names[index]} is a {host_class(block).__name__}, {reason}")
