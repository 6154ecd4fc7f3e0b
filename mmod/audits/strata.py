"""Accuracy of the learned choice by stratum: hard and easy images, kinds of questions, shifted images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from mmod.analysis.statistics import Estimate, Values, adjusted, simultaneous
from mmod.audits.contrast import OF_ACCURACY, OF_LOSS, Contrast
from mmod.io.tables import MarkdownTable, table_of

ALL = "all images"
DIFFICULTY = "loss of the dense model"
SHIFT = "shift"
_TOGETHER = "intervals hold for all rows together, p-values are corrected for their number"
_THIRDS = ("lowest third", "middle third", "highest third")


@dataclass(frozen=True)
class Stratum:
    """Some of the images, or all of them changed in one way, under the learned and the random choice of tokens.

    Args:
        group: Label that the images are sorted by; or another model, which then takes the place of the random choice.
        accuracy: Accuracy in percent with the learned choice.
        gap: Learned minus random; the intervals of a comparison hold for all its strata together.
        loss_gap: Random minus learned, in the same way.
        accuracy_p: P-value of the gap, corrected for all strata.
    """

    group: str
    name: str
    images: int
    accuracy: Estimate
    random: Estimate
    gap: Estimate
    loss_gap: Estimate
    accuracy_p: float
    loss_p: float


ByStratum = dict[tuple[str, str], Values]
"""By group and stratum, accuracy and loss of its samples with the learned choice and with another one (I, F, 2)."""
Members = Mapping[tuple[str, str], NDArray[np.bool_]]
"""By group and stratum, which images belong to it (I,)."""
Labels = Mapping[str, Sequence[str] | Sequence[float]]
"""Labels of samples by what they are sorted by."""


def check_labels(labels: Labels, samples: int, before: Labels | None) -> None:
    """Raise a ValueError for labels of another number of samples, or by other names than those `before`."""
    if before is not None and labels.keys() != before.keys():
        raise ValueError(f"strata name {', '.join(labels)} and named {', '.join(before)} before")
    for name, values in labels.items():
        if len(values) != samples:
            raise ValueError(f"strata give {len(values)} values of {name!r} for {samples} images")


def members_of(parts: Sequence[Labels]) -> Members:
    """Return a mask of the images (I,) for each group and stratum; a group with a single stratum is left out.

    Args:
        parts: The labels of each batch.
    """
    members = {}
    for group in parts[0]:
        values = list(chain.from_iterable(labels[group] for labels in parts))
        if all(isinstance(value, str) for value in values):
            names = np.asarray(values)
        else:
            numbers = np.asarray(values, dtype=np.float64)
            # By thirds of the values, with equal values in the same third.
            thirds = np.searchsorted(np.quantile(numbers, (1 / 3, 2 / 3)), numbers)
            names = np.asarray(_THIRDS)[thirds]
        strata = set(names.tolist())
        order = sorted(strata)
        if strata <= set(_THIRDS):
            # In their own order, which is not that of the alphabet.
            order = sorted(strata, key=_THIRDS.index)
        if len(order) > 1:
            members.update({(group, name): names == name for name in order})
    return members


def compare_strata(strata: ByStratum, resamples: int) -> list[Stratum]:
    """Compare both choices in each stratum; those of one image are left out."""
    contrasts = {}
    for seed, names in enumerate(names for names, value_IFC in strata.items() if len(value_IFC) > 1):
        contrasts[names] = Contrast.of(strata[names], resamples, seed=seed, sign_seed=seed)
    if not contrasts:
        return []
    gaps = []
    drawn = []
    uncorrected = []
    for contrast in contrasts.values():
        # That of accuracy is turned round: a positive gap is better in both columns. 0 - 0 has no sign.
        accuracy_change, loss_change = contrast.change_IFC[:, :, 1].mean(axis=0)
        gaps += [0 - accuracy_change, loss_change]
        drawn += [0 - contrast.drawn_change(OF_ACCURACY, 1), contrast.drawn_change(OF_LOSS, 1)]
        uncorrected += contrast.p_FC[:, 1].tolist()
    # Intervals for all rows together, because whoever reads a table looks for the largest gap.
    wide = simultaneous(np.asarray(gaps), np.stack(drawn, axis=1))
    corrected = adjusted(uncorrected)
    rows = []
    for number, ((group, name), contrast) in enumerate(contrasts.items()):
        row = Stratum(
            group,
            name,
            images=len(contrast.change_IFC),
            accuracy=contrast.mean(OF_ACCURACY, 0),
            random=contrast.mean(OF_ACCURACY, 1),
            gap=wide[2 * number],
            loss_gap=wide[2 * number + 1],
            accuracy_p=corrected[2 * number],
            loss_p=corrected[2 * number + 1],
        )
        rows.append(row)
    return rows


def strata_tables(strata: Sequence[Stratum], other: str, caption: str) -> list[MarkdownTable]:
    """Return a table for each group; `other` is what the learned choice, or the model, is compared with."""
    tables = []
    for group in dict.fromkeys(stratum.group for stratum in strata):
        columns = {
            "name": (group, ""),
            "images": ("images", ""),
            "accuracy": ("accuracy %", ".1f"),
            "random": (f"{other} %", ".1f"),
            "gap": ("gap", "+.1f"),
            "accuracy_p": ("p", ".3g"),
            "loss_gap": ("loss gap", "+.3f"),
        }
        rows = [vars(stratum) for stratum in strata if stratum.group == group]
        # Of the accuracies the values alone: what their difference is, and how sure, stands in the gap.
        shown = [{**row, **{name: row[name].value for name in ("accuracy", "random", "loss_gap")}} for row in rows]
        tables.append(table_of(columns, shown))
    return [*tables[:-1], tables[-1]._replace(caption=f"{caption}; {_TOGETHER}.")]


def say_gaps(strata: Sequence[Stratum]) -> list[str]:
    """Return a sentence for each group: its strata with the largest and smallest gap, and whether intervals overlap.

    Where a group is another model, the sentence begins with the gap to it on all images.
    """
    sentences = []
    for group in dict.fromkeys(stratum.group for stratum in strata):
        members = [stratum for stratum in strata if stratum.group == group]
        overall = [stratum for stratum in members if stratum.name == ALL]
        parts = [stratum for stratum in members if stratum.name != ALL]
        # Strata of difficulty alone, if there are any: whether hard images differ from easy ones.
        parts = [stratum for stratum in parts if stratum.name.startswith(DIFFICULTY)] or parts
        said = []
        for stratum in overall:
            difference = "a significant difference" if stratum.gap.is_clear else "no significant difference"
            said.append(f"Beside {group}, the model is at {stratum.gap:+.1f} points, {difference}")
        if len(parts) > 1:
            least, *_, most = sorted(parts, key=lambda stratum: stratum.gap.value)
            apart = "the intervals are apart" if most.gap.low > least.gap.high else "the intervals overlap"
            of_most = f"in {most.name!r}, {most.gap:+.1f}"
            of_least = f"in {least.name!r}, {least.gap:+.1f}"
            if overall:
                said.append(f"most {of_most}, least {of_least}: {apart}")
            else:
                lead = f"By {group}, the learned choice is worth most"
                said.append(f"{lead} {of_most} points over random tokens, and least {of_least}: {apart}")
        if said:
            sentences.append(f"{'; '.join(said)}.")
    return sentences
