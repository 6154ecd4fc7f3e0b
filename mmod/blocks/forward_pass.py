"""The forward pass of blocks that change the number of tokens or images, and what its modules share in it."""

from __future__ import annotations

from typing import Any, TypeVar

from mmod.threads import PerThread

T = TypeVar("T")


class ForwardPass:
    """What the modules of a stack share in a forward pass: one object of each class that a method keeps state in.

    Attributes:
        begun: False for the empty pass between two others.
    """

    def __init__(self, begun: bool = False) -> None:
        self.begun = begun
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
    """Holds the running forward pass of a stack in each thread; copies and pickles start anew."""

    def __init__(self) -> None:
        self.thread = PerThread(_Current)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    @property
    def running(self) -> ForwardPass:
        """The pass that runs in this thread, an empty one between passes."""
        return self.thread.value.running

    def begin(self) -> ForwardPass:
        """Begin a pass in this thread, which hides what an aborted one left behind."""
        self.thread.value.running = ForwardPass(begun=True)
        return self.running

    def end(self) -> None:
        """End the running pass."""
        self.thread.value.running = ForwardPass()
