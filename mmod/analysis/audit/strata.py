"""What the learned choice is worth in parts of a set: hard and easy images, kinds of questions, shifted images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

StratumOf = Callable[[Any], Mapping[str, "Sequence[str] | Sequence[float] | Tensor"]]
"""From a batch to what its images are sorted by: names, or numbers of which thirds are made, (B,) each."""

ALL, DIFFICULTY, SHIFT = "all images", "loss of the dense model", "shift"
_THIRDS = ("lowest third", "middle third", "highest third")


@dataclass(frozen=True)
class Stratum:
    """Some of the images, or all of them changed in one way, under the learned and the random choice of tokens.

    Args:
        group: What the images are sorted by; or another model, which then takes the place of the random choice.
        name: Which of them these are.
        accuracy: Accuracy in percent with the learned choice.
        gap: Learned less random; the intervals of a comparison hold for all its strata together.
        loss_gap: Random less learned, in the same way.
        accuracy_p: P-value of such a gap, corrected for all strata.
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


@dataclass(frozen=True)
class Outcomes:
    """Accuracy in [0, 1] and loss of each image, with the learned and with the random choice, (I,) each."""

    accuracy: Values
    loss: Values
    random_accuracy: Values
    random_loss: Values

    def of(self, chosen: Any) -> Outcomes:
        """Return those of some images."""
        return Outcomes(
            *(values[chosen] for values in (self.accuracy, self.loss, self.random_accuracy, self.random_loss))
        )


class Strata:
    """What images are sorted by, gathered batch by batch."""

    def __init__(self) -> None:
        self._values: dict[str, list[Any]] = {}
        self._images = 0

    def add(self, values: Mapping[str, Sequence[Any] | Tensor], images: int) -> None:
        """Add a batch."""
        if self._images and values.keys() != self._values.keys():
            raise ValueError(f"strata name {', '.join(values)} and named {', '.join(self._values)} before")
        for name, labels in values.items():
            labels = labels.tolist() if isinstance(labels, torch.Tensor) else list(labels)
            if len(labels) != images:
                raise ValueError(f"strata give {len(labels)} values of {name!r} for {images} images")
            self._values.setdefault(name, []).extend(labels)
        self._images += images

    def state(self) -> dict[str, Any]:
        """Return what was gathered as plain values."""
        return {"values": self._values, "images": self._images}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what was gathered."""
        self._values, self._images = state["values"], state["images"]

    def members(self) -> dict[tuple[str, str], Any]:
        """Return for each group and stratum where an image is in it (I,); groups of one stratum are left out."""
        members = {}
        for group, values in self._values.items():
            names = np.asarray([value if isinstance(value, str) else _THIRDS[0] for value in values])
            if not all(isinstance(value, str) for value in values):
                numbers = np.asarray(values, dtype=np.float64)
                thirds = np.searchsorted(np.quantile(numbers, (1 / 3, 2 / 3)), numbers)
                names = np.asarray(_THIRDS)[thirds]
            there = set(names.tolist())
            order = [name for name in _THIRDS if name in there] if there <= set(_THIRDS) else sorted(there)
            members.update({(group, name): names == name for name in order if len(order) > 1})
        return members


def compare_strata(strata: Mapping[tuple[str, str], Outcomes], resamples: int) -> list[Stratum]:
    """Compare the learned with the random choice in each stratum; those of one image are left out."""
    kept = {names: outcomes for names, outcomes in strata.items() if len(outcomes.loss) > 1}
    if not kept:
        return []
    gaps, drawn, p = [], [], []
    rows: list[tuple[Estimate, Estimate]] = []
    for seed, outcomes in enumerate(kept.values()):
        value_IC = np.stack(
            [100 * outcomes.accuracy, 100 * outcomes.random_accuracy, outcomes.loss, outcomes.random_loss], axis=1
        )
        gap_IC = np.stack([value_IC[:, 0] - value_IC[:, 1], value_IC[:, 3] - value_IC[:, 2]], axis=1)
        means = resampled_means(value_IC, resamples, seed)
        learned, random = (estimate_of(value_IC[:, column].mean(), means[:, column]) for column in (0, 1))
        rows.append((learned, random))
        gaps += gap_IC.mean(axis=0).tolist()
        drawn += [means[:, 0] - means[:, 1], means[:, 3] - means[:, 2]]
        p += sign_test(gap_IC, resamples, seed).tolist()
    wide, corrected = simultaneous(np.asarray(gaps), np.stack(drawn, axis=1)), adjusted(p)
    compared = []
    for place, ((group, name), outcomes) in enumerate(kept.items()):
        learned, random = rows[place]
        (gap, loss_gap), (accuracy_p, loss_p) = wide[2 * place : 2 * place + 2], corrected[2 * place : 2 * place + 2]
        compared.append(Stratum(group, name, len(outcomes.loss), learned, random, gap, loss_gap, accuracy_p, loss_p))
    return compared


def strata_rows(strata: Sequence[Stratum], other: str) -> list[list[str]]:
    """Return a table of strata, its header first."""
    header = ["by", "stratum", "images", "accuracy %", f"{other} %", "gap", "p", "loss gap", "p of loss"]
    return [header] + [
        [row.group, row.name, str(row.images), f"{row.accuracy:.1f}", f"{row.random:.1f}", f"{row.gap:+.1f}",
         f"{row.accuracy_p:.3g}", f"{row.loss_gap:+.3f}", f"{row.loss_p:.3g}"]
        for row in strata
    ]  # fmt: skip


def strata_told(strata: Sequence[Stratum]) -> list[str]:
    """Return a sentence for each group: where the learned choice is worth most and least, and if that can be told."""
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
    """Return a sentence for each other model: how far this one is above it, and where most and least."""
    sentences = []
    for group in dict.fromkeys(stratum.group for stratum in strata):
        overall, *parts = (stratum for stratum in strata if stratum.group == group)
        is_clear = overall.gap.low > 0 or overall.gap.high < 0
        sentence = f"Beside {group}, the model is at {overall.gap:+.1f} points"
        sentence += ", so that they differ" if is_clear else ", so that they cannot be told apart"
        # Where both are asked for, whether hard images are another matter than easy ones.
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
