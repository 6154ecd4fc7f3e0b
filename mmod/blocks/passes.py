"""Forward passes, the calls of a model in which they run, and how a block finds the pass of its input.

- In an ordinary call of the model nothing reads the tokens between blocks: the pass is the `latest` one of the running
  call, which its blocks enter in order.
- Otherwise a thread may have several batches between two blocks, as in a pipeline or a user's own loop. State then
  belongs to the tensors: a pass is found by the tensor that one block returned and the next one got.

Axes: B images, N tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmod.blocks.remaining import Remaining
from mmod.blocks.rows import Rows
from mmod.config import Patches
from mmod.routing import Routing, Rule, TokenGroups, TokenMasks
from mmod.threads import PerThread

# How many unfinished passes, and patches that wait for one, a thread remembers of a stack outside calls of the model.
UNFINISHED = 8


def recomputing() -> bool:
    """Return whether this code runs inside a backward pass, that is, recomputes a checkpointed forward."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1


ReadBlocks = Callable[[], Collection[int] | None]
"""Returns the numbers of the blocks whose output the running call of a host collects; None for all blocks."""


class StackCall:
    """A call of the module that owns a stack of blocks; the root, without `outer`, stands for code outside any.

    Args:
        outer: The call around it in this thread, if any.
        uninterrupted: The host's own code runs the blocks in order, and nothing reads the tokens between them. Blocks
            may then pass on rows, and tensors are not remembered.
        read_blocks: Returns the numbers of the blocks whose output the host collects in the running call; None for all.
        awaits_features: The host's `forward` will run its `forward_features`, which belongs to the same call.

    Attributes:
        passes: Observed passes that began in it, or came from a call around it, oldest first.
        latest: The uninterrupted pass that began last.
        ends_for_head: The head reads the rows that remain, so that the last block of the host's pass restores no token.
        begun: The runs of blocks that a pass of this call has entered.
        task: The backward pass in which the call began, which then recomputes the model as a whole; -1 for none.
    """

    def __init__(
        self,
        outer: StackCall | None = None,
        uninterrupted: bool = False,
        read_blocks: ReadBlocks | None = None,
        awaits_features: bool = False,
    ) -> None:
        self.outer = outer
        self.uninterrupted = uninterrupted
        self.read_blocks = read_blocks
        self.awaits_features = awaits_features
        self.passes: list[SpanPass] = []
        self.latest: SpanPass | None = None
        self.ends_for_head = False
        self.begun: set[object] = set()
        # A thread may meet a stack for the first time inside a backward pass: the root began before it.
        self.task = -1
        if outer is not None and not torch.compiler.is_compiling():
            self.task = torch._C._current_graph_task_id()

    @property
    def has_begun(self) -> bool:
        """Whether a pass has entered the blocks; in a compiled call, where none is noted, it has."""
        return bool(self.begun) or torch.compiler.is_compiling()

    def is_first(self, run: object) -> bool:
        """Note that a pass enters a run of blocks; return whether it is the host's: the first one in a call.

        Others come from code inside the call that runs the blocks by itself, such as a hook.
        """
        if self.outer is None:
            return False
        if torch.compiler.is_compiling():
            return True
        if run in self.begun:
            # Which passes that begin from now on are the host's is unknown.
            self.uninterrupted = False
            self.ends_for_head = False
            return False
        self.begun.add(run)
        return True


class StackCalls:
    """The calls of a stack in one thread: the running one, inside those around it.

    Attributes:
        entered: The pass that entered a block last.
        lengths: Tokens of each image of the calls that run, where a call knows more than its blocks.
    """

    def __init__(self) -> None:
        self.running = StackCall()
        self.entered: SpanPass | None = None
        self.lengths: list[tuple[int, ...]] = []
        self._patches: list[Patches] = []
        self._began = False

    def forget(self) -> None:
        """Forget what a call that ended has left."""
        self.entered = None
        self._patches = []

    def show_patches(self, patches: Patches) -> None:
        """Note what is known of patches that were made for the next pass."""
        if self._began:
            self._patches = []
        self._began = False
        self._patches = [*self._patches[1 - UNFINISHED :], patches]

    def take_patches(self) -> Patches:
        """Return what is known of the patches of a pass that begins; less where several wait for their passes."""
        self._began = True
        if not self._patches:
            return Patches()
        first, *others = self._patches
        if not others:
            return first
        return Patches(first.grid if all(other.grid == first.grid for other in others) else None)


class Decision(NamedTuple):
    """A decision of one block of a span, and what it was made by."""

    rule: Rule
    tokens: TokenMasks | TokenGroups
    routing: Routing


class SpanPass:
    """What the modules of a run share in one forward pass.

    It must not hold a tensor that is handed on: the pass is kept while that tensor lives, so neither would be freed.

    Attributes:
        place: Place of the last module that the pass entered.
        owner: The `Passes` that made it.
        shape: Shape of the first module's input (B, N).
        patches: What is known of the images' patches, where a score reads it.
        uninterrupted: See `StackCall`.
        is_first: See `StackCall.is_first`.
        ends_for_head: See `StackCall`.
        read_blocks: Numbers of the blocks whose output the host collects in an uninterrupted pass.
        busy: A module was entered and not left: it runs, or it failed.
        score_BN: Scores that all blocks read: importance, or what the first routed block computed; None before.
        trains: The score has a weight that trains.
        decisions: The decisions so far, by place.
        rows: The rows that the previous block passed on instead of all tokens, or None.
        remaining: The rows that remain where tokens leave for good; None where skipped tokens come back.
        masks: Which tokens of captions are padding, where the embedding of a text tower tells it.
    """

    masks = TokenMasks()

    def __init__(self) -> None:
        self.place = 0
        self.owner: object = None
        self.shape: tuple[int, ...] = ()
        self.patches = Patches()
        self.uninterrupted = False
        self.is_first = False
        self.ends_for_head = False
        self.read_blocks: Collection[int] = ()
        self.busy = False
        self.score_BN: Tensor | None = None
        self.trains = False
        self.decisions: dict[int, Decision] = {}
        self.rows: Rows | None = None
        self.remaining: Remaining | None = None


class _Remembered(NamedTuple):
    """A tensor between two modules, and the pass that it belongs to.

    Args:
        tensor: The tensor, or what it is a view of.
        address: Where the values of `tensor` lie.
        look: See `_look`.
    """

    tensor: weakref.ref[Tensor]
    address: int
    look: tuple[int, ...]
    found: SpanPass


class Passes:
    """Finds the forward pass that an input of one of several consecutive modules belongs to.

    - The first module begins a pass. A later one finds it by their order in an uninterrupted call.
    - In any other call a later module finds it by its input, the tensor that the module before returned.
    - Code between two modules may make a new tensor (a hook, a move to another device), and compilers cannot compare
      tensors. The input then belongs to the only unfinished pass of the running call, or outside calls to the only
      one of the thread. If there are several, the module raises instead of guessing.
    - A pass is unfinished until its last module is entered, or the call of the model in which it runs ends. After a
      failure in a module, it goes on only if that module gets the same tensor again.
    - Gradient checkpointing recomputes modules in a backward pass, perhaps in another thread. The first module of a
      segment finds the pass by its input, which is the same tensor; those after it also by the running backward pass.

    Copies and pickles know no pass.

    Args:
        calls: The calls of the stack, by thread.
        last: Place of the last module.
    """

    def __init__(self, calls: PerThread[StackCalls], last: int) -> None:
        self.calls = calls
        self.last = last
        # As a fact of its own: compilers guard on numbers that they read, and runs of other lengths share a graph.
        self.goes_on = last > 0
        self._by_address: dict[int, _Remembered] = {}
        # The pass that a backward pass recomputes in a thread, with the number of that backward pass.
        self._recomputed: PerThread[list[tuple[int, SpanPass]]] = PerThread(list)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the passes out of copies and pickles."""
        # A copy's tensors lie elsewhere, and a weak reference cannot be pickled.
        return {**vars(self), "_by_address": {}}

    def begin(self, x: Tensor) -> SpanPass:
        """Begin a pass with the input of the first module."""
        started = SpanPass()
        started.owner = self
        started.shape = tuple(x.shape[:2])
        calls = self.calls.value
        started.patches = calls.take_patches()
        call = calls.running
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != call.task:
            # A part of the model is recomputed.
            self._recomputed.value[:] = [(torch._C._current_graph_task_id(), started)]
            look = _look(x)
            match = self._by_address.get(look[0])
            if match is not None and match.look == look:
                started.patches = match.found.patches
            return started
        started.is_first = call.is_first(self)
        started.ends_for_head = started.is_first and call.ends_for_head
        started.uninterrupted = started.is_first and call.uninterrupted
        if started.uninterrupted and call.read_blocks is not None:
            # Known only now: hosts decide what to collect inside their forward.
            read = call.read_blocks()
            started.uninterrupted = read is not None
            started.read_blocks = () if read is None else read
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

    def find(self, x: Tensor, place: int | None) -> SpanPass | None:
        """Return the pass that the input of a later module belongs to; None if no pass reached it.

        Args:
            place: The module's place; None in a compiled call of the model, whose modules run in order: a graph that
                reads no place serves several modules.

        Raises:
            RuntimeError: The input may belong to several passes, or is recomputed and was never seen.
        """
        call = self.calls.value.running
        latest = call.latest
        if latest is not None and latest.owner is self and not latest.busy:
            # Nothing reads the tokens between modules: their order tells the pass, and no tensor is remembered.
            if place is None:
                return latest
            if latest.place < place:
                latest.place = place
                return latest
        found = None
        if not torch.compiler.is_compiling():
            found = self._pass_of(x)
            if torch._C._current_graph_task_id() != call.task:
                return self._find_recomputed(found)
        if found is None:
            found = self._only_unfinished(x, place, call)
            if found is None:
                return None
            if torch.compiler.is_compiling() or not x.is_inference():
                # To be found again where it is recomputed. A buffer of inference mode may hold another batch later.
                self.hand_on(found, x)
        if place is not None:
            found.place = place
            if place >= self.last and call.outer is None:
                call.passes = [other for other in call.passes if other is not found]
        return found

    def hand_on(self, current: SpanPass, y: Tensor) -> None:
        """Remember that a tensor between two modules belongs to a pass."""
        if torch.compiler.is_compiling():
            return
        look = _look(y)
        address = look[0]
        # Wrapped tensors and those on meta have no address to be told by.
        if not address:
            return
        remembered = self._by_address

        def forget(tensor: weakref.ref[Tensor]) -> None:
            # Another tensor may lie there by now.
            if address in remembered and remembered[address].tensor is tensor:
                del remembered[address]

        # FSDP2 gives a block a view of the tensor that checkpointing keeps.
        kept = y if y._base is None else y._base
        remembered[address] = _Remembered(weakref.ref(kept, forget), kept.data_ptr(), look, current)

    def follow(self, x: Tensor, y: Tensor) -> None:
        """Remember that a tensor belongs to the pass of another one, if that is known, whose values it rearranges."""
        found = None if torch.compiler.is_compiling() else self._pass_of(x)
        if found is not None:
            self.hand_on(found, y)

    def _pass_of(self, x: Tensor) -> SpanPass | None:
        """Return the pass that a tensor is remembered to belong to, or None."""
        look = _look(x)
        match = self._by_address.get(look[0])
        tensor = None if match is None or match.look != look else match.tensor()
        # Memory may be given to another tensor while the first one lives.
        if match is None or tensor is None or tensor.data_ptr() != match.address:
            return None
        return match.found

    def _only_unfinished(self, x: Tensor, place: int | None, call: StackCall) -> SpanPass | None:
        """Return the only unfinished pass that can go on at a place: of the running call, or of one around it."""
        level: StackCall | None = call
        while level is not None:
            reachable = [other for other in level.passes if other.owner is self and _can_reach(other, place)]
            if len(reachable) > 1:
                # Batches of another size cannot be meant.
                reachable = [other for other in reachable if other.shape == x.shape[:2]]
            if len(reachable) > 1:
                # Passes that were given up should raise this error only once.
                level.passes = [other for other in level.passes if all(other is not item for item in reachable)]
                raise RuntimeError(
                    f"{len(reachable)} forward passes are unfinished at this routed block, and its input is none of "
                    "the tensors that the block before returned, so the pass that it belongs to is unknown: pass the "
                    "tensors on unchanged, or run one batch after the other, or call the whole model. The unfinished "
                    "passes are forgotten now"
                )
            if reachable:
                found = reachable[0]
                if level is not call:
                    # The embedding of captions, for one, stands in front of the module that holds the blocks.
                    level.passes = [other for other in level.passes if other is not found]
                    call.passes.append(found)
                return found
            level = level.outer
        return None

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


def _can_reach(unfinished: SpanPass, place: int | None) -> bool:
    """Return whether a pass may enter a module at a place next."""
    return not unfinished.busy and (place is None or unfinished.place < place)


def _look(x: Tensor) -> tuple[int, ...]:
    """Return what a tensor is told by: where its values lie, how often they were changed in place, and their layout.

    The first number is 0 for a tensor without values of its own.
    """
    if type(x) is not Tensor or x.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return (0,)
    # Tensors of inference mode do not count changes.
    version = 0 if x.is_inference() else x._version
    return (x.data_ptr(), version, *x.shape[:2], *x.stride())
