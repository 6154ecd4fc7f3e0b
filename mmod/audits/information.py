"""What a decision depends on: known facts of tokens, and content or position where the content of images is moved.

Both are computed from the masks of decisions, by counts of groups of images.
Axes: B images, N tokens, F tokens of an image that may be skipped, G groups of images, K kinds of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils._pytree import tree_map

from mmod.analysis.statistics import Estimate, pseudo_mean
from mmod.audits.tables import BatchRows, TokenKinds
from mmod.io.tables import MarkdownTable, table_of

# Images are dealt out to so many groups by their number; each is left out once.
_GROUPS = 50
POSITION = "position"
"""The fact that is known of every token: its order among those that may be skipped."""
_TOLD = (
    "Mutual information of a known fact of a token and of being kept, bias removed by the jackknife; 95 % intervals."
)


@dataclass(frozen=True)
class Information:
    """Mutual information between the kind of a token and whether a decision keeps it.

    Intervals are over images by the jackknife, which also removes the upward bias of the estimate.

    Args:
        bits: The mutual information, in bits per token.
        share: The same as a share of the entropy of decisions: 0 if the kind says nothing, 1 if it decides.
        kept: Share that is kept of the tokens of each kind; empty for positions.

    Source: Quenouille, Biometrika 43 (1956), and Tukey, The Annals of Mathematical Statistics 29 (1958): the jackknife.
    """

    bits: Estimate
    share: Estimate
    kept: dict[str, float]


@dataclass
class KindCounts:
    """Kept tokens and all tokens of each kind, by group of images (G, 2, K). Kinds without names are positions."""

    names: list[str] = field(default_factory=list)
    counts_G2K: Tensor = field(default_factory=lambda: torch.zeros(_GROUPS, 2, 0, dtype=torch.float64))

    @property
    def left_out(self) -> Tensor:
        """The counts of all images, and then those without each group of them (1 + G, 2, K)."""
        total_2K = self.counts_G2K.sum(0)
        filled_G = self.counts_G2K[:, 1].sum(1) > 0
        # A group is left out by subtracting its counts from those of all.
        return torch.cat([total_2K[None], total_2K - self.counts_G2K[filled_G]])

    def add(self, kind_BN: Tensor, keep_BN: Tensor, free_BN: Tensor, images: range) -> None:
        """Count the tokens of a batch."""
        kinds = max(self.counts_G2K.shape[2], int(kind_BN.max()) + 1)
        self.counts_G2K = F.pad(self.counts_G2K, (0, kinds - self.counts_G2K.shape[2]))
        # One histogram over all pairs of group and kind.
        cell_BN = torch.arange(images.start, images.stop).unsqueeze(1) % _GROUPS * kinds + kind_BN
        for row, counted_BN in enumerate((keep_BN & free_BN, free_BN)):
            count = torch.bincount(cell_BN[counted_BN], minlength=_GROUPS * kinds)
            self.counts_G2K[:, row] += count.view(_GROUPS, kinds)

    def add_kinds(self, kinds: TokenKinds, keep_BN: Tensor, free_BN: Tensor, images: range) -> None:
        """Count the tokens of a batch whose kinds have names."""
        self.names += [name for name in kinds.names if name not in self.names]
        numbers = torch.tensor([self.names.index(name) for name in kinds.names])
        self.add(numbers[kinds.kind_BN.long()], keep_BN, free_BN, images)

    def frequency(self, kinds: int) -> Tensor:
        """Return how often tokens of each kind are kept, in [0, 1] (K)."""
        # Negative padding cuts off kinds that are not asked for.
        kept_K, there_K = F.pad(self.counts_G2K.sum(0), (0, kinds - self.counts_G2K.shape[2]))
        return kept_K / there_K.clamp(min=1)

    def information(self) -> Information | None:
        """Return what kinds say of being kept; None where there are not two."""
        there_K = self.counts_G2K[:, 1].sum(0) > 0
        if int(there_K.sum()) < 2:
            return None
        bits, share = map(_jackknifed, _bits(self.left_out))
        kept_K = self.frequency(len(there_K))
        kept = {name: float(kept_K[number]) for number, name in enumerate(self.names) if there_K[number]}
        return Information(bits, share, kept)


def kind_counts(batches: Iterable[BatchRows]) -> dict[str, dict[str, KindCounts]]:
    """Count kept tokens by decision, and by their position among those that may be skipped or what is known of them."""
    counts: dict[str, dict[str, KindCounts]] = {}
    for batch in batches:
        for name, decision in batch.decisions.items():
            free_BN = decision.free.unpacked()
            masks = decision.keep.unpacked(), free_BN, batch.images
            facts = counts.setdefault(name, {POSITION: KindCounts()})
            facts[POSITION].add((free_BN.cumsum(1) - 1).clamp(min=0), *masks)
            for known, kinds in batch.kinds.items():
                # Parts of a model may have different tokens.
                if kinds.kind_BN.shape == free_BN.shape:
                    facts.setdefault(known, KindCounts()).add_kinds(kinds, *masks)
    return counts


def information_of(batches: Iterable[BatchRows]) -> dict[str, dict[str, Information]]:
    """Return by decision what the position of a token, and what else is known of it, say of being kept."""
    information: dict[str, dict[str, Information]] = {}
    for name, facts in kind_counts(batches).items():
        known_bits = {known: kinds.information() for known, kinds in facts.items()}
        # Facts that are the same for all tokens say nothing.
        information[name] = {known: bits for known, bits in known_bits.items() if bits is not None}
    return information


def check_shapes(kinds: Mapping[str, ArrayLike], free: Mapping[str, Tensor]) -> None:
    """Raise a ValueError for what is known of other tokens than those that decisions are on."""
    shapes = dict.fromkeys(tuple(free_BN.shape) for free_BN in free.values())
    for known, names in kinds.items():
        if np.shape(names) not in shapes:
            raise ValueError(
                f"token_kinds give {known!r} of {np.shape(names)} tokens, and decisions are on "
                f"{', '.join(map(str, shapes))}"
            )


def _jackknifed(value_G: Tensor) -> Estimate:
    """Return the estimate of a figure of all images, which comes first, and of those without each group (1 + G)."""
    return pseudo_mean(float(value_G[0]), value_G[1:])


def _bits(counts_G2K: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mutual information in bits that counts show, and its share of the entropy of being kept (G) each."""
    kept_GK, there_GK = counts_G2K.unbind(1)
    total_G = there_GK.sum(1)
    entropy_G = _entropy(kept_GK.sum(1) / total_G)
    # The entropy that is left within kinds, weighed by their tokens.
    left_G = (_entropy(kept_GK / there_GK.clamp(min=1)) * there_GK).sum(1) / total_G
    bits_G = entropy_G - left_G
    return bits_G, torch.where(entropy_G > 0, bits_G / entropy_G, 0.0)


def _entropy(share: Tensor) -> Tensor:
    return -(torch.xlogy(share, share) + torch.xlogy(1 - share, 1 - share)) / torch.log(share.new_tensor(2.0))


def information_table(information: Mapping[str, Mapping[str, Information]]) -> MarkdownTable:
    """Return what known facts of tokens say of decisions."""
    rows = []
    for decision, facts in information.items():
        for known, entry in facts.items():
            row = {
                "decision": decision,
                "known": known,
                "bits": entry.bits,
                "percent": 100 * entry.share,
                "kept": ", ".join(f"{kind} {share:.2f}" for kind, share in entry.kept.items()),
            }
            rows.append(row)
    columns = {
        "decision": ("decision", ""),
        "known": ("known of a token", ""),
        "bits": ("bits", ".4f"),
        "percent": ("% of the decision's entropy", ".1f"),
        "kept": ("kept", ""),
    }
    return table_of(columns, rows, _TOLD)


@dataclass(frozen=True)
class Influence:
    """Shares of a router's choice that content and position explain, each alone.

    Each image is evaluated twice, rolled by whole patches drawn at random, so that all content is equally likely at
    every position, whatever the data. The remainder is their interaction, other patches, or chance.

    Args:
        content: Share of the variance of being kept that a patch's content explains wherever it stands, in [0, 1].
        position: Share that its position explains whatever stands there, in [0, 1].
        position_share: Position over the sum of both.

    Source: Sobol', Mathematics and Computers in Simulation 55 (2001): first-order indices, that of content from pairs
    that share it alone.
    """

    images: int
    content: Estimate
    position: Estimate
    position_share: Estimate

    def __str__(self) -> str:
        return (
            f"where images are rolled by whole patches, content decides {100 * self.content:.0f} % of what is kept and "
            f"position {100 * self.position:.0f} %"
        )


def influence_of(batches: Iterable[BatchRows]) -> Influence | None:
    """Return what decides where content is moved, the mean over decisions; None where nothing was moved."""
    # By decision: by position, and by whether the same content was kept at another position.
    counts: dict[str, tuple[KindCounts, KindCounts]] = {}
    images = 0
    grid = None
    for batch in batches:
        moved = {name: decision.moved for name, decision in batch.decisions.items() if decision.moved}
        # Images of another grid have other positions.
        if not moved or batch.grid is None or (grid or batch.grid) != batch.grid:
            continue
        grid = batch.grid
        images += len(batch.images)
        shifts = _shifts(batch.images, grid)
        for name, masks in moved.items():
            by_position, again = counts.setdefault(name, (KindCounts(), KindCounts()))
            kept = [mask.unpacked() for mask in masks]
            free_BF = torch.ones_like(kept[0])
            for keep_BF in kept:
                by_position.add(torch.arange(keep_BF.shape[1]).expand(keep_BF.shape), keep_BF, free_BF, batch.images)
            was_BF, is_BF = (_rolled_back(keep_BF, shift_B2, grid) for keep_BF, shift_B2 in zip(kept, shifts))
            again.add(was_BF.long(), is_BF, free_BF, batch.images)
    if not counts:
        return None
    content_G, position_G = torch.stack([_shares(*pair) for pair in counts.values()]).mean(0)
    both_G = position_G + content_G
    share_G = torch.where(both_G > 0, position_G / both_G, 0.0)
    return Influence(images, *map(_jackknifed, (content_G, position_G, share_G)))


def rolled_twice(batch: Any, grid: tuple[int, int], images: range) -> list[Any]:
    """Return a batch rolled by patches in two ways; nothing where it has no images that the grid divides."""
    if math.prod(grid) < 2:
        return []
    rolled = [roll_patches(batch, shift_B2, grid) for shift_B2 in _shifts(images, grid)]
    return [] if any(moved is None for moved in rolled) else rolled


def _shifts(images: range, grid: tuple[int, int]) -> Tensor:
    """Return by how many rows and columns each image is rolled, in two ways (2, B, 2)."""
    # Two different positions for all content, so that what stays in place is not taken for what stays with content.
    positions = [np.random.default_rng((image,)).choice(math.prod(grid), 2, replace=False) for image in images]
    # From a number to row and column: `unravel_index` returns the axes apart.
    return torch.from_numpy(np.stack(np.unravel_index(np.stack(positions, axis=1), grid), axis=-1))


def roll_patches(batch: Any, shift_B2: Tensor, grid: tuple[int, int]) -> Any:
    """Return a batch whose images are rolled by whole patches; None where it has none that the grid divides."""
    is_rolled = False

    def move(value: Any) -> Any:
        nonlocal is_rolled
        if not isinstance(value, Tensor) or value.ndim != 4 or not value.is_floating_point():
            return value
        sides = value.shape[2:]
        if len(value) != len(shift_B2) or any(side % count for side, count in zip(sides, grid)):
            return value
        is_rolled = True
        images = []
        for image, shift_2 in zip(value, shift_B2):
            steps = [int(shift) * side // count for shift, side, count in zip(shift_2, sides, grid)]
            images.append(image.roll(steps, (1, 2)))
        return torch.stack(images)

    moved = tree_map(move, batch)
    return moved if is_rolled else None


def _rolled_back(keep_BF: Tensor, shift_B2: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return what is kept by the position where its content was before (B, F)."""
    maps = zip(keep_BF.unflatten(1, grid), (-shift_B2).tolist())
    return torch.stack([keep.roll(shift, (0, 1)).flatten() for keep, shift in maps])


def _shares(positions: KindCounts, again: KindCounts) -> Tensor:
    """Return the shares of content and of position, of all images and without each group of them (2, 1 + G)."""
    position_G = _of_position(positions.left_out)
    # A position that counts is never the same twice, which lowers what content seems to decide.
    content_G = _of_content(again.left_out) + position_G / (positions.counts_G2K.shape[2] - 1)
    return torch.stack([content_G, position_G])


def _of_content(counts_G2K: Tensor) -> Tensor:
    """Return how much more often content is kept that was kept elsewhere, than content that was not (G)."""
    kept_GK, there_GK = counts_G2K.unbind(1)
    share_GK = kept_GK / there_GK.clamp(min=1)
    return torch.where((there_GK > 0).all(1), share_GK[:, -1] - share_GK[:, 0], 0.0)


def _of_position(counts_G2K: Tensor) -> Tensor:
    """Return the share of the variance of being kept that lies between positions (G)."""
    kept_GK, there_GK = counts_G2K.unbind(1)
    mean_G1 = kept_GK.sum(1, keepdim=True) / there_GK.sum(1, keepdim=True)
    between_G = (there_GK * (kept_GK / there_GK.clamp(min=1) - mean_G1).square()).sum(1) / there_GK.sum(1)
    variance_G = (mean_G1 * (1 - mean_G1)).squeeze(1)
    return torch.where(variance_G > 0, between_G / variance_G, 0.0)
