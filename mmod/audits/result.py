"""The result of an audit: its figures, its verdict, and both as text and tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mmod.analysis.statistics import Estimate, adjusted, estimate_of, published
from mmod.analysis.table import Table
from mmod.audits.across import Across, across_of
from mmod.audits.choices import LEARNED, RANDOM, Choice
from mmod.audits.contrast import OF_ACCURACY, OF_LOSS, Contrast, values_of
from mmod.audits.information import Influence, influence_of, information_tables
from mmod.audits.oracle import LeaveOneOut, leave_one_out_of
from mmod.audits.strata import (
    ALL,
    SHIFT,
    ByStratum,
    Members,
    Stratum,
    compare_strata,
    members_of,
    say_gaps,
    strata_tables,
)
from mmod.audits.tables import BatchRows, baseline_row, row_on
from mmod.config import AuditConfig
from mmod.io.tables import MarkdownTable, fitted, table_of
from mmod.plain import from_plain

_LEVEL = 0.05
_COLUMNS = {
    "name": ("tokens kept", ""),
    "accuracy": ("accuracy %", ".1f"),
    "accuracy_change": ("accuracy change", "+.1f"),
    "accuracy_p": ("p", ".3g"),
    "loss_change": ("loss change", "+.3f"),
    "loss_p": ("p of loss", ".3g"),
}
VerdictKind = Literal["content", "position", "both", "no better than random", "inconclusive"]
_LEADS: dict[VerdictKind, str] = {
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
    """

    name: str
    family: str
    accuracy: Estimate
    loss: Estimate
    accuracy_change: Estimate | None = None
    loss_change: Estimate | None = None
    accuracy_p: float | None = None
    loss_p: float | None = None


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
        influence: Shares of the choice that content and position explain; None without a known grid of patches.
    """

    images: int
    draws: int
    conditions: list[Condition]
    gap: Estimate
    position: str | None
    explained: Estimate | None
    kind: VerdictKind
    verdict: str
    across: Across
    strata: list[Stratum] = dataclasses.field(default_factory=list)
    leave_one_out: LeaveOneOut | None = None
    baselines: list[Stratum] = dataclasses.field(default_factory=list)
    influence: Influence | None = None

    def to_dict(self) -> dict[str, object]:
        """Return everything as plain JSON values."""
        return published(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, object]) -> Audit:
        """Return the audit that `to_dict` wrote."""
        return from_plain(cls, fields, "audit", limit=None)

    def sections(self) -> list[str | MarkdownTable]:
        """Return sentences and tables, all but the verdict."""
        across = self.across
        conditions = (
            f"{self.images} images, {self.draws} random draws. Intervals are of 95 %, by resampling images; p-values "
            "are of paired tests by random signs, corrected by Holm's method."
        )
        never = "; ".join(f"{share:.3f} of the tokens from {name} on" for name, share in across.never.items())
        parts: list[str | MarkdownTable] = [
            table_of(_COLUMNS, [vars(condition) for condition in self.conditions], conditions),
            across.verdict,
            *across.tables(),
            f"Never kept: {never}.",
            *information_tables(across.information),
        ]
        if self.strata:
            caption = "Gaps are those of the learned over the random choice"
            parts += [*strata_tables(self.strata, "random", caption), *say_gaps(self.strata)]
        if self.baselines:
            caption = "Gaps are those of this model over the other, on the same images"
            parts += [*strata_tables(self.baselines, "its", caption), *say_gaps(self.baselines)]
        if self.leave_one_out is not None:
            parts.append(self.leave_one_out.table())
        return parts

    def __str__(self) -> str:
        return "\n\n".join(map(fitted, [self.verdict, *self.sections()]))

    _repr_markdown_ = __str__  # Notebooks show it.


def result_of(
    batches: Sequence[BatchRows],
    table: Table,
    others: Sequence[str],
    baselines: Sequence[str],
    routed: Sequence[str],
    choices: Mapping[str, Choice],
    config: AuditConfig,
) -> Audit:
    """Return what the rows of an audit's batches say.

    Args:
        table: The outcomes of their samples, and of those of other sets.
        others: Names of the other sets, see `row_on`.
        baselines: Names of other models, see `baseline_row`.
        routed: Names of the model's routed blocks.
    """
    images = sum(len(batch.images) for batch in batches)
    if images < 2:
        raise ValueError(f"an audit needs two images or more, got {images}")
    names = [LEARNED, *choices]
    # Each context is compared with the learned choice.
    contrast = Contrast.of(values_of(table, names), config.resamples, seed=0, sign_seed=1)
    random = names.index(RANDOM)
    # Turned round, since contrasts are with the learned choice; 0 - 0 has no sign.
    above_S = 0 - contrast.drawn_change(OF_ACCURACY, random)
    mean_C = contrast.mean_FC[OF_ACCURACY]
    gap = estimate_of(mean_C[0] - mean_C[random], above_S)
    # What the verdict rests on: by interval and by test, since intervals of few images are too short.
    is_clear = gap.low > 0 and contrast.p_FC[OF_ACCURACY, random] < _LEVEL
    is_none = not is_clear and gap.high < config.margin and images >= _FEW

    positions = [name for name, choice in choices.items() if choice.family == "position"]
    position = max(positions, key=lambda name: mean_C[names.index(name)], default=None)
    explained = None
    if position is not None and is_clear:
        explained = _share_reached(contrast, names.index(position), random)
    influence = influence_of(batches)
    kind, verdict = finding_of(gap, explained, position, influence, is_clear=is_clear, is_none=is_none)

    members = members_of([batch.labels for batch in batches])
    return Audit(
        images=images,
        draws=config.draws,
        conditions=_conditions(names, choices, contrast),
        gap=gap,
        position=position,
        explained=explained,
        kind=kind,
        verdict=verdict,
        across=across_of(batches, routed),
        strata=compare_strata(_strata_values(table, members, others), config.resamples),
        leave_one_out=leave_one_out_of(table, batches),
        baselines=compare_strata(_baseline_values(table, members, baselines), config.resamples),
        influence=influence,
    )


def _share_reached(contrast: Contrast, position: int, random: int) -> Estimate:
    """Return the share of the gap between the learned and the random choice that a fixed position reaches."""
    above_S = 0 - contrast.drawn_change(OF_ACCURACY, random)
    # Resamples in which the router is no better than random have no share to explain.
    is_above_S = above_S > 0
    drawn_SC = contrast.drawn_SFC[is_above_S, OF_ACCURACY]
    share_S = (drawn_SC[:, position] - drawn_SC[:, random]) / above_S[is_above_S]
    mean_C = contrast.mean_FC[OF_ACCURACY]
    above = mean_C[0] - mean_C[random]
    return estimate_of((mean_C[position] - mean_C[random]) / above, share_S)


def _strata_values(table: Table, members: Members, others: Sequence[str]) -> ByStratum:
    """Return the outcomes of the learned and the random choice by stratum, and on other sets."""
    value_IFC = values_of(table, [LEARNED, RANDOM])
    strata = {of: value_IFC[is_in_I] for of, is_in_I in members.items()}
    if others:
        # The audited set is the one without a shift.
        strata[SHIFT, "none"] = value_IFC
        for name in others:
            strata[SHIFT, name] = values_of(table, [row_on(name, LEARNED), row_on(name, RANDOM)])
    return strata


def _baseline_values(table: Table, members: Members, baselines: Sequence[str]) -> ByStratum:
    """Return the outcomes of the model and of each baseline, on all images and by stratum."""
    strata: ByStratum = {}
    for name in baselines:
        value_IFC = values_of(table, [LEARNED, baseline_row(name)])
        strata[name, ALL] = value_IFC
        for (group, part), is_in_I in members.items():
            strata[name, f"{group}: {part}"] = value_IFC[is_in_I]
    return strata


def _conditions(names: Sequence[str], choices: Mapping[str, Choice], contrast: Contrast) -> list[Condition]:
    """Return the model in each context, the learned one first."""
    # Tested all together and corrected, since the audit asks many questions of the same images.
    p_values = contrast.p_FC[:, 1:].flatten().tolist()
    p_FC = np.reshape(adjusted(p_values), (2, -1))
    conditions = [Condition(LEARNED, "learned", contrast.mean(OF_ACCURACY, 0), contrast.mean(OF_LOSS, 0))]
    for number, name in enumerate(names[1:], 1):
        condition = Condition(
            name,
            choices[name].family,
            accuracy=contrast.mean(OF_ACCURACY, number),
            loss=contrast.mean(OF_LOSS, number),
            accuracy_change=contrast.change(OF_ACCURACY, number),
            loss_change=contrast.change(OF_LOSS, number),
            accuracy_p=float(p_FC[OF_ACCURACY, number - 1]),
            loss_p=float(p_FC[OF_LOSS, number - 1]),
        )
        conditions.append(condition)
    return conditions


def finding_of(
    gap: Estimate,
    explained: Estimate | None,
    best: str | None,
    influence: Influence | None,
    *,
    is_clear: bool,
    is_none: bool,
) -> tuple[VerdictKind, str]:
    """Return what a router uses, and sentences that say so, what it is worth, and what a fixed position would do."""
    kind: VerdictKind = "inconclusive"
    if influence is not None:
        kind = _kind_by(influence, is_clear=is_clear)
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
        if is_clear:
            verdict += " No fixed position was tried."
        return kind, verdict
    share = f"{100 * explained:.0f} % of that"
    if explained.high < 1:
        return kind, f"{verdict} On this data the best fixed position, {best!r}, reaches {share}."
    return kind, f"{verdict} On this data a fixed position would do as well: {best!r} reaches {share}."


def _kind_by(influence: Influence, *, is_clear: bool) -> VerdictKind:
    """Return what a router uses by what decides where content is moved."""
    content = influence.content
    position = influence.position
    share = influence.position_share
    if influence.images < _FEW:
        return "inconclusive"
    if max(content.low, position.low) <= 0 or max(content.value, position.value) < _NONE:
        if max(content.high, position.high) < 2 * _NONE and not is_clear:
            return "no better than random"
        return "inconclusive"
    if share.value < _BOTH[0] and share.high < _HALF:
        return "content"
    if share.value > _BOTH[1] and share.low > _HALF:
        return "position"
    if min(content.low, position.low) > 0:
        return "both"
    return "inconclusive"
