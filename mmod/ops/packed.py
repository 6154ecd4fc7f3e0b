"""Packed rows: the kept tokens of a batch in one sequence, without padding.

Only attention needs the boundaries between images.
Axes: B images, K slots per image, T packed rows, H heads, E channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from mmod.ops.backend import HALF, Backend, Kernel, exporting, kernel_op, op
from mmod.ops.casting import cast_alike, is_grouped
from mmod.ops.intercept import SDPA, AttentionCall, AttentionIntercept

# From this many rows per image on, one attention call per image beats padding on a CPU. Measured on two threads, fp32,
# forward and forward + backward in ms, against padding with a key mask / four buckets of similar lengths / a
# block-diagonal mask:
#   32 images of 98 +- 25 rows, 6 heads: 19 and 75, against 53 and 141 / 27 and 111 / more memory than it is worth
#   8 images of 98 +- 30 rows, 6 heads: 2.9 and 16, against 7.7 and 20 / 5.8 and 23 / 16 and 53
#   32 images of 24 +- 10 rows, 6 heads: 1.9 and 12, against 7.0 and 17 / 5.7 and 17 / 22 and 73
#   64 images of 8 +- 4 rows, 3 heads: 1.7 and 13, against 1.0 and 6.0 / 1.3 and 8.2 / 7.2 and 20
ROWS_WORTH_A_CALL = 16


class Packing(NamedTuple):
    """Origin of packed rows, and the boundaries between images.

    Args:
        row_T: Index of each row among the B * N tokens of the batch (T).
        slot_T: Index of each row among the B * K slots of the batch (T).
        cu_seqlens: Cumulative sequence lengths of the images, from 0 to T (B + 1), int32.
        max_seqlen: Slots per image K, an upper bound of the rows of an image.
    """

    row_T: Tensor
    slot_T: Tensor
    cu_seqlens: Tensor
    max_seqlen: int


def pack_rows(index_BK: Tensor, valid_BK: Tensor, total: int, tokens: int) -> Packing:
    """Return the packing of a batch's valid slots, without a host synchronisation.

    Args:
        index_BK: Kept tokens (B, K).
        valid_BK: False where a slot is empty (B, K).
        total: Number of valid slots T.
        tokens: All tokens N of an image.

    Example:
        >>> index, valid = torch.tensor([[0, 2], [1, 0]]), torch.tensor([[True, True], [True, False]])
        >>> packing = pack_rows(index, valid, total=3, tokens=4)
        >>> packing.row_T.tolist(), packing.cu_seqlens.tolist()
        ([0, 2, 5], [0, 2, 3])
    """
    # `nonzero` would wait for the device to know how many there are.
    slot_T = torch.nonzero_static(valid_BK.flatten(), size=total).squeeze(1)
    first_B1 = torch.arange(index_BK.shape[0], device=index_BK.device).unsqueeze(1) * tokens
    # Lengths to boundaries: a leading 0, then the running sum.
    cu_seqlens = F.pad(valid_BK.sum(dim=1).cumsum(0, dtype=torch.int32), (1, 0))
    return Packing((index_BK + first_B1).flatten()[slot_T], slot_T, cu_seqlens, index_BK.shape[1])


def packed_attention(
    q_THE: Tensor,
    k_THE: Tensor,
    v_THE: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    dropout: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attend within each image of a packed sequence.

    Args:
        q_THE: Queries (T, H, E).
        k_THE: Keys (T, H, E); with grouped queries, their number of heads is a divisor of H.
        v_THE: Values, like keys.
        cu_seqlens: Cumulative sequence lengths, from 0 to T; an image may be empty (B + 1), int32.
        max_seqlen: Rows of the longest image, or more.
        dropout: Share of probabilities dropped.
        is_causal: A row sees those before it in its image.
        scale: Factor of the products; None means 1 / sqrt(E).

    Returns:
        The output (T, H, E).

    Raises:
        ValueError: A forced backend does not support these inputs, or their dtypes differ outside autocast.

    Example:
        >>> q, k, v = torch.randn(3, 3, 2, 8)
        >>> out = packed_attention(q, k, v, torch.tensor([0, 2, 2, 3], dtype=torch.int32), max_seqlen=2)
        >>> bool(torch.allclose(out[2], v[2], atol=1e-6))
        True
    """
    if scale is None:
        scale = 1 / math.sqrt(q_THE.shape[-1])
    q_THE, k_THE, v_THE = cast_alike(q_THE, k_THE, v_THE)
    return _attend(q_THE, k_THE, v_THE, cu_seqlens, max_seqlen, dropout, is_causal, scale)


def attend_by_image(images: int, bias: Tensor | None = None) -> AttentionIntercept:
    """Return a context manager that splits the attention of one sequence of many images by image.

    Args:
        images: Number of images, of equally many tokens each.
        bias: Bias of keys (B, 1 or H, 1 or K, K) of logits, or a mask that is True where a pair may attend; or None.

    Example:
        >>> q = k = v = torch.randn(2, 3, 4, 8)
        >>> together = [x.transpose(0, 1).flatten(1, 2).unsqueeze(0) for x in (q, k, v)]
        >>> with attend_by_image(2):
        ...     y = torch.nn.functional.scaled_dot_product_attention(*together)
        >>> y.shape, bool(torch.allclose(y[0, :, :4], torch.nn.functional.scaled_dot_product_attention(q, k, v)[0]))
        (torch.Size([1, 3, 8, 8]), True)
    """
    return AttentionIntercept(partial(_attend_by_image, images, bias))


def _attend_by_image(images: int, bias: Tensor | None, call: AttentionCall) -> Tensor:
    # Rows (B, H, K, E) of rows (1, H, B K, E).
    parts = (call.query, call.key, call.value)
    query, key, value = (rows.squeeze(0).unflatten(1, (images, -1)).transpose(0, 1) for rows in parts)
    mask = bias
    if mask is None:
        mask = call.attn_mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    y = call._replace(query=query, key=key, value=value, attn_mask=mask).run()
    return y.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def attend_by_length(lengths: Sequence[int], bias_T: Tensor | None = None) -> AttentionIntercept:
    """Return a context manager that splits the attention of one sequence into parts of several lengths.

    Args:
        lengths: Tokens of each part, in order.
        bias_T: Bias of keys (T) of logits; None for none.

    Example:
        >>> q = k = torch.zeros(1, 1, 3, 8)
        >>> v = torch.tensor([1.0, 3.0, 5.0]).view(1, 1, 3, 1)
        >>> with attend_by_length((2, 1)):
        ...     torch.nn.functional.scaled_dot_product_attention(q, k, v).flatten()
        tensor([2., 2., 5.])
    """
    return AttentionIntercept(partial(_attend_by_length, list(lengths), bias_T))


def _attend_by_length(lengths: list[int], bias_T: Tensor | None, call: AttentionCall) -> Tensor:
    parts = zip(*(rows.split(lengths, dim=2) for rows in (call.query, call.key, call.value)))
    biases: Sequence[Tensor | None] = [None] * len(lengths)
    if bias_T is not None:
        biases = bias_T.to(call.query.dtype).view(1, 1, 1, -1).split(lengths, dim=3)
    # Boundaries stand in the place of a host's mask.
    attended = [
        call._replace(query=query, key=key, value=value, attn_mask=bias).run()
        for (query, key, value), bias in zip(parts, biases)
    ]
    return torch.cat(attended, dim=2)


def attend_within(packing: Packing, by_length: AttentionIntercept | None = None) -> AttentionIntercept:
    """Return a context manager in which a block treats a packed sequence as rows of many images.

    Attention stays within images. Where the host draws one Bernoulli number for each sequence of a batch (stochastic
    depth), one is drawn for each image.

    Args:
        by_length: Attends image by image with a bias of keys, which a packed sequence takes none of; None for no bias.
    """
    attend: Callable[[AttentionCall], Tensor] = partial(_attend_packed, packing)
    if by_length is not None:
        attend = by_length.attend
    draw = partial(_draw_by_image, packing)
    unseen = "images in one sequence of packed rows cannot be told apart in it"
    return AttentionIntercept(attend, other=(Tensor.bernoulli_, draw), unseen=unseen)


def _draw_by_image(packing: Packing, shares: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    # Stochastic depth draws one number for a sample; dropout draws by element.
    if shares.shape != (1, 1, 1):
        return shares.bernoulli_(*args, **kwargs)
    # One number per image, which each of its rows gets.
    images = packing.cu_seqlens.shape[0] - 1
    drawn_B = shares.new_empty(images).bernoulli_(*args, **kwargs)
    return drawn_B[image_of_rows(packing.row_T, packing.cu_seqlens)].view(1, -1, 1)


def _attend_packed(packing: Packing, call: AttentionCall) -> Tensor:
    if call.attn_mask is not None or call.query.shape[0] != 1:
        raise RuntimeError("packed rows take plain or causal attention over one sequence, without a mask")
    out_THE = packed_attention(
        call.query[0].transpose(0, 1),
        call.key[0].transpose(0, 1),
        call.value[0].transpose(0, 1),
        packing.cu_seqlens,
        packing.max_seqlen,
        dropout=call.dropout_p,
        is_causal=call.is_causal,
        scale=call.scale,
    )
    return out_THE.transpose(0, 1).unsqueeze(0)


def image_of_rows(rows: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the image of each row of a packed sequence (T)."""
    # `right=True`: a boundary is the first row of the next image.
    return torch.bucketize(torch.arange(rows.shape[0], device=rows.device), cu_seqlens[1:], right=True)


def _empty_results(q_THE: Tensor, *unused: object) -> tuple[Tensor, Tensor]:
    rows, heads, _ = q_THE.shape
    return q_THE.new_empty(q_THE.shape), q_THE.new_empty(heads, rows, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    q_THE, k_THE, v_THE, start, longest, valid, is_causal, scale = inputs
    ctx.save_for_backward(q_THE, k_THE, v_THE, *output, start, valid)
    ctx.settings = longest, is_causal, scale


def _backward(ctx: Any, grad_out: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    *saved, valid = ctx.saved_tensors
    longest, is_causal, scale = ctx.settings
    return (*attend_rows_backward(grad_out, *saved, longest, valid, is_causal, scale), *(None,) * 5)


def _products(q_THE: Tensor, start: Tensor, longest: int) -> int:
    """Return the FLOPs of one product of all pairs: exact where the lengths are known, else an upper bound."""
    # Subclasses, such as fake tensors, have no values to read.
    known = type(start) is Tensor and start.device.type != "meta"
    pairs = int(q_THE.shape[0] * longest)
    if known:
        pairs = int(start.diff().square().sum())
    return 2 * pairs * q_THE.shape[1] * q_THE.shape[2]


attend_rows = kernel_op(
    "attend.attend_rows",
    "(Tensor q, Tensor k, Tensor v, Tensor start, SymInt longest, Tensor? valid, bool is_causal, float scale) -> "
    "(Tensor, Tensor)",
    _empty_results,
    _save,
    _backward,
    flops=lambda q, k, v, start, longest, *_, **__: 2 * _products(q, start, longest),
)
# Scores and their gradient are computed once more, then three products: five to the forward pass's two.
attend_rows_backward = kernel_op(
    "attend.attend_rows_backward",
    "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor start, SymInt longest, "
    "Tensor? valid, bool is_causal, float scale) -> (Tensor, Tensor, Tensor)",
    lambda grad_out, *rows: tuple(x.new_empty(x.shape) for x in rows[:3]),
    flops=lambda grad_out, q, k, v, out, lse, start, longest, *_, **__: 5 * _products(q, start, longest),
)


def _by_xformers(
    q_THE: Tensor,
    k_THE: Tensor,
    v_THE: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout: float,
    is_causal: bool,
    scale: float,
) -> Tensor:
    # Imported where it is chosen: the package is optional.
    from xformers.ops import fmha

    # xformers takes no empty sequence.
    mask = fmha.attn_bias.BlockDiagonalMask.from_seqlens([n for n in cu_seqlens.diff().tolist() if n])
    if is_causal:
        mask = mask.make_causal()
    group = q_THE.shape[1] // k_THE.shape[1]
    if group > 1:
        k_THE = k_THE.repeat_interleave(group, dim=1)
        v_THE = v_THE.repeat_interleave(group, dim=1)
    out: Tensor = fmha.memory_efficient_attention(
        q_THE.unsqueeze(0),
        k_THE.unsqueeze(0),
        v_THE.unsqueeze(0),
        attn_bias=mask,
        scale=scale,
    )
    return out.squeeze(0)


def _by_varlen(
    q_THE: Tensor,
    k_THE: Tensor,
    v_THE: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout: float,
    is_causal: bool,
    scale: float,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # Only arguments that all supported torch versions share.
    # -1 is no limit: all rows before, and after only where it is not causal.
    window = (-1, 0) if is_causal else (-1, -1)
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return cast(Tensor, varlen_attn(q_THE, k_THE, v_THE, *lengths, scale=scale, window_size=window))


def _image_by_image(
    q_THE: Tensor,
    k_THE: Tensor,
    v_THE: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout: float,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """Call attention once for each image; on a CPU, reading its lengths needs no synchronisation."""
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q_THE, k_THE, v_THE))
    call = AttentionCall(query, key, value, None, dropout, is_causal, scale, is_grouped(q_THE, k_THE))
    # Fused attention takes no empty image.
    by_length = attend_by_length([length for length in cu_seqlens.diff().tolist() if length])
    return by_length.attend(call).squeeze(0).transpose(0, 1)


def _padded(
    q_THE: Tensor,
    k_THE: Tensor,
    v_THE: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout: float,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """Pad every image to `max_seqlen` rows and mask the padding: all shapes follow from the arguments."""
    images = cu_seqlens.shape[0] - 1
    image_T = image_of_rows(q_THE, cu_seqlens)
    # Position within the image plus the image's first slot.
    slot_T = torch.arange(q_THE.shape[0], device=q_THE.device) - cu_seqlens[image_T] + image_T * max_seqlen

    def pad(x_THE: Tensor) -> Tensor:
        padded = x_THE.new_zeros(images * max_seqlen, *x_THE.shape[1:])
        return padded.index_copy(0, slot_T, x_THE).unflatten(0, (images, max_seqlen)).transpose(1, 2)

    slot_K = torch.arange(max_seqlen, device=q_THE.device)
    # An empty image still needs one key: a softmax over no keys is NaN.
    visible = (slot_K < cu_seqlens.diff().clamp(min=1).unsqueeze(1))[:, None, None, :]
    if is_causal:
        visible = visible & (slot_K <= slot_K.unsqueeze(1))
    out_BHKE = SDPA(
        pad(q_THE),
        pad(k_THE),
        pad(v_THE),
        attn_mask=visible,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=is_grouped(q_THE, k_THE),
    )
    return out_BHKE.transpose(1, 2).flatten(0, 1).index_select(0, slot_T)


def _is_small(
    width: int, q_THE: Tensor, k: Tensor, v: Tensor, start: Tensor, longest: int, dropout: float, *_: object
) -> bool:
    """Return whether heads have at most so many channels, and nothing is dropped."""
    return q_THE.shape[-1] <= width and not dropout


@op(
    Kernel(
        lambda q, k, v, start, longest, dropout, *options: attend_rows(q, k, v, start, longest, None, *options)[0],
        "a variable-length kernel",
        "torch's variable-length kernel takes half precision only",
        takes=partial(_is_small, 128),
        where="head_dim <= 128, no dropout",
        auto=(torch.float32,),
    ),
    Kernel(
        _by_xformers,
        "the attention of xformers",
        backend=Backend.XFORMERS,
        takes=partial(_is_small, 256),
        where="head_dim <= 256, no dropout",
        auto=(),
    ),
    how="padding and a mask of keys; torch's varlen_attn on CUDA in half precision; a call of fused attention for each "
    f"image on a CPU, from {ROWS_WORTH_A_CALL} rows an image on",
    name="packed_attention",
)
def _attend(
    q_THE: Tensor,
    k_THE: Tensor,
    v_THE: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout: float,
    is_causal: bool,
    scale: float,
) -> Tensor:
    if q_THE.is_cpu:
        # A graph would have to break to read the lengths. Nor does it compare sizes, or each outcome would be a graph.
        run = _padded
        if not torch.compiler.is_compiling():
            images = max(1, cu_seqlens.shape[0] - 1)
            if q_THE.shape[0] >= ROWS_WORTH_A_CALL * images:
                run = _image_by_image
    else:
        # The inputs of `varlen_attn`.
        plain = not dropout and not is_grouped(q_THE, k_THE) and q_THE.shape[-1] % 8 == 0
        takes_varlen = q_THE.is_cuda and q_THE.dtype in HALF and plain and not exporting()
        run = _padded
        if takes_varlen:
            run = _by_varlen
    return run(q_THE, k_THE, v_THE, cu_seqlens, max_seqlen, dropout, is_causal, scale)
