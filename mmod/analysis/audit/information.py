"""What is known of a token says of whether it is kept: mutual information, from counts that do not grow with images.

Axes: B images, N tokens, G groups of images, K kinds of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from mmod.analysis.statistics import Estimate, pseudo_mean

KindsOf = Callable[[Any], Mapping[str, ArrayLike]]
"""From a batch to what is known of its tokens: the names of their kinds (B, N), prefix tokens and padding included."""

# Images are dealt out to so many groups by their number; each is left out once.
_GROUPS = 50


@dataclass(frozen=True)
class Information:
    """What the kind of a token says of whether a decision keeps it.

    Intervals are over images, which are left out group by group; that also takes away the bias that counts have, which
    see a little information in any chance.

    Args:
        bits: Mutual information of the kind and of being kept, in bits a token.
        share: The same over the entropy of being kept: 0 where the kind says nothing, 1 where it says all.
        kept: Share that is kept of the tokens of each kind; empty for positions.

    Source: Quenouille, Biometrika 43 (1956), and Tukey, The Annals of Mathematical Statistics 29 (1958): the jackknife.
    """

    bits: Estimate
    share: Estimate
    kept: dict[str, float]


class KindCounts:
    """Kept tokens and all tokens of each kind, by group of images (G, 2, K). Kinds without names are positions."""

    def __init__(self, names: Sequence[str] = (), counts: ArrayLike | None = None) -> None:
        self.names = list(names)
        self.counts_G2K = torch.zeros(_GROUPS, 2, 0, dtype=torch.float64) if counts is None else torch.tensor(counts)

    def add(self, kind_BN: Tensor, keep_BN: Tensor, free_BN: Tensor, images: range) -> None:
        """Count the tokens of a batch."""
        known, kinds = self.counts_G2K.shape[2], int(kind_BN.max()) + 1
        if kinds > known:
            self.counts_G2K = torch.nn.functional.pad(self.counts_G2K, (0, kinds - known))
        kinds = self.counts_G2K.shape[2]
        group_B1 = torch.tensor([image % _GROUPS for image in images], device=kind_BN.device).unsqueeze(1)
        place_BN = group_B1 * kinds + kind_BN
        counts = [
            torch.bincount(place_BN[counted_BN], minlength=_GROUPS * kinds).view(_GROUPS, kinds)
            for counted_BN in (keep_BN & free_BN, free_BN)
        ]
        self.counts_G2K += torch.stack(counts, dim=1).to(self.counts_G2K)

    def add_names(self, names: ArrayLike, keep_BN: Tensor, free_BN: Tensor, images: range) -> None:
        """Count the tokens of a batch whose kinds have names."""
        there, inverse = np.unique(np.asarray(names, dtype=str), return_inverse=True)
        self.names += [str(name) for name in there if name not in self.names]
        numbers = torch.tensor([self.names.index(name) for name in there], device=keep_BN.device)
        self.add(numbers[torch.from_numpy(inverse).to(keep_BN.device).view(keep_BN.shape)], keep_BN, free_BN, images)

    def frequency(self, kinds: int) -> Tensor:
        """Return how often tokens of each kind are kept, in [0, 1] (K)."""
        missing = max(0, kinds - self.counts_G2K.shape[2])
        kept_K, there_K = torch.nn.functional.pad(self.counts_G2K.sum(0), (0, missing))[:, :kinds]
        return kept_K / there_K.clamp(min=1)

    def information(self) -> Information | None:
        """Return what kinds say of being kept; None where there are not two."""
        total_2K = self.counts_G2K.sum(0)
        there_K = total_2K[1] > 0
        if int(there_K.sum()) < 2:
            return None
        filled_G = self.counts_G2K[:, 1].sum(1) > 0
        without_G2K = total_2K - self.counts_G2K[filled_G]
        bits, share = _shares(total_2K[None])
        bits_G, share_G = _shares(without_G2K)
        share_K = self.frequency(len(there_K))
        kept = {name: float(share_K[number]) for number, name in enumerate(self.names) if there_K[number]}
        return Information(pseudo_mean(float(bits), bits_G), pseudo_mean(float(share), share_G), kept)


def _shares(counts_G2K: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mutual information in bits that counts show, and its share of the entropy of being kept (G) each."""
    kept_GK, there_GK = counts_G2K.unbind(1)
    total_G = there_GK.sum(1)
    entropy_G = _entropy(kept_GK.sum(1) / total_G)
    left_G = (_entropy(kept_GK / there_GK.clamp(min=1)) * there_GK).sum(1) / total_G
    bits_G = entropy_G - left_G
    return bits_G, torch.where(entropy_G > 0, bits_G / entropy_G, 0.0)


def _entropy(share: Tensor) -> Tensor:
    """Return the entropy in bits of what happens with a probability."""
    return -(torch.xlogy(share, share) + torch.xlogy(1 - share, 1 - share)) / torch.log(share.new_tensor(2.0))


def information_rows(information: Mapping[str, Mapping[str, Information]]) -> Sequence[list[str]]:
    """Return a table of what is known of tokens and says of decisions, its header first."""
    rows = [["decision", "known of a token", "bits", "% of the decision's entropy", "kept"]]
    for decision, known in information.items():
        for name, entry in known.items():
            kept = ", ".join(f"{kind} {share:.2f}" for kind, share in entry.kept.items())
            rows.append([decision, name, f"{entry.bits:.4f}", f"{100 * entry.share:.1f}", kept])
    return rows
