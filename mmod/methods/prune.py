"""Token pruning: tokens that receive little attention are dropped for all later blocks.

Axes: B images, H heads, N tokens, K kept tokens, D channels, E channels of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from mmod.adapters import BlockStack
from mmod.config.plan import check_blocks
from mmod.methods.base import Method, register_method
from mmod.methods.reduction import AttentionInputs, Grid, Restore, check_halves, pooling, reduce_
from mmod.ops import gather_rows, scatter_rows
from mmod.ops.importance import class_token_attention


@register_method("prune")
@dataclass(frozen=True)
class Prune(Method):
    """Token pruning between attention and MLP of some blocks, by the attention that tokens receive there (EViT).

    Prefix tokens are always kept.

    Args:
        keep: Share of its patches that a pruning block keeps, rounded up.
        blocks: Numbers of the blocks that prune.
        fuse: Add one token, the sum of the dropped tokens weighted by attention. The next pruning block treats it as a
            patch.
        by: Whose attention counts, averaged over heads: "class_token", the "mean" over all tokens, or "auto": the class
            token if the head reads it, else the mean.

    Source: EViT, Liang et al., arXiv 2202.07800.

    Example:
        >>> import timm, mmod
        >>> model = mmod.apply_(timm.create_model("test_vit").eval(), Prune(keep=0.5, blocks=(1, 3)))
        >>> model.forward_features(torch.zeros(1, 3, 160, 160)).shape[1]
        28
    """

    keep: Annotated[float, "(0, 1]"] = 0.7
    blocks: Annotated[tuple[int, ...], "[0, inf)"] = (3, 6, 9)
    fuse: bool = True
    by: Literal["auto", "class_token", "mean"] = "auto"

    def check(self, model: nn.Module, stack: BlockStack) -> None:
        """Raise a ValueError unless the model has the blocks and their halves can run separately."""
        check_blocks(self.blocks, len(stack.blocks))
        if self.by == "class_token" and not stack.class_token:
            raise ValueError(
                f"by='class_token': this {type(model).__name__} has no class token; valid are 'auto' and 'mean'"
            )
        for index in self.blocks:
            check_halves(stack.names[index], stack.blocks[index])

    def change(self, model: nn.Module, stack: BlockStack) -> None:
        """Convert the blocks; where the model has an output per patch, the last block restores pruned tokens."""
        by_class_token = self.by == "class_token" or (
            self.by == "auto" and stack.class_token and pooling(model) == "token"
        )
        reductions = dict.fromkeys(self.blocks, partial(prune_tokens, self.keep, self.fuse))
        reduce_(stack, reductions, restores=pooling(model) == "", reads_importance=not by_class_token)


def prune_tokens(
    share: float, fuse: bool, grid: Grid, inputs: AttentionInputs, prefix: int
) -> tuple[Grid, Restore] | None:
    """Keep the prefix and the share of patches that receive the most attention; fuse the others if asked to."""
    x_BND = grid.x_BND
    patches = x_BND.shape[1] - prefix
    kept = math.ceil(share * patches)
    if kept == patches:
        return None
    # Without captured importance, the attention of the first query, the class token, counts.
    score_BN = class_token_attention(inputs.query, inputs.key) if inputs.importance_BN is None else inputs.importance_BN
    score_BN = score_BN[:, prefix:]
    order_BN = score_BN.argsort(dim=1, descending=True, stable=True) + prefix
    index_BK = order_BN[:, :kept].sort(dim=1).values
    if prefix:
        first = torch.arange(prefix, device=x_BND.device).expand(len(x_BND), -1)
        index_BK = torch.cat([first, index_BK], dim=1)
    y_BKD = gather_rows(x_BND, index_BK)
    # The fused token takes the position of the dropped token with the most attention.
    position_BK = torch.cat([index_BK, order_BN[:, kept : kept + 1]], dim=1) if fuse else index_BK
    if fuse:
        dropped_BR = order_BN[:, kept:]
        weight_BR1 = score_BN.gather(1, dropped_BR - prefix).unsqueeze(-1).to(x_BND.dtype)
        fused_B1D = (weight_BR1 * gather_rows(x_BND, dropped_BR)).sum(dim=1, keepdim=True)
        y_BKD = torch.cat([y_BKD, fused_B1D], dim=1)
    place_BK = None if grid.place_BN is None else grid.place_BN.gather(1, position_BK)

    def restore(y_BKD: Tensor) -> Tensor:
        # Pruned tokens have their state before the pruning; a fused token is dropped.
        return scatter_rows(x_BND, index_BK, y_BKD[:, : index_BK.shape[1]])

    return Grid(y_BKD, place_BK, None), restore
