"""The grid of patches of a forward pass: rows and columns as the host makes them, never guessed from their number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from mmod.blocks.forward_pass import PassTracker
from mmod.blocks.hook import ModelHook

Grid = tuple[int, int]
"""Rows and columns of patches."""


class GridSource(NamedTuple):
    """Where a host shows its grid.

    Args:
        module: The module that makes the patches of an image.
        read: Returns the grid from the module's output; None where a batch has no common one.
    """

    module: nn.Module
    read: Callable[[Any], Grid | None]


def grid_of_map(output: Any) -> Grid | None:
    """Return the grid of a feature map (B, C, rows, columns), which the projection to patches of most hosts returns."""
    return (output.shape[2], output.shape[3]) if isinstance(output, Tensor) and output.ndim == 4 else None


class GridHook(ModelHook):
    """Hands the grid of an image's patches to the forward pass that begins after them."""

    def __init__(self, tracker: PassTracker, read: Callable[[Any], Grid | None]) -> None:
        self.tracker = tracker
        self.read = read

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do nothing before the call."""

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Read the grid; there is no output of a call that failed."""
        self.tracker.running.next_grid = None if output is None else self.read(output)


class GridOfPass:
    """Returns the grid of the forward pass that runs in this thread; None where the host has not shown it."""

    def __init__(self, tracker: PassTracker) -> None:
        self.tracker = tracker

    def __call__(self) -> Grid | None:
        """Return rows and columns; of the patches that were just made, if no block has begun the pass."""
        running = self.tracker.running
        return running.grid if running.begun else running.next_grid
