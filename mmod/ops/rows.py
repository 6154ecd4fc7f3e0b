"""Ops that move rows at the entry and the exit of a routed block.

Indices are unique within an image, so no values are accumulated and all backends return the same bits.
Axes: B images, N tokens, K slots per image, D channels. Packed rows are one image of B * N tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmod.ops.backend import Kernel, kernel_op, op
from mmod.values import one_of

NORMS = ("layer", "rms")


def inverse_rows(index_BK: Tensor, tokens: int) -> Tensor:
    """Return the slot of each token, -1 for tokens that are not kept (B, N), int32.

    Args:
        index_BK: Token of each slot, unique within an image (B, K).
        tokens: All tokens N of an image.

    Example:
        >>> inverse_rows(torch.tensor([[1, 3]]), 4).tolist()
        [[-1, 0, -1, 1]]
    """
    slot_BK = torch.arange(index_BK.shape[1], dtype=torch.int32, device=index_BK.device).expand(index_BK.shape)
    # int32 is all that kernels need, and half of what is saved for the backward pass.
    none_BN = torch.full((index_BK.shape[0], tokens), -1, dtype=torch.int32, device=index_BK.device)
    return none_BN.scatter(1, index_BK.long(), slot_BK)


def lerp_rows(z_BKD: Tensor, y_BKD: Tensor, gate_BK: Tensor | None) -> Tensor:
    """Return the gated update from z to y: `z + gate * (y - z)`.

    `torch.lerp` returns y exactly at gate 1, in half precision too; the formula does not.

    Args:
        z_BKD: Rows before the block (B, K, D) or packed (T, D).
        y_BKD: Rows after it.
        gate_BK: Weight of the update (B, K) or (T), or None for 1.

    Example:
        >>> lerp_rows(torch.zeros(1, 1, 1), torch.ones(1, 1, 1), torch.tensor([[0.25]])).item()
        0.25
    """
    if y_BKD.dtype != z_BKD.dtype:
        y_BKD = y_BKD.to(z_BKD.dtype)
    if gate_BK is None:
        return y_BKD
    gate_BK1 = gate_BK.unsqueeze(-1)
    if gate_BK1.dtype != z_BKD.dtype:
        gate_BK1 = gate_BK1.to(z_BKD.dtype)
    # `lerp` is exact at gate 0 and at gate 1.
    return torch.lerp(z_BKD, y_BKD, gate_BK1)


def put_rows(x_BND: Tensor, index_BK: Tensor, y_BKD: Tensor, row_T: Tensor | None = None) -> Tensor:
    """Scatter rows in torch operations; `row_T` as in `take_rows`."""
    if row_T is None:
        row_T = batch_rows(x_BND, index_BK)
    # Graphs, and devices other than a CPU, have none.
    if row_T is None:
        element_BKD = index_BK.unsqueeze(-1).expand_as(y_BKD).long()
        return torch.scatter(x_BND, 1, element_BKD, y_BKD)
    if x_BND.shape[0] == 1:
        return x_BND.index_copy(1, row_T, y_BKD)
    return x_BND.flatten(0, 1).index_copy(0, row_T, y_BKD.flatten(0, 1)).view(x_BND.shape)


def batch_rows(x_BND: Tensor, index_BK: Tensor) -> Tensor | None:
    """Return the rows that an index selects, numbered over the batch (B K), where torch may index whole rows.

    Graphs, and devices other than a CPU, index elements: there it returns None.
    """
    # Measured on one CPU thread, ViT-S, fp32, half the tokens kept: gather 45 -> 9 us at batch 1, 2.7 -> 0.1 ms at
    # batch 32, scatter 87 -> 26 us and 2.9 -> 1.0 ms.
    # What `torch.compiler.is_compiling` asks, in one call less. A graph would guard on the flag, so it is asked last.
    if not x_BND.is_cpu or torch.compiler.is_dynamo_compiling() or torch.compiler._is_compiling_flag:
        return None
    if torch._C._get_tracing_state() is not None:
        return None
    if index_BK.shape[0] == 1 and index_BK.dtype == torch.int64:
        return index_BK[0]
    # A view over the batch needs rows side by side.
    if not x_BND.is_contiguous():
        return None
    return flat_rows(index_BK, x_BND.shape[1])


def flat_rows(index_BK: Tensor, tokens: int) -> Tensor:
    """Return rows of images numbered over the batch (B K)."""
    images = index_BK.shape[0]
    if images == 1:
        row_T = index_BK[0]
        return row_T if row_T.dtype == torch.int64 else row_T.long()
    first_B = torch.arange(0, images * tokens, tokens, device=index_BK.device)
    return (index_BK + first_B.unsqueeze(1)).flatten()


def _empty_like(x: Tensor, *unused: object) -> Tensor:
    return x.new_empty(x.shape)


def _save_for_gather(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    x, index, inverse = inputs
    ctx.tokens = x.shape[1]
    ctx.save_for_backward(index, inverse)


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return _spread_rows(grad, *ctx.saved_tensors, ctx.tokens), None, None


def _save_for_merge(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _x, index, z, y, gate, valid, inverse = inputs
    ctx.dtype = y.dtype
    if gate is None:
        # The gradient of y is then that of its rows, whatever y was.
        y = None
    ctx.save_for_backward(index, z, y, gate, valid, inverse)


def _merge_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    index, z, y, gate, valid, inverse = ctx.saved_tensors
    grad_x: Tensor | None = None
    grad_z: Tensor | None = None
    grad_y: Tensor | None = None
    grad_gate: Tensor | None = None
    if ctx.needs_input_grad[0]:
        grad_x = _blank_rows(grad, index, valid, inverse)
    if gate is not None:
        if any(ctx.needs_input_grad[position] for position in (2, 3, 4)):
            grad_z, grad_y, grad_gate = _merge_rows_grad(grad, index, z, y, gate, valid)
    elif ctx.needs_input_grad[3]:
        # Updates may be of another dtype than tokens under autocast.
        grad_y = _gather_rows(grad, index, inverse).to(ctx.dtype)
        if valid is not None:
            grad_y = grad_y.masked_fill(~valid.unsqueeze(-1), 0.0)
    return grad_x, None, grad_z, grad_y, grad_gate, None, None


def _save_for_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, index, weight, bias, _eps, ctx.centred = inputs
    ctx.tokens = x.shape[1]
    ctx.bias_dtype = None if bias is None else bias.dtype
    z, _, mean, scale = output
    ctx.save_for_backward(z, index, weight, mean, scale)


def _norm_backward(ctx: Any, grad_z: Tensor, grad_normed: Tensor, *statistics: Tensor) -> tuple[Tensor | None, ...]:
    z, index, weight, mean, scale = ctx.saved_tensors
    grads = _gather_norm_grad(grad_z, grad_normed, z, index, weight, mean, scale, ctx.tokens, ctx.centred)
    grad_weight = None if weight is None else grads[1].to(weight.dtype)
    grad_bias = None if ctx.bias_dtype is None else grads[2].to(ctx.bias_dtype)
    return grads[0], None, grad_weight, grad_bias, None, None


def _empty_norm(x: Tensor, index: Tensor, *unused: object) -> tuple[Tensor, ...]:
    z = x.new_empty(*index.shape, x.shape[2])
    statistic = x.new_empty(index.shape, dtype=torch.float32)
    return z, torch.empty_like(z), statistic, torch.empty_like(statistic)


def _empty_norm_grad(grad_z: Tensor, grad_normed: Tensor, z: Tensor, *others: Any) -> tuple[Tensor, ...]:
    *_, tokens, _centred = others
    total = z.new_empty(z.shape[2], dtype=torch.float32)
    return z.new_empty(z.shape[0], tokens, z.shape[2]), total, torch.empty_like(total)


_gather_rows = kernel_op(
    "rows.gather_rows",
    "(Tensor x_BND, Tensor index_BK, Tensor? inverse_BN=None) -> Tensor",
    lambda x, index, *_: x.new_empty(*index.shape, x.shape[2]),
    _save_for_gather,
    _gather_backward,
)
# The inverse of gather_rows: zeros at all other rows.
_spread_rows = kernel_op(
    "rows.spread_rows",
    "(Tensor y, Tensor index, Tensor? inverse, SymInt tokens) -> Tensor",
    lambda y, index, inverse, tokens: y.new_empty(y.shape[0], tokens, y.shape[2]),
    lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:3]),
    lambda ctx, grad: (_gather_rows(grad, *ctx.saved_tensors), None, None, None),
)
_merge_rows = kernel_op(
    "rows.merge_rows",
    "(Tensor x, Tensor index, Tensor? z, Tensor y, Tensor? gate, Tensor? valid, Tensor? inverse) -> Tensor",
    _empty_like,
    _save_for_merge,
    _merge_backward,
)
_blank_rows = kernel_op(
    "rows.blank_rows", "(Tensor x, Tensor index, Tensor? valid, Tensor? inverse) -> Tensor", _empty_like
)
_merge_rows_grad = kernel_op(
    "rows.merge_rows_grad",
    "(Tensor grad, Tensor index, Tensor z, Tensor y, Tensor gate, Tensor? valid) -> (Tensor, Tensor, Tensor)",
    lambda grad, index, *rows: tuple(map(_empty_like, rows[:3])),
)
_gather_norm = kernel_op(
    "rows.gather_norm",
    "(Tensor x, Tensor index, Tensor? weight, Tensor? bias, float eps, bool centred) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    _empty_norm,
    _save_for_norm,
    _norm_backward,
)
_gather_norm_grad = kernel_op(
    "rows.gather_norm_grad",
    "(Tensor grad_z, Tensor grad_normed, Tensor z, Tensor index, Tensor? weight, Tensor mean, Tensor scale, "
    "SymInt tokens, bool centred) -> (Tensor, Tensor, Tensor)",
    _empty_norm_grad,
)
# Not inside compiled graphs: Inductor fuses row moves with neighbouring operations, but not with a custom kernel.
_kernel = functools.partial(Kernel, how="a kernel", compiled=False)
_UNMEASURED = "not yet measured; reason: one launch that moves rows, where torch indexes every element"


def take_rows(x_BND: Tensor, index_BK: Tensor, row_T: Tensor | None = None) -> Tensor:
    """Return `gather_rows` in torch operations, whatever the backend.

    Args:
        row_T: What `batch_rows` returns for the index, if it is known; the index is not read then.
    """
    if row_T is None:
        row_T = batch_rows(x_BND, index_BK)
    # Graphs, and devices other than a CPU, have none.
    if row_T is None:
        element_BKD = index_BK.unsqueeze(-1).expand(-1, -1, x_BND.shape[-1]).long()
        return torch.gather(x_BND, 1, element_BKD)
    images, _, width = x_BND.shape
    if images == 1:
        return x_BND.index_select(1, row_T)
    # Counted, because -1 is ambiguous in a batch without images.
    slots = index_BK.shape[1]
    if images:
        slots = row_T.shape[0] // images
    return x_BND.flatten(0, 1).index_select(0, row_T).view(images, slots, width)


@op(_kernel(_gather_rows, why=_UNMEASURED), how="copies of rows, in graphs of elements")
def gather_rows(x_BND: Tensor, index_BK: Tensor, inverse_BN: Tensor | None = None) -> Tensor:
    """Return the rows of every image that `index_BK` selects.

    Args:
        x_BND: Tokens (B, N, D).
        index_BK: Indices into N, unique within an image (B, K).
        inverse_BN: Slot of each token, -1 for none (B, N), int32; optional, makes the gradient faster.

    Example:
        >>> gather_rows(torch.arange(6.0).view(1, 3, 2), torch.tensor([[0, 2]])).tolist()
        [[[0.0, 1.0], [4.0, 5.0]]]
    """
    return take_rows(x_BND, index_BK)


def gather_norm(
    x_BND: Tensor,
    index_BK: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    kind: str = "layer",
) -> tuple[Tensor, Tensor]:
    """Return the rows of every image that `index_BK` selects, and the same rows normalised.

    Args:
        weight: Weight of the norm (D), or None for 1.
        bias: Bias of the norm (D), or None for 0.
        eps: Added to the variance.
        kind: "layer" subtracts the mean of a row first, "rms" does not.

    Returns:
        Two tensors (B, K, D) of x's dtype.

    Raises:
        ValueError: Unknown norm.

    Example:
        >>> gather_norm(torch.tensor([[[0.0], [3.0]]]), torch.tensor([[1]]), kind="rms")
        (tensor([[[3.]]]), tensor([[[1.0000]]]))
    """
    one_of("kind", kind, NORMS)
    return _normed_rows(x_BND, index_BK, weight, bias, eps, kind == "layer")


@op(
    _kernel(
        lambda *args: _gather_norm(*args)[:2],
        takes=lambda x_BND, *_: x_BND.shape[2] <= 16384,
        where="channels <= 16384",
        why="not yet measured; reason: rows are read once, not three times",
    ),
    how="gather_rows and torch's norm",
    name="gather_norm",
)
def _normed_rows(
    x_BND: Tensor, index_BK: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    z_BKD = take_rows(x_BND, index_BK)
    if centred:
        return z_BKD, F.layer_norm(z_BKD, z_BKD.shape[-1:], weight, bias, eps)
    normed_BKD = F.rms_norm(z_BKD, z_BKD.shape[-1:], weight, eps)
    if bias is not None:
        normed_BKD = normed_BKD + bias
    return z_BKD, normed_BKD


def _merge_by_kernel(
    x_BND: Tensor,
    index_BK: Tensor,
    z_BKD: Tensor,
    y_BKD: Tensor,
    gate_BK: Tensor | None = None,
    valid_BK: Tensor | None = None,
    inverse_BN: Tensor | None = None,
) -> Tensor:
    z: Tensor | None = z_BKD
    if gate_BK is None:
        # Then z is not read, so it is not kept for the backward pass either.
        z = None
    return _merge_rows(x_BND, index_BK, z, y_BKD, gate_BK, valid_BK, inverse_BN)


@op(
    _kernel(_merge_by_kernel, why="not yet measured; reason: one pass over the rows instead of three"),
    how="torch's lerp, and copies of rows, in graphs of elements",
)
def merge_rows(
    x_BND: Tensor,
    index_BK: Tensor,
    z_BKD: Tensor,
    y_BKD: Tensor,
    gate_BK: Tensor | None = None,
    valid_BK: Tensor | None = None,
    inverse_BN: Tensor | None = None,
) -> Tensor:
    """Return all rows after the block: `lerp(z, y, gate)` where a row is kept, else x.

    The result is a new tensor: hosts return a block's input in `forward_intermediates`, so it must not change.

    Args:
        x_BND: Tokens after the block if none were kept (B, N, D).
        index_BK: Token of each slot, unique within an image (B, K).
        z_BKD: The kept rows before the block (B, K, D).
        y_BKD: The kept rows after it (B, K, D).
        gate_BK: Weight of the update (B, K), or None for 1.
        valid_BK: False where a slot is empty (B, K), or None.
        inverse_BN: Slot of each token, -1 for none (B, N), int32; optional.

    Source: Raposo et al., arXiv 2404.02258, Eq. 1.

    Example:
        >>> x, y = torch.zeros(1, 3, 1), torch.ones(1, 1, 1)
        >>> merge_rows(x, torch.tensor([[1]]), x[:, 1:2], y, torch.tensor([[0.25]])).flatten().tolist()
        [0.0, 0.25, 0.0]
    """
    if gate_BK is None:
        new_BKD = y_BKD.to(x_BND.dtype)
    else:
        new_BKD = lerp_rows(z_BKD, y_BKD, gate_BK)
    if valid_BK is not None:
        # An empty slot points at some row of the image, which must get back what it has.
        new_BKD = torch.where(valid_BK.unsqueeze(-1), new_BKD, take_rows(x_BND, index_BK))
    return put_rows(x_BND, index_BK, new_BKD)
