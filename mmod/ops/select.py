"""Selection: from scores to the tokens that run, and the gates of their updates.

Axes: B images, N tokens, K slots per image. Prefix tokens are the first `prefix` of the sequence, or those that
`protect_BN` marks, at most `prefix` per image. An empty slot points at a token that is not kept, so indices are unique
within an image and a plain scatter can write rows back.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from mmod.ops.backend import Kernel, batching, check_counts, exporting, kernel_op, op
from mmod.ops.gate import apply_gate


def short_repr(values: NamedTuple) -> str:
    """Return a named tuple's repr with shapes instead of tensors, and without what is None or holds nothing else."""
    shown = []
    for name, value in zip(values._fields, values):
        if isinstance(value, Tensor):
            shown.append(f"{name}={tuple(value.shape)}")
        elif hasattr(value, "_fields"):
            if any(part is not None and part is not False for part in value):
                shown.append(f"{name}={short_repr(value)}")
        elif value is not None:
            shown.append(f"{name}={value!r}")
    return f"{type(values).__name__}({', '.join(shown)})"


class Kept(NamedTuple):
    """The tokens that run.

    Args:
        index_BK: Kept tokens, ascending among the valid slots (B, K).
        valid_BK: False at empty slots (B, K); None if all are filled.
        total: Number of valid slots in the batch if known without a synchronisation, else None.
        inverse_BN: Slot of each token, -1 for none (B, N), if the selection computed it, else None.
        idle_BK: True at slots of skipped tokens, which run at gate 0 so that the router learns (B, K); None for none.
        image_S: The kept images, if images are kept or skipped as a whole, else None.
        order_BN: All tokens, the kept ones first (B, N), if the selection sorts and is asked for them, else None.
    """

    index_BK: Tensor
    valid_BK: Tensor | None = None
    total: int | None = None
    inverse_BN: Tensor | None = None
    idle_BK: Tensor | None = None
    image_S: Tensor | None = None
    order_BN: Tensor | None = None

    def __repr__(self) -> str:
        return short_repr(self)

    def among(self, tokens: int) -> Tensor:
        """Return which of N tokens are kept (B, N)."""
        valid_BK = self.valid_BK
        if valid_BK is None:
            valid_BK = torch.ones_like(self.index_BK, dtype=torch.bool)
        if self.idle_BK is not None:
            valid_BK = valid_BK & ~self.idle_BK
        none_BN = valid_BK.new_zeros(valid_BK.shape[0], tokens)
        return none_BN.scatter(1, self.index_BK, valid_BK)


def kept_count(tokens: int, capacity: Fraction, prefix: int = 0) -> int:
    """Return how many of `tokens` tokens a capacity keeps: `max(1, prefix, floor(capacity * tokens))`.

    Args:
        tokens: All tokens of an image, prefix included; may be symbolic.
        capacity: Share kept, as a fraction.
        prefix: Leading tokens that are always kept and count as kept.

    Example:
        >>> kept_count(197, Fraction(1, 2), prefix=1)
        98
    """
    # In integers: 0.29 of 100 tokens is 28 in floating point.
    numerator, denominator = capacity.as_integer_ratio()
    kept = tokens * numerator // denominator
    minimum = prefix or 1
    # On a plain int, `sym_max` breaks the graph in torch 2.11; on a symbol, a comparison would make it static.
    if type(kept) is int:
        return minimum if kept < minimum else kept
    return cast(int, torch.sym_max(minimum, kept))


def _empty_selection(
    score: Tensor,
    count: int,
    prefix: int,
    valid: Tensor | None,
    protect: Tensor | None,
    numerator: int,
    denominator: int,
    gate: str,
    scale: float,
) -> tuple[Tensor, ...]:
    shape = (score.shape[0], count)
    # Empty where there is nothing to tell: an operation returns tensors alone.
    gate_shape = (0,) if gate == "identity" else shape
    valid_shape = (0,) if valid is None else shape
    return (
        score.new_empty(gate_shape),
        score.new_empty(shape, dtype=torch.int64),
        score.new_empty(valid_shape, dtype=torch.bool),
        score.new_empty(score.shape, dtype=torch.int32),
    )


def _save_for_gate(ctx: Any, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
    score, *_, ctx.gate, ctx.scale = inputs
    inverse = output[3]
    ctx.save_for_backward(score, inverse)


def _gate_backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    score, inverse = ctx.saved_tensors
    grad = None
    if ctx.gate != "identity":
        grad = _gate_grad(grads[0], score, inverse, ctx.gate, ctx.scale)
    # One for each argument, of which the score alone has a gradient.
    return grad, *(None,) * 8


# Gates (empty for identity), indices, valid slots (empty without padding) and the inverse map.
_select_topk = kernel_op(
    "select.select_topk",
    "(Tensor score, SymInt count, SymInt prefix, Tensor? valid, Tensor? protect, SymInt numerator, "
    "SymInt denominator, str gate, float scale) -> (Tensor, Tensor, Tensor, Tensor)",
    _empty_selection,
    _save_for_gate,
    _gate_backward,
)
_gate_grad = kernel_op(
    "select.gate_grad",
    "(Tensor grad, Tensor score, Tensor inverse, str gate, float scale) -> Tensor",
    lambda grad, score, *_: score.new_empty(score.shape),
)


def _by_kernel(
    score_BN: Tensor,
    capacity: Fraction,
    prefix: int = 0,
    valid_BN: Tensor | None = None,
    protect_BN: Tensor | None = None,
    *,
    gate: str = "identity",
    scale: float = 1.0,
    ordered: bool = False,
) -> tuple[Kept, Tensor | None]:
    count = kept_count(score_BN.shape[1], capacity, prefix)
    gate_BK: Tensor | None
    valid_BK: Tensor | None
    gate_BK, index_BK, valid_BK, inverse_BN = _select_topk(
        score_BN, count, prefix, valid_BN, protect_BN, capacity.numerator, capacity.denominator, gate, scale
    )
    # The operation always returns four tensors, empty where there is nothing to tell.
    if valid_BN is None:
        valid_BK = None
    if gate == "identity":
        gate_BK = None
    return Kept(index_BK, valid_BK, inverse_BN=inverse_BN), gate_BK


@op(
    Kernel(
        _by_kernel,
        "a kernel",
        "not yet measured; reason: one launch instead of six, which small batches outside graphs may not repay",
        # The longest sequence whose sort keys fit in one program.
        takes=lambda score_BN, *_, **__: score_BN.shape[1] <= 8192,
        where="tokens <= 8192",
    ),
    how="a stable sort by score, and a sort of the kept indices",
)
def select_topk(
    score_BN: Tensor,
    capacity: Fraction,
    prefix: int = 0,
    valid_BN: Tensor | None = None,
    protect_BN: Tensor | None = None,
    *,
    gate: str = "identity",
    scale: float = 1.0,
    ordered: bool = False,
) -> tuple[Kept, Tensor | None]:
    """Keep the highest scores of every image.

    Ties go to the lowest index and NaN ranks last, on every backend. With `valid_BN`, an image's budget is a share of
    its valid tokens, so padding neither runs nor uses capacity.

    Args:
        score_BN: Raw scores (B, N).
        capacity: Share of tokens kept.
        prefix: Number of tokens that are always kept.
        valid_BN: False where a token is padding (B, N), or None.
        protect_BN: True where a token is always kept (B, N), or None for the leading ones.
        gate: How a score weighs its token's update, a name of `mmod.Gate`; the gate carries a gradient to the score.
        scale: Factor of the gate.
        ordered: Return `Kept.order_BN` too, in versions that sort.

    Returns:
        The kept tokens, and the weight of each slot's update (B, K), None where it is 1; gates of empty slots have no
        effect.

    Example:
        >>> kept, gate_BK = select_topk(torch.tensor([[0.1, 0.9, 0.9, 0.5]]), Fraction(1, 2))
        >>> kept.index_BK
        tensor([[1, 2]])
    """
    count = kept_count(score_BN.shape[1], capacity, prefix)
    valid_BK = None
    if valid_BN is None:
        order_BN = _rank(score_BN, prefix, protect_BN)
        index_BK = order_BN[:, :count]
        # Ascending, so that kept tokens keep their order and neighbours stay neighbours in memory.
        index_BK = torch.sort(index_BK, dim=1).values
    else:
        order_BN = _rank(_rank_last(score_BN, ~valid_BN), prefix, protect_BN)
        index_BK = order_BN[:, :count]
        # The budget is a share of the real tokens, so that padding changes no decision.
        number_B = valid_BN.sum(dim=1)
        count_B = (number_B * capacity.numerator // capacity.denominator).clamp(min=max(1, prefix))
        index_BK, valid_BK = ascending_valid(index_BK, torch.minimum(count_B, number_B), score_BN.shape[1])
    gate_BK = None
    if gate != "identity":
        gate_BK = apply_gate(score_BN.gather(1, index_BK), gate, scale)
    return Kept(index_BK, valid_BK, order_BN=order_BN if ordered else None), gate_BK


# The definition alone, for callers that know that no kernel may run.
sort_topk: Callable[..., tuple[Kept, Tensor | None]] = select_topk.__wrapped__  # type: ignore[attr-defined]


def select_threshold(
    level_BN: Tensor,
    threshold: float,
    *,
    prefix: int = 0,
    min_tokens: int = 0,
    max_tokens: int | None = None,
    valid_BN: Tensor | None = None,
    protect_BN: Tensor | None = None,
    ordered: bool = False,
) -> Kept:
    """Keep the tokens whose normalised score reaches a threshold.

    With `max_tokens`, shapes are static. Without it, the number of slots is the largest count in the batch, which takes
    one host synchronisation. Under `torch.func.vmap` and in compiled graphs, which permit none, every token has a slot.

    Args:
        level_BN: Normalised scores (B, N); NaN is never kept.
        threshold: A token is kept when its level is at least this.
        prefix: Number of tokens that are always kept.
        min_tokens: Keep at least this many, the highest levels first, prefix included.
        max_tokens: Keep at most this many, the highest levels first, prefix included.
        valid_BN: False where a token is padding (B, N), or None.
        protect_BN: True where a token is always kept (B, N), or None for the leading ones.
        ordered: Return the order of all tokens too.

    Returns:
        The kept tokens, without the number of valid slots where only the device knows it. K may be 0 where no gradient
        is recorded.

    Raises:
        ValueError: Without `max_tokens` under `torch.export`.

    Example:
        >>> kept = select_threshold(torch.tensor([[0.9, 0.2, 0.7], [0.1, 0.1, 0.6]]), 0.5)
        >>> kept.index_BK.tolist(), kept.valid_BK.tolist(), kept.total
        ([[0, 2], [2, 0]], [[True, True], [True, False]], 3)
    """
    tokens = level_BN.shape[1]
    if valid_BN is not None:
        level_BN = _rank_last(level_BN, ~valid_BN)
    if protect_BN is None:
        count_B = (level_BN[:, prefix:] >= threshold).sum(dim=1) + prefix
    else:
        count_B = ((level_BN >= threshold) | protect_BN).sum(dim=1)
    if valid_BN is None:
        most_B = torch.full_like(count_B, tokens)
    else:
        most_B = valid_BN.sum(dim=1)
    ceiling = None
    if max_tokens is not None:
        # The prefix always runs, whatever `max_tokens` says.
        ceiling = max(max_tokens, prefix)
    count_B = torch.minimum(count_B.clamp(min=max(min_tokens, prefix), max=ceiling), most_B)
    slots, total = _slots_for_threshold(count_B, tokens, ceiling)
    order_BN = _rank(level_BN, prefix, protect_BN)
    index_BK, valid_BK = ascending_valid(order_BN[:, :slots], count_B, tokens)
    kept_order_BN = order_BN if ordered else None
    if total == valid_BK.numel():
        # Every slot is filled, so that blocks need neither a mask nor packed rows.
        return Kept(index_BK, None, total, order_BN=kept_order_BN)
    return Kept(index_BK, valid_BK, total, order_BN=kept_order_BN)


def _slots_for_threshold(count_B: Tensor, tokens: int, ceiling: int | None) -> tuple[int, int | None]:
    """Return the number of slots K for counts of kept tokens, and the number of valid ones if it is read."""
    if ceiling is not None:
        # In a graph the number of tokens may be a symbol.
        if not isinstance(tokens, int):
            return cast(int, torch.sym_min(ceiling, tokens)), None
        return min(ceiling, tokens), None
    if exporting():
        raise ValueError("threshold routing needs max_tokens to be exported: without it shapes depend on the data")
    if cannot_count():
        # No count is read, so every token has a slot, filled or empty.
        return tokens, None
    # The host waits for the device here, and only here.
    counts = count_B.tolist()
    if not counts:
        # Of no images, all tokens are kept: none is without a kept one that it joins.
        return tokens, 0
    return slots_for(counts), sum(counts)


def cannot_count() -> bool:
    """Return whether no value can be read: under vmap, and in a compiled graph, which warns that all tokens run."""
    if batching():
        return True
    if not torch.compiler.is_compiling() or exporting():
        return False
    _warn_static()
    return True


def _warn_static() -> None:
    """Warn while a graph is made, not when it runs."""
    warnings.warn(
        "a compiled graph gives every token a slot where a threshold decides without max_tokens, so skipped tokens are "
        "computed too and save nothing: set select=mmod.Threshold(..., max_tokens=...) to the most tokens that an "
        "image may keep, or do not compile",
        stacklevel=2,
    )


# What `torch.compiler.assume_constant_result` does, which imports the compiler.
_warn_static._dynamo_marked_constant = True  # type: ignore[attr-defined]


def select_images(level_B: Tensor, threshold: float, tokens: int) -> Kept:
    """Keep images whose normalised score reaches a threshold, with one host synchronisation.

    Returns:
        The kept images, ascending (S), and the same as slots of their tokens. K is N, or 0 where no image is kept and
        no gradient is recorded.

    Example:
        >>> kept = select_images(torch.tensor([0.2, 0.7]), 0.5, 2)
        >>> kept.image_S.tolist(), kept.valid_BK.tolist()
        ([1], [[False, False], [True, True]])
    """
    check_counts("routing of images", "the number of images that run")
    keep_B = level_B >= threshold
    image_S = keep_B.nonzero().squeeze(1)
    # With gradients some image always runs, see `slots_for`.
    slots = 0
    if image_S.shape[0] or torch.is_grad_enabled():
        slots = tokens
    index_K = torch.arange(slots, device=level_B.device)
    index_BK = index_K.expand(keep_B.shape[0], -1)
    return Kept(index_BK, keep_B.unsqueeze(1).expand(-1, slots), image_S=image_S)


def slots_for(counts: Sequence[int]) -> int:
    """Return the number of slots K for counts of kept tokens: the largest, and at least 1 where gradients are recorded.

    With an empty slot the block runs, and its parameters get the zero gradients that distributed training waits for.
    """
    return max([int(torch.is_grad_enabled()), *counts])


def _rank_last(score_BN: Tensor, last_BN: Tensor) -> Tensor:
    """Rank tokens of a mask last: they become NaN, which sorts last, after NaN scores became -inf."""
    lowest = torch.finfo(score_BN.dtype).min
    return score_BN.nan_to_num(nan=-torch.inf, neginf=lowest, posinf=torch.inf).masked_fill(last_BN, torch.nan)


def best_first(score: Tensor, count: int | None = None) -> Tensor:
    """Return the positions of the highest scores of the last axis, best first; all of them for None.

    Ties go to the lowest index and NaN ranks last, also in ONNX.

    Example:
        >>> best_first(torch.tensor([0.1, 0.9, 0.9, 0.5])).tolist()
        [1, 2, 3, 0]
    """
    return _rank(score, 0, None)[..., :count]


def _rank(score_BN: Tensor, prefix: int, protect_BN: Tensor | None) -> Tensor:
    """Return the prefix and all other tokens, best first (B, N)."""
    if score_BN.requires_grad:
        score_BN = score_BN.detach()
    # Scores are negated and sorted ascending, because a sort puts NaN last.
    rank_BN = -score_BN
    if protect_BN is not None:
        # Only what is always kept ranks at minus infinity: before scores that are infinite.
        lowest = torch.finfo(rank_BN.dtype).min
        rank_BN = rank_BN.clamp(min=lowest).masked_fill(protect_BN, -torch.inf)
    elif prefix:
        rank_BN.narrow(1, 0, prefix).fill_(-torch.inf)
    # The flag that `exporting` reads, without a call: this runs in every block.
    if torch.compiler._is_exporting_flag and torch.onnx.is_in_onnx_export():
        # ONNX has no stable sort, but its TopK breaks ties by the lower index.
        rank_BN = rank_BN.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)
        return torch.topk(rank_BN, rank_BN.shape[-1], dim=-1, largest=False).indices
    return torch.sort(rank_BN, dim=-1, stable=True).indices


def ascending_valid(index_BK: Tensor, count_B: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Sort the first `count_B` slots of each image ascending, before the empty ones; return them and the valid slots.

    `tokens` is above every index.
    """
    valid_BK = torch.arange(index_BK.shape[1], device=index_BK.device) < count_B.unsqueeze(1)
    # Empty slots are raised above all valid ones for the sort, and lowered again.
    index_BK = torch.sort(torch.where(valid_BK, index_BK, index_BK + tokens), dim=1).values
    return torch.where(valid_BK, index_BK, index_BK - tokens), valid_BK
