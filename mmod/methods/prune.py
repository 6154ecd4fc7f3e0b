"""Token pruning: tokens that receive little attention are dropped for all later blocks.

Axes: B images, H heads, N tokens, K kept tokens, D channels, E channels of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from mmod.adapters import BlockStack
from mmod.blocks import Reduced
from mmod.config.plan import blocks_or_quarters
from mmod.methods.base import owner_of, register_method
from mmod.methods.reduction import Reducing, Reduction, pooling
from mmod.ops import capture_importance, capture_inputs, gather_rows
from mmod.ops.select import best_first

WatchedAttention = capture_importance | capture_inputs
"""What reads the attention that tokens receive."""


@register_method("prune")
@dataclass(frozen=True)
class Prune(Reducing):
    """Token pruning between attention and MLP of some blocks, by the attention that tokens receive there (EViT).

    Prefix tokens are always kept. In a call of the model, a head that pools patches pools the remaining ones. Other
    code gets the full grid, in which a pruned patch is as it was when dropped.

    Args:
        keep: Share of its patches that a pruning block keeps, rounded up.
        blocks: Numbers of the blocks that prune; None takes those after each quarter of the depth, (3, 6, 9) of 12.
        fuse: Add one token, the sum of the dropped tokens weighted by attention. The next pruning block treats it as a
            patch.
        by: Whose attention counts, averaged over heads: "class_token", or the "mean" over all tokens. "auto" is the
            class token, or the mean if there is none or a timm model's head does not read it.
        training_only: Change the model in training mode alone; in evaluation it is dense.

    Source: EViT, Liang et al., arXiv 2202.07800.

    Example:
        >>> import timm, mmod
        >>> model = mmod.apply_(timm.create_model("test_vit").eval(), Prune(keep=0.5, blocks=(1, 3)))
        >>> with mmod.trace(model) as decisions:
        ...     answer = model(torch.zeros(1, 3, 160, 160))
        >>> decisions["blocks.3"].kept.index_BK.shape[1]
        28
    """

    keep: Annotated[float, "(0, 1]"] = 0.7
    blocks: Annotated[tuple[int, ...] | None, "[0, inf)"] = None
    fuse: bool = True
    by: Literal["auto", "class_token", "mean"] = "auto"
    training_only: bool = False
    heads: ClassVar[tuple[str, ...]] = ("prefix", "patches")

    def rules(self, model: nn.Module, stack: BlockStack) -> dict[int, Reduction]:
        """Return the rule of each block that prunes."""
        blocks = blocks_or_quarters(self.blocks, len(stack.blocks))
        if self.by == "class_token" and not stack.class_token:
            raise ValueError(
                f"by='class_token': this {type(model).__name__} has no class token; valid are 'auto' and 'mean'"
            )
        watch = partial(self.watch, stack.class_token, owner_of(model, stack))
        return dict.fromkeys(blocks, Reduction(watch, partial(self.reduce, stack.prefix)))

    def watch(self, class_token: bool, owner: nn.Module) -> WatchedAttention:
        """Return what reads the mean attention, or the class token's."""
        if self.by == "class_token" or (self.by == "auto" and class_token and pooling(owner) == "token"):
            return capture_inputs()
        return capture_importance()

    def reduce(self, prefix: int, x_BND: Tensor, size_BN: Tensor | None, attention: WatchedAttention) -> Reduced | None:
        """Keep the prefix and the share of patches that receive the most attention; fuse the others on request."""
        # A token that an earlier block fused is one of them.
        patches = x_BND.shape[1] - prefix
        kept = math.ceil(self.keep * patches)
        if kept == patches:
            return None
        score_BN = attention.read()[:, prefix:]
        order_BN = best_first(score_BN) + prefix
        index_BK = order_BN[:, :kept].sort(dim=1).values
        if prefix:
            first = torch.arange(prefix, device=x_BND.device).expand(x_BND.shape[0], -1)
            index_BK = torch.cat([first, index_BK], dim=1)
        y_BKD = gather_rows(x_BND, index_BK)
        if self.fuse:
            dropped_BR = order_BN[:, kept:]
            weight_BR1 = score_BN.gather(1, dropped_BR - prefix).unsqueeze(-1).to(x_BND.dtype)
            fused_B1D = (weight_BR1 * gather_rows(x_BND, dropped_BR)).sum(dim=1, keepdim=True)
            y_BKD = torch.cat([y_BKD, fused_B1D], dim=1)
            # The fused token takes the position of the dropped token with the most attention.
            index_BK = torch.cat([index_BK, dropped_BR[:, :1]], dim=1)
        return Reduced(y_BKD, index_BK, fuses=self.fuse)
