"""The forward pass of a stack of blocks, and what its modules share in it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from mmod.routing import Router, Routing, TokenMarks
from mmod.routing.rule import PerThread


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
                if routing.index_BK.device == device and all(a is b for a, b in zip(seen, tokens)):
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
        return None if earlier is None or earlier.join_BN is None else earlier.to(device)

    def remember(self, router: Router, tokens: tuple[object, ...], routing: Routing) -> None:
        """Keep a decision for the blocks that follow."""
        if self.latest is not routing:
            self._decided.append((router, tokens, routing))


class ForwardPass:
    """What the modules of one stack of blocks share in one forward pass, and cannot hand on through the host's code.

    Life cycle, kept by `PassTracker`, of which a stack has one:

    - The first converted module that runs begins the pass: the token embedding of a text tower, which knows its
      captions, or the first converted block. Whatever an aborted pass left behind is out of sight from then on.
    - Each thread has a running pass of its own. A block asks for it once, by its input, and writes or reads shared
      scores. When it leaves, the pass that it entered runs again, whatever was called inside the block.
    - The last routed block ends the pass, and nothing is left in the tracker.
    - Gradient checkpointing runs parts again, in a backward pass, perhaps in another thread and after other passes.
      A block that starts such a part gets the input it had at first: by that, each input remembers its pass for as
      long as it lives. Blocks that follow in the same part find the pass that runs in this backward pass.

    Attributes:
        scores: Shared scores by the first block of their span. They stay to the end of the pass, for parts that run
            again.
        tokens: What is known of a batch of captions, None for images.
        holds_rows: Blocks of a span may hand on rows in the place of all tokens.
        held: The rows that the block before has handed on, a `Rows`, or None if it did not.
    """

    def __init__(self, holds_rows: bool = False) -> None:
        self.scores: dict[int, SharedScore] = {}
        self.tokens: TokenMarks | None = None
        self.holds_rows = holds_rows
        self.held: Any = None


class _Running:
    """What runs in one thread.

    Attributes:
        forward_pass: The running pass, if any.
        task: The backward pass that it was last used in, -1 for none.
        normed: Kept rows of the running block, and what its first norm makes of them.
        branch: How the branches of the running block run, a `BranchRows` or `WeighedBranch`; None as the host's do.
        holds_rows: See `ForwardPass`; of the pass that the call of the model will begin.
    """

    def __init__(self) -> None:
        self.holds_rows = False
        self.forward_pass: ForwardPass | None = None
        self.task = -1
        self.normed: tuple[Tensor, Tensor] | None = None
        self.branch: Any = None


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
        self._threads = PerThread(_Running)
        self._seen: dict[int, tuple[weakref.ref[Tensor], ForwardPass]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Make an empty one in its place."""
        return type(self), ()

    @property
    def running(self) -> _Running:
        """What runs in this thread."""
        return self._threads.own

    def begin(self) -> ForwardPass:
        """Begin a pass in this thread."""
        running = self.running
        # For one pass: a call that is interrupted is not told of its end.
        holds_rows, running.holds_rows = running.holds_rows, False
        return self._run(ForwardPass(holds_rows))

    def resume(self) -> ForwardPass:
        """Return the running pass for a block that only writes; begin one where none runs, or a part runs again."""
        running = self.running.forward_pass
        return self.begin() if running is None or recomputing() else running

    def of(self, x: Tensor) -> ForwardPass | None:
        """Return the pass that a block's input belongs to, or None where none was begun.

        Args:
            x: The block's input.

        Raises:
            RuntimeError: Gradient checkpointing runs the block again, but on an input that it has not seen.
        """
        if recomputing():
            return self._recomputed(x)
        running = self.running.forward_pass
        if running is not None and not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
            self._remember(x, running)
        return running

    def leave(self, forward_pass: ForwardPass | None) -> None:
        """Leave a block.

        Args:
            forward_pass: The pass that goes on, None where the block was the last of it.
        """
        self.running.forward_pass = forward_pass

    def _run(self, forward_pass: ForwardPass) -> ForwardPass:
        running = self.running
        running.forward_pass = forward_pass
        if not torch.compiler.is_compiling():
            running.task = torch._C._current_graph_task_id()
        return forward_pass

    def _remember(self, x: Tensor, forward_pass: ForwardPass) -> None:
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            return
        seen, address = self._seen, x.data_ptr()
        seen[address] = (weakref.ref(x, lambda _: seen.pop(address, None)), forward_pass)

    def _recomputed(self, x: Tensor) -> ForwardPass | None:
        found = self._seen.get(x.data_ptr())
        if found is not None:
            return self._run(found[1])
        if self.running.task == torch._C._current_graph_task_id():
            return self.running.forward_pass
        raise RuntimeError(
            "gradient checkpointing runs a routed block again on an input that it has not seen: checkpointing that "
            "moves or copies inputs in between cannot be combined with this router"
        )


def recomputing() -> bool:
    """Whether this code runs inside a backward pass, that is, recomputes a checkpointed forward."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1
