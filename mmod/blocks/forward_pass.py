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
    """Scores that a span, a run of consecutive routed blocks, reads, and the decisions on them so far.

    Args:
        score_BN: Importance in the dense block before the span, or what its first block drew (B, N).
        trains: The score has a weight that trains.
    """

    def __init__(self, score_BN: Tensor, trains: bool = False) -> None:
        self.score_BN = score_BN
        self.trains = trains
        # By falling capacity, where tokens join others; a segment that is recomputed finds its decision again.
        self._decided: list[tuple[Router, tuple[object, ...], Routing]] = []

    @property
    def latest(self) -> Routing | None:
        """The span's last decision, if any."""
        return self._decided[-1][2] if self._decided else None

    def decided(self, router: Router, tokens: tuple[object, ...], device: torch.device) -> Routing | None:
        """Return an earlier block's decision by the same rule on the same tokens, on the block's device; or None."""
        for earlier, marks, routing in reversed(self._decided):
            if earlier.config is router.config and earlier.capacity == router.capacity:
                if router.config.joins:
                    return routing.to(device)
                if routing.kept.index_BK.device == device and all(a is b for a, b in zip(marks, tokens)):
                    return routing
        return None

    def before(self, router: Router, device: torch.device) -> Routing | None:
        """Return the decision whose rows a block's attention runs on before the block decides; None for all tokens."""
        earlier = None
        for other, _, routing in self._decided:
            # A recomputed segment finds its decision, and those after it.
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
    """What the modules of a stack share in a forward pass, because the host's code does not pass it on.

    Life cycle, kept by the stack's `PassTracker`:

    - The first converted module begins the pass: the token embedding of a text tower, or the first converted block.
      This hides what an aborted pass left behind.
    - Each thread has a running pass, an empty one between passes. A block looks it up once, by its input. When the
      block leaves, the pass that it entered is the running one again.
    - The last routed block ends the pass.
    - Gradient checkpointing recomputes segments in a backward pass, perhaps in another thread and after other passes.
      The first block of a segment finds the pass by its input, which is the same tensor; the others find the pass that
      runs in this backward pass.

    Attributes:
        begun: False for the empty pass between two others.
        scores: Shared scores by the first block of their span, kept to the end for recomputed segments.
        grid: Rows and columns of the images' patches, where a score reads them; else None.
        holds_rows: Blocks of a span may pass on rows instead of all tokens.
        held: The `Rows` that the previous block passed on, or None.
        task: The backward pass that last used it, -1 for none.
        branch: How branches of the running block run: `BranchRows`, `WeighedBranch` or a mode; None as in the host.
    """

    def __init__(self, holds_rows: bool = False, begun: bool = False, task: int = -1) -> None:
        self.begun = begun
        self.scores: dict[int, SharedScore] = {}
        self.tokens: TokenMarks | None = None
        self.holds_rows = holds_rows
        self.next_holds_rows = False
        self.grid: tuple[int, int] | None = None
        self.next_grid: tuple[int, int] | None = None
        self.held: Any = None
        self.task = task
        self.normed: tuple[Tensor, Tensor] | None = None
        self.branch: Any = None
        self._slots: dict[type, Any] = {}

    def slot(self, owner: type[T]) -> T:
        """Return this pass's object of a class that a method keeps its state in, made on first use."""
        if owner not in self._slots:
            self._slots[owner] = owner()
        return self._slots[owner]


class _Current:
    """The running pass of a thread."""

    def __init__(self) -> None:
        self.running = ForwardPass()


class PassTracker:
    """Finds the forward pass that a module of a stack runs in, see `ForwardPass`; copies and pickles start anew."""

    def __init__(self) -> None:
        self.thread = PerThread(_Current)
        self._remembered: dict[int, tuple[weakref.ref[Tensor], ForwardPass]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    @property
    def running(self) -> ForwardPass:
        """The pass that runs in this thread, an empty one between passes."""
        return self.thread.value.running

    def begin(self, x: Tensor | None = None) -> ForwardPass:
        """Begin a pass in this thread, with the input of its first block; without one where no block begins it."""
        before = self.running
        # For one pass only: an interrupted call is not told of its end.
        forward_pass = ForwardPass(before.next_holds_rows, begun=True)
        forward_pass.grid = before.next_grid
        before.next_holds_rows = False
        before.next_grid = None
        if x is not None:
            self._keep_grid(x, forward_pass)
        return self._run(forward_pass)

    def _keep_grid(self, x: Tensor, forward_pass: ForwardPass) -> None:
        """Keep the grid with the first block's input, by which a recomputed block finds it again."""
        if recomputing():
            match = self._remembered.get(x.data_ptr())
            if match is not None:
                forward_pass.grid = match[1].grid
        elif forward_pass.grid is not None and not _keeps_nothing():
            self._remember(x, forward_pass)

    def resume(self) -> ForwardPass:
        """Return the running pass for a block that only writes; begin one if none runs, or a segment is recomputed."""
        running = self.running
        return running if running.begun and not recomputing() else self.begin()

    def of(self, x: Tensor) -> ForwardPass | None:
        """Return the pass that a block's input belongs to, or None if none was begun."""
        if recomputing():
            return self._recomputed(x)
        running = self.running
        if not running.begun:
            return None
        # A pass whose blocks hand on rows is run again as a whole, if at all.
        if not running.holds_rows and not _keeps_nothing():
            self._remember(x, running)
        return running

    def leave(self, forward_pass: ForwardPass | None) -> None:
        """Leave a block: its pass goes on, or ends for None."""
        current = self.thread.value
        current.running = ForwardPass(task=current.running.task) if forward_pass is None else forward_pass

    def _run(self, forward_pass: ForwardPass) -> ForwardPass:
        self.thread.value.running = forward_pass
        if not torch.compiler.is_compiling():
            forward_pass.task = torch._C._current_graph_task_id()
        return forward_pass

    def _remember(self, x: Tensor, forward_pass: ForwardPass) -> None:
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            return
        remembered, address = self._remembered, x.data_ptr()
        # FSDP2 gives a block a view of the input that checkpointing keeps.
        kept = x if x._base is None else x._base
        remembered[address] = (weakref.ref(kept, lambda _: remembered.pop(address, None)), forward_pass)

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


def _keeps_nothing() -> bool:
    """Whether no input of this code is kept for a backward pass that Python runs."""
    return torch.compiler.is_compiling() or torch.is_inference_mode_enabled()


def recomputing() -> bool:
    """Whether this code runs inside a backward pass, that is, recomputes a checkpointed forward."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1
