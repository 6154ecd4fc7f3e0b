"""`torch.nn.MultiheadAttention` as separate calls, so that its projections and attention can be intercepted.

Axes: B images, L queries, S keys, D channels, H heads, E channels of a head. Tokens come first, as torch hands them on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Call = Callable[..., Tensor]


def multihead_attention(
    call: Call,
    query_LBD: Tensor,
    key_SBD: Tensor,
    value_SBD: Tensor,
    channels: int,
    heads: int,
    in_weight: Tensor | None,
    in_bias: Tensor | None,
    key_bias: Tensor | None,
    value_bias: Tensor | None,
    add_zero_attn: bool,
    dropout: float,
    out_weight: Tensor,
    out_bias: Tensor | None,
    *,
    training: bool = True,
    attn_mask: Tensor | None = None,
    need_weights: bool = True,
    **options: object,
) -> tuple[Tensor, None]:
    """Compute `torch.nn.functional.multi_head_attention_forward` through calls that can be replaced.

    A function mode is off while it handles a call, so it would not see the attention inside torch's function. `call`
    receives `linear` and `scaled_dot_product_attention`, or what replaces them, with their arguments; all others are
    those of torch's function, of which several must be off. In place of the map, None is returned.
    """
    options |= {"need_weights": need_weights, "add_zero_attn": add_zero_attn, "bias_k": key_bias, "bias_v": value_bias}
    refused = []
    for name, value in options.items():
        is_set = value is not None and value is not False
        if is_set and name not in _HARMLESS:
            refused.append(name)
    if refused or in_weight is None:
        raise ValueError(
            f"torch.nn.MultiheadAttention with {', '.join(refused) or 'separate projections'} is not supported: use "
            "one weight for query, key and value, need_weights=False and no mask of keys"
        )
    projected = _project(call, query_LBD, key_SBD, value_SBD, in_weight, in_bias)
    query = projected[0]
    images = query.shape[1]
    by_head = (torch.unflatten(x, -1, (heads, channels // heads)).permute(1, 2, 0, 3) for x in projected)
    attended_BHLE = call(
        F.scaled_dot_product_attention,
        *by_head,
        attn_mask=_additive(attn_mask, images, heads, query.dtype),
        dropout_p=dropout if training else 0.0,
    )
    attended_LBD = attended_BHLE.permute(2, 0, 1, 3).flatten(2)
    return call(F.linear, attended_LBD, out_weight, out_bias), None


# `is_causal` is a hint that repeats the mask; averaging concerns the map, which is not returned.
_HARMLESS = ("is_causal", "average_attn_weights")


def _project(
    call: Call, query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, ...]:
    if query is key and key is value:
        # One product for all three, as torch's function computes it.
        return tuple(call(F.linear, query, weight, bias).chunk(3, dim=-1))
    # One product for each: their weights lie behind each other in one tensor.
    inputs = (query, key, value)
    weights = weight.chunk(3)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    return tuple(call(F.linear, *parts) for parts in zip(inputs, weights, biases))


def _additive(mask: Tensor | None, images: int, heads: int, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -torch.inf)
    if mask.ndim == 2:
        return mask
    # Three axes hold batch and heads in one, as torch documents it.
    return torch.unflatten(mask, 0, (images, heads))
