"""What a decision depends on: known facts of tokens, and content or position where the content of images is moved.

Both are computed from the masks of decisions, by counts of groups of images.
Axes: B images, N tokens, F tokens of an image that may be skipped, G groups of images, K kinds of tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike
from torch import Tensor

from mmod.analysis.statistics import Estimate, pseudo_mean
from mmod.audits.shifts import changed_images
from mmod.audits.tables import BatchRows
from mmod.io.tables import MarkdownTable, table_of
from mmod.plain import without_none

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


Part = tuple[Tensor, Tensor, Tensor, range]
"""Of a batch the kind of each token, which tokens are kept, which may be skipped (B, N) each, and its images."""


def count_kinds(parts: Iterable[Part]) -> Tensor:
    """Count kept tokens, and all that may be skipped, by kind and by group of images, float64 (G, 2, K)."""
    counts_G2K = torch.zeros(_GROUPS, 2, 0, dtype=torch.float64)
    for kind_BN, keep_BN, free_BN, images in parts:
        kinds = max(counts_G2K.shape[2], int(kind_BN.max()) + 1)
        counts_G2K = F.pad(counts_G2K, (0, kinds - counts_G2K.shape[2]))
        # One histogram over all pairs of group and kind.
        cell_BN = torch.arange(images.start, images.stop).unsqueeze(1) % _GROUPS * kinds + kind_BN
        for row, counted_BN in enumerate((keep_BN & free_BN, free_BN)):
            count = torch.bincount(cell_BN[counted_BN], minlength=_GROUPS * kinds)
            counts_G2K[:, row] += count.view(_GROUPS, kinds)
    return counts_G2K


def kept_shares(counts_G2K: Tensor, kinds: int) -> Tensor:
    """Return how often tokens of each kind are kept, in [0, 1] (K)."""
    # Negative padding cuts off kinds that are not asked for.
    kept_K, there_K = F.pad(counts_G2K.sum(0), (0, kinds - counts_G2K.shape[2]))
    return kept_K / there_K.clamp(min=1)


def position_counts(batches: Sequence[BatchRows]) -> dict[str, Tensor]:
    """Count kept tokens by decision, and by their position among those that may be skipped; see `count_kinds`."""
    return {name: count_kinds(_by_position(batches, name)) for name in batches[0].decisions}


def _by_position(batches: Iterable[BatchRows], name: str) -> Iterator[Part]:
    for batch in batches:
        keep_BN, free_BN = batch.decisions[name].unpacked()
        # That of tokens that may not be skipped is not counted.
        yield (free_BN.cumsum(1) - 1).clamp(min=0), keep_BN, free_BN, batch.images


def _by_kind(batches: Iterable[BatchRows], name: str, known: str, names: Sequence[str]) -> Iterator[Part]:
    for batch in batches:
        kinds = batch.kinds.get(known)
        keep_BN, free_BN = batch.decisions[name].unpacked()
        # Parts of a model may have different tokens.
        if kinds is not None and kinds.kind_BN.shape == free_BN.shape:
            # Batches number the kinds that they have.
            numbers = torch.tensor([names.index(kind) for kind in kinds.names])
            yield numbers[kinds.kind_BN.long()], keep_BN, free_BN, batch.images


def information_of(batches: Sequence[BatchRows]) -> dict[str, dict[str, Information]]:
    """Return by decision what the position of a token, and what else is known of it, say of being kept."""
    names: dict[str, list[str]] = {}
    for batch in batches:
        for known, kinds in batch.kinds.items():
            names[known] = list(dict.fromkeys([*names.get(known, ()), *kinds.names]))
    information: dict[str, dict[str, Information]] = {}
    for name, positions in position_counts(batches).items():
        facts = {POSITION: information_in(positions)}
        for known, all_kinds in names.items():
            facts[known] = information_in(count_kinds(_by_kind(batches, name, known, all_kinds)), all_kinds)
        # Facts that are the same for all tokens say nothing.
        information[name] = without_none(facts)
    return information


def information_in(counts_G2K: Tensor, names: Sequence[str] = ()) -> Information | None:
    """Return what kinds say of being kept; None where there are not two.

    Args:
        names: Those of the kinds; positions have none.
    """
    there_K = counts_G2K[:, 1].sum(0) > 0
    if int(there_K.sum()) < 2:
        return None
    bits, share = map(_jackknifed, _bits(_left_out(counts_G2K)))
    kept_K = kept_shares(counts_G2K, len(there_K))
    kept = {name: float(share) for name, share, is_there in zip(names, kept_K, there_K) if is_there}
    return Information(bits, share, kept)


def _left_out(counts_G2K: Tensor) -> Tensor:
    """Return the counts of all images, and then those without each group of them (1 + G, 2, K)."""
    total_2K = counts_G2K.sum(0)
    filled_G = counts_G2K[:, 1].sum(1) > 0
    # A group is left out by subtracting its counts from those of all.
    return torch.cat([total_2K[None], total_2K - counts_G2K[filled_G]])


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
    nats = -(torch.xlogy(share, share) + torch.xlogy(1 - share, 1 - share))
    return nats / torch.log(share.new_tensor(2.0))


def information_tables(information: Mapping[str, Mapping[str, Information]]) -> list[MarkdownTable]:
    """Return what known facts of tokens say of decisions, a table for each fact."""
    facts = dict.fromkeys(chain.from_iterable(information.values()))
    tables = []
    for known in facts:
        rows: list[dict[str, object]] = []
        columns = {"decision": (f"{known} of a token", ""), "percent": ("% of the decision's entropy", ".1f")}
        for decision, entries in information.items():
            if known not in entries:
                continue
            entry = entries[known]
            columns |= {f"kept {kind}": (f"kept of {kind}", ".2f") for kind in entry.kept}
            kept = {f"kept {kind}": share for kind, share in entry.kept.items()}
            rows.append({"decision": decision, "percent": 100 * entry.share, **kept})
        tables.append(table_of(columns, rows))
    if tables:
        # One caption for all of them.
        tables[-1] = tables[-1]._replace(caption=_TOLD)
    return tables


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


def influence_of(batches: Sequence[BatchRows]) -> Influence | None:
    """Return what decides where content is moved, the mean over decisions; None where nothing was moved."""
    moved = [batch for batch in batches if batch.grid is not None and any(_moved_names(batch))]
    if not moved:
        return None
    # Images of another grid have other positions.
    moved = [batch for batch in moved if batch.grid == moved[0].grid]
    shares = []
    for name in dict.fromkeys(chain.from_iterable(map(_moved_names, moved))):
        rolled = [batch for batch in moved if batch.decisions[name].moved]
        positions = count_kinds(chain.from_iterable(_rolled_positions(batch, name) for batch in rolled))
        contents = count_kinds(_kept_again(batch, name) for batch in rolled)
        shares.append(_shares(positions, contents))
    content_G, position_G = torch.stack(shares).mean(0)
    both_G = position_G + content_G
    share_G = torch.where(both_G > 0, position_G / both_G, 0.0)
    images = sum(len(batch.images) for batch in moved)
    return Influence(images, *map(_jackknifed, (content_G, position_G, share_G)))


def _moved_names(batch: BatchRows) -> list[str]:
    return [name for name, decision in batch.decisions.items() if decision.moved]


def _rolled_positions(batch: BatchRows, name: str) -> Iterator[Part]:
    """Yield what is kept of rolled images by position."""
    for mask in batch.decisions[name].moved:
        keep_BF = mask.unpacked()
        position_BF = torch.arange(keep_BF.shape[1]).expand(keep_BF.shape)
        yield position_BF, keep_BF, torch.ones_like(keep_BF), batch.images


def _kept_again(batch: BatchRows, name: str) -> Part:
    """Return which content is kept at one position, by whether it is at another one."""
    assert batch.grid is not None
    masks = zip(batch.decisions[name].moved, _shifts(batch.images, batch.grid))
    was_BF, is_BF = (_rolled_back(mask.unpacked(), shift_B2, batch.grid) for mask, shift_B2 in masks)
    return was_BF.long(), is_BF, torch.ones_like(is_BF), batch.images


def rolled_twice(batch: object, grid: tuple[int, int], images: range) -> list[object]:
    """Return a batch rolled by patches in two ways; nothing where it has no images that the grid divides."""
    if math.prod(grid) < 2:
        return []
    rolled = [roll_patches(batch, shift_B2, grid) for shift_B2 in _shifts(images, grid)]
    if any(moved is None for moved in rolled):
        return []
    return rolled


def _shifts(images: range, grid: tuple[int, int]) -> Tensor:
    """Return by how many rows and columns each image is rolled, in two ways (2, B, 2)."""
    # Two different positions for all content, so that what stays in place is not taken for what stays with content.
    positions = [np.random.default_rng((image,)).choice(math.prod(grid), 2, replace=False) for image in images]
    # From a number to row and column: `unravel_index` returns the axes apart.
    rows_and_columns = np.unravel_index(np.stack(positions, axis=1), grid)
    return torch.from_numpy(np.stack(rows_and_columns, axis=-1))


def roll_patches(batch: object, shift_B2: Tensor, grid: tuple[int, int]) -> object:
    """Return a batch whose images are rolled by whole patches; None where it has none that the grid divides."""

    def roll(images: Tensor) -> Tensor | None:
        sides = images.shape[2:]
        if any(side % count for side, count in zip(sides, grid)):
            return None
        rolled = []
        for image, shift_2 in zip(images, shift_B2):
            steps = [int(shift) * side // count for shift, side, count in zip(shift_2, sides, grid)]
            rolled.append(image.roll(steps, (1, 2)))
        return torch.stack(rolled)

    return changed_images(batch, len(shift_B2), roll)


def _rolled_back(keep_BF: Tensor, shift_B2: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return what is kept by the position where its content was before (B, F)."""
    maps = zip(keep_BF.unflatten(1, grid), (-shift_B2).tolist())
    return torch.stack([keep.roll(shift, (0, 1)).flatten() for keep, shift in maps])


def _shares(positions_G2K: Tensor, again_G2K: Tensor) -> Tensor:
    """Return the shares of content and of position, of all images and without each group of them (2, 1 + G)."""
    position_G = _of_position(_left_out(positions_G2K))
    # A position that counts is never the same twice, which lowers what content seems to decide.
    content_G = _of_content(_left_out(again_G2K)) + position_G / (positions_G2K.shape[2] - 1)
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
    share_GK = kept_GK / there_GK.clamp(min=1)
    between_G = (there_GK * (share_GK - mean_G1).square()).sum(1) / there_GK.sum(1)
    variance_G = (mean_G1 * (1 - mean_G1)).squeeze(1)
    return torch.where(variance_G > 0, between_G / variance_G, 0.0)
