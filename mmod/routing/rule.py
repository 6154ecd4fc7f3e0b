"""How a router decides in the passes of one thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Generic, NamedTuple, TypeVar

from mmod.config import RoutingConfig
from mmod.routing.partial import PartialSlots

T = TypeVar("T")


class PerThread(threading.local, Generic[T]):
    """One object for each thread, made when the thread first asks; copies and pickles start anew.

    Args:
        make: Makes the object: a plain one, whose attributes compilers can follow.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self.make = make
        self.value = make()

    def __reduce__(self) -> tuple[Any, ...]:
        """Make another in its place."""
        return type(self), (self.make,)


class Rule(NamedTuple):
    """What a router decides by.

    Args:
        config: How to score, select and gate; the score is the router's whatever the config says.
        capacity: Share of tokens kept.
        partial: Slots at a part of their weight, while the capacity is learned; None where every slot runs in full.
    """

    config: RoutingConfig
    capacity: Fraction
    partial: PartialSlots | None = None
