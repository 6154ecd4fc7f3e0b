"""Counterfactual choices of tokens: each ranks the tokens of a batch, and the best of them are kept.

Axes: B images, N tokens, F tokens of an image that may be skipped, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmod.routing import Routing
from mmod.routing.score.stride import spread_evenly

__all__ = [
    "CHOICES",
    "DENSE_ATTENTION",
    "RANDOM",
    "REFERENCE_ENTROPY",
    "Choice",
    "Family",
    "Place",
    "choices",
    "default_choices",
    "first",
]

Family = Literal["random", "position", "other"]
RANDOM, DENSE_ATTENTION, REFERENCE_ENTROPY = "random", "dense attention", "reference entropy"


@dataclass(frozen=True)
class Place:
    """Where a decision is replaced, and what is known there.

    Args:
        block: Name of the block whose router decides.
        x_BND: What the router scores in this forward pass (B, N, D).
        learned: What it decides on these images as it was learned.
        free_BN: True where a token may be skipped (B, N).
        partner: What it decides on other images, one for each, in the order of the tokens that may be skipped.
        images: Numbers of the images, in the order in which they come.
        frequency_F: How often the router keeps each of the tokens that may be skipped, by their order, in [0, 1].
        grid: Rows and columns of the tokens that may be skipped.
        attention_BN: Attention that each token receives in the same block of the dense model, the mean over heads and
            queries; None where nobody asks a dense model.
        entropy_BN: How unsure the dense model is at each token, see `mmod.analysis.audit.reference.token_entropy`; None
            where nobody asks it.
        draw: Number of the draw, for what is drawn at random.
    """

    block: str
    x_BND: Tensor
    learned: Routing
    free_BN: Tensor
    partner: Kept
    images: range
    frequency_F: Tensor
    grid: tuple[int, int]
    attention_BN: Tensor | None = None
    entropy_BN: Tensor | None = None
    draw: int = 0

    @property
    def order_BN(self) -> Tensor:
        """Number of each token among those of its image that may be skipped; of no meaning for others."""
        return (self.free_BN.cumsum(1) - 1).clamp(min=0)


class Kept(NamedTuple):
    """What is remembered of the tokens that may be skipped: which were kept, and their scores, (B, F) each."""

    keep_BF: Tensor
    score_BF: Tensor


class Choice(NamedTuple):
    """A counterfactual choice.

    Args:
        family: "position" for what depends on nothing but the place of a token, "random", or "other".
        rank: Maps a `Place` to ranks (B, N); the highest are kept.
    """

    family: Family
    rank: Callable[[Place], Tensor]


def _random(place: Place) -> Tensor:
    """Draw once for each image, by its number: all blocks keep the same tokens, whatever else is in the batch."""
    tokens = place.x_BND.shape[1]
    draws = [np.random.default_rng((place.draw, image)).random(tokens) for image in place.images]
    return torch.from_numpy(np.stack(draws)).to(place.x_BND.device)


def _stride(place: Place) -> Tensor:
    return spread_evenly(place.x_BND.shape[1], place.x_BND.device)[place.order_BN]


def _centre(place: Place) -> Tensor:
    """Rank by the distance from the middle of the grid, the nearest first."""
    rows, columns = place.grid
    row_BN, column_BN = place.order_BN // columns, place.order_BN % columns
    return -torch.hypot((row_BN - (rows - 1) / 2) / rows, (column_BN - (columns - 1) / 2) / columns)


def _border(place: Place) -> Tensor:
    return -_centre(place)


def _mean_mask(place: Place) -> Tensor:
    return place.frequency_F[place.order_BN]


def _inverted(place: Place) -> Tensor:
    """Rank what the router dropped before what it kept, and each by its score, the lowest first."""
    return first(~place.learned.keep_BN, -place.learned.score_BN)


def _shuffled(place: Place) -> Tensor:
    """Rank what the router kept of another image before the rest."""
    tokens, partner = int(place.free_BN.sum(1).max()), place.partner
    if partner.keep_BF.shape[1] != tokens:
        raise ValueError(
            f"'shuffled' gives an image the decision of another one, in which {partner.keep_BF.shape[1]} tokens may be "
            f"skipped and not {tokens}: take images of one size, or leave it out of `conditions`"
        )
    return first(partner.keep_BF, partner.score_BF).gather(1, place.order_BN)


def _norm(place: Place) -> Tensor:
    return place.x_BND.float().norm(dim=-1)


def _dense_attention(place: Place) -> Tensor:
    assert place.attention_BN is not None
    return place.attention_BN


def _reference_entropy(place: Place) -> Tensor:
    assert place.entropy_BN is not None
    return place.entropy_BN


def first(first_BN: Tensor, score_BN: Tensor) -> Tensor:
    """Return ranks by score in which marked tokens come before all others, from 0 (B, N).

    Args:
        first_BN: True where a token is marked.
        score_BN: Scores.
    """
    order_BN = score_BN.double().argsort(dim=1, stable=True)
    places = torch.arange(score_BN.shape[1], device=score_BN.device).expand(score_BN.shape)
    rank_BN = torch.empty_like(order_BN).scatter_(1, order_BN, places)
    return rank_BN + first_BN * score_BN.shape[1]


CHOICES: Mapping[str, Choice] = {
    RANDOM: Choice("random", _random),
    "stride": Choice("position", _stride),
    "centre": Choice("position", _centre),
    "border": Choice("position", _border),
    "mean mask": Choice("position", _mean_mask),
    "token norm": Choice("other", _norm),
    "inverted": Choice("other", _inverted),
    "shuffled": Choice("other", _shuffled),
    DENSE_ATTENTION: Choice("other", _dense_attention),
    REFERENCE_ENTROPY: Choice("other", _reference_entropy),
}
"""The choices that an audit makes unless it is told otherwise, by name; the last two where it has a dense model."""
_OF_REFERENCE = (DENSE_ATTENTION, REFERENCE_ENTROPY)


def default_choices(has_reference: bool) -> list[str]:
    """Return the names of the choices that are made unless others are asked for.

    Args:
        has_reference: Whether there is a dense model.

    Example:
        >>> sorted(set(default_choices(True)) - set(default_choices(False)))
        ['dense attention', 'reference entropy']
    """
    return [name for name in CHOICES if has_reference or name not in _OF_REFERENCE]


def choices(
    conditions: tuple[str, ...] | None,
    own: Mapping[str, Callable[[Place], Tensor]] | None,
    *,
    has_reference: bool = False,
) -> dict[str, Choice]:
    """Return the choices that an audit makes, by name.

    Args:
        conditions: Names of those of `CHOICES` that are wanted, None for all.
        own: Further ones, as functions from a `Place` to ranks (B, N).
        has_reference: Whether there is a dense model.

    Raises:
        ValueError: A name that there is not, one that is taken or named twice, no random choice, or one that needs a
            dense model.
    """
    wanted, own = default_choices(has_reference) if conditions is None else list(conditions), own or {}
    unknown = sorted(set(wanted) - set(CHOICES))
    if unknown:
        raise ValueError(f"conditions names {', '.join(unknown)}; valid are {', '.join(CHOICES)}")
    if len(set(wanted)) < len(wanted):
        raise ValueError(f"conditions must name each choice once, got {wanted}")
    taken = sorted(set(own) & {*CHOICES, "as learned"})
    if taken:
        raise ValueError(f"own names {', '.join(taken)}, which an audit has already: choose another name")
    for name in () if has_reference else _OF_REFERENCE:
        if name in wanted:
            raise ValueError(f"the condition {name!r} needs a dense model: give `reference`")
    if RANDOM not in wanted:
        raise ValueError(f"conditions must name {RANDOM!r}, which the verdict compares with, got {wanted}")
    return {name: CHOICES[name] for name in wanted} | {name: Choice("other", rank) for name, rank in own.items()}
