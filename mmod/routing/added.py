"""Modules that a method adds, whose weights are drawn once a model that was made on the meta device gets memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Added(nn.Module):
    """A module with weights that a method adds, and that a dense checkpoint lacks.

    Attributes:
        mod_emptied: The weights left the meta device and got memory, but no values.
    """

    mod_emptied: bool = False

    def mod_lacks_values(self) -> bool:
        """Return whether some weights have no values."""
        return self.mod_emptied or any(weight.is_meta for weight in self.parameters())

    def mod_fill(self, device: torch.device) -> None:
        """Give the weights their initial values, after a dense checkpoint was loaded; by default they get none."""

    def mod_leave_meta(self) -> None:
        """Record that the weights left the meta device and have no values yet."""
        self.mod_emptied = True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Added:
        """Apply a function to the weights, as `to_empty` does."""
        was_meta = any(weight.is_meta for weight in self.parameters())
        super()._apply(fn, recurse)
        if was_meta and not any(weight.is_meta for weight in self.parameters()):
            self.mod_leave_meta()
        return self


class Drawn(Added):
    """A module that draws the weight that a method adds.

    Attributes:
        drawn: The weights were drawn; False on the meta device, after which a host may say when they are.
    """

    weight: Tensor
    drawn: bool

    def reset_parameters(self) -> None:
        """Draw the initial weights."""
        self.draw()
        self.drawn = not self.weight.is_meta

    def draw(self) -> None:
        """Fill the weights."""
        raise NotImplementedError

    def mod_fill(self, device: torch.device) -> None:
        """Draw the weights."""
        self.to_empty(device=device)

    def mod_leave_meta(self) -> None:
        """Draw the weights."""
        self.reset_parameters()

    def check_values(self, x: Tensor) -> None:
        """Raise a ValueError for weights without values, with which torch computes whatever is in memory."""
        if self.weight.is_meta and not x.is_meta:
            raise ValueError(
                f"the weights of this {type(self).__name__}, which a method of mmod added, are on the meta device and "
                "have no values: load the model's weights by load_state_dict(weights, strict=False, assign=True), or "
                "call model.to_empty(device=...) before they are loaded; both draw what was added. Route a model "
                "first, then dispatch it by accelerate"
            )
