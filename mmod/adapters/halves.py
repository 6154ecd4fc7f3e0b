"""The two halves of a timm block, its attention and its MLP, between which tokens merge or are pruned.

The host's forward has no hook between them, so its residual sums are repeated here, with the host's modules.
Axes: B images, N tokens, D channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from timm.models import beit, eva, vision_transformer
from torch import Tensor, nn

from mmod.blocks import Halves

PRE_NORM = (vision_transformer.Block, eva.EvaBlock, beit.Block)
_POST_NORM = (vision_transformer.ResPostBlock, eva.EvaBlockPostNorm)
SPLIT: tuple[type[nn.Module], ...] = PRE_NORM + _POST_NORM
"""Blocks whose halves can run separately."""


def attend(block: Any, x_BND: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    """Return tokens (B, N, D) after a block's attention."""
    if isinstance(block, _POST_NORM):
        return x_BND + block.drop_path1(block.norm1(block.attn(x_BND, **arguments)))
    return x_BND + block.drop_path1(_scaled(block, 1, block.attn(block.norm1(x_BND), **arguments)))


def feed(block: Any, x_BND: Tensor) -> Tensor:
    """Return tokens (B, N, D) after a block's MLP."""
    if isinstance(block, _POST_NORM):
        return x_BND + block.drop_path2(block.norm2(block.mlp(x_BND)))
    return x_BND + block.drop_path2(_scaled(block, 2, block.mlp(block.norm2(x_BND))))


HALVES = Halves(attend, feed)


def _scaled(block: Any, half: int, update_BND: Tensor) -> Tensor:
    """Apply the layer scale of a half: a module in some families, a parameter or None in others."""
    if isinstance(block, vision_transformer.Block):
        return getattr(block, f"ls{half}")(update_BND)
    gamma = getattr(block, f"gamma_{half}")
    return update_BND if gamma is None else gamma * update_BND
