"""Token merging: every block merges its most similar tokens.

Axes: B images, H heads, N tokens, A tokens of the first set, C of the second, R merged ones, D channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor, nn

from mmod.adapters import BlockStack, image_facts, patch_grid
from mmod.blocks import Reduced
from mmod.methods.base import register_method
from mmod.methods.reduction import Reducing, Reduction
from mmod.ops import capture_inputs, gather_rows
from mmod.ops.casting import without_autocast
from mmod.ops.select import best_first
from mmod.values import brief

# Of so many patches, fewer than one is left where a user has hardly meant it.
_FEW = 20


@register_method("merge")
@dataclass(frozen=True)
class Merge(Reducing):
    """Token merging between attention and MLP (ToMe): bipartite soft matching by the keys' mean over heads.

    Tokens alternate between two sets, and the r tokens of the first set with the most similar partner in the second
    merge into it. A merged token is the mean of its tokens, and attention is proportional to its size. Prefix tokens
    are in the sets, but never merge. With a class token, a distillation token or no prefix this is the source's
    released algorithm; register tokens are protected in the same way. Outside the blocks, each token has the state of
    its group, so any code that averages patches weighs groups by size.

    Args:
        r: Number of tokens that a block merges: one number, or one per block. However large it is, a block merges at
            most half of the patches that are left.
        training_only: Change the model in training mode alone; in evaluation it is dense.

    Source: ToMe, Bolya et al., arXiv 2210.09461.

    Example:
        >>> import timm, mmod
        >>> model = mmod.apply_(timm.create_model("test_vit").eval(), Merge(r=8))
        >>> with mmod.trace(model) as decisions:
        ...     answer = model(torch.zeros(1, 3, 160, 160))
        >>> decisions["blocks.5"].kept.index_BK.shape[1]
        53
    """

    r: Annotated[int | tuple[int, ...], "[0, inf)"] = 8
    training_only: bool = False

    def caution(self, model: nn.Module) -> str:
        """Return how few tokens the last block leaves, where that is less than a twentieth of the patches."""
        stack = self.find(model)
        size = image_facts(model).usual
        if size is not None:
            patches = math.prod(patch_grid(model, size))
        elif stack.proof is not None:
            patches = stack.proof.patches
        else:
            return ""
        left = patches
        for count in self._counts(stack).values():
            left -= min(count, left // 2)
        if left * _FEW >= patches:
            return ""
        # Half of the patches are left then.
        smaller = max(1, patches // (2 * len(stack.blocks)))
        return f"r={brief(self.r)} leaves {left} of {patches} patches in the end. Set a smaller r, such as {smaller}"

    def rules(self, model: nn.Module, stack: BlockStack) -> dict[int, Reduction]:
        """Return the rule of each block that merges."""
        return {
            index: Reduction(capture_inputs, partial(merge_tokens, count, stack.prefix))
            for index, count in self._counts(stack).items()
        }

    def _counts(self, stack: BlockStack) -> dict[int, int]:
        """Return the number of merged tokens by block, without zeros."""
        depth = len(stack.blocks)
        counts = self.r
        if isinstance(counts, int):
            counts = (counts,) * depth
        if len(counts) != depth:
            raise ValueError(f"r must have one number per block, {depth}, got {len(counts)}")
        return {index: count for index, count in enumerate(counts) if count}


def merge_tokens(
    count: int, prefix: int, x_BND: Tensor, size_BN: Tensor | None, attention: capture_inputs
) -> Reduced | None:
    """Merge the most similar patches."""
    tokens = x_BND.shape[1]
    # Tokens of the first set merge into those of the second, so at most half of the patches can.
    merged = min(count, (tokens - prefix) // 2)
    if not merged:
        return None
    stay_BK, gone_BR, into_BR = match(attention.read_keys(), prefix, merged)
    if size_BN is None:
        size_BN = x_BND.new_ones(x_BND.shape[:2])
    gone_size_BR = size_BN.gather(1, gone_BR)
    size_BK = size_BN.gather(1, stay_BK).scatter_add(1, into_BR, gone_size_BR)
    # A merged token is the mean of its tokens.
    sum_BND = x_BND * size_BN.unsqueeze(-1)
    into_BRD = into_BR.unsqueeze(-1).expand(-1, -1, x_BND.shape[-1])
    gone_BRD = gather_rows(sum_BND, gone_BR)
    sum_BKD = gather_rows(sum_BND, stay_BK).scatter_add(1, into_BRD, gone_BRD)
    return Reduced(sum_BKD / size_BK.unsqueeze(-1), stay_BK, size_BK, joined_BR=(gone_BR, into_BR))


def match(key_BHNE: Tensor, prefix: int, merged: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return which tokens remain, which are merged, and into which of the remaining ones.

    Args:
        key_BHNE: Keys of the attention (B, H, N, E).
        prefix: Leading tokens, which neither merge nor are merged into.
        merged: Number of tokens to merge, R.

    Returns:
        Remaining tokens (B, N - R): the prefix, the remaining first set, then the second set; merged tokens (B, R); and
        their slots among the remaining ones (B, R). The order determines the sets of the next block. As in the source's
        code, the first set keeps its order after a prefix, and is sorted by descending similarity without one.
    """
    # In half precision, many tokens would be equally similar.
    key_BHNE = key_BHNE.to(torch.promote_types(key_BHNE.dtype, torch.float32))
    with torch.no_grad(), without_autocast(key_BHNE):
        key_BNE = key_BHNE.mean(dim=1)
        key_BNE = key_BNE / key_BNE.norm(dim=-1, keepdim=True)
        # The first set are the tokens with even numbers.
        first_BAE = key_BNE[:, ::2]
        second_BCE = key_BNE[:, 1::2]
        like_BAC = first_BAE @ second_BCE.transpose(1, 2)
        # The prefix alternates between the two sets, as all tokens do.
        protected_A = prefix - prefix // 2
        protected_C = prefix // 2
        like_BAC[:, :protected_A] = -torch.inf
        like_BAC[:, :, :protected_C] = -torch.inf
        best_BA, partner_BA = like_BAC.max(dim=-1)
        order_BA = best_first(best_BA)
        gone_BR = order_BA[:, :merged]
        left_BA = order_BA[:, merged:]
        if prefix:
            left_BA = left_BA.sort(dim=-1).values[:, protected_A:]
        # In what remains, the second set without its prefix stands behind the prefix and what is left of the first.
        into_BR = partner_BA.gather(1, gone_BR) + (prefix + left_BA.shape[1] - protected_C)
        position_N = torch.arange(key_BHNE.shape[2], device=key_BHNE.device)
        position_BN = position_N.expand(left_BA.shape[0], -1)
        second_BC = position_BN[:, 2 * protected_C + 1 :: 2]
        stay_BK = torch.cat([position_BN[:, :prefix], 2 * left_BA, second_BC], dim=1)
        return stay_BK, 2 * gone_BR, into_BR
