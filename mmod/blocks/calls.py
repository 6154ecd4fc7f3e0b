"""The calls of a model in which forward passes run."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from mmod.blocks.passes import SpanPass
from mmod.config import Patches

# How many unfinished passes, and patches that wait for one, a thread remembers of a stack outside calls of the model.
UNFINISHED = 8


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
