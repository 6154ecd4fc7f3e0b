"""Ops that move rows at the entry and the exit of a routed block.

Indices are unique within an image, so no values are accumulated and all backends return the same bits.
Axes: B images, N tokens, K slots per image, D channels. Packed rows are one image of B * N tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from mmod.ops import reference
from mmod.ops.backend import FLOAT, Backend, Version, choose, register

NORMS = ("layer", "rms")


def gather_rows(x_BND: Tensor, index_BK: Tensor, inverse_BN: Tensor | None = None) -> Tensor:
    """Return the rows of every image that `index_BK` selects.

    Args:
        x_BND: Tokens (B, N, D).
        index_BK: Indices into N, unique within an image (B, K).
        inverse_BN: Slot of each token, -1 for none (B, N), int32; optional, makes the gradient faster.

    Returns:
        The selected rows (B, K, D).

    Example:
        >>> gather_rows(torch.arange(6.0).view(1, 3, 2), torch.tensor([[0, 2]])).tolist()
        [[[0.0, 1.0], [4.0, 5.0]]]
    """
    rows: Tensor = choose("gather_rows", x_BND).run(x_BND, index_BK, inverse_BN)
    return rows


def scatter_rows(x_BND: Tensor, index_BK: Tensor, y_BKD: Tensor, inverse_BN: Tensor | None = None) -> Tensor:
    """Return the tokens with the rows at `index_BK` replaced.

    The result is a new tensor: hosts return a block's input in `forward_intermediates`, so it must not change.

    Args:
        x_BND: Tokens (B, N, D).
        index_BK: Indices into N, unique within an image (B, K).
        y_BKD: The new rows (B, K, D), of x's dtype.
        inverse_BN: Slot of each token, -1 for none (B, N), int32; optional.

    Example:
        >>> scatter_rows(torch.zeros(1, 3, 1), torch.tensor([[1]]), torch.ones(1, 1, 1)).flatten().tolist()
        [0.0, 1.0, 0.0]
    """
    rows: Tensor = choose("scatter_rows", x_BND).run(x_BND, index_BK, y_BKD, inverse_BN)
    return rows


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
        x_BND: Tokens (B, N, D).
        index_BK: Indices into N, unique within an image (B, K).
        weight: Weight of the norm (D), or None for 1.
        bias: Bias of the norm (D), or None for 0.
        eps: Added to the variance.
        kind: "layer" subtracts the mean of a row first, "rms" does not.

    Returns:
        The selected rows and their normalised form, both (B, K, D) and of x's dtype.

    Raises:
        ValueError: Unknown norm.

    Example:
        >>> gather_norm(torch.tensor([[[0.0], [3.0]]]), torch.tensor([[1]]), kind="rms")
        (tensor([[[3.]]]), tensor([[[1.0000]]]))
    """
    if kind not in NORMS:
        raise ValueError(f"unknown norm {kind!r}; valid are {', '.join(NORMS)}")
    version = choose("gather_norm", x_BND, channels=x_BND.shape[2])
    rows: tuple[Tensor, Tensor] = version.run(x_BND, index_BK, weight, bias, eps, kind)
    return rows


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

    The result is a new tensor, as with `scatter_rows`.

    Args:
        x_BND: Tokens after the block if none were kept (B, N, D).
        index_BK: Token of each slot, unique within an image (B, K).
        z_BKD: The kept rows before the block (B, K, D).
        y_BKD: The kept rows after it (B, K, D).
        gate_BK: Weight of the update (B, K), or None for 1.
        valid_BK: False where a slot is empty (B, K), or None.
        inverse_BN: Slot of each token, -1 for none (B, N), int32; optional.

    Returns:
        All tokens after the block (B, N, D).

    Source: Raposo et al., arXiv 2404.02258, Eq. 1.

    Example:
        >>> x, y = torch.zeros(1, 3, 1), torch.ones(1, 1, 1)
        >>> merge_rows(x, torch.tensor([[1]]), x[:, 1:2], y, torch.tensor([[0.25]])).flatten().tolist()
        [0.0, 0.25, 0.0]
    """
    version = choose("merge_rows", x_BND)
    rows: Tensor = version.run(x_BND, index_BK, z_BKD, y_BKD, gate_BK, valid_BK, inverse_BN)
    return rows


# The custom ops import kernels when they first run, so this module needs no Triton.


@custom_op("mmod::gather_rows", mutates_args=())
def _gather_rows(x: Tensor, index: Tensor, inverse: Tensor | None) -> Tensor:
    from mmod.ops.triton import rows

    return rows.gather(x, index)


@_gather_rows.register_fake
def _(x: Tensor, index: Tensor, *unused: Any) -> Tensor:
    return x.new_empty(*index.shape, x.shape[2])


def _save_for_gather(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, index, inverse = inputs
    ctx.tokens = x.shape[1]
    ctx.save_for_backward(index, inverse)


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    index, inverse = ctx.saved_tensors
    return _spread_rows(grad, index, inverse, ctx.tokens), None, None


_gather_rows.register_autograd(_gather_backward, setup_context=_save_for_gather)


@custom_op("mmod::spread_rows", mutates_args=())
def _spread_rows(y: Tensor, index: Tensor, inverse: Tensor | None, tokens: int) -> Tensor:
    """Put rows at the indices and zeros elsewhere: the inverse of gather_rows."""
    from mmod.ops.triton import rows

    inverse = reference.inverse_rows(index, tokens) if inverse is None else inverse
    out = y.new_empty(y.shape[0], tokens, y.shape[2])
    return rows.merge(None, inverse, None, y, None, None, out)


@_spread_rows.register_fake
def _(y: Tensor, index: Tensor, inverse: Tensor | None, tokens: int) -> Tensor:
    return y.new_empty(y.shape[0], tokens, y.shape[2])


def _save_for_spread(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])


def _spread_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    index, inverse = ctx.saved_tensors
    return _gather_rows(grad, index, inverse), None, None, None


_spread_rows.register_autograd(_spread_backward, setup_context=_save_for_spread)


@custom_op("mmod::merge_rows", mutates_args=())
def _merge_rows(
    x: Tensor,
    index: Tensor,
    z: Tensor | None,
    y: Tensor,
    gate: Tensor | None,
    valid: Tensor | None,
    inverse: Tensor | None,
) -> Tensor:
    from mmod.ops.triton import rows

    inverse = reference.inverse_rows(index, x.shape[1]) if inverse is None else inverse
    return rows.merge(x, inverse, z, y, gate, valid, x.new_empty(x.shape))


@_merge_rows.register_fake
def _(x: Tensor, *unused: Any) -> Tensor:
    return x.new_empty(x.shape)


def _save_for_merge(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _x, index, z, y, gate, valid, inverse = inputs
    ctx.dtype = y.dtype
    ctx.save_for_backward(index, z, None if gate is None else y, gate, valid, inverse)


def _merge_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    index, z, y, gate, valid, inverse = ctx.saved_tensors
    grad_x, grad_z, grad_y, grad_gate = None, None, None, None
    if ctx.needs_input_grad[0]:
        grad_x = _blank_rows(grad, index, valid, inverse)
    if gate is not None:
        if any(ctx.needs_input_grad[position] for position in (2, 3, 4)):
            grad_z, grad_y, grad_gate = _merge_rows_grad(grad, index, z, y, gate, valid)
    elif ctx.needs_input_grad[3]:
        grad_y = _gather_rows(grad, index, inverse).to(ctx.dtype)
        grad_y = grad_y if valid is None else grad_y.masked_fill(~valid.unsqueeze(-1), 0.0)
    return grad_x, None, grad_z, grad_y, grad_gate, None, None


_merge_rows.register_autograd(_merge_backward, setup_context=_save_for_merge)


@custom_op("mmod::blank_rows", mutates_args=())
def _blank_rows(x: Tensor, index: Tensor, valid: Tensor | None, inverse: Tensor | None) -> Tensor:
    """Zero the kept rows and copy all others."""
    from mmod.ops.triton import rows

    inverse = reference.inverse_rows(index, x.shape[1]) if inverse is None else inverse
    return rows.merge(x, inverse, None, None, None, valid, x.new_empty(x.shape))


@_blank_rows.register_fake
def _(x: Tensor, *unused: Any) -> Tensor:
    return x.new_empty(x.shape)


@custom_op("mmod::merge_rows_grad", mutates_args=())
def _merge_rows_grad(
    grad: Tensor, index: Tensor, z: Tensor, y: Tensor, gate: Tensor, valid: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    from mmod.ops.triton import rows

    return rows.merge_grad(grad, index, z, y, gate, valid)


@_merge_rows_grad.register_fake
def _(grad: Tensor, index: Tensor, z: Tensor, y: Tensor, gate: Tensor, *unused: Any) -> tuple[Tensor, ...]:
    return z.new_empty(z.shape), y.new_empty(y.shape), gate.new_empty(gate.shape)


@custom_op("mmod::gather_norm", mutates_args=())
def _gather_norm(
    x: Tensor, index: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from mmod.ops.triton import rows

    return rows.gather_norm(x, index, weight, bias, eps, centred)


@_gather_norm.register_fake
def _(x: Tensor, index: Tensor, *unused: Any) -> tuple[Tensor, ...]:
    z = x.new_empty(*index.shape, x.shape[2])
    statistic = x.new_empty(index.shape, dtype=torch.float32)
    return z, torch.empty_like(z), statistic, torch.empty_like(statistic)


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


_gather_norm.register_autograd(_norm_backward, setup_context=_save_for_norm)


@custom_op("mmod::gather_norm_grad", mutates_args=())
def _gather_norm_grad(
    grad_z: Tensor,
    grad_normed: Tensor,
    z: Tensor,
    index: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    scale: Tensor,
    tokens: int,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from mmod.ops.triton import rows

    return rows.gather_norm_grad(grad_z, grad_normed, z, index, weight, mean, scale, tokens, centred)


@_gather_norm_grad.register_fake
def _(grad_z: Tensor, grad_normed: Tensor, z: Tensor, *others: Any) -> tuple[Tensor, ...]:
    tokens = others[-2]
    total = z.new_empty(z.shape[2], dtype=torch.float32)
    return z.new_empty(z.shape[0], tokens, z.shape[2]), total, torch.empty_like(total)


# Not inside compiled graphs: Inductor fuses row moves with neighbouring operations, but not with a custom kernel.
_kernel = functools.partial(Version, how="a kernel", backend=Backend.TRITON, dtypes=FLOAT, compiled=False)
# Measured on two CPU threads, ViT-S, fp32, half the tokens kept: gather 45 -> 9 us at batch 1, 2.7 -> 0.1 ms at batch
# 32, scatter 62 -> 16 us and 3.4 -> 0.5 ms.
_contiguous = functools.partial(
    Version,
    how="copies of rows",
    devices=("cpu",),
    when=reference.has_contiguous_rows,
    where="rows contiguous, not compiled",
)
_UNMEASURED = "not yet measured; reason: one launch that moves rows, where torch indexes every element"

register(
    "gather_rows",
    _kernel(_gather_rows, why=_UNMEASURED),
    _contiguous(reference.gather_contiguous),
    Version(reference.gather_elements, "torch's gather"),
)
register(
    "scatter_rows",
    _kernel(lambda x, index, y, inverse: _merge_rows(x, index, None, y, None, None, inverse), why=_UNMEASURED),
    _contiguous(reference.scatter_contiguous),
    Version(reference.scatter_elements, "torch's scatter"),
)
register(
    "gather_norm",
    _kernel(
        lambda x, index, weight, bias, eps, kind: _gather_norm(x, index, weight, bias, eps, kind == "layer")[:2],
        limits={"channels": 16384},
        why="not yet measured; reason: rows are read once, not three times",
    ),
    Version(reference.gather_norm, "gather_rows by torch and torch's norm"),
)
register(
    "merge_rows",
    _kernel(
        lambda x, index, z, y, gate, *others: _merge_rows(x, index, None if gate is None else z, y, gate, *others),
        why="not yet measured; reason: one pass over the rows instead of three",
    ),
    Version(reference.merge_rows, "torch's lerp and scatter_rows by torch"),
)
