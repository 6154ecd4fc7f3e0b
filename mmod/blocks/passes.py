"""Forward passes, and the calls of a model in which they run.

Axes: B images, N tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import FrameType

import torch

# How many unfinished passes, and grids that wait for one, a thread remembers of a stack outside calls of the model.
UNFINISHED = 8


def recomputing() -> bool:
    """Return whether this code runs inside a backward pass, that is, recomputes a checkpointed forward."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1


ReadBlocks = Callable[[], Collection[int] | None]
"""Returns the numbers of the blocks whose output the running call of a host collects; None for all blocks."""


class StackCall:
    """A call of the module that holds a stack of blocks; the root, without `outer`, stands for code outside any.

    Args:
        outer: The call around it in this thread, if any.
        unobserved: The host's own code runs the blocks in order, and nothing reads the tokens between them. Blocks may
            then pass on rows, and tensors are not remembered.
        host: Package of the host's code.
        frame: The frame of the call; None for the root and while compiling.
        read_blocks: Returns the numbers of the blocks whose output the host collects in the running call; None for all.

    Attributes:
        passes: Observed passes that began in it, or came from a call around it, oldest first.
        latest: The unobserved pass that began last.
        task: The backward pass in which the call began, which then recomputes the model as a whole; -1 for none.
    """

    def __init__(
        self,
        outer: StackCall | None = None,
        unobserved: bool = False,
        host: str = "",
        frame: FrameType | None = None,
        read_blocks: ReadBlocks | None = None,
    ) -> None:
        self.outer = outer
        self.unobserved = unobserved
        self.host = host
        self.frame = frame
        self.read_blocks = read_blocks
        self.passes: list[Pass] = []
        self.latest: Pass | None = None
        # A thread may meet a stack for the first time inside a backward pass: the root began before it.
        self.task = -1
        if outer is not None and not torch.compiler.is_compiling():
            self.task = torch._C._current_graph_task_id()


Grid = tuple[int, int]
"""Rows and columns of patches."""


class StackCalls:
    """The calls of a stack in one thread: the running one, inside those around it.

    Attributes:
        entered: The pass that entered a block last.
    """

    def __init__(self) -> None:
        self.running = StackCall()
        self.entered: Pass | None = None
        self._grids: list[Grid | None] = []
        self._began = False

    def begin(self, call: StackCall) -> None:
        """Begin a call of the module that holds the blocks, inside the running one."""
        self.running = call

    def end(self) -> None:
        """End the running call, with its unfinished passes."""
        if self.running.outer is not None:
            self.running = self.running.outer
        self.entered = None
        self._grids = []

    def current(self) -> tuple[StackCall, bool]:
        """Return the call that this code runs in, and whether the host's code alone leads here from its beginning.

        A KeyboardInterrupt ends a call without a word, because torch runs hooks after an `Exception` only; and a hook
        inside a call may run the blocks by itself. Both show in the frames.
        """
        if torch.compiler.is_compiling():
            return self.running, True
        while self.running.frame is not None and self.running.outer is not None:
            packages = _packages_since(self.running.frame)
            if packages is not None:
                return self.running, packages <= {self.running.host, "torch", "mmod"}
            self.running = self.running.outer
        return self.running, True

    def show_grid(self, grid: Grid | None) -> None:
        """Take the grid of patches that were made for the next pass."""
        if self._began:
            self._grids = []
        self._began = False
        self._grids = [*self._grids[1 - UNFINISHED :], grid]

    def take_grid(self) -> Grid | None:
        """Return the grid of a pass that begins; None where patches of several grids wait for their passes."""
        self._began = True
        if any(grid != self._grids[0] for grid in self._grids):
            return None
        return self._grids[0] if self._grids else None


def _packages_since(beginning: FrameType) -> set[str] | None:
    """Return the packages whose code runs between a frame and here; None if the frame does not run any more."""
    packages = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not beginning:
        if frame is None:
            return None
        packages.add(str(frame.f_globals.get("__name__", "")).partition(".")[0])
        frame = frame.f_back
    return packages


class Pass:
    """What the modules of a run share in one forward pass; what they share in particular derives from it.

    It must not hold a tensor that is handed on: the pass is kept while that tensor lives, so neither would be freed.

    Attributes:
        place: Place of the last module that the pass entered.
        owner: The `Passes` that made it.
        shape: Shape of the first module's input (B, N).
        grid: Rows and columns of the images' patches, where a score reads them; else None.
        unobserved: See `StackCall`.
        by_host: The host's own code runs the modules, in a call of the model.
        read_blocks: Numbers of the blocks whose output the host collects in an unobserved pass.
        busy: A module was entered and not left: it runs, or it failed.
    """

    def __init__(self) -> None:
        self.place = 0
        self.owner: object = None
        self.shape: tuple[int, ...] = ()
        self.grid: Grid | None = None
        self.unobserved = False
        self.by_host = False
        self.read_blocks: Collection[int] = ()
        self.busy = False
