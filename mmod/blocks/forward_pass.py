"""The forward pass of a stack of blocks, and what its modules share in it."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

import torch
from torch import Tensor

from mmod.routing import Router, Routing, TokenMarks
from mmod.routing.rule import PerThread

T = TypeVar("T")


class SharedScore:
    """Scores that all routed blocks of a span read, and what was decided on them so far.

    A span is a run of consecutive routed blocks.

    Args:
        score_BN: Importance in the dense block before the span, or what its first block drew (B, N).
    """

    def __init__(self, score_BN: Tensor) -> None:
        self.score_BN = score_BN
        # By falling capacity, where tokens join others; parts of the pass that run again find each its own.
        self._decided: list[tuple[Router, tuple[object, ...], Routing]] = []

    @property
    def latest(self) -> Routing | None:
        """What the span decided last, if anything."""
        return self._decided[-1][2] if self._decided else None

    def decided(self, router: Router, tokens: tuple[object, ...], device: torch.device) -> Routing | None:
        """Return what an earlier block decided on these scores by the same rule, if one did.

        Args:
            router: The block's router.
            tokens: What else the decision depends on: which tokens are padding, protected, or in which group.
            device: Where the block is; the blocks of a span may lie on several devices.
        """
        for earlier, seen, routing in reversed(self._decided):
            if earlier.config is router.config and earlier.capacity == router.capacity:
                if router.config.joins:
                    return routing.to(device)
                if routing.kept.index_BK.device == device and all(a is b for a, b in zip(seen, tokens)):
                    return routing
        return None

    def before(self, router: Router, device: torch.device) -> Routing | None:
        """Return the decision on whose rows the attention of a block runs that decides after it, None for all tokens.

        Args:
            router: The block's router.
            device: Where the block is.
        """
        earlier = None
        for other, _, routing in self._decided:
            # A part of the pass that runs again finds what it has decided, and what was decided after it.
            if other is router:
                break
            earlier = routing
            if other.capacity == router.capacity:
                break
        return None if earlier is None or earlier.joined.slot_BN is None else earlier.to(device)

    def remember(self, router: Router, tokens: tuple[object, ...], routing: Routing) -> None:
        """Keep a decision for the blocks that follow."""
        if self.latest is not routing:
            self._decided.append((router, tokens, routing))


class ForwardPass:
    """What the modules of one stack of blocks share in one forward pass, and cannot hand on through the host's code.

    Life cycle, kept by `PassTracker`, of which a stack has one:

    - The first converted module that runs begins the pass: the token embedding of a text tower, which knows its
      captions, or the first converted block. Whatever an aborted pass left behind is out of sight from then on.
    - Each thread has a running pass; between passes it is an empty one. A block asks for it once, by its input, and
      writes or reads shared scores. When it leaves, the pass that it entered runs again, whatever was called inside.
    - The last routed block ends the pass, and nothing is left in the tracker.
    - Gradient checkpointing runs segments again, in a backward pass, perhaps in another thread and after other passes.
      A block that starts such a segment gets the input it had at first: by that, each input remembers its pass for as
      long as it lives. Blocks that follow in the same segment find the pass that runs in this backward pass.

    Attributes:
        begun: A module has begun it; False between passes.
        scores: Shared scores by the first block of their span. They stay to the end of the pass, for segments that run
            again.
        tokens: What is known of a batch of captions, None for images.
        holds_rows: Blocks of a span may hand on rows in the place of all tokens.
        next_holds_rows: They may in the pass that the call of the model will begin.
        held: The rows that the block before has handed on, a `Rows`, or None if it did not.
        task: The backward pass that it was last used in, -1 for none.
        normed: Kept rows of the running block, and what its first norm makes of them.
        branch: How the branches of the running block run, a `BranchRows` or `WeighedBranch`; None as the host's do.
    """

    def __init__(self, holds_rows: bool = False, begun: bool = False, task: int = -1) -> None:
        self.begun = begun
        self.scores: dict[int, SharedScore] = {}
        self.tokens: TokenMarks | None = None
        self.holds_rows = holds_rows
        self.next_holds_rows = False
        self.held: Any = None
        self.task = task
        self.normed: tuple[Tensor, Tensor] | None = None
        self.branch: Any = None
        self._slots: dict[type, Any] = {}

    def slot(self, owner: type[T]) -> T:
        """Return what one sort of module keeps in this pass, an object of its class, made when first asked for."""
        if owner not in self._slots:
            self._slots[owner] = owner()
        value: T = self._slots[owner]
        return value


class _Current:
    """Refers to the running pass of a thread."""

    def __init__(self) -> None:
        self.forward_pass = ForwardPass()


class PassTracker:
    """Finds the forward pass that a module of one stack runs in, see `ForwardPass`; copies and pickles know none.

    Example:
        >>> tracker, x = PassTracker(), torch.zeros(1)
        >>> begun = tracker.begin()
        >>> tracker.of(x) is begun
        True
        >>> tracker.leave(None)
        >>> tracker.of(x)
    """

    def __init__(self) -> None:
        self._threads = PerThread(_Current)
        self._remembered: dict[int, tuple[weakref.ref[Tensor], ForwardPass]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Make an empty one in its place."""
        return type(self), ()

    @property
    def running(self) -> ForwardPass:
        """The pass that runs in this thread, an empty one between passes."""
        return self._threads.value.forward_pass

    def begin(self) -> ForwardPass:
        """Begin a pass in this thread."""
        before = self.running
        # For one pass: a call that is interrupted does not hear of its end.
        holds_rows, before.next_holds_rows = before.next_holds_rows, False
        return self._run(ForwardPass(holds_rows, begun=True))

    def resume(self) -> ForwardPass:
        """Return the running pass for a block that only writes; begin one where none runs, or a segment runs again."""
        running = self.running
        return running if running.begun and not recomputing() else self.begin()

    def of(self, x: Tensor) -> ForwardPass | None:
        """Return the pass that a block's input belongs to, or None where none was begun.

        Args:
            x: The block's input.

        Raises:
            RuntimeError: Gradient checkpointing runs the block again, but on an input that it never had.
        """
        if recomputing():
            return self._recomputed(x)
        running = self.running
        if not running.begun:
            return None
        if not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
            self._remember(x, running)
        return running

    def leave(self, forward_pass: ForwardPass | None) -> None:
        """Leave a block.

        Args:
            forward_pass: The pass that goes on, None where the block was the last of it.
        """
        current = self._threads.value
        current.forward_pass = ForwardPass(task=current.forward_pass.task) if forward_pass is None else forward_pass

    def _run(self, forward_pass: ForwardPass) -> ForwardPass:
        self._threads.value.forward_pass = forward_pass
        if not torch.compiler.is_compiling():
            forward_pass.task = torch._C._current_graph_task_id()
        return forward_pass

    def _remember(self, x: Tensor, forward_pass: ForwardPass) -> None:
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            return
        remembered, address = self._remembered, x.data_ptr()
        remembered[address] = (weakref.ref(x, lambda _: remembered.pop(address, None)), forward_pass)

    def _recomputed(self, x: Tensor) -> ForwardPass | None:
        match = self._remembered.get(x.data_ptr())
        if match is not None:
            return self._run(match[1])
        running = self.running
        if running.task == torch._C._current_graph_task_id():
            return running if running.begun else None
        raise RuntimeError(
            "gradient checkpointing runs a routed block again on an input that it never had: checkpointing that "
            "moves or copies inputs in between cannot be combined with this router"
        )


def recomputing() -> bool:
    """Whether this code runs inside a backward pass, that is, recomputes a checkpointed forward."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1
