"""State of which each thread has its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerThread(threading.local, Generic[T]):
    """One object for each thread, made when the thread first reads it; copies and pickles start anew.

    Args:
        make: Makes the object: a plain one, whose attributes compilers can follow.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self.make = make
        self.value = make()

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.make,)
