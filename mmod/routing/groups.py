"""Groups of tokens in a language model: how they are assigned, and how the best of each are selected.

Axes: B samples, N tokens, G groups, K slots per sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

import torch
from torch import Tensor, nn

from mmod.ops.backend import batching
from mmod.ops.select import Kept, ascending_valid, slots_for
from mmod.routing.decision import KEPT, PADDING, PackedSamples, TokenGroups


def assign_groups(
    free_BN: Tensor,
    gated_BN: Tensor,
    valid_BN: Tensor,
    frames: str | int | None = None,
    strict: bool = True,
    segment_BN: Tensor | None = None,
    first_BN: Tensor | None = None,
    prompt_BN: Tensor | None = None,
) -> TokenGroups:
    """Assign every token to its group, with one host synchronisation, two for spans, or a few for packed rows.

    Args:
        frames: Groups: None for one per sample, "span" for one per span, or a number of tokens.
        segment_BN: Sample of each token in rows that pack several, from 0 (B, N); else None.
        first_BN: True at the first token of every span (B, N); None takes unbroken runs of tokens that may be skipped.
        prompt_BN: True at tokens of prompts (B, N); None if all are.

    Example:
        >>> free = torch.tensor([[False, True, True, False, True]])
        >>> groups = assign_groups(free, free, torch.ones_like(free), frames="span")
        >>> groups.group_BN.tolist(), groups.sizes, groups.always
        ([[0, 1, 1, 0, 2]], ((2, 1),), (2,))
    """
    group_BN, count = _numbered(free_BN & valid_BN, frames, segment_BN, first_BN)
    group_BN = group_BN.masked_fill(~valid_BN, PADDING)
    # Padding is counted in the first column, and what is always kept in the second.
    counts = torch.zeros(group_BN.shape[0], count + 2, dtype=torch.long, device=group_BN.device)
    rows = counts.scatter_add(1, group_BN + 1, torch.ones_like(group_BN)).tolist()
    sizes = tuple(_used(row[2:]) for row in rows)
    # By the counts that the host knows: packed samples alone are counted for it.
    if isinstance(frames, int) and any(set(row) - {frames} for row in sizes):
        by_sample = [sum(row) for row in sizes]
        raise ValueError(f"frames={frames} does not divide the image tokens of a sample, {by_sample}")
    always = tuple(row[1] for row in rows)
    if prompt_BN is not None:
        prompt_BN = prompt_BN & valid_BN
    segments = None
    if segment_BN is not None:
        segments = split_segments(segment_BN, valid_BN, prompt_BN)
    return TokenGroups(
        group_BN,
        gated_BN & valid_BN,
        _limits(group_BN),
        sizes,
        always,
        strict,
        segments=segments,
        prompt_BN=prompt_BN,
    )


def _numbered(
    free_BN: Tensor, frames: str | int | None, segment_BN: Tensor | None, first_BN: Tensor | None
) -> tuple[Tensor, int]:
    """Return the group of each token that may be skipped, from 1, and 0 at all others (B, N); and how many may be."""
    if frames is None and segment_BN is None:
        return free_BN.long(), 1
    if frames is None:
        assert segment_BN is not None
        return (segment_BN + 1) * free_BN, int(segment_BN.max()) + 1
    if frames == "span":
        # A run of image tokens, such as an image; spans of routed blocks are another thing.
        if first_BN is None:
            first_BN = free_BN & ~nn.functional.pad(free_BN, (1, 0))[:, :-1]
        group_BN = first_BN.cumsum(1) * free_BN
        count = 0
        # An empty tensor has no largest number.
        if group_BN.numel():
            count = int(group_BN.max())
        return group_BN, count
    size = int(frames)
    if segment_BN is not None:
        _check_frames(free_BN, segment_BN, size)
    frame_BN = (free_BN.cumsum(1) - 1) // size + 1
    return frame_BN * free_BN, -(-free_BN.shape[1] // size)


def _check_frames(free_BN: Tensor, segment_BN: Tensor, frames: int) -> None:
    """Raise a ValueError unless the image tokens of every packed sample are whole frames."""
    samples = int(segment_BN.max()) + 1
    counts = torch.zeros(free_BN.shape[0], samples, dtype=torch.long, device=free_BN.device)
    counts = counts.scatter_add(1, segment_BN, free_BN.long())
    if bool((counts % frames).any()):
        raise ValueError(f"frames={frames} does not divide the image tokens of packed samples, {counts.tolist()}")


def split_segments(segment_BN: Tensor, valid_BN: Tensor, prompt_BN: Tensor | None = None) -> PackedSamples:
    """Return where the tokens of packed samples stand, with one host synchronisation.

    Args:
        segment_BN: Sample of each token in its row, from 0 (B, N).
        prompt_BN: True at tokens whose attention counts as importance (B, N); None for all valid ones.

    Example:
        >>> segments = split_segments(torch.tensor([[0, 0, 0, 1, 1]]), torch.ones(1, 5, dtype=torch.bool))
        >>> segments.split(torch.tensor([[10, 11, 12, 13, 14]]))[segments.valid_SL].tolist()
        [10, 11, 12, 13, 14]
        >>> segments.valid_SL.tolist()
        [[True, True, True], [True, True, False]]
    """
    samples, tokens = segment_BN.shape
    row_B1 = torch.arange(samples, device=segment_BN.device).unsqueeze(1)
    # Samples are numbered over the whole batch, in order.
    sample_T = (segment_BN + row_B1 * tokens).flatten().unique(return_inverse=True)[1]
    size_S = sample_T.bincount()
    order_T = torch.sort(sample_T, stable=True).indices
    sorted_T = sample_T[order_T]
    begin_S = size_S.cumsum(0) - size_S
    # The place of each token in its sample.
    rank_T = torch.arange(len(order_T), device=order_T.device) - begin_S[sorted_T]
    slots = int(size_S.max())
    slot_T = torch.empty_like(order_T)
    slot_T[order_T] = sorted_T * slots + rank_T
    token_SL = order_T.new_zeros(len(size_S) * slots)
    token_SL[slot_T] = torch.arange(len(slot_T), device=slot_T.device)
    valid_SL = torch.zeros_like(token_SL, dtype=torch.bool)
    valid_SL[slot_T] = valid_BN.flatten()
    valid_SL = valid_SL.view(-1, slots)
    queries_BN = valid_BN if prompt_BN is None else prompt_BN
    counted_S = torch.zeros_like(size_S).scatter_add(0, sample_T, queries_BN.flatten().long()).clamp(min=1)
    counted_B1 = queries_BN.sum(dim=1, keepdim=True).clamp(min=1)
    share_BN = counted_S[sample_T].view(samples, tokens) / counted_B1
    return PackedSamples(token_SL.view(-1, slots), valid_SL, slot_T.view(samples, tokens), share_BN)


def decoded_groups(valid_BN: Tensor) -> TokenGroups:
    """Assign the next token of every sample, which may be skipped without a change of shapes; `valid_BN` is (B, 1)."""
    samples = valid_BN.shape[0]
    group_BN = valid_BN * 2 - 1
    return TokenGroups(
        group_BN,
        valid_BN,
        _limits(group_BN),
        sizes=((1,),) * samples,
        always=(0,) * samples,
        strict=False,
        alone=True,
    )


def _limits(group_BN: Tensor) -> Tensor:
    limit_BN = torch.full(group_BN.shape, torch.inf, device=group_BN.device)
    return limit_BN.masked_fill(group_BN == KEPT, -torch.inf).masked_fill(group_BN == PADDING, torch.nan)


def _used(counts: list[int]) -> tuple[int, ...]:
    """Return the sizes of a sample's groups, without the zeros behind the last one."""
    used = len(counts)
    while used and not counts[used - 1]:
        used -= 1
    return tuple(counts[:used])


def select_within(score_BN: Tensor, capacity: Fraction, groups: TokenGroups) -> Kept:
    """Keep the highest scores of every group, and all tokens that are always kept.

    Ties go to the lowest index and NaN ranks last in its group. A group of n tokens keeps `floor(capacity * n)`.

    Example:
        >>> free = torch.tensor([[False, True, True, True, True]])
        >>> groups = assign_groups(free, free, torch.ones_like(free))
        >>> select_within(torch.tensor([[0.0, 0.1, 0.9, 0.2, 0.9]]), Fraction(1, 2), groups).index_BK
        tensor([[0, 2, 4]])
    """
    keeps = [[kept_in_group(size, capacity, groups.strict) for size in row] for row in groups.sizes]
    counts = [sum(row) + always for row, always in zip(keeps, groups.always)]
    tokens = score_BN.shape[1]
    if not any(keeps) or all(kept == list(sizes) for kept, sizes in zip(keeps, groups.sizes)):
        return kept_by_mask(groups.group_BN > PADDING, counts)
    # Negated, because a sort puts NaN last, which padding becomes below.
    worst_BN = -score_BN.detach().nan_to_num(nan=-torch.inf, neginf=torch.finfo(score_BN.dtype).min)
    if max(map(len, keeps)) > 1:
        return kept_by_mask(_best_of_groups(worst_BN, keeps, groups), counts)
    # One group a sample: what is always kept is sorted to the front, and padding behind all others.
    worst_BN = torch.minimum(worst_BN, groups.limit_BN)
    best_BK = torch.sort(worst_BN, dim=1, stable=True).indices[:, : max(counts)]
    if min(counts) == max(counts):
        return Kept(torch.sort(best_BK, dim=1).values, None, sum(counts))
    index_BK, valid_BK = ascending_valid(best_BK, torch.tensor(counts, device=best_BK.device), tokens)
    return Kept(index_BK, valid_BK, sum(counts))


def _best_of_groups(worst_BN: Tensor, keeps: Sequence[Sequence[int]], groups: TokenGroups) -> Tensor:
    """Return which tokens are kept of samples with several groups (B, N).

    Args:
        worst_BN: Negated scores (B, N).
        keeps: How many tokens of each group are kept, by sample.
    """
    tokens = worst_BN.shape[1]
    count = max(map(len, keeps))
    order_BN = torch.sort(worst_BN, dim=1, stable=True).indices
    # A second, stable sort by group keeps every group sorted by score; padding and kept tokens come first.
    in_order_BN = groups.group_BN.gather(1, order_BN)
    order_BN = order_BN.gather(1, torch.sort(in_order_BN, dim=1, stable=True).indices)
    # Of the n tokens of a group, the first m are kept: the positions at which they end, behind earlier groups.
    ends = []
    for sizes, row in zip(groups.sizes, keeps):
        starts = accumulate([tokens - sum(sizes), *sizes])
        of_sample = [start + kept for start, kept in zip(starts, row)]
        ends.append([*of_sample, *[0] * (count - len(row))])
    end_BG = torch.tensor(ends, device=worst_BN.device)
    place_BN = torch.arange(tokens, device=order_BN.device).expand_as(order_BN)
    rank_BN = torch.empty_like(order_BN).scatter_(1, order_BN, place_BN)
    # Groups are numbered from 1; what is in none is decided below.
    chosen_BN = rank_BN < end_BG.gather(1, groups.group_BN.clamp(min=1) - 1)
    return torch.where(groups.free_BN, chosen_BN, groups.group_BN == KEPT)


def kept_in_group(size: int, capacity: Fraction, strict: bool) -> int:
    """Return how many tokens of a group of some size a capacity keeps.

    Args:
        strict: The group is of images: capacity 0 keeps none, and a higher one that keeps none is an error. Of text, at
            least one token runs.
    """
    kept = size * capacity.numerator // capacity.denominator
    if kept or not size:
        return kept
    if not capacity:
        if strict:
            return 0
        raise ValueError("capacity 0 is for image tokens: where text may be skipped, too, it must be in (0, 1]")
    if strict:
        raise ValueError(
            f"capacity {float(capacity)} keeps none of {size} image tokens; give at least 1/{size} = {1 / size:.4f}. "
            "In a preset or plan with a capacity for each block, the lowest one counts. More pixels give more tokens, "
            "such as by `size: {shortest_edge: N, longest_edge: N}` of Qwen-VL's processor"
        )
    return 1


def kept_by_mask(keep_BN: Tensor, counts: list[int] | None = None) -> Kept:
    """Return the slots of kept tokens, in order.

    Args:
        counts: Number of kept tokens of each sample, if known. To count them takes one host synchronisation; under
            `torch.func.vmap`, which permits none, every token has a slot, and the number is None.
    """
    if counts is None and batching():
        index_BN = torch.sort((~keep_BN).to(torch.uint8), dim=1, stable=True).indices
        return Kept(index_BN, keep_BN.gather(1, index_BN))
    if counts is None:
        counts = keep_BN.sum(1).tolist()
    slots = slots_for(counts)
    total = sum(counts)
    if all(count == keep_BN.shape[1] for count in counts):
        index_BN = torch.arange(keep_BN.shape[1], device=keep_BN.device).expand_as(keep_BN)
        return Kept(index_BN, None, total)
    index_BK = torch.sort((~keep_BN).to(torch.uint8), dim=1, stable=True).indices[:, :slots]
    if all(count == slots for count in counts):
        return Kept(index_BK, None, total)
    count_B1 = torch.tensor(counts, device=keep_BN.device).unsqueeze(1)
    return Kept(index_BK, torch.arange(slots, device=keep_BN.device) < count_B1, total)
