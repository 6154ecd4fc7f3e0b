"""How a block with a cache, among all tokens, between its halves, or in one branch runs on the rows of a decision.

What an ordinary block does, `KeptTokens`, stands with its rows (`mmod/blocks/rows.py`).

Axes: B images or samples, N tokens, K slots per image or sample, D channels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from mmod.blocks.branches import running
from mmod.blocks.call import Arguments, BlockCall
from mmod.blocks.converted import ConvertedBlock
from mmod.blocks.rows import (
    Execution,
    Host,
    KeptTokens,
    PackedRows,
    Rows,
    gather_kept,
    reweigh,
    without_gate,
    write_kept,
)
from mmod.config import RoutingConfig
from mmod.ops import lerp_rows
from mmod.routing import Routing

# From a host's forward, its arguments after the tokens by name, all tokens and the kept ones to the output.
AttendsToAll = Callable[[Callable[..., object], Arguments, Tensor, Tensor], Any]


def choose_execution(call: BlockCall, config: RoutingConfig) -> Execution:
    """Return how a block with a config runs."""
    if config.merges_inside:
        return MlpOfKept(call, config)
    if config.operator != "block":
        return OneBranch(call, config)
    if config.context == "all":
        return AmongAll(call, config)
    if call.caches:
        return CachedTokens(call, config)
    return KeptTokens(call, config)


class AllTokens(Rows):
    """All tokens in order, so nothing is gathered; a branch inside the block selects."""

    def __init__(self, x_BND: Tensor, routing: Routing, weighs: bool = True) -> None:
        self.x_BND = x_BND
        self.routing = routing
        self.weighs = weighs
        self.z = x_BND

    def write_back(self, y_BKD: Tensor) -> Tensor:
        """Return the tokens after the block."""
        return y_BKD


class RowsInPlace(AllTokens):
    """All tokens in order, because all are kept or each sample has one token."""

    def write_back(self, y_BKD: Tensor) -> Tensor:
        """Return the tokens after the layer; skipped ones are unchanged, or weighed."""
        x_BND = self.x_BND
        routing = self.routing if self.weighs else without_gate(self.routing)
        valid_B1 = routing.kept.valid_BK
        if valid_B1 is None:
            return write_kept(x_BND, x_BND, y_BKD, routing)
        # A skipped token of a decoding step ran too, which keeps shapes and addresses; its result is dropped here.
        new_B1D = lerp_rows(x_BND, y_BKD.to(x_BND.dtype), routing.gate_BK)
        old_B1D = reweigh(x_BND, routing.skipped_BN)
        return torch.where(valid_B1.unsqueeze(-1), new_B1D, old_B1D)


def in_order(x_BND: Tensor, routing: Routing) -> bool:
    """Return whether the rows of a decision are all tokens in order, kept or not."""
    tokens = x_BND.shape[1]
    kept = routing.kept
    return kept.index_BK.shape[1] == tokens and (kept.valid_BK is None or tokens == 1)


class CachedTokens(KeptTokens):
    """The block has a cache: kept tokens also attend to those in it, and it is told what its next update receives."""

    def make_rows(self, block: ConvertedBlock, x: Tensor, arguments: Arguments, routing: Routing) -> Rows:
        """Return all tokens where they are if each sample has one, else as without a cache."""
        alone = getattr(routing.tokens, "alone", False) or (x.shape[1] == 1 and in_order(x, routing))
        if alone and not self.packs(block, arguments, routing):
            return RowsInPlace(x, routing, self.weighs)
        return super().make_rows(block, x, arguments, routing)

    def run(self, block: ConvertedBlock, host: Host, z: Tensor, arguments: Arguments, rows: Rows) -> Tensor:
        """Return the rows after the host's block."""
        if rows.packing is not None:
            return self.run_packed(block, host, z, arguments, cast(PackedRows, rows))
        call = self.call
        routing = rows.routing
        # With one token per sample, all kept, the arguments need no change.
        unchanged = isinstance(rows, RowsInPlace) and routing.kept.valid_BK is None
        narrowed_to = None if unchanged else routing
        # The mask joins the cache's keys with the new ones, so it is narrowed before the cache hears of these.
        selected = call.select_tokens(arguments, rows.x_BND, narrowed_to)
        call.begin_update(arguments, rows.x_BND, narrowed_to)
        # Hosts take no empty sequence.
        if not rows.slots:
            call.record_no_attention(rows.x_BND)
            return z
        with self.gated(block, routing.gate_BK):
            return host(z, **selected)


class AmongAll(Execution):
    """The block runs on the kept tokens, which attend to all tokens; a cache receives all."""

    def make_rows(self, block: ConvertedBlock, x: Tensor, arguments: Arguments, routing: Routing) -> Rows:
        """Return all tokens where they are if a block with a cache keeps them all, else the kept ones."""
        if self.call.caches and in_order(x, routing):
            return RowsInPlace(x, routing, self.weighs)
        return super().make_rows(block, x, arguments, routing)

    def run(self, block: ConvertedBlock, host: Host, z: Tensor, arguments: Arguments, rows: Rows) -> Tensor:
        """Return the kept tokens after the host's block."""
        call = self.call
        routing = rows.routing
        if not call.caches and not rows.slots:
            return z
        with self.gated(block, routing.gate_BK):
            if not isinstance(rows, RowsInPlace):
                return cast(Tensor, call.attend_to_all(block, host, arguments, rows.x_BND, z, routing))
            selected = call.select_tokens(arguments, rows.x_BND, None)
            call.begin_update(arguments, rows.x_BND, routing, all_tokens=True)
            return host(z, **selected)


class MlpOfKept(Execution):
    """Attention runs on the rows of the previous decision; then the block decides, and its MLP runs on fewer rows."""

    between_halves = True

    def make_rows(self, block: ConvertedBlock, x: Tensor, arguments: Arguments, routing: Routing) -> Rows:
        """Return the means of merged tokens."""
        return Rows(x, routing)

    def run(self, block: ConvertedBlock, host: Host, z: Tensor, arguments: Arguments, rows: Rows) -> Tensor:
        """Return the rows after the host's MLP."""
        halves = self.call.halves
        assert halves is not None
        if halves.fed and arguments:
            # Rows that stand for several tokens have the arguments of the one that was kept.
            arguments = rows.select(block, arguments)
        return halves.feed(block, z, arguments)


class OneBranch(Execution):
    """The block runs on all tokens, except for one branch, which runs on the kept tokens."""

    def __init__(self, call: BlockCall, config: RoutingConfig) -> None:
        super().__init__(call, config)
        self.operator = str(config.operator)
        self.among_all = config.context == "all"

    def make_rows(self, block: ConvertedBlock, x: Tensor, arguments: Arguments, routing: Routing) -> Rows:
        """Return all tokens."""
        return AllTokens(x, routing)

    def run(self, block: ConvertedBlock, host: Host, z: Tensor, arguments: Arguments, rows: Rows) -> Tensor:
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
            # The branch is the MLP, or attention where each token keeps its place: the cache receives all.
            selected = call.select_tokens(arguments, z, None)
            call.begin_update(arguments, z, routing, all_tokens=True)
        branch = partial(self.run_branch, routing, attends)
        with running(block.mod_state.inner, {call.operators[self.operator]: branch}):
            return host(z, **selected)

    def run_branch(
        self,
        routing: Routing,
        attend_to_all: AttendsToAll | None,
        forward: Callable[..., object],
        args: tuple[Any, ...],
        kwargs: Arguments,
    ) -> object:
        """Run the branch on the kept tokens; return the gated update of all tokens (B, N, D), zero at the others.

        The tokens are the first argument, and all that are the same tensor, such as queries, keys and values; or the
        keyword `hidden_states`.

        Args:
            attend_to_all: Runs the branch if kept tokens attend to all tokens; None if they attend to each other.
        """
        others = dict(kwargs)
        x: Tensor
        if args:
            x = args[0]
        else:
            x = others.pop("hidden_states")
        x_BND = x
        in_sequence = x.shape[:-1] != routing.score_BN.shape
        if in_sequence:
            # The host runs all images as one sequence.
            x_BND = x.view(*routing.score_BN.shape, -1)
        z_BKD = gather_kept(x_BND, routing)

        def run_on(rows: Tensor, **arguments: object) -> object:
            if in_sequence:
                rows = rows.reshape(*x.shape[:-2], -1, x.shape[-1])
            if not args:
                return forward(hidden_states=rows, **arguments)
            # Queries, keys and values may all be the tokens.
            return forward(*[rows if value is x else value for value in args], **arguments)

        if attend_to_all is not None:
            output = attend_to_all(run_on, others, x_BND, z_BKD)
        elif routing.kept.index_BK.shape[1]:
            output = run_on(z_BKD, **others)
        else:
            # Hosts take no empty sequence.
            output = z_BKD
        # What did not come from the host's branch is not in the tuple that the host's block unpacks.
        if self.operator in self.call.tuples and not isinstance(output, tuple):
            output = output, None
        in_tuple = isinstance(output, tuple)
        y_BKD = output[0] if in_tuple else output
        if in_sequence:
            y_BKD = y_BKD.view(z_BKD.shape)
        # The host adds the result to all tokens: between zeros, the gate weighs the update alone, and skipped tokens
        # get none.
        nothing_BND = y_BKD.new_zeros(x_BND.shape)
        nothing_BKD = y_BKD.new_zeros(y_BKD.shape)
        out = write_kept(nothing_BND, nothing_BKD, y_BKD, routing)
        if in_sequence:
            out = out.view(x.shape)
        if in_tuple:
            return (out, *output[1:])
        return out
