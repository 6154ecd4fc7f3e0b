"""How a routed block runs, chosen once when the model is routed: on which rows, and what of the host runs on them.

Axes: B images, N tokens, K slots per image, T packed rows, D channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from mmod.blocks.branches import BranchRows, running_branch
from mmod.blocks.call import BlockCall
from mmod.blocks.forward_pass import ForwardPass
from mmod.blocks.rows import AllTokens, PackedRows, Rows
from mmod.config import RoutingConfig
from mmod.ops import attend_within
from mmod.routing import Routing


class Way:
    """How a routed block runs.

    Args:
        call: How the host library calls the block.
        config: How the block is routed.
    """

    def __init__(self, call: BlockCall, config: RoutingConfig) -> None:
        self.call: Any = call
        self.operator = str(config.operator)

    def before(
        self, block: Any, x: Tensor, arguments: Mapping[str, Any], forward_pass: ForwardPass | None,
        rows: Rows | None,
    ) -> Tensor:  # fmt: skip
        """Return the tokens that the router scores, after what the block runs before its decision.

        Args:
            block: The block.
            x: All tokens, or the rows that the block before handed on.
            arguments: The block's arguments after the tokens, by name.
            forward_pass: The pass that the block runs in; None where it shares nothing.
            rows: The rows that the block before handed on; None where it did not.
        """
        return x

    def rows(self, block: Any, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Rows:
        """Return the rows that the block runs on, not yet entered."""
        return AllTokens(x)

    def run(self, block: Any, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return the rows after the block.

        Args:
            block: The block.
            z: The rows, as `rows.enter` returned them.
            arguments: The block's arguments for all tokens.
            rows: The rows that were entered.
        """
        raise NotImplementedError


class KeptAlone(Way):
    """The block runs on the kept tokens, which attend to each other."""

    def rows(self, block: Any, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Rows:
        """Return packed rows where images keep different numbers and the host can run them, else padded ones."""
        if routing.valid_BK is not None and routing.total and self.call.can_pack(block, arguments):
            return PackedRows(x)
        return Rows(x, getattr(block, self.call.fused_norm) if self.call.fused_norm else None)

    def run(self, block: Any, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return the rows after the host's block."""
        routing = rows.routing
        assert routing is not None
        if rows.packing is not None:
            return run_packed(block, z, self.call.pack(arguments, rows.x_BND, routing, rows.packing), rows)
        if not routing.index_BK.shape[1]:
            return z
        return block.run_host(z, **self.call.select_tokens(arguments, rows.x_BND, routing))


def run_packed(block: Any, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
    """Return packed rows (1, T, D) after the host's block, in which each image attends to itself alone.

    Args:
        block: The block.
        z: The packed rows (1, T, D).
        arguments: The block's arguments for them.
        rows: Where they come from.

    Raises:
        RuntimeError: The block called no fused attention, so images would have attended to each other.
    """
    assert rows.packing is not None
    attention = attend_within(rows.packing)
    with attention:
        y = block.run_host(z, **arguments)
    if not attention.calls:
        raise RuntimeError("packed rows need fused attention: this block called no scaled_dot_product_attention")
    return y


class AmongAll(Way):
    """The block runs on the kept tokens, which attend to all tokens."""

    def rows(self, block: Any, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Rows:
        """Return the kept tokens."""
        return Rows(x, getattr(block, self.call.fused_norm) if self.call.fused_norm else None)

    def run(self, block: Any, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return the rows after the host's block."""
        assert rows.routing is not None
        if not rows.routing.index_BK.shape[1]:
            return z
        y: Tensor = self.call.attend_to_all(block, block.run_host, arguments, rows.x_BND, z, rows.routing)
        return y


class OneBranch(Way):
    """The block runs on all tokens, except for one branch, which runs on the kept tokens."""

    def __init__(self, call: BlockCall, config: RoutingConfig) -> None:
        super().__init__(call, config)
        self.among_all = config.context == "all"

    def run(self, block: Any, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return all tokens after the host's block."""
        call, routing = self.call, rows.routing
        assert routing is not None
        attends = partial(call.attend_to_all, block, routing=routing) if self.among_all else None
        if self.operator == "attention" and attends is None:
            arguments = call.select_tokens(arguments, z, routing)
        with running_branch(block.mod_state.tracker, BranchRows(routing, attends, self.operator in call.tuples)):
            return block.run_host(z, **arguments)


class TwoHalves(Way):
    """Attention runs on the rows of the decision before; then the block decides, and its MLP runs on fewer rows."""

    def before(
        self, block: Any, x: Tensor, arguments: Mapping[str, Any], forward_pass: ForwardPass | None,
        rows: Rows | None,
    ) -> Tensor:  # fmt: skip
        """Return the tokens, or the rows that were handed on, after attention."""
        state, held = block.mod_state, rows
        earlier = state.before(block.router, x, forward_pass) if rows is None else rows.routing
        z = x
        if rows is None and earlier is not None:
            rows = Rows(x)
            z = rows.enter(x, earlier)
        if rows is not None:
            assert earlier is not None
            arguments = self.call.select_tokens(arguments, rows.x_BND, earlier)
        attend = partial(self.call.halves.attend, block, z, arguments)
        if state.observes:
            marks = self.call.marks(arguments, z, forward_pass)
            y = block.observe(attend, marks, block.router.config.importance, forward_pass)
        else:
            y = attend()
        return y if rows is held else rows.leave(y)  # type: ignore[union-attr]

    def rows(self, block: Any, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Rows:
        """Return the kept tokens, or the means of merged ones."""
        return Rows(x)

    def run(self, block: Any, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return the rows after the host's MLP."""
        y: Tensor = self.call.halves.feed(block, z)
        return y
