"""How a routed decoder layer runs: as a routed block does, and its cache is told which tokens it is about to be given.

Axes: B samples, N tokens, K slots per sample, D channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmod.blocks.branches import BranchRows, WeighedBranch, running_branch
from mmod.blocks.call import BlockCall
from mmod.blocks.rows import PackedRows, Rows, leave_rows, reweigh_skipped
from mmod.blocks.ways import OneBranch, Way, run_packed
from mmod.config import RoutingConfig
from mmod.ops import lerp_rows
from mmod.routing import Routing


class RowsInPlace(Rows):
    """All tokens in their own order, where a gather would return them: all are kept, or each sample has one token."""

    def enter(self, rows_BND: Tensor, routing: Routing) -> Tensor:
        """Return the tokens."""
        self.routing = routing
        return rows_BND

    def leave(self, y_BKD: Tensor) -> Tensor:
        """Return the tokens after the layer; those that are skipped are as before, or weighed."""
        assert self.routing is not None
        x_BND, routing = self.x_BND, self.routing if self.weighs else self.routing._replace(gate_BK=None)
        if routing.valid_BK is None:
            return leave_rows(x_BND, x_BND, y_BKD, routing)
        new_B1D = lerp_rows(x_BND, y_BKD.to(x_BND.dtype), routing.gate_BK)
        return torch.where(routing.valid_BK.unsqueeze(-1), new_B1D, reweigh_skipped(x_BND, routing))


class _Gated(Way):
    """A layer whose gate weighs the update of the layer, or of its branches inside."""

    def __init__(self, call: BlockCall, config: RoutingConfig) -> None:
        super().__init__(call, config)
        self.weighs = config.language.gate_on == "update"

    def gated(self, block: Any, gate: Tensor | None) -> AbstractContextManager[None]:
        """Return a context in which the layer's branches are weighed, where that is where the gate is."""
        return nullcontext() if self.weighs else running_branch(block.mod_state.tracker, WeighedBranch(gate))


class KeptAlone(_Gated):
    """The layer runs on the kept tokens, which attend to each other and to those in its cache."""

    def rows(self, block: Any, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Rows:
        """Return packed rows where samples keep different numbers and the host can run them, else padded ones."""
        if routing.valid_BK is not None and routing.total and self.call.can_pack(block, arguments):
            return PackedRows(x, weighs=self.weighs)
        assert routing.groups is not None
        in_place = routing.groups.alone or (x.shape[1] == 1 and _in_order(x, routing))
        return (RowsInPlace if in_place else Rows)(x, weighs=self.weighs)

    def run(self, block: Any, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return the rows after the host's layer."""
        call, x, routing = self.call, rows.x_BND, rows.routing
        assert routing is not None
        if isinstance(rows, PackedRows):
            packed = call.pack(arguments, x, routing, rows.packing)
            call.begin_update(arguments, x, routing, rows.packing)
            with self.gated(block, rows.gate_1T):
                return run_packed(block, z, packed, rows)
        # One token per sample, all kept: the arguments are right as they are.
        given = None if isinstance(rows, RowsInPlace) and routing.valid_BK is None else routing
        selected = call.select_tokens(arguments, x, given)
        call.begin_update(arguments, x, given)
        if not routing.index_BK.shape[1]:
            call.record_no_attention(x)
            return z
        with self.gated(block, routing.gate_BK):
            return block.run_host(z, **selected)


class AmongAll(_Gated):
    """The layer runs on the kept tokens, which attend to all tokens; its cache is given all of them."""

    def rows(self, block: Any, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Rows:
        """Return the kept tokens."""
        return (RowsInPlace if _in_order(x, routing) else Rows)(x, weighs=self.weighs)

    def run(self, block: Any, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return the rows after the host's layer."""
        call, x, routing = self.call, rows.x_BND, rows.routing
        assert routing is not None
        if isinstance(rows, RowsInPlace):
            selected = call.select_tokens(arguments, x, None)
            call.begin_update(arguments, x, routing, whole=True)
            with self.gated(block, routing.gate_BK):
                return block.run_host(x, **selected)
        with self.gated(block, routing.gate_BK):
            y: Tensor = call.attend_to_all(block, block.run_host, arguments, x, z, routing)
        return y


class OneBranchOfLayer(OneBranch):
    """The layer runs on all tokens, except for one branch, which runs on the kept tokens."""

    def run(self, block: Any, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Return all tokens after the host's layer."""
        call, routing, attends = self.call, rows.routing, None
        assert routing is not None
        if self.operator == "attention" and not self.among_all:
            arguments, given = call.select_tokens(arguments, z, routing), arguments
            call.begin_update(given, z, routing)
            if not routing.index_BK.shape[1]:
                call.record_no_attention(z)
        elif self.operator == "mlp" or _in_order(z, routing):
            arguments, given = call.select_tokens(arguments, z, None), arguments
            call.begin_update(given, z, routing, whole=True)
        else:
            attends = partial(call.attend_to_all, block, routing=routing)
        with running_branch(block.mod_state.tracker, BranchRows(routing, attends, self.operator in call.tuples)):
            return block.run_host(z, **arguments)


def _in_order(x_BND: Tensor, routing: Routing) -> bool:
    """Return whether the rows of a decision are all tokens in their own order, kept or not."""
    return routing.index_BK.shape[1] == x_BND.shape[1] and (routing.valid_BK is None or x_BND.shape[1] == 1)
