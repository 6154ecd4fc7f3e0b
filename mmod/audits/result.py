"""The result of an audit: its figures, its verdict, and both as text and tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from mmod.analysis.statistics import Estimate, Values, adjusted, estimate_of, published, resampled_means, sign_test
from mmod.audits.across import Across, across_of
from mmod.audits.choices import LEARNED, RANDOM, Choice
from mmod.audits.information import Influence, influence_of, information_table
from mmod.audits.oracle import LeaveOneOut, leave_one_out_of
from mmod.audits.strata import (
    ALL,
    SHIFT,
    OutcomePairs,
    Stratum,
    compare_strata,
    members_of,
    say_gaps,
    strata_table,
)
from mmod.audits.tables import BatchTables, Outcomes, joined, outcomes_of
from mmod.config import AuditConfig
from mmod.io.tables import MarkdownTable, table_of
from mmod.values import from_plain

_LEVEL = 0.05
_COLUMNS = {
    "name": ("tokens kept", ""),
    "accuracy": ("accuracy %", ".1f"),
    "loss": ("loss", ".3f"),
    "accuracy_change": ("accuracy change", "+.1f"),
    "accuracy_p": ("p", ".3g"),
    "loss_change": ("loss change", "+.3f"),
    "loss_p": ("p of loss", ".3g"),
    "effect": ("effect", ".2f"),
}
Kind = Literal["content", "position", "both", "no better than random", "inconclusive"]
_LEADS: dict[Kind, str] = {
    "content": "The router uses content",
    "position": "The router uses position",
    "both": "The router uses content and position",
    "no better than random": "No better than random",
    "inconclusive": "Inconclusive",
}
# Shares of position, of what content and position decide, between which a router uses both.
_BOTH = (0.25, 0.75)
# A choice of which content and position each decide less than that, and surely less than twice that, uses neither.
_NONE = 0.05
# Intervals of fewer images are too short.
_FEW = 10
# A router of which a fixed position reaches less than that share cannot use position alone.
_HALF = 0.5


@dataclass(frozen=True)
class Condition:
    """The model with one choice of tokens.

    Args:
        family: "learned", "random", "position" or "other".
        accuracy: Accuracy in percent.
        accuracy_change: Accuracy minus that with the learned choice, paired by image; None for the learned choice.
        accuracy_p: P-value of that change, corrected for all tests of the audit.
        effect: Change of the loss over its standard deviation among images.
    """

    name: str
    family: str
    accuracy: Estimate
    loss: Estimate
    accuracy_change: Estimate | None = None
    loss_change: Estimate | None = None
    accuracy_p: float | None = None
    loss_p: float | None = None
    effect: float | None = None


@dataclass(frozen=True)
class Audit:
    """What the decisions of a model are worth, and how they depend on each other.

    Args:
        draws: Random choices per image, of which results are means.
        conditions: The model with each choice of tokens, the learned one first.
        gap: Accuracy of the learned choice minus that of the random one.
        position: Name of the fixed position that scores highest.
        explained: Share of the gap that this position reaches; None without a clear gap or a position.
        kind: What the router uses, or "no better than random" where it uses neither content nor position.
        verdict: The same in sentences, with what its choice is worth and what a fixed position would reach on the data.
        strata: The learned choice against the random one by stratum.
        baselines: The model against baselines, on all images and by stratum.
        influence: What decides which patches are kept where content is moved; None without a known grid of patches.
    """

    images: int
    draws: int
    conditions: list[Condition]
    gap: Estimate
    position: str | None
    explained: Estimate | None
    kind: Kind
    verdict: str
    across: Across
    strata: list[Stratum] = dataclasses.field(default_factory=list)
    leave_one_out: LeaveOneOut | None = None
    baselines: list[Stratum] = dataclasses.field(default_factory=list)
    influence: Influence | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        return dataclasses.asdict(self, dict_factory=published)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Audit:
        """Return the audit that `to_dict` wrote."""
        return from_plain(cls, fields, "audit", limit=None)

    def sections(self) -> list[str | MarkdownTable]:
        """Return sentences and tables, all but the verdict."""
        across = self.across
        names = self.across.decisions
        conditions = (
            f"{self.images} images, {self.draws} random draws. Intervals are of 95 %, by resampling images; p-values "
            "are of paired tests by random signs, corrected by Holm's method."
        )
        again = []
        for name, row in zip(names, across.again):
            again.append([name, *("" if share is None else f"{share:.2f}" for share in row)])
        kept = ["kept by chance", *(f"{across.kept[name]:.2f}" for name in names)]
        never = "; ".join(f"{share:.3f} of the tokens from {name} on" for name, share in across.never.items())
        parts: list[str | MarkdownTable] = [
            table_of(_COLUMNS, [vars(condition) for condition in self.conditions], conditions),
            across.verdict,
            MarkdownTable([["kept in", *(f"again in {name}" for name in names)], *again, kept]),
            f"Never kept: {never}.",
        ]
        known = information_table(across.information)
        if len(known.rows) > 1:
            parts.append(known)
        if self.strata:
            caption = "Gaps are those of the learned over the random choice"
            parts += [strata_table(self.strata, "random", caption), *say_gaps(self.strata)]
        if self.baselines:
            caption = "Gaps are those of this model over the other, on the same images"
            parts += [strata_table(self.baselines, "its", caption), *say_gaps(self.baselines)]
        if self.leave_one_out is not None:
            parts.append(self.leave_one_out.table())
        return parts

    def __str__(self) -> str:
        return "\n\n".join([self.verdict, *map(str, self.sections())])

    _repr_markdown_ = __str__  # Notebooks show it.


def compare(
    tables: Sequence[BatchTables],
    others: Mapping[str, Sequence[BatchTables]],
    routed: Sequence[str],
    choices: Mapping[str, Choice],
    config: AuditConfig,
) -> Audit:
    """Return what the tables of an audit's batches say.

    Args:
        others: Those of other sets by name.
        routed: Names of the model's routed blocks.
    """
    images = sum(table.samples for table in tables)
    if images < 2:
        raise ValueError(f"an audit needs two images or more, got {images}")
    names = [LEARNED, *choices]
    outcomes = outcomes_of(tables)
    columns = [100 * outcomes[name].accuracy for name in names] + [outcomes[name].loss for name in names]

    # Accuracies of all contexts, then their losses; each is compared with that of the learned choice.
    value_I2C = np.stack(columns, axis=1).reshape(images, 2, len(names))
    drawn = resampled_means(value_I2C.reshape(images, -1), config.resamples, seed=0)
    drawn_S2C = drawn.reshape(-1, 2, len(names))
    mean_2C = value_I2C.mean(axis=0)
    gap_I2C = value_I2C - value_I2C[:, :, :1]
    uncorrected = sign_test(gap_I2C[:, :, 1:].reshape(images, -1), config.resamples, seed=1).tolist()
    # Tested all together and corrected, since the audit asks many questions of the same images.
    conditions = _conditions(names, choices, value_I2C, drawn_S2C, np.reshape(adjusted(uncorrected), (2, -1)))

    random = names.index(RANDOM)
    above_S = drawn_S2C[:, 0, 0] - drawn_S2C[:, 0, random]
    gap = estimate_of(mean_2C[0, 0] - mean_2C[0, random], above_S)
    # What the verdict rests on: by interval and by test, since intervals of few images are too short.
    is_clear = gap.low > 0 and uncorrected[random - 1] < _LEVEL

    positions = [number for number, name in enumerate(names) if number and choices[name].family == "position"]
    best = max(positions, key=lambda number: mean_2C[0, number], default=None)
    explained = None
    if best is not None and is_clear:
        # Resamples in which the router is no better than random have no share to explain.
        is_above_S = above_S > 0
        position_S = drawn_S2C[:, 0, best] - drawn_S2C[:, 0, random]
        share = position_S[is_above_S] / above_S[is_above_S]
        explained = estimate_of((mean_2C[0, best] - mean_2C[0, random]) / gap.value, share)
    is_none = not is_clear and gap.high < config.margin and images >= _FEW

    position = None if best is None else names[best]
    influence = influence_of(tables)
    kind, verdict = evaluate(gap, explained, position, influence, is_clear=is_clear, is_none=is_none)
    strata, baselines = _pairs(tables, others)

    return Audit(
        images=images,
        draws=config.draws,
        conditions=conditions,
        gap=gap,
        position=position,
        explained=explained,
        kind=kind,
        verdict=verdict,
        across=across_of(tables, routed),
        strata=compare_strata(strata, config.resamples),
        leave_one_out=leave_one_out_of(tables),
        baselines=compare_strata(baselines, config.resamples),
        influence=influence,
    )


def _conditions(
    names: Sequence[str], choices: Mapping[str, Choice], value_I2C: Values, drawn_S2C: Values, p_2C: Values
) -> list[Condition]:
    """Return the model in each context, from accuracies and losses, their resampled means, and p-values of changes."""
    mean_2C = value_I2C.mean(axis=0)
    gap_I2C = value_I2C - value_I2C[:, :, :1]
    gap_S2C = drawn_S2C - drawn_S2C[:, :, :1]
    conditions = []
    for number, name in enumerate(names):
        accuracy, loss = (estimate_of(mean_2C[figure, number], drawn_S2C[:, figure, number]) for figure in range(2))
        if name == LEARNED:
            conditions.append(Condition(name, "learned", accuracy, loss))
            continue
        accuracy_change, loss_change = (
            estimate_of(gap_I2C[:, figure, number].mean(), gap_S2C[:, figure, number]) for figure in range(2)
        )
        accuracy_p, loss_p = p_2C[:, number - 1].tolist()
        spread = float(gap_I2C[:, 1, number].std())
        effect = loss_change.value / spread if spread else 0.0
        changes = accuracy_change, loss_change, accuracy_p, loss_p, effect
        conditions.append(Condition(name, choices[name].family, accuracy, loss, *changes))
    return conditions


def _pairs(
    tables: Sequence[BatchTables], others: Mapping[str, Sequence[BatchTables]]
) -> tuple[OutcomePairs, OutcomePairs]:
    """Return outcomes of the learned choice by group and stratum: against random tokens, and against other models."""
    members = members_of([table.labels for table in tables])
    audited = outcomes_of(tables)
    learned = audited[LEARNED]

    def split(other: Outcomes) -> OutcomePairs:
        return {names: (learned.of(chosen), other.of(chosen)) for names, chosen in members.items()}

    pairs = split(audited[RANDOM])
    # The audited set is the one without a shift.
    sets = {name or "none": outcomes_of(tables, name) for name in tables[0].outcomes}
    sets |= {name: outcomes_of(of_set) for name, of_set in others.items()}
    if len(sets) > 1:
        pairs |= {(SHIFT, name): (outcomes[LEARNED], outcomes[RANDOM]) for name, outcomes in sets.items()}
    baselines: OutcomePairs = {}
    for name in tables[0].baselines:
        outcomes = joined(table.baselines[name] for table in tables)
        baselines[name, ALL] = learned, outcomes
        baselines |= {(name, f"{group}: {part}"): pair for (group, part), pair in split(outcomes).items()}
    return pairs, baselines


def evaluate(
    gap: Estimate,
    explained: Estimate | None,
    best: str | None,
    influence: Influence | None,
    *,
    is_clear: bool,
    is_none: bool,
) -> tuple[Kind, str]:
    """Return what a router uses, and sentences that say so, what it is worth, and what a fixed position would do."""
    kind: Kind = "inconclusive"
    if influence is not None:
        kind = _of(influence, is_clear=is_clear)
        why = str(influence)
    elif is_none:
        kind = "no better than random"
        why = "other tokens would do as well"
    elif explained is not None and explained.high < _HALF:
        kind = "content"
        why = "no fixed position reaches half of what its choice is worth"
    else:
        why = "its content was not moved, which needs batches of images on a known grid of patches"
    if is_clear:
        worth = "Its choice is worth"
    elif is_none:
        worth = "Its choice is no better than random:"
    else:
        worth = "These images are too few to say whether its choice is better than random:"
    verdict = f"{_LEADS[kind]}: {why}. {worth} {gap:+.1f} points of accuracy over random tokens (95 % interval)."
    if explained is None:
        return kind, f"{verdict} No fixed position was tried." if is_clear else verdict
    share = f"{100 * explained:.0f} % of that"
    if explained.high < 1:
        return kind, f"{verdict} On this data the best fixed position, {best!r}, reaches {share}."
    return kind, f"{verdict} On this data a fixed position would do as well: {best!r} reaches {share}."


def _of(influence: Influence, *, is_clear: bool) -> Kind:
    """Return what a router uses by what decides where content is moved."""
    content = influence.content
    position = influence.position
    share = influence.position_share
    if influence.images < _FEW:
        return "inconclusive"
    if max(content.low, position.low) <= 0 or max(content.value, position.value) < _NONE:
        is_neither = max(content.high, position.high) < 2 * _NONE and not is_clear
        return "no better than random" if is_neither else "inconclusive"
    if share.value < _BOTH[0] and share.high < _HALF:
        return "content"
    if share.value > _BOTH[1] and share.low > _HALF:
        return "position"
    return "both" if min(content.low, position.low) > 0 else "inconclusive"
