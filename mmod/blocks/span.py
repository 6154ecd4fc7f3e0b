"""Spans of consecutive blocks, and how a block finds the forward pass of its input.

- In an ordinary call of the model nothing reads the tokens between blocks: the pass is the `latest` one of the running
  call, which its blocks enter in order.
- Otherwise a thread may have several batches between two blocks, as in a pipeline or a user's own loop. State then
  belongs to the tensors: a pass is found by the tensor that one block returned and the next one got.

Axes: B images, N tokens, K rows that a block passed on, D channels.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from mmod.blocks.branches import Inner
from mmod.blocks.call import BlockCall
from mmod.blocks.calls import UNFINISHED, SpanPass, StackCall, StackCalls
from mmod.blocks.record import Record, make_records
from mmod.threads import PerThread


class _Remembered(NamedTuple):
    """A tensor between two modules, and the pass that it belongs to.

    Args:
        tensor: The tensor, or what it is a view of.
        address: See `_address`.
        signature: See `_signature`.
    """

    tensor: weakref.ref[Tensor]
    address: int
    signature: tuple[int, ...]
    found: SpanPass


class Span:
    """A run of consecutive blocks that share scores, rows, or facts about their tokens.

    It finds the forward pass that the input of one of its modules belongs to.

    - The first module begins a pass. A later one finds it by their order in an uninterrupted call.
    - In any other call a later module finds it by its input, the tensor that the module before returned.
    - Code between two modules may make a new tensor (a hook, a move to another device), and compilers cannot compare
      tensors. The input then belongs to the only unfinished pass of the running call, or outside calls to the only
      one of the thread. If there are several, the module raises instead of guessing.
    - A pass is unfinished until its last module is entered, or the call of the model in which it runs ends. After a
      failure in a module, it goes on only if that module gets the same tensor again.
    - Gradient checkpointing recomputes modules in a backward pass, perhaps in another thread. The first module of a
      segment finds the pass by its input, which is the same tensor; those after it also by the running backward pass.

    Copies and pickles know no pass. A span of blocks is not `language.tokens="span"`, which is about runs of image
    tokens.

    Args:
        calls: The calls of the stack, by thread.
        names: Names of the modules, in order. A dense block whose importance routed blocks read has position 0.
        scored_by_first: The first routed block computes the scores; otherwise they are importance, or none are shared.
        for_loss: Importance serves a loss only, and is computed in training only.

    Attributes:
        last: Position of the last module.
    """

    def __init__(
        self,
        calls: PerThread[StackCalls],
        names: Sequence[str],
        scored_by_first: bool = False,
        for_loss: bool = False,
    ) -> None:
        self.calls = calls
        self.names = tuple(names)
        self.scored_by_first = scored_by_first
        self.for_loss = for_loss
        self.last = len(names) - 1
        # As a fact of its own: compilers guard on numbers that they read, and runs of other lengths share a graph.
        self.goes_on = self.last > 0
        self._by_address: dict[int, _Remembered] = {}
        # The pass that a backward pass recomputes in a thread, with the number of that backward pass.
        self._recomputed: PerThread[list[tuple[int, SpanPass]]] = PerThread(list)

    def __getstate__(self) -> dict[str, object]:
        """Leave the passes out of copies and pickles."""
        # A copy's tensors lie elsewhere, and a weak reference cannot be pickled.
        return {**vars(self), "_by_address": {}}

    def enter(self, x: Tensor, state: BlockState) -> SpanPass | None:
        """Return the pass of a block's input, tokens (B, N, D) or rows that were passed on (B, K, D).

        The first block begins it. None where no pass has reached the block.

        Raises:
            ValueError: The number of images or tokens changed since the block before.
            RuntimeError: See `find`.
        """
        calls = self.calls.value
        if state.begins:
            span_pass = self.begin(x)
        else:
            # Outside calls of the model, where batches may be in flight in stages, positions tell them apart. A graph
            # that reads a position serves one block: one that reads only `begins` and `ends` serves all blocks between.
            in_order = torch.compiler.is_dynamo_compiling() and calls.running.outer is not None
            latest = calls.running.latest
            # Where nothing reads the tokens between modules, their order tells the pass, and no tensor is remembered.
            comes_next = latest is not None and latest.owner is self and not latest.busy
            if latest is not None and comes_next and (in_order or latest.position < state.position):
                span_pass = latest
                if not in_order:
                    span_pass.position = state.position
            else:
                found = self.find(x, None if in_order else state.position)
                if found is None:
                    return None
                if in_order and state.ends:
                    # No position says that it is over.
                    calls.running.passes = [other for other in calls.running.passes if other is not found]
                span_pass = found
        # An uninterrupted pass may hand on rows instead of all tokens.
        if not span_pass.uninterrupted and not torch.compiler.is_compiling() and span_pass.shape != x.shape[:2]:
            raise ValueError(
                f"a block got (images, tokens) = {tuple(x.shape[:2])}, and the pass that it continues has "
                f"{span_pass.shape}: the batch or the sequence changed between the two blocks, which share scores or "
                "rows. Keep all images and tokens between them, or route with a router that shares none, such as "
                "'linear'"
            )
        # Until the block is left. A pass that failed in a block is found by its tensor alone.
        span_pass.busy = True
        calls.entered = span_pass
        score_BN = span_pass.score_BN
        # The blocks of a model may be on several devices.
        if score_BN is not None and score_BN.device != x.device:
            span_pass.score_BN = score_BN.to(x.device)
        return span_pass

    def leave(self, y: Tensor, span_pass: SpanPass, state: BlockState) -> Tensor:
        """Return all tokens after a block; the next block finds the pass by them."""
        span_pass.busy = False
        if not state.ends and not span_pass.uninterrupted:
            self.hand_on(span_pass, y)
        return y

    def begin(self, x: Tensor) -> SpanPass:
        """Begin a pass with the input of the first module."""
        started = SpanPass()
        started.owner = self
        started.shape = tuple(x.shape[:2])
        calls = self.calls.value
        # The patch embedding ran just before, and its hook left them.
        started.patches = calls.take_patches()
        call = calls.running
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != call.task:
            # A part of the model is recomputed, in a backward pass in which the call did not begin. Later blocks of the
            # part find the new pass by the number of that backward pass.
            self._recomputed.value[:] = [(torch._C._current_graph_task_id(), started)]
            found = self._pass_of(x)
            if found is not None:
                started.patches = found.patches
            return started
        is_first = call.is_first(self)
        started.ends_for_head = is_first and call.ends_for_head
        started.uninterrupted = is_first and call.uninterrupted
        if started.uninterrupted and call.read_blocks is not None:
            # Known only now: hosts decide what to collect inside their forward.
            read = call.read_blocks()
            if read is None:
                started.uninterrupted = False
            else:
                started.read_blocks = read
        if started.uninterrupted:
            call.latest = started
            return started
        if call.outer is None:
            # Outside calls nothing says when a pass was given up, so the oldest are forgotten.
            del call.passes[: 1 - UNFINISHED]
        if self.goes_on:
            call.passes.append(started)
        if started.patches.grid is not None or started.patches.seen is not None:
            # A recomputed first block finds them by its input.
            self.hand_on(started, x)
        return started

    def find(self, x: Tensor, position: int | None) -> SpanPass | None:
        """Return the pass of a later module's input, where order does not tell it; None if no pass reached it.

        Args:
            position: The module's position; None in a compiled call of the model, whose modules run in order: a graph
                that reads no position serves several modules.

        Raises:
            RuntimeError: The input may belong to several passes, or is recomputed and was never seen.
        """
        call = self.calls.value.running
        # Something may have read the tokens or run the blocks in another order: the tensor tells.
        found = self._pass_of(x)
        if not torch.compiler.is_dynamo_compiling() and torch._C._current_graph_task_id() != call.task:
            return self._find_recomputed(found)
        if found is None:
            found = self._only_unfinished(x, position, call)
            if found is None:
                return None
            if torch.compiler.is_compiling() or not x.is_inference():
                # To be found again where it is recomputed. A buffer of inference mode may hold another batch later.
                self.hand_on(found, x)
        if position is not None:
            found.position = position
            # A call forgets its passes when it ends; outside calls the last block does it.
            if position >= self.last and call.outer is None:
                call.passes = [other for other in call.passes if other is not found]
        return found

    def hand_on(self, current: SpanPass, y: Tensor) -> None:
        """Remember that a tensor between two modules belongs to a pass."""
        if torch.compiler.is_dynamo_compiling():
            return
        signature = _signature(y)
        address = signature[0]
        remembered = self._by_address

        def forget(tensor: weakref.ref[Tensor]) -> None:
            # Another tensor may lie there by now.
            if address in remembered and remembered[address].tensor is tensor:
                del remembered[address]

        # FSDP2 gives a block a view of the tensor that checkpointing keeps.
        kept = y
        if _address(y) and y._base is not None:
            kept = y._base
        remembered[address] = _Remembered(weakref.ref(kept, forget), _address(kept), signature, current)

    def follow(self, x: Tensor, y: Tensor) -> None:
        """Remember that a tensor belongs to the pass of another one, if that is known, whose values it rearranges."""
        found = self._pass_of(x)
        if found is not None:
            self.hand_on(found, y)

    def _pass_of(self, x: Tensor) -> SpanPass | None:
        """Return the pass that a tensor is remembered to belong to, or None."""
        if torch.compiler.is_dynamo_compiling():
            return None
        signature = _signature(x)
        match = self._by_address.get(signature[0])
        if match is None or match.signature != signature:
            return None
        tensor = match.tensor()
        # Memory may be given to another tensor while the first one lives.
        if tensor is None or _address(tensor) != match.address:
            return None
        return match.found

    def _only_unfinished(self, x: Tensor, position: int | None, call: StackCall) -> SpanPass | None:
        """Return the only unfinished pass of a call that can go on at a position; None for no such pass."""
        reachable = [other for other in call.passes if other.owner is self and _can_reach(other, position)]
        if len(reachable) > 1:
            # Batches of another size cannot be meant.
            reachable = [other for other in reachable if other.shape == x.shape[:2]]
        if len(reachable) > 1:
            # Passes that were given up should raise this error only once.
            call.passes = [other for other in call.passes if all(other is not item for item in reachable)]
            raise RuntimeError(
                f"{len(reachable)} forward passes are unfinished at this routed block, and its input is none of the "
                "tensors that the block before returned, so the pass that it belongs to is unknown: pass the tensors "
                "on unchanged, or run one batch after the other, or call the whole model. Compiled code compares no "
                "tensors: concatenate to one batch what runs in step. The unfinished passes are forgotten now"
            )
        if not reachable:
            return None
        return reachable[0]

    def _find_recomputed(self, found: SpanPass | None) -> SpanPass | None:
        """Return the pass that the running backward pass recomputes: the one found by the input, or the last such."""
        task = torch._C._current_graph_task_id()
        if found is not None:
            self._recomputed.value[:] = [(task, found)]
            return found
        for number, current in self._recomputed.value:
            if number == task:
                return current
        raise RuntimeError(
            "gradient checkpointing runs a routed block again on an input that it never had: checkpointing that "
            "moves or copies inputs in between cannot be combined with this router"
        )


@dataclass(eq=False, kw_only=True)
class BlockState:
    """Plain state of a block in a span, invisible to state_dict and export.

    Args:
        call: How the host calls the block.
        span: The span that the block is part of; None if it shares nothing.
        position: The block's position in its span.
        number: The block's number in its stack.

    Attributes:
        begins: The block is the first module of its span. Where the span reads importance of the dense block in front,
            that `ImportanceBlock` is, and no routed block.
        ends: The block is the last module of its span.
    """

    call: BlockCall
    span: Span | None = None
    position: int = 0
    number: int = 0
    inner: PerThread[Inner] = field(default_factory=lambda: PerThread(Inner), repr=False)
    records: PerThread[Record] = field(default_factory=make_records, init=False, repr=False)
    begins: bool = field(init=False)
    ends: bool = field(init=False)

    def __post_init__(self) -> None:
        self.begins = self.position == 0
        self.ends = self.span is None or self.position == self.span.last


def _can_reach(unfinished: SpanPass, position: int | None) -> bool:
    """Return whether a pass may enter a module at a position next."""
    return not unfinished.busy and (position is None or unfinished.position < position)


def _address(x: Tensor) -> int:
    """Return where the values of a tensor lie; 0 for one without values of its own, as in traces and on meta."""
    if type(x) is not Tensor or x.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return 0
    return x.data_ptr()


def _signature(x: Tensor) -> tuple[int, ...]:
    """Return what a tensor is told by: where its values lie, how often they were changed in place, and their layout.

    A tensor without values of its own is told by the object.
    """
    # Tensors of inference mode do not count changes.
    version = 0 if x.is_inference() else x._version
    address = _address(x)
    if not address:
        return (id(x), version)
    return (address, version, *x.shape[:2], *x.stride())
