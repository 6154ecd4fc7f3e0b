"""How the decisions of a model's blocks depend on each other: tokens kept again, or never, and what predicts it.

Axes: B images, N tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from mmod.analysis.evaluations import joined
from mmod.analysis.statistics import Estimate, normal_mean
from mmod.audits.information import Information, information_of
from mmod.audits.tables import BatchRows
from mmod.io.tables import MarkdownTable

# `returning` is 0 where tokens leave for good and 1 where decisions are independent.
_HALF = 0.5
AgreementKind = Literal["early exit", "block-specific", "one decision", "inconclusive"]


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
            exit, 1 where decisions are independent. None with one decision, or where none could return.
        information: By decision, what the "position" of a token and its other known properties say of it.
    """

    decisions: list[str]
    blocks: dict[str, list[str]]
    kept: dict[str, Estimate]
    again: list[list[Estimate | None]]
    never: dict[str, Estimate]
    returning: Estimate | None
    information: dict[str, dict[str, Information]]
    kind: AgreementKind
    verdict: str

    def tables(self) -> list[MarkdownTable]:
        """Return how often tokens kept in one block are kept in another, a table for each part of the model."""
        tables = []
        for part, names in groupby(self.decisions, key=_part):
            chosen = [self.decisions.index(name) for name in names]
            short = [self.decisions[i].rpartition(".")[2] for i in chosen]
            rows = [[f"kept in {part or 'the model'}, again in", *short]]
            for name, i in zip(short, chosen):
                shares = (self.again[i][j] for j in chosen)
                rows.append([name, *map(_cell, shares)])
            rows.append(["by chance", *(_cell(self.kept[self.decisions[i]]) for i in chosen)])
            tables.append(MarkdownTable(rows))
        return tables


def across_of(batches: Sequence[BatchRows], routed: Sequence[str]) -> Across:
    """Return how the decisions of a model depend on each other; `routed` are the names of its routed blocks."""
    names = list(batches[0].decisions)
    parts = [list(part) for _, part in groupby(names, key=_part)]
    columns = joined([_shares(batch, parts) for batch in batches])
    shares = {of: normal_mean(share_I) for of, share_I in columns.items()}
    back = shares.get(("returning",))
    # Nothing can return where no decision before the last one of a part dropped a token.
    if back is not None and math.isnan(back.value):
        back = None
    kind, verdict = _agreement_of(back, parts)
    return Across(
        decisions=names,
        blocks=_followers(names, routed),
        kept={name: shares["kept", name] for name in names},
        # Parts of a model with different tokens have no pairs.
        again=[[shares.get(("again", i, j)) for j in names] for i in names],
        never={part[0]: shares["never", part[0]] for part in parts},
        returning=back,
        information=information_of(batches),
        kind=kind,
        verdict=verdict,
    )


def _shares(batch: BatchRows, parts: Sequence[Sequence[str]]) -> dict[tuple[str, ...], Tensor]:
    """Return shares of the tokens of each sample by what they are of (B,)."""
    shares: dict[tuple[str, ...], Tensor] = {}
    returning = []
    for part in parts:
        free_BN = batch.decisions[part[0]].free.unpacked()
        free_B = free_BN.sum(1)
        keeps = {name: batch.decisions[name].keep.unpacked() for name in part}
        for name, keep_BN in keeps.items():
            shares["kept", name] = keep_BN.sum(1) / free_B
            # NaN, which does not count, for an image of which the decision before keeps nothing.
            for before, before_BN in keeps.items():
                shares["again", before, name] = (before_BN & keep_BN).sum(1) / before_BN.sum(1)
        ever_BN = torch.stack(list(keeps.values())).any(0)
        shares["never", part[0]] = (free_BN & ~ever_BN).sum(1) / free_B
        if len(part) > 1:
            returning.append(_returning(list(keeps.values()), free_BN))
    if returning:
        shares["returning",] = torch.cat(returning)
    return shares


def _returning(keeps: Sequence[Tensor], free_BN: Tensor) -> Tensor:
    """Return how often tokens of each image return that were dropped, over what chance would give (B,)."""
    free_B = free_BN.sum(1)
    gone_BN = torch.zeros_like(free_BN)
    back_B, expected_B = free_B.new_zeros((2, len(free_B)), dtype=torch.float64)
    # Before the first decision nothing is gone, so that it adds nothing.
    for keep_BN in keeps:
        back_B += (keep_BN & gone_BN).sum(1)
        expected_B += gone_BN.sum(1) * (keep_BN.sum(1) / free_B)
        # A token that is kept again stays among those that were dropped: it may return more than once.
        gone_BN = gone_BN | (free_BN & ~keep_BN)
    return back_B / expected_B


def _followers(decisions: Sequence[str], routed: Sequence[str]) -> dict[str, list[str]]:
    """Return the blocks that keep the tokens of each decision, the deciding block first."""
    followers: dict[str, list[str]] = {}
    latest: dict[str, list[str]] = {}
    for name in routed:
        part = _part(name)
        if name in decisions:
            latest[part] = followers.setdefault(name, [])
        # A block that decides nothing keeps the tokens of the last one that did. A part that decides nothing did not
        # run: a tower of images where texts are read.
        if part in latest:
            latest[part].append(name)
    return followers


def _cell(share: Estimate | None) -> str:
    if share is None:
        return ""
    # Without its interval, for which a table of blocks has no room.
    return f"{Estimate(share.value):.2f}"


def _part(name: str) -> str:
    """Return what the names of a part's blocks share: the place of the module that holds them."""
    return name.rpartition(".")[0]


def _agreement_of(returning: Estimate | None, parts: Sequence[Sequence[str]]) -> tuple[AgreementKind, str]:
    if all(len(part) == 1 for part in parts):
        decider = "One router decides for all routed blocks" if len(parts) == 1 else "Each part decides once"
        return "one decision", f"{decider}: tokens are kept by all of them or by none."
    if returning is None:
        return (
            "inconclusive",
            "Inconclusive whether tokens leave for good: no decision dropped any before another one kept some.",
        )
    rate = (
        f"a token that was dropped is kept later {returning:.2f} times as often as where decisions are independent "
        "(95 % interval)"
    )
    if returning.high < _HALF:
        return "early exit", f"Tokens leave for good, as in early exit: {rate}."
    if returning.low > _HALF:
        return "block-specific", f"Blocks choose tokens of their own: {rate}."
    return "inconclusive", f"Inconclusive whether tokens leave for good or blocks choose their own: {rate}."
