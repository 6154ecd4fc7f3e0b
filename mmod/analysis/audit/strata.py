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
        group: What the images are sorted by; or the name of another model, which then takes the place of the random
            choice.
        name: Which of them these are.
        accuracy: Accuracy in percent with the learned choice.
        gap: How much the first is above the second; the interval is one of those of 95 % that hold for all strata of
            a comparison together.
        loss_gap: How much the loss is above that with the learned choice where the choice is random; the interval is
            of the same kind.
        accuracy_p: How likely such a gap is by chance, corrected for all strata.
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
        return Outcomes(*(own[chosen] for own in (self.accuracy, self.loss, self.random_accuracy, self.random_loss)))


class Strata:
    """What images are sorted by, gathered batch by batch.

    Example:
        >>> strata = Strata()
        >>> strata.add({"kind": ["count", "read", "count"]}, 3)
        >>> {name: chosen.tolist() for (_, name), chosen in strata.members().items()}
        {'count': [True, False, True], 'read': [False, True, False]}
    """

    def __init__(self) -> None:
        self._values: dict[str, list[Any]] = {}
        self._images = 0

    def add(self, values: Mapping[str, Sequence[Any] | Tensor], images: int) -> None:
        """Add a batch."""
        if self._images and values.keys() != self._values.keys():
            raise ValueError(f"strata name {', '.join(values)} and named {', '.join(self._values)} before")
        for name, own in values.items():
            own = own.tolist() if isinstance(own, torch.Tensor) else list(own)
            if len(own) != images:
                raise ValueError(f"strata give {len(own)} values of {name!r} for {images} images")
            self._values.setdefault(name, []).extend(own)
        self._images += images

    def state(self) -> dict[str, Any]:
        """Return what was gathered as plain values."""
        return {"values": self._values, "images": self._images}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what was gathered."""
        self._values, self._images = state["values"], state["images"]

    def members(self) -> dict[tuple[str, str], Any]:
        """Return for each group and stratum where an image is in it (I,); groups of one stratum are left out."""
        found = {}
        for group, values in self._values.items():
            names = np.asarray([value if isinstance(value, str) else _THIRDS[0] for value in values])
            if not all(isinstance(value, str) for value in values):
                numbers = np.asarray(values, dtype=np.float64)
                thirds = np.searchsorted(np.quantile(numbers, (1 / 3, 2 / 3)), numbers)
                names = np.asarray(_THIRDS)[thirds]
            there = set(names.tolist())
            order = [name for name in _THIRDS if name in there] if there <= set(_THIRDS) else sorted(there)
            found.update({(group, name): names == name for name in order if len(order) > 1})
        return found


def compare_strata(strata: Mapping[tuple[str, str], Outcomes], resamples: int) -> list[Stratum]:
    """Compare the learned with the random choice in each stratum; those of one image are left out."""
    kept = {names: own for names, own in strata.items() if len(own.loss) > 1}
    if not kept:
        return []
    gaps, drawn, p = [], [], []
    rows: list[tuple[Estimate, Estimate]] = []
    for seed, own in enumerate(kept.values()):
        value_IC = np.stack([100 * own.accuracy, 100 * own.random_accuracy, own.loss, own.random_loss], axis=1)
        gap_IC = np.stack([value_IC[:, 0] - value_IC[:, 1], value_IC[:, 3] - value_IC[:, 2]], axis=1)
        means = resampled_means(value_IC, resamples, seed)
        learned, random = (estimate_of(value_IC[:, column].mean(), means[:, column]) for column in (0, 1))
        rows.append((learned, random))
        gaps += gap_IC.mean(axis=0).tolist()
        drawn += [means[:, 0] - means[:, 1], means[:, 3] - means[:, 2]]
        p += sign_test(gap_IC, resamples, seed).tolist()
    wide, corrected = simultaneous(np.asarray(gaps), np.stack(drawn, axis=1)), adjusted(p)
    found = []
    for place, ((group, name), own) in enumerate(kept.items()):
        learned, random = rows[place]
        (gap, loss_gap), (accuracy_p, loss_p) = wide[2 * place : 2 * place + 2], corrected[2 * place : 2 * place + 2]
        found.append(Stratum(group, name, len(own.loss), learned, random, gap, loss_gap, accuracy_p, loss_p))
    return found


def strata_rows(strata: Sequence[Stratum], other: str) -> list[list[str]]:
    """Return a table of strata, its header first."""
    header = ["by", "stratum", "images", "accuracy %", f"{other} %", "gap", "p", "loss gap", "p of loss"]
    return [header] + [
        [own.group, own.name, str(own.images), f"{own.accuracy:.1f}", f"{own.random:.1f}", f"{own.gap:+.1f}",
         f"{own.accuracy_p:.3g}", f"{own.loss_gap:+.3f}", f"{own.loss_p:.3g}"]
        for own in strata
    ]  # fmt: skip


def strata_told(strata: Sequence[Stratum]) -> list[str]:
    """Return a sentence for each group: where the learned choice is worth most and least, and if that can be told."""
    told = []
    for group in dict.fromkeys(own.group for own in strata):
        ends = _ends([own for own in strata if own.group == group])
        if ends is not None:
            most, least, apart = ends
            told.append(
                f"By {group}, the learned choice is worth most in {most.name!r}, {most.gap:+.1f} points over random "
                f"tokens, and least in {least.name!r}, {least.gap:+.1f}: {apart}."
            )
    return told


def beside_told(strata: Sequence[Stratum]) -> list[str]:
    """Return a sentence for each other model: how far this one is above it, and where most and least."""
    told = []
    for group in dict.fromkeys(own.group for own in strata):
        whole, *parts = (own for own in strata if own.group == group)
        is_clear = whole.gap.low > 0 or whole.gap.high < 0
        sentence = f"Beside {group}, the model is at {whole.gap:+.1f} points"
        sentence += ", so that they differ" if is_clear else ", so that they cannot be told apart"
        # Where both are asked for, whether hard images are another matter than easy ones.
        ends = _ends([own for own in parts if own.name.startswith(DIFFICULTY)] or parts)
        if ends is not None:
            most, least, apart = ends
            sentence += f"; most in {most.name!r}, {most.gap:+.1f}, least in {least.name!r}, {least.gap:+.1f}: {apart}"
        told.append(f"{sentence}.")
    return told


def _ends(strata: Sequence[Stratum]) -> tuple[Stratum, Stratum, str] | None:
    """Return the strata of the largest and the smallest gap, and whether these are apart; None for fewer than two."""
    ordered = sorted(strata, key=lambda own: own.gap.value)
    if len(ordered) < 2:
        return None
    least, most = ordered[0], ordered[-1]
    return most, least, "the intervals are apart" if most.gap.low > least.gap.high else "the intervals overlap"
