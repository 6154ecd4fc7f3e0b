"""Branches of a decoder layer whose output is weighed before it is added to the residual stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from mmod.blocks.forward_pass import PassTracker


class WeighedBranch(nn.Module):
    """Mixin for a module whose output is added to the residual stream, and weighed before.

    A part of the module's class rather than a hook for the time of a call, which compilers cannot trace.

    Attributes:
        mod_state: Knows the weights of the running layer.
    """

    mod_state: PassTracker

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns, weighed; of a tuple, the first element is.

        Args:
            args: Arguments of the module.
            kwargs: The same by name.
        """
        output, gate_BK = super().forward(*args, **kwargs), self.mod_state.running.gate_BK
        if gate_BK is None:
            return output
        first = output[0] if isinstance(output, tuple) else output
        first = first * gate_BK.unsqueeze(-1).to(first.dtype)
        return (first, *output[1:]) if isinstance(output, tuple) else first


@contextmanager
def weighed_branches(tracker: PassTracker, gate_BK: Tensor | None) -> Iterator[None]:
    """Weigh what the branches of the running layer return.

    Args:
        tracker: That of the layer's stack.
        gate_BK: The weights (B, K), or None for 1.
    """
    running = tracker.running
    running.gate_BK = gate_BK
    try:
        yield
    finally:
        running.gate_BK = None
