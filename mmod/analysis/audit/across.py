"""How the decisions of a model's blocks depend on each other: tokens kept again, or never, and what predicts it.

Axes: B images, N tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from mmod.analysis.audit.information import Information, KindCounts
from mmod.analysis.statistics import Estimate, RunningMean

# `returning` is 0 where tokens leave for good and 1 where decisions are independent.
_HALF = 0.5
_POSITION = "position"
Kind = Literal["early exit", "block-specific", "one decision", "inconclusive"]


@dataclass(frozen=True)
class Across:
    """How the decisions of a model depend on each other. Prefix tokens and padding are excluded.

    Args:
        blocks: For each deciding block, in order, the routed blocks that keep its tokens.
        kept: Share of tokens that each decision keeps.
        again: P(kept at j | kept at i) in row i and column j: `kept` of j where decisions are independent, None between
            parts of a model with different tokens.
        never: Share of tokens that no decision keeps, by the first block of their part.
        returning: How often a token is kept that an earlier decision dropped, over the share that is kept: 0 in early
            exit, 1 where decisions are independent. None with one decision.
        information: By decision, what the "position" of a token and its other known properties say of it.
    """

    decisions: list[str]
    blocks: dict[str, list[str]]
    kept: dict[str, Estimate]
    again: list[list[Estimate | None]]
    never: dict[str, Estimate]
    returning: Estimate | None
    information: dict[str, dict[str, Information]]
    kind: Kind
    verdict: str


@dataclass
class Counter:
    """Counts of what is kept, by position and across decisions, of the routed blocks of these names."""

    routed: list[str]
    decisions: list[str] = field(default_factory=list)
    images: int = 0
    kept: dict[str, RunningMean] = field(default_factory=dict)
    # By an earlier or later decision and by the one that keeps the same token.
    pairs: dict[str, dict[str, RunningMean]] = field(default_factory=dict)
    never: dict[str, RunningMean] = field(default_factory=dict)
    returning: RunningMean = field(default_factory=RunningMean)
    # By decision and by what is known of tokens.
    kinds: dict[str, dict[str, KindCounts]] = field(default_factory=dict)

    def add(
        self,
        kept: Mapping[str, Tensor],
        free: Mapping[str, Tensor],
        kinds: Mapping[str, ArrayLike] = MappingProxyType({}),
    ) -> None:
        """Count the decisions of a batch."""
        self.decisions = self.decisions or list(kept)
        shapes = {name: tuple(keep_BN.shape) for name, keep_BN in kept.items()}
        for known, names in kinds.items():
            if np.shape(names) not in shapes.values():
                raise ValueError(
                    f"token_kinds give {known!r} of {np.shape(names)} tokens, and decisions are on "
                    f"{', '.join(map(str, dict.fromkeys(shapes.values())))}"
                )
        for name, keep_BN in kept.items():
            free_BN = free[name]
            counts = self.kinds.setdefault(name, {_POSITION: KindCounts()})
            images = range(self.images, self.images + len(keep_BN))
            order_BN = (free_BN.cumsum(1) - 1).clamp(min=0)
            counts[_POSITION].add(order_BN, keep_BN, free_BN, images)
            for known, names in kinds.items():
                if np.shape(names) == shapes[name]:
                    counts.setdefault(known, KindCounts()).add_names(names, keep_BN, free_BN, images)
        self.images += len(next(iter(kept.values())))
        for _, of_part in groupby(self.decisions, key=lambda name: name.rpartition(".")[0]):
            part = list(of_part)
            self._add_part(part, [kept[name] & free[name] for name in part], free[part[0]])

    def _add_part(self, names: Sequence[str], keeps: Sequence[Tensor], free_BN: Tensor) -> None:
        free_B = free_BN.sum(1)
        gone_BN = torch.zeros_like(free_BN)
        ever_BN = torch.zeros_like(free_BN)
        back_B, expected_B = free_B.new_zeros((2, len(free_B)), dtype=torch.float64)
        for j, (name, keep_BN) in enumerate(zip(names, keeps)):
            for other, before_BN in zip(names, keeps):
                sums = self.pairs.setdefault(other, {}).setdefault(name, RunningMean())
                sums.add((before_BN & keep_BN).sum(1) / before_BN.sum(1))
            self.kept.setdefault(name, RunningMean()).add(keep_BN.sum(1) / free_B)
            # Nothing is gone before the first decision, so it has no share in what returns.
            if j:
                back_B += (keep_BN & gone_BN).sum(1)
                expected_B += gone_BN.sum(1) * (keep_BN.sum(1) / free_B)
            gone_BN = gone_BN | (free_BN & ~keep_BN)
            ever_BN = ever_BN | keep_BN
        if len(names) > 1:
            self.returning.add(back_B / expected_B)
        self.never.setdefault(names[0], RunningMean()).add((free_BN & ~ever_BN).sum(1) / free_B)

    def frequency(self, name: str, tokens: int) -> Tensor:
        """Return how often a decision keeps each of the tokens that may be skipped, by their order, in [0, 1] (F,)."""
        return self.kinds[name][_POSITION].frequency(tokens)

    def result(self) -> Across:
        """Return what was counted."""
        names = self.decisions
        returning = self.returning.mean() if self.returning.sums[0] else None
        kind, verdict = _judge(returning, len(names))
        information: dict[str, dict[str, Information]] = {}
        for name in names:
            known = {fact: kinds.information() for fact, kinds in self.kinds[name].items()}
            # Facts that are the same for all tokens say nothing.
            information[name] = {fact: bits for fact, bits in known.items() if bits is not None}
        again: list[list[Estimate | None]] = []
        for i in names:
            # Parts of a model with different tokens have no pairs.
            again.append([self.pairs[i][j].mean() if j in self.pairs[i] else None for j in names])
        return Across(
            decisions=names,
            blocks=self._followers(),
            kept={name: self.kept[name].mean() for name in names},
            again=again,
            never={name: sums.mean() for name, sums in self.never.items()},
            returning=returning,
            information=information,
            kind=kind,
            verdict=verdict,
        )

    def _followers(self) -> dict[str, list[str]]:
        """Return the blocks that keep the tokens of each decision, the deciding block first."""
        followers: dict[str, list[str]] = {}
        for name in self.routed:
            if name in self.decisions:
                latest = followers.setdefault(name, [])
            latest.append(name)
        return followers


def _judge(returning: Estimate | None, decisions: int) -> tuple[Kind, str]:
    if returning is None:
        decider = "One router decides for all routed blocks" if decisions == 1 else "Each part decides once"
        return "one decision", f"{decider}: tokens are kept by all of them or by none."
    rate = (
        f"a token that was dropped is kept later {returning:.2f} times as often as where decisions are independent "
        "(95 % interval)"
    )
    if returning.high < _HALF:
        return "early exit", f"Tokens leave for good, as in early exit: {rate}."
    if returning.low > _HALF:
        return "block-specific", f"Blocks choose tokens of their own: {rate}."
    return "inconclusive", f"Inconclusive whether tokens leave for good or blocks choose their own: {rate}."
