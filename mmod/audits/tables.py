"""What an audit keeps of a batch: outcomes of its samples in every context, and what each decision keeps of them.

These are two tables, from which all figures are computed: a row for each context and sample, and a row for each sample
and decision, whose masks are packed to bits. The tables of a batch are one result of a store.
Axes: B samples, N tokens, F tokens of a sample that may be skipped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from mmod.audits.choices import FreeDecision

AUDITED = ""
"""Name of the audited set, beside those of its shifts."""
# More kinds of tokens than a byte tells apart are rare.
_BYTE = 256


@dataclass(frozen=True)
class Outcomes:
    """Loss, and accuracy in [0, 1], of each sample in one context, float64 (B,)."""

    loss: Tensor
    accuracy: Tensor

    def of(self, chosen_B: Tensor) -> Outcomes:
        """Return those of some samples."""
        return Outcomes(self.loss[chosen_B], self.accuracy[chosen_B])


def joined(parts: Iterable[Outcomes]) -> Outcomes:
    """Return the outcomes of several batches as those of one."""
    losses, accuracies = zip(*((part.loss, part.accuracy) for part in parts))
    return Outcomes(torch.cat(losses), torch.cat(accuracies))


@dataclass(frozen=True)
class Mask:
    """True or false for each token of each sample, eight tokens in a byte (B, N / 8)."""

    tokens: int
    bits: Tensor

    @classmethod
    def of(cls, mask_BN: Tensor) -> Mask:
        """Return a mask (B, N), packed."""
        bits = np.packbits(mask_BN.bool().cpu().numpy(), axis=1)
        return cls(mask_BN.shape[1], torch.from_numpy(bits))

    def unpacked(self) -> Tensor:
        """Return the mask (B, N)."""
        return torch.from_numpy(np.unpackbits(self.bits.numpy(), axis=1, count=self.tokens)).bool()


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
        return cls(names.tolist(), kind_BN.to(torch.uint8 if len(names) <= _BYTE else torch.int64))


@dataclass(frozen=True)
class Moved:
    """Masks of kept tokens (B, F) by decision, in two passes over images whose content was moved."""

    grid: tuple[int, int]
    keep: list[dict[str, Mask]]


@dataclass(frozen=True)
class BatchTables:
    """The tables of a batch.

    Args:
        first: Number of its first sample in the set.
        samples: How many it has.
        keep: By decision, which tokens are kept, among those that may be skipped.
        free: By decision, which tokens may be skipped.
        last: By decision, that on the last sample, which the first one of the next batch is shuffled with.
        outcomes: By name of a set, the audited one or a shift of it, and by context.
        baselines: By name of another model.
        labels: What samples are sorted by.
        kinds: What is known of tokens.
        worth: Columns of `LeaveOneOut`, of each sample (B,); empty where no tokens are left out.
    """

    first: int
    samples: int
    keep: dict[str, Mask] = field(default_factory=dict)
    free: dict[str, Mask] = field(default_factory=dict)
    last: dict[str, FreeDecision] = field(default_factory=dict)
    outcomes: dict[str, dict[str, Outcomes]] = field(default_factory=dict)
    baselines: dict[str, Outcomes] = field(default_factory=dict)
    labels: dict[str, list[str] | list[float]] = field(default_factory=dict)
    kinds: dict[str, TokenKinds] = field(default_factory=dict)
    moved: Moved | None = None
    worth: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @property
    def images(self) -> range:
        """Numbers of the samples in their set."""
        return range(self.first, self.first + self.samples)


def outcomes_of(tables: Sequence[BatchTables], dataset: str = AUDITED) -> dict[str, Outcomes]:
    """Return the outcomes of all samples of a set by context."""
    contexts = tables[0].outcomes[dataset]
    return {name: joined(table.outcomes[dataset][name] for table in tables) for name in contexts}
