"""What an audit finds, its verdict, and how both are written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmod.analysis.audit.across import Across
from mmod.analysis.audit.choices import Choice
from mmod.analysis.audit.influence import Influence
from mmod.analysis.audit.information import information_rows
from mmod.analysis.audit.oracle import LeaveOneOut
from mmod.analysis.audit.strata import Stratum, beside_told, strata_rows, strata_told
from mmod.analysis.audit.verdict import Kind, judge
from mmod.analysis.statistics import (
    Estimate,
    Values,
    adjusted,
    estimate_of,
    published,
    read_published,
    resampled_means,
    sign_test,
)
from mmod.io.tables import markdown_table

LEARNED = "as learned"
_LEVEL = 0.05


@dataclass(frozen=True)
class Condition:
    """The model with one choice of tokens.

    Args:
        name: What chooses.
        family: "learned", "random", "position" or "other".
        accuracy: Accuracy in percent.
        loss: Mean loss.
        accuracy_change: Accuracy less that with the learned choice, paired by image; None for that itself.
        accuracy_p: How likely such a change is by chance, corrected for all tests of the audit.
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
    """What the decisions of a model are worth, and how they hang together.

    Args:
        images: Number of images.
        draws: Random choices that were averaged.
        conditions: The model with each choice of tokens, the learned one first.
        gap: Accuracy of the learned choice above the random one.
        position: Name of the fixed position that scores highest.
        explained: Share of the gap that this position reaches; None without a clear gap or a position.
        kind: What the router uses, or "no better than random" where it uses neither content nor position.
        verdict: The same in sentences, with what its choice is worth and what a fixed position would reach on the data.
        across: How the decisions of the blocks hang together.
        strata: The learned against the random choice in parts of the set.
        leave_one_out: What single tokens are worth.
        beside: The model against others, on all images and in parts of the set.
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
    beside: list[Stratum] = dataclasses.field(default_factory=list)
    influence: Influence | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain JSON values."""
        return dataclasses.asdict(self, dict_factory=published)

    def rows(self) -> list[list[str]]:
        """Return the conditions as rows of a table, its header first."""
        header = ["tokens kept", "accuracy %", "loss", "accuracy change", "p", "loss change", "p of loss", "effect"]
        return [header, *map(_cells, self.conditions)]

    def table(self) -> str:
        """Return the conditions as a Markdown table."""
        header, *rows = self.rows()
        return markdown_table(header, rows)

    def never(self) -> str:
        """Say how many tokens no block of a span keeps."""
        return "; ".join(f"{share:.3f} of the tokens from {name} on" for name, share in self.across.never.items())

    def __str__(self) -> str:
        across, names = self.across, self.across.decisions
        again = [
            [name, *("" if share is None else f"{share:.2f}" for share in row)]
            for name, row in zip(names, across.again)
        ]
        kept = ["kept by chance", *(f"{across.kept[name]:.2f}" for name in names)]
        matrix = markdown_table(["kept in", *(f"again in {name}" for name in names)], [*again, kept])
        return (
            f"{self.verdict}\n\n{self.table()}\n\n{self.images} images, {self.draws} random draws. Intervals are of "
            "95 %, by resampling images; p-values are of paired tests by random signs, corrected by Holm's method.\n\n"
            f"{across.verdict}\n\n{matrix}\n\nNever kept: {self.never()}.{self._more()}"
        )

    _repr_markdown_ = __str__  # Notebooks show it.

    def _more(self) -> str:
        """Return what is known of tokens, and what was found in strata and about single ones."""
        parts = []
        header, *known = information_rows(self.across.information)
        if known:
            parts += [
                markdown_table(header, known),
                "What is known of a token says so much of whether it is kept, without the bias of counts.",
            ]
        if self.strata:
            header, *rows = strata_rows(self.strata, "random")
            parts += [
                markdown_table(header, rows),
                "Gaps are those of the learned over the random choice; their intervals hold for all of them together.",
                *strata_told(self.strata),
            ]
        if self.beside:
            header, *rows = strata_rows(self.beside, "its")
            parts += [
                markdown_table(["beside", *header[1:]], rows),
                "Gaps are those of this model over the other, on the same images; their intervals hold for all of them "
                "together.",
                *beside_told(self.beside),
            ]
        if self.leave_one_out is not None:
            single = self.leave_one_out
            rows = [[name, f"{score:.2f}", f"{single.norm[name]:.2f}"] for name, score in single.agreement.items()]
            parts += [markdown_table(["decision", "score and worth of a token", "norm and worth"], rows), single.told()]
        return "".join(f"\n\n{part}" for part in parts)


def _cells(row: Condition) -> list[str]:
    changes = zip((row.accuracy_change, row.loss_change), ("+.1f", "+.3f"))
    accuracy_change, loss_change = ("" if change is None else f"{change:{form}}" for change, form in changes)
    accuracy_p, loss_p = ("" if p is None else f"{p:.3g}" for p in (row.accuracy_p, row.loss_p))
    effect = "" if row.effect is None else f"{row.effect:.2f}"
    return [
        row.name,
        f"{row.accuracy:.1f}",
        f"{row.loss:.3f}",
        accuracy_change,
        accuracy_p,
        loss_change,
        loss_p,
        effect,
    ]


def read_audit(fields: Mapping[str, Any]) -> Audit:
    """Return the audit that `Audit.to_dict` wrote."""
    # Earlier versions wrote one share for each decision here.
    information = {name: known for name, known in fields["across"]["information"].items() if isinstance(known, Mapping)}
    return read_published(Audit, {**fields, "across": {**fields["across"], "information": information}})


def compare(
    outcomes: Mapping[str, tuple[Values, Values]], made: Mapping[str, Choice], *, resamples: int, margin: float,
    draws: int, across: Across, influence: Influence | None,
) -> Audit:  # fmt: skip
    """Compare the conditions of an audit."""
    names = list(outcomes)
    accuracies, losses = zip(*outcomes.values())
    value_IC = np.stack([*(100 * accuracy for accuracy in accuracies), *losses], axis=1)
    mean_C, drawn = value_IC.mean(axis=0), resampled_means(value_IC, resamples, seed=0)
    count = len(names)
    base_C = np.repeat([0, count], count)
    gap_IC, gap_drawn = value_IC - value_IC[:, base_C], drawn - drawn[:, base_C]
    tested = [column for column in range(2 * count) if column % count]
    alone = sign_test(gap_IC[:, tested], resamples, seed=1).tolist()
    p = dict(zip(tested, adjusted(alone)))

    def condition(name: str, a: int) -> Condition:
        b = a + count
        mine = estimate_of(mean_C[a], drawn[:, a]), estimate_of(mean_C[b], drawn[:, b])
        if not a:
            return Condition(name, "learned", *mine)
        changes = [estimate_of(gap_IC[:, column].mean(), gap_drawn[:, column]) for column in (a, b)]
        spread = float(gap_IC[:, b].std())
        effect = float(gap_IC[:, b].mean()) / spread if spread else 0.0
        return Condition(name, made[name].family, *mine, changes[0], changes[1], p[a], p[b], effect)

    positions = [name for name in names[1:] if made[name].family == "position"]
    best = max(positions, key=lambda name: mean_C[names.index(name)], default=None)
    random = next(place for place, name in enumerate(names) if place and made[name].family == "random")
    gap = estimate_of(mean_C[0] - mean_C[random], drawn[:, 0] - drawn[:, random])
    # What the verdict rests on: by interval and by test, since intervals of few images are too short.
    is_clear = gap.low > 0 and alone[tested.index(random)] < _LEVEL
    explained = None
    if best is not None and is_clear:
        at, reached = names.index(best), drawn[:, 0] - drawn[:, random]
        share = (drawn[:, at] - drawn[:, random])[reached > 0] / reached[reached > 0]
        explained = estimate_of((mean_C[at] - mean_C[random]) / gap.value, share)
    kind, verdict = judge(gap, explained, best, margin, influence, is_clear=is_clear)
    conditions = [condition(name, place) for place, name in enumerate(names)]
    return Audit(len(value_IC), draws, conditions, gap, best, explained, kind, verdict, across, influence=influence)
