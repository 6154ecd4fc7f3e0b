"""How the decisions of a model's blocks hang together: who is kept again, who never, and what position says of it.

Axes: B images, N tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mmod.analysis.audit.replace import only_free
from mmod.analysis.audit.statistics import Estimate, Sums

__all__ = ["Across", "Counter"]

# What `returning` is between 0, where tokens leave for good, and 1, where decisions are independent.
_HALF = 0.5


@dataclass(frozen=True)
class Across:
    """What the decisions of a model have in common. Prefix tokens and padding do not count.

    Args:
        decisions: Names of the blocks whose routers decide, in order.
        blocks: For each of them the routed blocks that keep its tokens.
        kept: Share of tokens that each decision keeps.
        again: P(kept at j | kept at i) in row i and column j. Where decisions are independent it is `kept` of j. None
            between parts of a model that have tokens of their own.
        never: Share of tokens that no decision keeps, by the first block of their part.
        returning: How often a token is kept that an earlier decision has dropped, over the share that is kept: 0 where
            tokens leave for good, as in early exit, 1 where decisions are independent. None with one decision.
        information: For each decision the share of its entropy that position takes away, from 0 (position says
            nothing) to 1 (it says all).
        kind: "early exit", "block-specific", "one decision", or "cannot be told".
        verdict: The same in a sentence.
    """

    decisions: list[str]
    blocks: dict[str, list[str]]
    kept: dict[str, Estimate]
    again: list[list[Estimate | None]]
    never: dict[str, Estimate]
    returning: Estimate | None
    information: dict[str, float]
    kind: Literal["early exit", "block-specific", "one decision", "cannot be told"]
    verdict: str


class Counter:
    """Counts of what is kept, by position and across decisions; they do not grow with the images.

    Args:
        routed: Names of all routed blocks, in order.
    """

    def __init__(self, routed: Sequence[str]) -> None:
        self._routed = list(routed)
        self.decisions: list[str] = []
        self._pairs: dict[tuple[str, str], Sums] = {}
        self._never: dict[str, Sums] = {}
        self._returning = Sums()
        # Of each decision, for each place in the order of tokens that may be skipped, how many are kept, and how many
        # there are.
        self._positions: dict[str, Tensor] = {}

    def add(self, kept: Mapping[str, Tensor], free: Mapping[str, Tensor]) -> None:
        """Count the decisions of a batch.

        Args:
            kept: For each decision, True where a token is kept (B, N).
            free: The same where a token may be skipped.
        """
        self.decisions = self.decisions or list(kept)
        for name, keep_BN in kept.items():
            both = (keep_BN & free[name], free[name])
            counts = torch.stack([only_free(own, free[name]).sum(0) for own in both]).double().cpu()
            self._positions[name] = _longer(self._positions.get(name), counts)
        for part in self._parts():
            self._add_part(part, [kept[name] & free[name] for name in part], free[part[0]])

    def _add_part(self, names: Sequence[str], keeps: Sequence[Tensor], free_BN: Tensor) -> None:
        free_B = free_BN.sum(1)
        gone_BN, ever_BN = torch.zeros_like(free_BN), torch.zeros_like(free_BN)
        back_B, expected_B = free_B.new_zeros((2, len(free_B)), dtype=torch.float64)
        for j, (name, keep_BN) in enumerate(zip(names, keeps)):
            for other, before_BN in zip(names, keeps):
                sums = self._pairs.setdefault((other, name), Sums())
                sums.add((before_BN & keep_BN).sum(1) / before_BN.sum(1))
            self._pairs.setdefault((name, ""), Sums()).add(keep_BN.sum(1) / free_B)
            if j:
                back_B += (keep_BN & gone_BN).sum(1)
                expected_B += gone_BN.sum(1) * (keep_BN.sum(1) / free_B)
            gone_BN, ever_BN = gone_BN | (free_BN & ~keep_BN), ever_BN | keep_BN
        if len(names) > 1:
            self._returning.add(back_B / expected_B)
        self._never.setdefault(names[0], Sums()).add((free_BN & ~ever_BN).sum(1) / free_B)

    def frequency(self, name: str, tokens: int) -> Tensor:
        """Return how often a decision keeps each of the tokens that may be skipped, by their order, in [0, 1] (F,).

        Args:
            name: The decision.
            tokens: Number of such tokens F.
        """
        kept_F, free_F = _longer(self._positions[name], torch.zeros(2, tokens, dtype=torch.float64))[:, :tokens]
        return kept_F / free_F.clamp(min=1)

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
            information={name: _information(self._positions[name]) for name in names},
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
        found: dict[str, list[str]] = {}
        for name in self._routed:
            if name in self.decisions:
                latest = found.setdefault(name, [])
            latest.append(name)
        return found


def _judge(
    returning: Estimate | None, decisions: int
) -> tuple[Literal["early exit", "block-specific", "one decision", "cannot be told"], str]:
    if returning is None:
        what = "One router decides for all routed blocks" if decisions == 1 else "Each part decides once"
        return "one decision", f"{what}: tokens are kept by all of them or by none."
    told = (
        f"a token that was dropped is kept later {returning:.2f} times as often as where decisions are independent "
        "(95 % interval)"
    )
    if returning.high < _HALF:
        return "early exit", f"Tokens leave for good, as in early exit: {told}."
    if returning.low > _HALF:
        return "block-specific", f"Blocks choose tokens of their own: {told}."
    return "cannot be told", f"Whether tokens leave for good or blocks choose their own cannot be told: {told}."


def _information(counts_2N: Tensor) -> float:
    """Return the mutual information of being kept with the position, over the entropy of being kept."""
    kept_N, free_N = counts_2N[:, counts_2N[1] > 0]
    entropy = float(_entropy(kept_N.sum() / free_N.sum()))
    left = float((_entropy(kept_N / free_N) * free_N).sum() / free_N.sum())
    return 1 - left / entropy if entropy else 0.0


def _entropy(share: Tensor) -> Tensor:
    """Return the entropy in bits of what happens with a probability."""
    return -(torch.xlogy(share, share) + torch.xlogy(1 - share, 1 - share)) / torch.log(share.new_tensor(2.0))


def _longer(earlier: Tensor | None, counts: Tensor) -> Tensor:
    """Return the sum of counts by position, of sequences of any length."""
    if earlier is None:
        return counts
    positions = max(earlier.shape[1], counts.shape[1])
    padded = [torch.nn.functional.pad(own, (0, positions - own.shape[1])) for own in (earlier, counts)]
    return padded[0] + padded[1]
