"""Blocks that run their host's forward themselves.

Axes: B images, N tokens, D channels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from mmod.blocks.branches import Branch, running
from mmod.blocks.conversion import Mixin
from mmod.config import CHANGE
from mmod.ops import capture_importance
from mmod.ops.intercept import AttentionIntercept
from mmod.routing import token_change

EXPORT = "Use torch.export, torch.onnx.export(dynamo=True) or torch.compile, which replace TorchScript"


class ConvertedBlock(Mixin):
    """Mixin of a block that runs its host's forward itself."""

    def run_host(self, z: Tensor, **arguments: Any) -> Tensor:
        """Return tokens after the host's forward."""
        return super().forward(z, **arguments)

    def observe(
        self, run: Callable[[], Tensor], x: Tensor, queries_BN: Tensor | None, importance: str
    ) -> tuple[Tensor, Tensor]:
        """Run what contains the host's attention on tokens x; return its result, and the importance of x (B, N).

        Args:
            queries_BN: True at tokens whose attention counts (B, N); None for all.
        """
        if importance == CHANGE:
            y = run()
            return y, token_change(x, y)
        captured = capture_importance(queries_BN, importance)
        y = self.run_observed(run, captured)
        return y, captured.read()

    def run_observed(self, run: Callable[[], Tensor], watch: AttentionIntercept) -> Tensor:
        """Run what contains the host's attention, inside a mode that reads it."""
        state = self.mod_state
        name = state.call.operators.get("attention")
        attention = None if name is None else self.get_submodule(name)
        # Each call of torch inside the mode costs time, so the attention alone runs in it, unless its forward was
        # replaced.
        if name is not None and isinstance(attention, Branch) and "forward" not in vars(attention):
            with running(state.inner, {name: watch.run}):
                return run()
        watch.cross = state.call.cross
        with running(state.inner, {}):
            y: Tensor = watch.run(run, (), {})
            return y

    def __prepare_scriptable__(self) -> nn.Module:
        """Refuse TorchScript."""
        raise RuntimeError(
            "a routed model cannot be scripted: its blocks take the host's arguments as they come, which TorchScript "
            f"has no types for. {EXPORT}"
        )
