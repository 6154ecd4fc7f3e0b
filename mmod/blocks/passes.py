"""What the modules of a span share in one forward pass.

Axes: B images, N tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from torch import Tensor

from mmod.blocks.remaining import Remaining
from mmod.blocks.rows import Rows
from mmod.config import Patches
from mmod.routing import Routing, Rule, TokenGroups, TokenMasks


class Decision(NamedTuple):
    """A decision of one block of a span, and what it was made by."""

    rule: Rule
    tokens: TokenMasks | TokenGroups
    routing: Routing


class SpanPass:
    """What the modules of a run share in one forward pass.

    It must not hold a tensor that is handed on: the pass is kept while that tensor lives, so neither would be freed.

    Attributes:
        position: Position of the last module that the pass entered.
        owner: The `Span` that made it.
        shape: Shape of the first module's input (B, N).
        patches: What is known of the images' patches, where a score reads it.
        uninterrupted: See `StackCall`.
        is_first: See `StackCall.is_first`.
        ends_for_head: See `StackCall`.
        read_blocks: Numbers of the blocks whose output the host collects in an uninterrupted pass.
        busy: A module was entered and not left: it runs, or it failed.
        score_BN: Scores that all blocks read: importance, or what the first routed block computed; None before.
        trains: The score has a weight that trains.
        decisions: The decisions so far, by position.
        rows: The rows that the previous block passed on instead of all tokens, or None.
        remaining: The rows that remain where tokens leave for good; None where skipped tokens come back.
        read_B1: The token that the embedding of a caption is read from (B, 1), where a text tower reads one.
        masks: Which tokens of captions are padding, once a block has asked.
    """

    read_B1: Tensor | None = None
    masks: TokenMasks | None = None

    def __init__(self) -> None:
        self.position = 0
        self.owner: object = None
        self.shape: tuple[int, ...] = ()
        self.patches = Patches()
        self.uninterrupted = False
        self.is_first = False
        self.ends_for_head = False
        self.read_blocks: Collection[int] = ()
        self.busy = False
        self.score_BN: Tensor | None = None
        self.trains = False
        self.decisions: dict[int, Decision] = {}
        self.rows: Rows | None = None
        self.remaining: Remaining | None = None
