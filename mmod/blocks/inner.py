"""What a running block tells modules inside it: how a branch runs, and a norm that was computed already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from mmod.threads import PerThread


class BranchRunner(Protocol):
    """Runs a branch of the running block otherwise than its host does."""

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the output of the branch, from its host's forward and the arguments of the call."""


NOTHING_SILENT: Mapping[str, BranchRunner] = MappingProxyType({})


class Inner:
    """What a running block tells its modules, in one thread.

    Attributes:
        runner: Runs the block's branches; None as in the host.
        observed: The attention is read from around the block.
        silent: What runs in the place of modules while the other half of the block runs alone, by their names.
        normed: Rows and their first norm, if the kernel that gathered them computed it.
    """

    def __init__(self) -> None:
        self.runner: BranchRunner | None = None
        self.observed = False
        self.silent = NOTHING_SILENT
        self.normed: tuple[Tensor, Tensor] | None = None

    @property
    def expects_batch(self) -> bool:
        """Whether a branch that runs otherwise, or what reads the attention, expects all images in a batch."""
        return self.runner is not None or self.observed


@contextmanager
def running_branch(inner: PerThread[Inner], runner: BranchRunner) -> Iterator[None]:
    """Context in which the branches of a block run in a certain way."""
    current = inner.value
    # A hook inside the block may call the model again.
    outer = current.runner
    current.runner = runner
    try:
        yield
    finally:
        current.runner = outer


@contextmanager
def silencing(inner: PerThread[Inner], silent: Mapping[str, BranchRunner]) -> Iterator[None]:
    """Context in which some modules of a block do nothing."""
    current = inner.value
    outer = current.silent
    current.silent = silent
    try:
        yield
    finally:
        current.silent = outer
