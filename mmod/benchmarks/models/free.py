"""Free routing: the same blocks on a fixed slice of the tokens, the speed that routing can reach at best."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from mmod.blocks import BlockCall, ImportanceBlock, RoutedBlock, convert, make_dense
from mmod.model import routed_blocks
from mmod.routing import Routing, kept_count


class FreeState:
    """The state of a freely routed block.

    Args:
        call: How the host calls the block.
        capacity: Share of tokens kept.
        prefix: Leading tokens that are always kept.
        context: What a kept token attends to.
    """

    def __init__(self, call: BlockCall, capacity: Fraction, prefix: int, context: str) -> None:
        self.call = call
        self.capacity = capacity
        self.prefix = prefix
        self.context = context


class FreeBlock(nn.Module):
    """Mixin that runs a host block on the first K tokens: no score, no selection, no gate, no moving by index.

    Attributes:
        mod_state: Plain state, see `FreeState`.
    """

    mod_state: FreeState

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the host block on `x[:, :K]` and put the result in front of the other tokens.

        Args:
            x: Tokens (B, N, D).
            args: Further arguments of the host block.
            kwargs: The same by name.
        """
        call, tokens = self.mod_state.call, x.shape[1]
        count = kept_count(tokens, self.mod_state.capacity, self.mod_state.prefix)
        arguments = call.bind(args, kwargs)
        if self.mod_state.context == "all":
            index_BK = torch.arange(count, device=x.device).expand(x.shape[0], -1)
            first = Routing(score_BN=x[..., 0], index_BK=index_BK)
            y = call.attend_to_all(self, super().forward, arguments, x, x[:, :count], first)
        else:
            y = super().forward(x[:, :count], **first_tokens(arguments, tokens, count))
        return torch.cat([y, x[:, count:]], dim=1)


def first_tokens(arguments: Mapping[str, Any], tokens: int, count: int) -> dict[str, Any]:
    """Cut a block's arguments down to the first `count` of `tokens` tokens.

    Args:
        arguments: The block's arguments after the tokens, by name.
        tokens: N.
        count: K.
    """
    cut = dict(arguments)
    if "rope" in cut:
        # Rotary embeddings leave the prefix out, so the last N - K of them are those of the tokens left out.
        rope = cut["rope"]
        cut["rope"] = rope[..., : rope.shape[-2] - (tokens - count), :]
    for name in ("attn_mask", "shared_rel_pos_bias"):
        if name in cut:
            cut[name] = cut[name][..., :count, :count]
    return cut


def free_routing(model: nn.Module) -> nn.Module:
    """Return a copy of a routed model, sharing its weights, whose routed blocks run on their first K tokens.

    It keeps as many tokens as the routed model and computes no importance, so what the routed model takes longer is
    the price of routing. Its outputs mean nothing.

    Args:
        model: A model routed by top-k.

    Raises:
        ValueError: Nothing in it is routed, or by threshold, which fixes no K.

    Example:
        >>> import timm, mmod
        >>> free = free_routing(mmod.route_(timm.create_model("test_vit")))
        >>> type(free.blocks[1]).__name__
        'FreeBlock'
    """
    for name, block in routed_blocks(model).items():
        if block.router.config.select != "topk":
            raise ValueError(f"{name} is routed by threshold: free routing needs a fixed number of tokens")
    free = sharing_copy(model)
    for module in list(free.modules()):
        if isinstance(module, RoutedBlock):
            state = FreeState(
                module.mod_state.call, module.router.capacity, module.router.prefix, module.router.config.context
            )
            make_dense(module)
            convert(module, FreeBlock, state)
        elif isinstance(module, ImportanceBlock):
            make_dense(module)
    return free


def sharing_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy of a model that shares its parameters and buffers."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)
