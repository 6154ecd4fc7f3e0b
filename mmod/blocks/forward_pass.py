"""What modules of one model tell each other during a forward pass, apart for every thread that runs one.

A routed block reads what a block before it computed. The host's own code stands between the two, so the value cannot
travel as an argument. It is kept for the thread that runs the pass, and taken away where the last reader has read it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class PerThread(threading.local, Generic[T]):
    """One object for each thread, made when the thread first asks; copies and pickles start anew.

    Args:
        make: Makes the object. It is a plain one, whose attributes compilers can follow.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self.make = make
        self.own = make()

    def __reduce__(self) -> tuple[Any, ...]:
        """Make another in its place."""
        return type(self), (self.make,)


class _Slot:
    def __init__(self) -> None:
        self.value: Any = None
        self.task = -1


class PassValue(Generic[T]):
    """A value that belongs to the forward pass of one thread; copies and pickles hold none.

    Example:
        >>> value = PassValue()
        >>> value.put(3)
        >>> value.get(), value.take(), value.get()
        (3, 3, None)
    """

    def __init__(self) -> None:
        self._slot = PerThread(_Slot)

    def __reduce__(self) -> tuple[Any, ...]:
        """Make an empty one in its place."""
        return type(self), ()

    def put(self, value: T | None) -> None:
        """Leave a value for the modules that follow."""
        self._slot.own.value = value

    def get(self) -> T | None:
        """Return what was left, or None."""
        value: T | None = self._slot.own.value
        return value

    def take(self) -> T | None:
        """Return what was left, or None, and leave nothing behind."""
        value = self.get()
        self._slot.own.value = None
        return value


class ReplayedValue(PassValue[T]):
    """A value that is found again when gradient checkpointing runs a part of the pass a second time.

    The second run may happen in another thread, and after other passes. It has the input that the reader had at first,
    by which the value is remembered for as long as that input lives.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, tuple[weakref.ref[Tensor], T]] = {}

    def put(self, value: T | None) -> None:
        """Leave a value for the modules that follow."""
        slot = self._slot.own
        slot.value = value
        if not torch.compiler.is_compiling():
            slot.task = torch._C._current_graph_task_id()

    def of(self, x: Tensor, last: bool = False) -> T | None:
        """Return the value of the pass that a reader's input belongs to, or None where none was left.

        Args:
            x: The reader's input.
            last: Nobody reads the value of this pass again.

        Raises:
            RuntimeError: Gradient checkpointing runs the reader again, but on an input that it has not seen.
        """
        if recomputing():
            return self._replayed(x)
        value = self.take() if last else self.get()
        if value is not None and not torch.compiler.is_compiling() and not torch.is_inference_mode_enabled():
            self._remember(x, value)
        return value

    def _remember(self, x: Tensor, value: T) -> None:
        if torch._C._functorch.is_functorch_wrapped_tensor(x):
            return
        seen, address = self._seen, x.data_ptr()
        seen[address] = (weakref.ref(x, lambda _: seen.pop(address, None)), value)

    def _replayed(self, x: Tensor) -> T | None:
        found = self._seen.get(x.data_ptr())
        if found is not None:
            # Readers that follow in the same checkpointed part have inputs that are new.
            self.put(found[1])
            return found[1]
        if self._slot.own.task == torch._C._current_graph_task_id():
            # Left in this very backward pass, by what computes it or by a reader before.
            return self.get()
        raise RuntimeError(
            "gradient checkpointing runs a routed block again on an input that it has not seen: checkpointing that "
            "moves or copies inputs in between cannot be combined with this router"
        )


def recomputing() -> bool:
    """Whether this code runs inside a backward pass, that is, recomputes a checkpointed forward."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1
