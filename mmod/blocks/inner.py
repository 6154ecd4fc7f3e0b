"""What a running block tells modules inside it: how they run, and a norm that was computed already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from mmod.threads import PerThread

Runner = Callable[[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]], Any]
"""Runs a module of the running block otherwise than its host does, from the host's forward and a call's arguments."""


class Inner:
    """What a running block tells its modules, in one thread.

    Attributes:
        runners: What runs in the place of modules, by their names in the block; the others run as in the host.
        expects_batch: A module that runs otherwise, or what reads the attention, expects all images in a batch.
        normed: Rows and their first norm, if the kernel that gathered them computed it.
    """

    def __init__(self) -> None:
        self.runners: Mapping[str, Runner] = {}
        self.expects_batch = False
        self.normed: tuple[Tensor, Tensor] | None = None


@contextmanager
def running(inner: PerThread[Inner], runners: Mapping[str, Runner], expects_batch: bool = True) -> Iterator[None]:
    """Context in which some modules of a block run in another way, and the others as around it."""
    current = inner.value
    # A hook inside the block may call the model again.
    outer = current.runners
    in_batch = current.expects_batch
    current.runners = {**outer, **runners}
    current.expects_batch = in_batch or expects_batch
    try:
        yield
    finally:
        current.runners = outer
        current.expects_batch = in_batch
