"""Accuracy of the learned choice by stratum: hard and easy images, kinds of questions, shifted images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmod.analysis.statistics import (
    Estimate,
    Values,
    adjusted,
    estimate_of,
    resampled_means,
    sign_test,
    simultaneous,
)
from mmod.io.tables import Table, table_of

StratumOf = Callable[[Any], Mapping[str, "Sequence[str] | Sequence[float] | Tensor"]]
"""From a batch to what its images are sorted by: names, or numbers of which thirds are made, (B,) each."""

ALL, DIFFICULTY, SHIFT = "all images", "loss of the dense model", "shift"
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


@dataclass
class Outcomes:
    """Loss, and accuracy in [0, 1], of each image with one choice of tokens (I,)."""

    loss: Values = field(default_factory=lambda: np.zeros(0))
    accuracy: Values = field(default_factory=lambda: np.zeros(0))

    def add(self, loss_B: Tensor, accuracy_B: Tensor) -> None:
        """Add a batch."""
        self.loss = np.concatenate([self.loss, loss_B.double().cpu().numpy()])
        self.accuracy = np.concatenate([self.accuracy, accuracy_B.double().cpu().numpy()])

    def of(self, chosen: Any) -> Outcomes:
        """Return those of some images."""
        return Outcomes(self.loss[chosen], self.accuracy[chosen])


OutcomePair = tuple[Outcomes, Outcomes]
"""Outcomes of the learned choice, and those of the random one or of another model, on the same images."""


@dataclass
class Strata:
    """Labels of images, gathered batch by batch."""

    values: dict[str, list[Any]] = field(default_factory=dict)
    images: int = 0

    def add(self, values: Mapping[str, Sequence[Any] | Tensor], images: int) -> None:
        """Add a batch."""
        if self.images and values.keys() != self.values.keys():
            raise ValueError(f"strata name {', '.join(values)} and named {', '.join(self.values)} before")
        for name, labels in values.items():
            labels = labels.tolist() if isinstance(labels, torch.Tensor) else list(labels)
            if len(labels) != images:
                raise ValueError(f"strata give {len(labels)} values of {name!r} for {images} images")
            self.values.setdefault(name, []).extend(labels)
        self.images += images

    def members(self) -> dict[tuple[str, str], Any]:
        """Return for each group and stratum where an image is in it (I,); groups of one stratum are left out."""
        members = {}
        for group, values in self.values.items():
            names = np.asarray([value if isinstance(value, str) else _THIRDS[0] for value in values])
            if not all(isinstance(value, str) for value in values):
                numbers = np.asarray(values, dtype=np.float64)
                thirds = np.searchsorted(np.quantile(numbers, (1 / 3, 2 / 3)), numbers)
                names = np.asarray(_THIRDS)[thirds]
            there = set(names.tolist())
            order = [name for name in _THIRDS if name in there] if there <= set(_THIRDS) else sorted(there)
            members.update({(group, name): names == name for name in order if len(order) > 1})
        return members


def compare_strata(strata: Mapping[tuple[str, str], OutcomePair], resamples: int) -> list[Stratum]:
    """Compare both outcomes in each stratum; those of one image are left out."""
    kept = {names: pair for names, pair in strata.items() if len(pair[0].loss) > 1}
    if not kept:
        return []
    gaps, drawn, p = [], [], []
    rows: list[tuple[Estimate, Estimate]] = []
    for seed, (learned, random) in enumerate(kept.values()):
        value_IC = np.stack([100 * learned.accuracy, 100 * random.accuracy, learned.loss, random.loss], axis=1)
        gap_IC = np.stack([value_IC[:, 0] - value_IC[:, 1], value_IC[:, 3] - value_IC[:, 2]], axis=1)
        means = resampled_means(value_IC, resamples, seed)
        mine, other = (estimate_of(value_IC[:, column].mean(), means[:, column]) for column in (0, 1))
        rows.append((mine, other))
        gaps += gap_IC.mean(axis=0).tolist()
        drawn += [means[:, 0] - means[:, 1], means[:, 3] - means[:, 2]]
        p += sign_test(gap_IC, resamples, seed).tolist()
    wide, corrected = simultaneous(np.asarray(gaps), np.stack(drawn, axis=1)), adjusted(p)
    compared = []
    for place, ((group, name), (learned, _)) in enumerate(kept.items()):
        both = slice(2 * place, 2 * place + 2)
        (gap, loss_gap), (accuracy_p, loss_p) = wide[both], corrected[both]
        images = len(learned.loss)
        compared.append(Stratum(group, name, images, *rows[place], gap, loss_gap, accuracy_p, loss_p))
    return compared


def strata_table(strata: Sequence[Stratum], other: str, caption: str) -> Table:
    """Return a table of strata; `other` is what the learned choice, or the model, is compared with."""
    columns = {
        "group": ("by", ""), "name": ("stratum", ""), "images": ("images", ""), "accuracy": ("accuracy %", ".1f"),
        "random": (f"{other} %", ".1f"), "gap": ("gap", "+.1f"), "accuracy_p": ("p", ".3g"),
        "loss_gap": ("loss gap", "+.3f"), "loss_p": ("p of loss", ".3g"),
    }  # fmt: skip
    return table_of(columns, [vars(stratum) for stratum in strata], f"{caption}; {_TOGETHER}.")


def strata_told(strata: Sequence[Stratum]) -> list[str]:
    """Return a sentence for each group: the strata with the largest and smallest gap, and whether intervals overlap."""
    sentences = []
    for group in dict.fromkeys(stratum.group for stratum in strata):
        ends = _ends([stratum for stratum in strata if stratum.group == group])
        if ends is not None:
            most, least, apart = ends
            sentences.append(
                f"By {group}, the learned choice is worth most in {most.name!r}, {most.gap:+.1f} points over random "
                f"tokens, and least in {least.name!r}, {least.gap:+.1f}: {apart}."
            )
    return sentences


def beside_told(strata: Sequence[Stratum]) -> list[str]:
    """Return a sentence for each baseline: the gap to it, and the strata with the largest and smallest gap."""
    sentences = []
    for group in dict.fromkeys(stratum.group for stratum in strata):
        overall, *parts = (stratum for stratum in strata if stratum.group == group)
        difference = "a significant difference" if overall.gap.is_clear else "no significant difference"
        sentence = f"Beside {group}, the model is at {overall.gap:+.1f} points, {difference}"
        # Strata of difficulty alone, if there are any: whether hard images differ from easy ones.
        ends = _ends([stratum for stratum in parts if stratum.name.startswith(DIFFICULTY)] or parts)
        if ends is not None:
            most, least, apart = ends
            sentence += f"; most in {most.name!r}, {most.gap:+.1f}, least in {least.name!r}, {least.gap:+.1f}: {apart}"
        sentences.append(f"{sentence}.")
    return sentences


def _ends(strata: Sequence[Stratum]) -> tuple[Stratum, Stratum, str] | None:
    """Return the strata of the largest and the smallest gap, and whether these are apart; None for fewer than two."""
    ordered = sorted(strata, key=lambda stratum: stratum.gap.value)
    if len(ordered) < 2:
        return None
    least, most = ordered[0], ordered[-1]
    return most, least, "the intervals are apart" if most.gap.low > least.gap.high else "the intervals overlap"
