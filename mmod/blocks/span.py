"""Spans of routed blocks: runs of consecutive ones that share scores, decisions and rows.

A `Span` is made when the model is routed, and is known to its blocks. What they share in one forward pass is a
`SpanPass`, which each block finds by its input or by the order of the blocks (`mmod/blocks/passes.py`).

The dense block in front belongs to a span whose blocks read its importance. A span of blocks is not
`language.tokens="span"`, which is about runs of image tokens.

Axes: B images or samples, N tokens.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from mmod.blocks.passes import Pass, Passes, StackCalls, recomputing
from mmod.blocks.rows import Rows, gather_kept
from mmod.routing import Router, Routing, Rule, TokenGroups, TokenMasks
from mmod.threads import PerThread


class Decision(NamedTuple):
    """A decision of one block of a span, and what it was made by."""

    rule: Rule
    tokens: TokenMasks | TokenGroups
    routing: Routing


class InSpan(Protocol):
    """What a span reads of a block's state.

    Compilers guard on every number that they read. A graph that reads `place`, or the `number` in the stack, serves one
    block; one that reads only `begins` and `ends` serves all blocks between the first and the last.
    """

    place: int
    number: int
    begins: bool
    ends: bool
    passes_rows: bool


class SpanPass(Pass):
    """What the blocks of a span share in one forward pass.

    Attributes:
        score_BN: Scores that all blocks read: importance, or what the first routed block computed; None before.
        trains: The score has a weight that trains.
        decisions: The decisions so far, by place.
        rows: The rows that the previous block passed on instead of all tokens, or None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.score_BN: Tensor | None = None
        self.trains = False
        self.decisions: dict[int, Decision] = {}
        self.rows: Rows | None = None


class Span(Passes[SpanPass]):
    """A run of consecutive routed blocks that share scores, and a dense block in front whose importance they read.

    The dense block, if any, has place 0. Blocks that read the same scores by the same rule decide once.

    Args:
        names: Names of the modules, in order.
        scored_by_first: The first routed block computes the scores; otherwise they are importance.
        training_only: Importance serves a loss only, and is computed in training only.
    """

    def __init__(
        self, calls: PerThread[StackCalls], names: tuple[str, ...], scored_by_first: bool, training_only: bool
    ) -> None:
        super().__init__(calls, SpanPass, len(names) - 1)
        self.names = names
        self.scored_by_first = scored_by_first
        self.training_only = training_only

    def enter(self, x: Tensor, state: InSpan, router: Router, training: bool) -> SpanPass | None:
        """Return the pass of a block's input (B, N, D), or of rows that were passed on (B, K, D); None without one.

        The first module of the span begins the pass: a routed block here, or an `ImportanceBlock` by `begin`.

        Raises:
            ValueError: The first block, whose scores this block reads, was not run; or the shape changed since.
            RuntimeError: See `Passes.find`.
        """
        if self.training_only and not training:
            return None
        found: SpanPass | None
        compiling = torch.compiler.is_compiling()
        if state.begins:
            found = self.begin(x)
        else:
            # Outside calls of the model, where batches may be in flight in stages, places tell them apart.
            in_order = compiling and self.calls.value.running.outer is not None
            found = self.find(x, None if in_order else state.place)
            # An uninterrupted pass may hand on rows instead of all tokens.
            comparable = found is not None and not found.uninterrupted and not compiling
            if found is not None and comparable and found.shape != x.shape[:2]:
                self._refuse_shape(x, found)
        if found is not None:
            found.busy = True
            self.calls.value.entered = found
            if found.score_BN is not None and found.score_BN.device != x.device:
                found.score_BN = found.score_BN.to(x.device)
            return found
        score = router.config.router
        if self.scored_by_first and not score.learns and not score.same_everywhere:
            raise ValueError(
                f"{self.names[state.place]} decides by the scores that {self.names[0]} computes, and its input comes "
                f"from no pass through that block: run the whole model, or begin at {self.names[0]}"
            )
        return None

    def _refuse_shape(self, x: Tensor, found: SpanPass) -> NoReturn:
        raise ValueError(
            f"a routed block got (images, tokens) = {tuple(x.shape[:2])}, and the pass that it continues has "
            f"{found.shape}: the batch or the sequence changed between the two blocks, which share scores. Keep all "
            "images and tokens between them, or route with a router that shares none, such as 'linear'"
        )

    def decided(
        self, x_BND: Tensor, shared: SpanPass, state: InSpan, router: Router, tokens: TokenMasks | TokenGroups
    ) -> Routing | None:
        """Return a block's decision if the span knows it, or makes it among the tokens kept before; else None.

        Args:
            x_BND: All tokens, or the rows that the previous block passed on.
        """
        joins = router.config.joins
        if shared.rows is not None and not joins:
            return shared.rows.routing
        if shared.trains and recomputing() and not (shared.score_BN is not None and shared.score_BN.requires_grad):
            raise RuntimeError(
                "reentrant gradient checkpointing loses the gradient of a score that blocks share: checkpoint with "
                "use_reentrant=False, or set router.shared=False"
            )
        if not self._reuses(router):
            return None
        known = self._same_rule(shared, state.place, router, x_BND.device, tokens)
        if known is not None or not joins:
            return known
        earlier = self.before(shared, state.place, x_BND.device)
        if earlier is None:
            return None
        # Scores that are shared where tokens join never learn.
        with torch.no_grad():
            rows_BKD = gather_kept(x_BND, earlier) if shared.rows is None else x_BND
            narrowed: Routing = router(rows_BKD, None, tokens, earlier)
        return narrowed

    def remember(
        self, routing: Routing, shared: SpanPass, state: InSpan, router: Router, tokens: TokenMasks | TokenGroups
    ) -> None:
        """Keep a block's decision, and the scores if it is the first to compute them, for the blocks after it."""
        if shared.score_BN is None and self.scored_by_first:
            shared.score_BN = routing.score_BN
            learns = router.config.router.learns
            shared.trains = learns and any(weight.requires_grad for weight in router.parameters())
        if self._reuses(router):
            shared.decisions[state.place] = Decision(router.rule, tokens, routing)

    def before(self, shared: SpanPass, place: int, device: torch.device) -> Routing | None:
        """Return the decision of the block before, if skipped tokens joined others in it; None for all tokens."""
        # A block in between may have been removed from the model.
        for number in range(place - 1, -1, -1):
            if number in shared.decisions:
                routing = shared.decisions[number].routing
                return None if routing.joined.slot_BN is None else routing.to(device)
        return None

    def take_rows(self, x: Tensor, shared: SpanPass, router: Router) -> tuple[Tensor, Rows | None]:
        """Return x and the rows passed on, if the block can run on them; else all tokens and None."""
        rows = shared.rows
        if rows is None or rows.serves(router.rule):
            return x, rows
        shared.rows = None
        return rows.write_back(x), None

    def leave(self, y: Tensor, shared: SpanPass, rows: Rows, router: Router, state: InSpan) -> Tensor:
        """Return all tokens after a block (B, N, D), or its rows if the next block takes them."""
        shared.busy = False
        # The block's number is read only where there are some to compare, see `InSpan`.
        is_read = bool(shared.read_blocks) and state.number in shared.read_blocks
        passes_on = state.passes_rows and shared.uninterrupted and not is_read
        if passes_on and rows.shrinks and router.shares_decisions:
            if rows.rule is None:
                rows.rule = router.rule
            shared.rows = rows
            return y
        shared.rows = None
        y = rows.write_back(y)
        if not state.ends and not shared.uninterrupted:
            self.hand_on(shared, y)
        return y

    def _reuses(self, router: Router) -> bool:
        # Compilers merge equal calls themselves, and would guard on the identity of tensors. Whom a token joins depends
        # on the block that decides.
        return router.shares_decisions and (router.config.joins or not torch.compiler.is_compiling())

    def _same_rule(
        self, shared: SpanPass, place: int, router: Router, device: torch.device, tokens: TokenMasks | TokenGroups
    ) -> Routing | None:
        """Return the block's earlier decision, or that of a block before it by the same rule on the same tokens."""
        rule = router.rule
        for number in range(place, -1, -1):
            made = shared.decisions.get(number)
            if made is None or not made.rule.matches(rule):
                continue
            if rule.config.joins:
                return made.routing.to(device)
            if made.routing.kept.index_BK.device == device and all(a is b for a, b in zip(made.tokens, tokens)):
                return made.routing
        return None
