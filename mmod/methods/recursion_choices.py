"""What the recursions of a model chose, and how they choose in evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from mmod.methods.recursions import Cycle
from mmod.routing import Routing


def cycle_of(model: nn.Module) -> Cycle | None:
    """Return the shared blocks of a model; None where it has none.

    Args:
        model: Any model.
    """
    return next((module for module in model.modules() if isinstance(module, Cycle)), None)


@contextmanager
def choosing_together(cycle: Cycle) -> Iterator[None]:
    """Let recursions choose the highest gates of whole texts, as in training, for as long as the context lasts.

    Args:
        cycle: The shared blocks.
    """
    state, own = cycle.mod_state, cycle.mod_state.config
    state.config = replace(own, sampling=None)
    try:
        yield
    finally:
        state.config = own


@contextmanager
def deciding(cycle: Cycle) -> Iterator[list[Routing]]:
    """Record the decision of each recursion, of the last pass that this thread makes in the context.

    Args:
        cycle: The shared blocks.

    Yields:
        The decisions, filled by each pass.
    """
    records = cycle.mod_state.records.own
    found: list[Routing] = []
    records.decisions = found
    try:
        yield found
    finally:
        records.decisions = None
