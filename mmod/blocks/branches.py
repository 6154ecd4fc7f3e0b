"""Branches of a block, attention and MLP: gated before the residual sum, or run on the kept rows alone.

Axes: B images or samples, N tokens, K slots per image or sample, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from mmod.blocks.forward_pass import PassTracker
from mmod.blocks.rows import Host, Rows, Way, enter_rows, leave_rows
from mmod.ops.intercept import AttentionIntercept
from mmod.routing import Routing

# From a host's forward, its arguments after the tokens by name, all tokens and the kept ones to the output.
AttendsToAll = Callable[[Callable[..., Any], Mapping[str, Any], Tensor, Tensor], Any]


class BranchRows(NamedTuple):
    """Runs a branch on the kept tokens; its update of other tokens is zero.

    Args:
        attend_to_all: Runs the branch if kept tokens attend to all tokens; None if they attend to each other.
    """

    routing: Routing
    attend_to_all: AttendsToAll | None = None
    in_tuple: bool = False

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the gated update of all tokens (B, N, D).

        Every positional argument is the tokens; without any, they are the keyword `hidden_states`.
        """
        routing, others = self.routing, dict(kwargs)
        x_BND: Tensor = args[0] if args else others.pop("hidden_states")
        z_BKD = enter_rows(x_BND, routing)

        def run_on(rows: Tensor, **arguments: Any) -> Any:
            return forward(*[rows] * len(args), **arguments) if args else forward(hidden_states=rows, **arguments)

        if self.attend_to_all is not None:
            output = self.attend_to_all(run_on, others, x_BND, z_BKD)
        else:
            output = run_on(z_BKD, **others) if routing.kept.index_BK.shape[1] else z_BKD
        if self.in_tuple and not isinstance(output, tuple):
            output = output, None
        y_BKD = output[0] if isinstance(output, tuple) else output
        nothing_BND, nothing_BKD = y_BKD.new_zeros(x_BND.shape), y_BKD.new_zeros(y_BKD.shape)
        out_BND = leave_rows(nothing_BND, nothing_BKD, y_BKD, routing)
        return (out_BND, *output[1:]) if isinstance(output, tuple) else out_BND


class WeighedBranch(NamedTuple):
    """Runs a branch whose output is weighed (B, K) before the residual sum; None for 1."""

    gate_BK: Tensor | None

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the weighed output; of a tuple, the first element is weighed."""
        output = forward(*args, **kwargs)
        if self.gate_BK is None:
            return output
        first = output[0] if isinstance(output, tuple) else output
        first = first * self.gate_BK.unsqueeze(-1).to(first.dtype)
        return (first, *output[1:]) if isinstance(output, tuple) else first


class Branch(nn.Module):
    """Mixin of a residual branch, which runs as the running block wants; compilers cannot trace a hook for one call."""

    mod_state: PassTracker

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the branch's output."""
        branch = self.mod_state.running.branch
        return super().forward(*args, **kwargs) if branch is None else branch.run(super().forward, args, kwargs)


@contextmanager
def running_branch(tracker: PassTracker, branch: BranchRows | WeighedBranch | AttentionIntercept) -> Iterator[None]:
    """Context in which the running block's branches run in a certain way."""
    running = tracker.running
    running.branch = branch
    try:
        yield
    finally:
        running.branch = None


class OneBranch(Way):
    """The block runs on all tokens, except for one branch, which runs on the kept tokens."""

    def run(self, block: Any, host: Host, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return all tokens after the host's block."""
        call, routing = self.call, rows.routing
        attends = partial(call.attend_to_all, block, routing=routing) if self.among_all else None
        if self.operator == "attention" and attends is None:
            arguments = call.select_tokens(arguments, z, routing)
        with running_branch(block.mod_state.tracker, BranchRows(routing, attends, self.operator in call.tuples)):
            return host(z, **arguments)
