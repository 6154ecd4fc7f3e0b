"""How the decisions of a model's blocks hang together: who is kept again, who never, and what tells it beforehand.

Axes: B images, N tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from mmod.analysis.audit.information import Information, KindCounts
from mmod.analysis.statistics import Estimate, RunningMean

# What `returning` is between 0, where tokens leave for good, and 1, where decisions are independent.
_HALF = 0.5
_POSITION = "position"


@dataclass(frozen=True)
class Across:
    """What the decisions of a model have in common. Prefix tokens and padding do not count.

    Args:
        decisions: Names of the blocks whose routers decide, in order.
        blocks: For each of them the routed blocks that keep its tokens.
        kept: Share of tokens that each decision keeps.
        again: P(kept at j | kept at i) in row i and column j: `kept` of j where decisions are independent, None between
            parts of a model with different tokens.
        never: Share of tokens that no decision keeps, by the first block of their part.
        returning: How often a token is kept that an earlier decision dropped, over the share that is kept: 0 in early
            exit, 1 where decisions are independent. None with one decision.
        information: By decision, what the "position" of a token and its other known properties say of it.
        verdict: `kind` in a sentence.
    """

    decisions: list[str]
    blocks: dict[str, list[str]]
    kept: dict[str, Estimate]
    again: list[list[Estimate | None]]
    never: dict[str, Estimate]
    returning: Estimate | None
    information: dict[str, dict[str, Information]]
    kind: Literal["early exit", "block-specific", "one decision", "cannot be told"]
    verdict: str


class Counter:
    """Counts of what is kept, by position and across decisions, of the routed blocks of these names."""

    def __init__(self, routed: Sequence[str]) -> None:
        self._routed = list(routed)
        self.decisions: list[str] = []
        self._pairs: dict[tuple[str, str], RunningMean] = {}
        self._never: dict[str, RunningMean] = {}
        self._returning = RunningMean()
        # By decision and by what is known of tokens.
        self._kinds: dict[str, dict[str, KindCounts]] = {}
        self._images = 0

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
            free_BN, counts = free[name], self._kinds.setdefault(name, {_POSITION: KindCounts()})
            images = range(self._images, self._images + len(keep_BN))
            order_BN = (free_BN.cumsum(1) - 1).clamp(min=0)
            counts[_POSITION].add(order_BN, keep_BN, free_BN, images)
            for known, names in kinds.items():
                if np.shape(names) == shapes[name]:
                    counts.setdefault(known, KindCounts()).add_names(names, keep_BN, free_BN, images)
        self._images += len(next(iter(kept.values())))
        for part in self._parts():
            self._add_part(part, [kept[name] & free[name] for name in part], free[part[0]])

    def _add_part(self, names: Sequence[str], keeps: Sequence[Tensor], free_BN: Tensor) -> None:
        free_B = free_BN.sum(1)
        gone_BN, ever_BN = torch.zeros_like(free_BN), torch.zeros_like(free_BN)
        back_B, expected_B = free_B.new_zeros((2, len(free_B)), dtype=torch.float64)
        for j, (name, keep_BN) in enumerate(zip(names, keeps)):
            for other, before_BN in zip(names, keeps):
                sums = self._pairs.setdefault((other, name), RunningMean())
                sums.add((before_BN & keep_BN).sum(1) / before_BN.sum(1))
            self._pairs.setdefault((name, ""), RunningMean()).add(keep_BN.sum(1) / free_B)
            if j:
                back_B += (keep_BN & gone_BN).sum(1)
                expected_B += gone_BN.sum(1) * (keep_BN.sum(1) / free_B)
            gone_BN, ever_BN = gone_BN | (free_BN & ~keep_BN), ever_BN | keep_BN
        if len(names) > 1:
            self._returning.add(back_B / expected_B)
        self._never.setdefault(names[0], RunningMean()).add((free_BN & ~ever_BN).sum(1) / free_B)

    def state(self) -> dict[str, Any]:
        """Return the counts as plain values and arrays."""
        return {
            "decisions": self.decisions,
            "images": self._images,
            "pairs": [[*names, counts.sums] for names, counts in self._pairs.items()],
            "never": {name: counts.sums for name, counts in self._never.items()},
            "returning": self._returning.sums,
            "kinds": {
                name: {known: [counts.names, counts.counts_G2K.numpy()] for known, counts in kinds.items()}
                for name, kinds in self._kinds.items()
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from counts."""
        self.decisions, self._images = state["decisions"], state["images"]
        self._pairs = {(before, name): RunningMean(sums) for before, name, sums in state["pairs"]}
        self._never = {name: RunningMean(sums) for name, sums in state["never"].items()}
        self._returning = RunningMean(state["returning"])
        self._kinds = {
            name: {known: KindCounts(*counts) for known, counts in kinds.items()}
            for name, kinds in state["kinds"].items()
        }

    def frequency(self, name: str, tokens: int) -> Tensor:
        """Return how often a decision keeps each of the tokens that may be skipped, by their order, in [0, 1] (F,)."""
        return self._kinds[name][_POSITION].frequency(tokens)

    def result(self) -> Across:
        """Return what was counted."""
        names, returning = self.decisions, self._returning.mean() if self._returning.sums[0] else None
        kind, verdict = _judge(returning, len(names))
        return Across(
            decisions=names,
            blocks=self._followers(),
            kept={name: self._pairs[name, ""].mean() for name in names},
            again=[[self._pairs[i, j].mean() if (i, j) in self._pairs else None for j in names] for i in names],
            never={name: sums.mean() for name, sums in self._never.items()},
            returning=returning,
            information={name: _informed(self._kinds[name]) for name in names},
            kind=kind,
            verdict=verdict,
        )

    def _parts(self) -> list[list[str]]:
        """Return the decisions of each list of blocks."""
        parts: dict[str, list[str]] = {}
        for name in self.decisions:
            parts.setdefault(name.rpartition(".")[0], []).append(name)
        return list(parts.values())

    def _followers(self) -> dict[str, list[str]]:
        """Return for each decision the blocks that keep its tokens, itself first."""
        followers: dict[str, list[str]] = {}
        for name in self._routed:
            if name in self.decisions:
                latest = followers.setdefault(name, [])
            latest.append(name)
        return followers


def _judge(
    returning: Estimate | None, decisions: int
) -> tuple[Literal["early exit", "block-specific", "one decision", "cannot be told"], str]:
    if returning is None:
        what = "One router decides for all routed blocks" if decisions == 1 else "Each part decides once"
        return "one decision", f"{what}: tokens are kept by all of them or by none."
    rate = (
        f"a token that was dropped is kept later {returning:.2f} times as often as where decisions are independent "
        "(95 % interval)"
    )
    if returning.high < _HALF:
        return "early exit", f"Tokens leave for good, as in early exit: {rate}."
    if returning.low > _HALF:
        return "block-specific", f"Blocks choose tokens of their own: {rate}."
    return "cannot be told", f"Whether tokens leave for good or blocks choose their own cannot be told: {rate}."


def _informed(counts: Mapping[str, KindCounts]) -> dict[str, Information]:
    """Return what is known of tokens and says something; nothing where all are of one kind."""
    information = {known: kinds.information() for known, kinds in counts.items()}
    return {known: bits for known, bits in information.items() if bits is not None}
