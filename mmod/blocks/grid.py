"""The grid of patches of a forward pass: rows and columns as the host makes them, never guessed from their number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from mmod.blocks.hook import ModelHook
from mmod.blocks.passes import Grid, StackCalls
from mmod.threads import PerThread


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

    def __init__(self, calls: PerThread[StackCalls], read: Callable[[Any], Grid | None]) -> None:
        self.calls = calls
        self.read = read

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do nothing before the call."""

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Read the grid; there is no output of a call that failed."""
        if output is not None:
            self.calls.value.show_grid(self.read(output))


class GridOfPass:
    """Returns the grid of the forward pass that entered a block last in this thread; None if it is unknown."""

    def __init__(self, calls: PerThread[StackCalls]) -> None:
        self.calls = calls

    def __call__(self) -> Grid | None:
        """Return rows and columns."""
        entered = self.calls.value.entered
        return None if entered is None else entered.grid
