"""Branches of a block, attention and MLP: weighed before they are added to the residual stream, or run for kept rows.

Axes: B images or samples, N tokens, K slots per image or sample, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from mmod.blocks.forward_pass import PassTracker
from mmod.blocks.rows import enter_rows, leave_rows
from mmod.routing import Routing

# Runs a host's forward, given it, its arguments after the tokens by name, all tokens and the kept ones.
AttendsToAll = Callable[[Callable[..., Any], Mapping[str, Any], Tensor, Tensor], Any]


class BranchRows(NamedTuple):
    """How a branch runs for kept tokens alone; to all others it adds nothing.

    Args:
        routing: The decision.
        attend_to_all: Runs it where kept tokens attend to all tokens; None where it is given the kept ones alone.
        in_tuple: The branch returns a tuple of two, its output first.
    """

    routing: Routing
    attend_to_all: AttendsToAll | None = None
    in_tuple: bool = False

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what the branch makes of its tokens (B, N, D): its weighed output where they are kept, else zero.

        Args:
            forward: The host's forward of the branch.
            args: Its arguments; all of them are the tokens.
            kwargs: Its arguments by name, with the tokens as `hidden_states` where `args` are none.
        """
        routing, rest = self.routing, dict(kwargs)
        x_BND: Tensor = args[0] if args else rest.pop("hidden_states")
        z_BKD = enter_rows(x_BND, routing)

        def run_on(rows: Tensor, **arguments: Any) -> Any:
            return forward(*[rows] * len(args), **arguments) if args else forward(hidden_states=rows, **arguments)

        if self.attend_to_all is not None:
            output = self.attend_to_all(run_on, rest, x_BND, z_BKD)
        else:
            output = run_on(z_BKD, **rest) if routing.index_BK.shape[1] else z_BKD
        if self.in_tuple and not isinstance(output, tuple):
            output = output, None
        y_BKD = output[0] if isinstance(output, tuple) else output
        nothing_BND, nothing_BKD = y_BKD.new_zeros(x_BND.shape), y_BKD.new_zeros(y_BKD.shape)
        out_BND = leave_rows(nothing_BND, nothing_BKD, y_BKD, routing)
        return (out_BND, *output[1:]) if isinstance(output, tuple) else out_BND


class Branch(nn.Module):
    """Mixin for a module whose output is added to the residual stream.

    A part of the module's class rather than a hook for the time of a call, which compilers cannot trace.

    Attributes:
        mod_state: Knows how the branch of the running block runs, and the weights of its output.
    """

    mod_state: PassTracker

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the module returns, weighed; of a tuple, the first element is."""
        running = self.mod_state.running
        if running.branch_rows is not None:
            return running.branch_rows.run(super().forward, args, kwargs)
        output, gate_BK = super().forward(*args, **kwargs), running.gate_BK
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


@contextmanager
def branch_on_rows(tracker: PassTracker, rows: BranchRows) -> Iterator[None]:
    """Run the branch of the running block for kept tokens alone."""
    running = tracker.running
    running.branch_rows = rows
    try:
        yield
    finally:
        running.branch_rows = None
