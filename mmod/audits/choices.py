"""Counterfactual choices of tokens: each ranks the tokens of a batch, and the highest ranks are kept.

Axes: B images, N tokens, F tokens of an image that may be skipped, D channels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmod.ops import spread_evenly
from mmod.routing import Routing
from mmod.values import refuse_unknown

Family = Literal["random", "position", "other"]
LEARNED = "as learned"
RANDOM = "random"
ORACLE = "oracle"
DENSE_ATTENTION = "dense attention"
REFERENCE_ENTROPY = "reference entropy"


@dataclass(frozen=True)
class DecisionContext:
    """What a custom condition of an audit gets: the learned decision that it replaces, and its inputs.

    Args:
        x_BND: The router's input in this forward pass (B, N, D).
        learned: The learned decision on these images.
        free_BN: True where a token may be skipped (B, N).
        partner: The learned decision on another image for each image, over tokens that may be skipped.
        frequency_F: How often the router keeps a token, by its index among tokens that may be skipped, in [0, 1].
        reference: What the dense model adds, by name of the condition: the mean attention that tokens receive in the
            same block, and the entropy at every token (B, N).
    """

    block: str
    x_BND: Tensor
    learned: Routing
    free_BN: Tensor
    partner: FreeDecision
    images: range
    frequency_F: Tensor
    grid: tuple[int, int]
    reference: Mapping[str, Tensor]
    draw: int

    @property
    def order_BN(self) -> Tensor:
        """Index of a token among those of its image that may be skipped; undefined for other tokens."""
        return (self.free_BN.cumsum(1) - 1).clamp(min=0)


@dataclass(frozen=True)
class FreeDecision:
    """A decision over the tokens that may be skipped: which were kept, and their scores, (B, F) each."""

    keep_BF: Tensor
    score_BF: Tensor

    def of(self, images: slice) -> FreeDecision:
        """Return the decision on some of the images, in memory of its own."""
        return FreeDecision(self.keep_BF[images].clone(), self.score_BF[images].clone())


class Choice(NamedTuple):
    """A counterfactual choice: its family, and a function to ranks (B, N), of which the highest are kept."""

    family: Family
    rank: Callable[[DecisionContext], Tensor]


@functools.lru_cache(maxsize=1)
def _draws(draw: int, images: range, tokens: int) -> Tensor:
    """Draw once per image, seeded by its index: all blocks keep the same tokens, independent of the batch."""
    ranks = [np.random.default_rng((draw, image)).random(tokens) for image in images]
    return torch.from_numpy(np.stack(ranks))


def _centre(context: DecisionContext) -> Tensor:
    """Rank by distance from the centre of the grid, nearest first."""
    rows, columns = context.grid
    row_BN = context.order_BN // columns
    column_BN = context.order_BN % columns
    # In shares of the grid's sides, so that a long grid has no longer way to its ends.
    down_BN = (row_BN - (rows - 1) / 2) / rows
    across_BN = (column_BN - (columns - 1) / 2) / columns
    return -torch.hypot(down_BN, across_BN)


def _shuffled(context: DecisionContext) -> Tensor:
    """Rank the tokens that the router kept in another image first."""
    tokens = int(context.free_BN.sum(1).max())
    partner = context.partner
    if partner.keep_BF.shape[1] != tokens:
        raise ValueError(
            f"'shuffled' applies the decision of another image, in which {partner.keep_BF.shape[1]} tokens may be "
            f"skipped and not {tokens}: use images of one size, or leave it out of `conditions`"
        )
    return rank_first(partner.keep_BF, partner.score_BF).gather(1, context.order_BN)


def rank_first(first_BN: Tensor, score_BN: Tensor) -> Tensor:
    """Return ranks by score, from 0, with masked tokens above all others (B, N)."""
    # In float64, and stably: equal scores keep their order by position, as in the router.
    order_BN = score_BN.double().argsort(dim=1, stable=True)
    position_BN = torch.arange(score_BN.shape[1], device=score_BN.device).expand(score_BN.shape)
    rank_BN = torch.empty_like(order_BN).scatter_(1, order_BN, position_BN)
    # A token of the mask is above all others, whatever its score.
    return rank_BN + first_BN * score_BN.shape[1]


CHOICES: Mapping[str, Choice] = {
    RANDOM: Choice("random", lambda context: _draws(context.draw, context.images, context.x_BND.shape[1])),
    "stride": Choice(
        "position", lambda context: spread_evenly(context.x_BND.shape[1], context.x_BND.device)[context.order_BN]
    ),
    "centre": Choice("position", _centre),
    "border": Choice("position", lambda context: -_centre(context)),
    "mean mask": Choice("position", lambda context: context.frequency_F[context.order_BN]),
    "token norm": Choice("other", lambda context: context.x_BND.float().norm(dim=-1)),
    "inverted": Choice("other", lambda context: rank_first(~context.learned.keep_BN, -context.learned.score_BN)),
    "shuffled": Choice("other", _shuffled),
    DENSE_ATTENTION: Choice("other", lambda context: context.reference[DENSE_ATTENTION]),
    REFERENCE_ENTROPY: Choice("other", lambda context: context.reference[REFERENCE_ENTROPY]),
}
"""The default conditions of an audit, by name; the last two need a dense model."""
_OF_REFERENCE = (DENSE_ATTENTION, REFERENCE_ENTROPY)


def default_choices(has_reference: bool) -> list[str]:
    """Return the names of an audit's default conditions."""
    return [name for name in CHOICES if has_reference or name not in _OF_REFERENCE]


def choices(
    conditions: Sequence[str] | None,
    custom: Mapping[str, Callable[[DecisionContext], Tensor]] | None,
    *,
    has_reference: bool = False,
) -> dict[str, Choice]:
    """Return the choices of an audit, by name."""
    if conditions is None:
        conditions = default_choices(has_reference)
    names = list(conditions)
    custom = custom or {}
    refuse_unknown("condition", names, list(CHOICES))
    reserved = sorted(set(custom) & {*CHOICES, LEARNED, ORACLE})
    if reserved:
        raise ValueError(f"custom uses the reserved names {', '.join(reserved)}: choose other names")
    for name in _OF_REFERENCE:
        if name in names and not has_reference:
            raise ValueError(f"the condition {name!r} needs a dense model: pass `reference`")
    if RANDOM not in names:
        raise ValueError(f"conditions must name {RANDOM!r}, which the verdict compares with, got {names}")
    chosen = {name: CHOICES[name] for name in names}
    chosen |= {name: Choice("other", rank) for name, rank in custom.items()}
    return chosen
