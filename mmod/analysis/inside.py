"""What hooks see inside a routed block, kept tokens only, brought back to all tokens.

Axes: B images, N tokens, K slots of a module inside the block, H heads, T packed rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmod.routing import Routing
from mmod.values import brief


def to_all_tokens(values: Tensor, routing: Routing, *, attention: bool = False) -> Tensor:
    """Bring values from inside a routed block, which sees kept tokens only, to all tokens of its images.

    A skipped token that joined a kept one (`skipped="follow"` or `"merge"`) has that one's value. Any other skipped
    token has the value 0; in an attention map it attends to itself only, as it passes by unchanged. Attention to a
    group of merged tokens is shared equally by its tokens, so rows of a map still sum to 1. Values of all tokens, from
    a module that sees them, are returned as they are.

    Args:
        values: Inputs, outputs or gradients of a module in the block (B, K, ...), or packed (1, T, ...); or attention
            maps (B, H, K, K), with `context="all"` (B, H, K, N), or without heads.
        routing: The block's decision in the same forward pass, see `mmod.trace`. With `before="mlp"`, attention runs
            on the tokens that the previous block keeps: pass that block's decision for attention.
        attention: The values are attention maps.

    Returns:
        Values (B, N, ...), or maps (B, H, N, N). With `decisions` of `mmod.trace` and the model's number of prefix
        tokens, `values[:, prefix:].unflatten(1, decisions.grid)` is a map of the image.

    Raises:
        ValueError: The shape is neither that of the kept tokens nor that of all.

    Example:
        >>> import timm, mmod
        >>> model, seen = mmod.route_(timm.create_model("test_vit").eval(), "a-mod"), []
        >>> handle = model.blocks[5].norm1.register_forward_hook(lambda norm, args, output: seen.append(output))
        >>> with torch.no_grad(), mmod.trace(model) as decisions:
        ...     _ = model(torch.randn(1, 3, 160, 160))
        >>> seen[0].shape, to_all_tokens(seen[0], decisions["blocks.5"]).shape, decisions.grid
        (torch.Size([1, 50, 64]), torch.Size([1, 101, 64]), (10, 10))
    """
    if not isinstance(values, Tensor):
        raise TypeError(f"values must be a tensor, got {brief(values)}")
    if not isinstance(routing, Routing):
        raise TypeError(
            f"routing must be a block's decision, as in mmod.trace(model) as decisions: decisions['blocks.5'], got "
            f"{brief(routing)}"
        )
    images, tokens = routing.score_BN.shape
    if attention:
        return _map_to_all(values, routing)
    kept_images = routing.kept.image_S
    if kept_images is not None and values.shape[:2] == (len(kept_images), tokens):
        return values.new_zeros(images, *values.shape[1:]).index_copy(0, kept_images, values)
    if values.shape[:2] == (images, tokens):
        return values
    return _spread(_padded(values, routing), _slots(routing), 1)


def _spread(values: Tensor, slot_BN: Tensor, axis: int) -> Tensor:
    """Return values with tokens in the place of slots along an axis; those of tokens without a slot, -1, are 0."""
    shape = [1] * values.ndim
    shape[0], shape[axis] = slot_BN.shape
    slots = slot_BN.view(shape)
    # Every token takes the value of its slot; those without one are set to 0 behind.
    before = values.shape[:axis]
    behind = values.shape[axis + 1 :]
    index = slots.clamp(min=0).expand(*before, -1, *behind)
    return torch.where(slots >= 0, values.gather(axis, index), 0)


def _padded(values: Tensor, routing: Routing) -> Tensor:
    """Return values of kept tokens by slot (B, K, ...), 0 at empty slots."""
    slots, valid_BK = routing.kept.index_BK.shape, routing.kept.valid_BK
    if values.shape[:2] == slots:
        return values
    if valid_BK is None or values.shape[:2] != (1, int(valid_BK.sum())):
        raise ValueError(
            f"values of shape {tuple(values.shape)} fit neither the {slots[1]} kept tokens of {slots[0]} images nor "
            f"all {routing.score_BN.shape[1]}: take the decision of the same block and forward pass"
        )
    rows_T = valid_BK.flatten().nonzero().squeeze(1)
    empty = values.new_zeros(slots.numel(), *values.shape[2:])
    return empty.index_copy(0, rows_T, values[0]).unflatten(0, slots)


def _own_slots(routing: Routing) -> Tensor:
    """Return the slot of every token (B, N), -1 for tokens that are not kept."""
    images, tokens = routing.score_BN.shape
    index_BK = routing.kept.index_BK
    if routing.kept.valid_BK is not None:
        # Empty slots write to a token beyond the last.
        index_BK = index_BK.masked_fill(~routing.kept.valid_BK, tokens)
    slot_BK = torch.arange(index_BK.shape[1], device=index_BK.device).expand(images, -1)
    slot_BN = index_BK.new_full((images, tokens + 1), -1).scatter(1, index_BK, slot_BK)
    return slot_BN[:, :-1]


def _slots(routing: Routing) -> Tensor:
    """Return the slot that every token is in or joined (B, N), -1 for none."""
    if routing.joined.slot_BN is None:
        return _own_slots(routing)
    return routing.joined.slot_BN


def _map_to_all(values: Tensor, routing: Routing) -> Tensor:
    """Return attention maps of all tokens (B, H, N, N), from those of kept tokens."""
    images, tokens = routing.score_BN.shape
    slots = routing.kept.index_BK.shape[1]
    kept_images = routing.kept.image_S
    if values.ndim not in (3, 4):
        raise ValueError(f"attention maps must be (B, H, K, K) or (B, K, K), got {tuple(values.shape)}")
    has_heads = values.ndim == 4
    maps = values if has_heads else values.unsqueeze(1)
    # A token that no block computed attends to itself alone: it stays as it is.
    itself_NN = torch.eye(tokens, dtype=maps.dtype, device=maps.device)
    sides = maps.shape[2:]
    if kept_images is not None and (len(maps), *sides) == (len(kept_images), tokens, tokens):
        passed = itself_NN.expand(images, maps.shape[1], -1, -1).clone()
        maps = passed.index_copy(0, kept_images, maps)
    elif len(maps) == images and sides in ((slots, slots), (slots, tokens)):
        if maps.shape[3] != tokens:
            maps = _keys_to_all(maps, routing)
        slot_BN = _slots(routing)
        is_kept = slot_BN[:, None, :, None] >= 0
        maps = torch.where(is_kept, _spread(maps, slot_BN, 2), itself_NN)
    elif (len(maps), *sides) != (images, tokens, tokens):
        raise ValueError(
            f"attention maps of shape {tuple(values.shape)} are none of {slots} kept tokens of {images} images, nor of "
            f"all {tokens}: take the decision of the same block and forward pass, or, where a block decides after its "
            "attention (before='mlp'), that of the block before"
        )
    return maps if has_heads else maps.squeeze(1)


def _keys_to_all(maps_BHKK: Tensor, routing: Routing) -> Tensor:
    """Return attention to all tokens (B, H, K, N): that to a slot, shared by the tokens that were merged into it."""
    size_BK = routing.joined.size_BK
    if size_BK is None:
        return _spread(maps_BHKK, _own_slots(routing), 3)
    # A slot stands for several tokens, which share the attention that it receives.
    size_B11K = size_BK.clamp(min=1)[:, None, None, :]
    maps_BHKK = maps_BHKK / size_B11K.to(maps_BHKK.dtype)
    return _spread(maps_BHKK, _slots(routing), 3)
