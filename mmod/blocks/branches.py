"""Branches of a block, attention and MLP: gated before the residual sum, or run on the kept rows alone.

Axes: B images or samples, N tokens, K slots per image or sample, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from mmod.blocks.call import BlockCall
from mmod.blocks.forward_pass import PassTracker
from mmod.blocks.rows import Host, Rows, Way, enter_rows, leave_rows
from mmod.config import RoutingConfig
from mmod.routing import Routing

# Runs a host's forward, given it, its arguments after the tokens by name, all tokens and the kept ones.
AttendsToAll = Callable[[Callable[..., Any], Mapping[str, Any], Tensor, Tensor], Any]


class BranchRows(NamedTuple):
    """How a branch runs on the kept tokens; it returns zero for the others.

    Args:
        routing: The decision.
        attend_to_all: Runs the branch where kept tokens attend to all tokens; None where they attend to each other.
        in_tuple: The branch returns a tuple of two, its output first.
    """

    routing: Routing
    attend_to_all: AttendsToAll | None = None
    in_tuple: bool = False

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the branch's update of its tokens (B, N, D): the gated output for kept tokens, zero for the others.

        Args:
            forward: The host's forward of the branch.
            args: Its positional arguments; each of them is the tokens.
            kwargs: Its keyword arguments, with the tokens as `hidden_states` where `args` is empty.
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
    """How a branch runs whose output is weighed before it is added to the residual stream.

    Args:
        gate_BK: The weights (B, K), or None for 1.
    """

    gate_BK: Tensor | None

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the branch's output, weighed; of a tuple, the first element is weighed."""
        output = forward(*args, **kwargs)
        if self.gate_BK is None:
            return output
        first = output[0] if isinstance(output, tuple) else output
        first = first * self.gate_BK.unsqueeze(-1).to(first.dtype)
        return (first, *output[1:]) if isinstance(output, tuple) else first


class Branch(nn.Module):
    """Mixin for a module whose output is added to the residual stream.

    It is a mixin because compilers cannot trace a hook that lasts for one call.

    Attributes:
        mod_state: Knows how the branches of the running block run.
    """

    mod_state: PassTracker

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's output as the running block wants it."""
        branch = self.mod_state.running.branch
        return super().forward(*args, **kwargs) if branch is None else branch.run(super().forward, args, kwargs)


@contextmanager
def running_branch(tracker: PassTracker, branch: BranchRows | WeighedBranch) -> Iterator[None]:
    """Let the branches of the running block run in a certain way as long as the context lasts."""
    running = tracker.running
    running.branch = branch
    try:
        yield
    finally:
        running.branch = None


class OneBranch(Way):
    """The block runs on all tokens, except for one branch, which runs on the kept tokens."""

    def __init__(self, call: BlockCall, config: RoutingConfig) -> None:
        super().__init__(call, config)
        self.among_all = config.context == "all"

    def run(self, block: Any, host: Host, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return all tokens after the host's block."""
        call, routing = self.call, rows.routing
        attends = partial(call.attend_to_all, block, routing=routing) if self.among_all else None
        if self.operator == "attention" and attends is None:
            arguments = call.select_tokens(arguments, z, routing)
        with running_branch(block.mod_state.tracker, BranchRows(routing, attends, self.operator in call.tuples)):
            return host(z, **arguments)
