"""Branches of a block, attention and MLP: gated before the residual sum, or run on the kept rows alone.

Axes: B images or samples, N tokens, K slots per image or sample, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from mmod.blocks.conversion import Mixin
from mmod.blocks.inner import Inner, running_branch
from mmod.blocks.rows import Block, Execution, Host, Rows, gather, in_order, write_back
from mmod.routing import Routing
from mmod.threads import PerThread

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
        routing = self.routing
        others = dict(kwargs)
        x_BND: Tensor = args[0] if args else others.pop("hidden_states")
        z_BKD = gather(x_BND, routing)

        def run_on(rows: Tensor, **arguments: Any) -> Any:
            return forward(*[rows] * len(args), **arguments) if args else forward(hidden_states=rows, **arguments)

        if self.attend_to_all is not None:
            output = self.attend_to_all(run_on, others, x_BND, z_BKD)
        else:
            # Hosts take no empty sequence.
            output = run_on(z_BKD, **others) if routing.kept.index_BK.shape[1] else z_BKD
        # What did not come from the host's branch is not in the tuple that the host's block unpacks.
        if self.in_tuple and not isinstance(output, tuple):
            output = output, None
        y_BKD = output[0] if isinstance(output, tuple) else output
        # The host adds the result to all tokens: between zeros, the gate weighs the update alone, and skipped tokens
        # get none.
        nothing_BND = y_BKD.new_zeros(x_BND.shape)
        nothing_BKD = y_BKD.new_zeros(y_BKD.shape)
        out_BND = write_back(nothing_BND, nothing_BKD, y_BKD, routing)
        return (out_BND, *output[1:]) if isinstance(output, tuple) else out_BND


class Branch(Mixin):
    """Mixin of a residual branch, which runs as the running block wants; compilers cannot trace a hook for one call."""

    mod_state: PerThread[Inner]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the branch's output."""
        branch = self.mod_state.value.branch
        if branch is None:
            return super().forward(*args, **kwargs)
        return branch.run(super().forward, args, kwargs)


class OneBranch(Execution):
    """The block runs on all tokens, except for one branch, which runs on the kept tokens."""

    def run(self, block: Block, host: Host, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return all tokens after the host's block."""
        call = self.call
        routing = rows.routing
        selected = arguments
        attends: AttendsToAll | None = None
        if self.operator == "attention" and not self.among_all:
            selected = call.select_tokens(arguments, z, routing)
            call.begin_update(arguments, z, routing)
            if not rows.slots:
                # Recorded attention maps keep the index of their layer.
                call.record_no_attention(z)
        elif self.operator == "attention" and not (call.caches and in_order(z, routing)):
            attends = partial(call.attend_to_all, block, routing=routing)
        elif call.caches:
            selected = call.select_tokens(arguments, z, None)
            call.begin_update(arguments, z, routing, all_tokens=True)
        branch = BranchRows(routing, attends, self.operator in call.tuples)
        with running_branch(block.mod_state.inner, branch):
            return host(z, **selected)
