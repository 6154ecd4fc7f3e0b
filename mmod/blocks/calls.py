"""The calls of a model, and what the blocks of a span share in the forward passes that run in them.

Axes: B images, N tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from mmod.blocks.remaining import Remaining
from mmod.blocks.rows import Rows
from mmod.config import Patches
from mmod.routing import Routing, TokenMasks

# How many unfinished passes, and patches that wait for one, a thread remembers of a stack outside calls of the model.
UNFINISHED = 8

ReadBlocks = Callable[[], Collection[int] | None]
"""Returns the numbers of the blocks whose output the running call of a host collects; None for all blocks."""


class SpanPass:
    """What the modules of a run share in one forward pass.

    It must not hold a tensor that is handed on: the pass is kept while that tensor lives, so neither would be freed.

    Attributes:
        position: Position of the last module that the pass entered.
        owner: The `Span` that made it.
        shape: Shape of the first module's input (B, N).
        patches: What is known of the images' patches, where a score reads it.
        uninterrupted: See `StackCall`.
        ends_for_head: See `StackCall`.
        read_blocks: Numbers of the blocks whose output the host collects in an uninterrupted pass.
        busy: A module was entered and not left: it runs, or it failed.
        score_BN: Scores that all blocks read: importance, or what the first routed block computed; None before.
        trains: The score has a weight that trains.
        decisions: The decisions so far, by position.
        rows: The rows that the previous block passed on instead of all tokens, or None.
        remaining: The rows that remain where tokens leave for good; None where skipped tokens come back.
        read_B1: The token that the embedding of a caption is read from (B, 1), where a text tower reads one.
        masks: Which tokens of captions are padding, once a block has read them.
    """

    # Of captions alone: passes of images, which are most, set neither.
    read_B1: Tensor | None = None
    masks: TokenMasks | None = None

    def __init__(self) -> None:
        self.position = 0
        self.owner: object = None
        self.shape: tuple[int, ...] = ()
        self.patches = Patches()
        self.uninterrupted = False
        self.ends_for_head = False
        self.read_blocks: Collection[int] = ()
        self.busy = False
        self.score_BN: Tensor | None = None
        self.trains = False
        self.decisions: dict[int, Routing] = {}
        self.rows: Rows | None = None
        self.remaining: Remaining | None = None


class StackCall:
    """A call of the module that owns a stack of blocks; the root, without `outer`, stands for code outside such calls.

    Args:
        outer: The call around it in this thread, if any.
        uninterrupted: The host's own code runs the blocks in order, and nothing reads the tokens between them. Blocks
            may then pass on rows, and tensors are not remembered.
        read_blocks: Returns the numbers of the blocks whose output the host collects in the running call; None for all.
        awaits_features: The host's `forward` will run its `forward_features`, which belongs to the same call.

    Attributes:
        passes: Observed passes that began in it, oldest first.
        latest: The uninterrupted pass that began last.
        ends_for_head: The head reads the remaining rows, so the last block of the host's pass restores no token.
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
        self._inside = False
        self._began = False

    def forget(self) -> None:
        """Forget what a call that ended has left."""
        self.entered = None
        self._patches = []

    def show_patches(self, patches: Patches) -> None:
        """Note what is known of patches that were made for the next pass."""
        # What earlier passes have taken is over, and what was made before this call. All others wait, as in stages.
        inside = self.running.outer is not None
        if self._began or inside is not self._inside:
            self._patches = []
        self._inside = inside
        self._began = False
        self._patches = [*self._patches[1 - UNFINISHED :], patches]

    def take_patches(self) -> Patches:
        """Return what is known of the patches of a pass that begins; less where several wait for their passes."""
        self._began = True
        first, *others = self._patches or [Patches()]
        if not others:
            return first
        # Which of them are this pass's is unknown: only a grid that all have holds for it.
        if all(other.grid == first.grid for other in others):
            return Patches(first.grid)
        return Patches()
