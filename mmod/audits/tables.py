"""What an audit keeps of a batch: the outcomes of its samples in every context, and what each decision keeps of them.

All figures are functions of two tables. One has a row for each candidate, draw and sample
(`mmod.analysis.table.Table`), the other one for each sample and decision, with masks packed to bits.
Axes: B samples, N tokens, F tokens of a sample that may be skipped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from mmod.analysis.table import Measured, Table
from mmod.audits.choices import LEARNED, FreeDecision

ACCURACY = "accuracy"
LOSS = "loss"
# More kinds of tokens than a byte tells apart are rare.
_BYTE = 256
Outcomes = dict[str, Tensor]
"""Accuracy in [0, 1] and loss of each sample of a batch, float64 (B,)."""


@dataclass(frozen=True)
class Mask:
    """True or false for each token of each sample, eight tokens in a byte (B, N / 8)."""

    tokens: int
    bits: Tensor

    @classmethod
    def of(cls, mask_BN: Tensor) -> Mask:
        """Return a mask (B, N), packed."""
        mask = mask_BN.bool().cpu().numpy()
        return cls(mask.shape[1], torch.from_numpy(np.packbits(mask, axis=1)))

    def unpacked(self) -> Tensor:
        """Return the mask (B, N)."""
        mask = np.unpackbits(self.bits.numpy(), axis=1, count=self.tokens)
        return torch.from_numpy(mask).bool()


@dataclass(frozen=True)
class TokenKinds:
    """What is known of each token: the number of its kind (B, N), and the names of the kinds."""

    names: list[str]
    kind_BN: Tensor

    @classmethod
    def of(cls, name_BN: ArrayLike) -> TokenKinds:
        """Return the kinds of tokens with these names."""
        # The names alone in order of the alphabet; `return_inverse` gives each token the number of its name.
        names, kinds = np.unique(np.asarray(name_BN, dtype=str), return_inverse=True)
        kind_BN = torch.from_numpy(kinds).view(np.shape(name_BN))
        dtype = torch.uint8 if len(names) <= _BYTE else torch.int64
        return cls(names.tolist(), kind_BN.to(dtype))


@dataclass(frozen=True)
class DecisionRows:
    """What one decision of a model keeps of the samples of a batch.

    Args:
        keep: Which tokens are kept, among those that may be skipped.
        free: Which tokens may be skipped.
        last: The decision on the last sample, which the first one of the next batch is shuffled with.
        moved: Which patches are kept in two passes over rolled images; empty where none were rolled.
        worth: Rank correlation of what tokens are worth with "score" and "norm" (B,); empty where none was left out.
    """

    keep: Mask
    free: Mask
    last: FreeDecision
    moved: list[Mask] = field(default_factory=list)
    worth: dict[str, Tensor] = field(default_factory=dict)

    def unpacked(self) -> tuple[Tensor, Tensor]:
        """Return which tokens are kept, and which may be skipped (B, N) each."""
        return self.keep.unpacked(), self.free.unpacked()


@dataclass(frozen=True)
class BatchRows:
    """A batch in all its contexts: the unit of work, and one result of a store.

    Args:
        first: Number of its first sample in the set.
        outcomes: By candidate and draw.
        decisions: By the name of the block that decides.
        labels: What samples are sorted by.
        kinds: What is known of tokens.
        grid: Rows and columns of patches; None where they are not known.
    """

    first: int
    outcomes: dict[str, list[Outcomes]]
    decisions: dict[str, DecisionRows]
    labels: Mapping[str, Sequence[str] | Sequence[float]] = field(default_factory=dict)
    kinds: dict[str, TokenKinds] = field(default_factory=dict)
    grid: tuple[int, int] | None = None

    @property
    def images(self) -> range:
        """Numbers of the samples in their set."""
        return range(self.first, self.first + len(self.outcomes[LEARNED][0][LOSS]))


def add_outcomes(table: Table, batches: Iterable[BatchRows], of_set: str | None = None) -> None:
    """Add the outcomes of a set's samples to a table; on another set than the audited one, models are candidates too.

    Args:
        of_set: Name of the other set.
    """
    for batch in batches:
        for name, draws in batch.outcomes.items():
            for draw, columns in enumerate(draws):
                outcomes = {column: value_B.numpy() for column, value_B in columns.items()}
                table.add(row_on(of_set, name), draw, Measured({}, samples=len(batch.images), outcomes=outcomes))


def row_on(of_set: str | None, name: str) -> str:
    """Return the name of a model on another set among the candidates of a table; its own on the audited set, None."""
    if of_set is None:
        return name
    return f"sets.{of_set}.{name}"


def baseline_row(name: str) -> str:
    """Return the name of a baseline among the candidates of a table."""
    return f"baselines.{name}"
