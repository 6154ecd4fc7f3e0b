"""What the attention of a timm block compared, by which tokens are pruned or merged after it.

Axes: B images, H heads, N tokens, D channels, E channels of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from timm.layers import apply_rot_embed_cat
from torch import Tensor, nn

from mmod.adapters.halves import SPLIT
from mmod.blocks.conversion import convert, host_class
from mmod.blocks.forward_pass import PerThread


class Seen(NamedTuple):
    """What an attention compared, with rotary positions if it has them, and what came of it.

    Args:
        query: Queries (B, H, N, E).
        key: Keys (B, H, N, E).
        importance_BN: Mean attention that each token received (B, N), where it was asked for.
    """

    query: Tensor
    key: Tensor
    importance_BN: Tensor | None = None


class _Last:
    """The last tensor that one thread saw."""

    value: Tensor | None = None


class _Watched(nn.Module):
    """Mixin of the module that queries or keys pass last before attention; it remembers its output.

    Attributes:
        mod_state: Where the output is kept, for each thread.
    """

    mod_state: PerThread[_Last]

    def forward(self, x: Tensor) -> Tensor:
        """Run the host's module and remember what it returns."""
        y: Tensor = super().forward(x)
        self.mod_state.own.value = y
        return y


def check_halves(name: str, block: nn.Module) -> None:
    """Raise a ValueError that says why a block cannot be taken apart.

    Args:
        name: Its name in the model.
        block: The block.
    """
    if not isinstance(block, SPLIT):
        raise ValueError(
            f"{name} is a {host_class(block).__name__}, in which there is no place between attention and MLP; "
            f"blocks of {', '.join(dict.fromkeys(kind.__name__ for kind in SPLIT))} have one"
        )
    attention = block.get_submodule("attn")
    if not all(hasattr(attention, norm) for norm in ("q_norm", "k_norm")) or hasattr(attention, "lambda_init"):
        raise ValueError(f"{name} has a {type(attention).__name__}, whose queries and keys cannot be read")


def watch(block: nn.Module) -> None:
    """Let a block remember the queries and keys of its attention until `seen` takes them."""
    for norm in ("attn.q_norm", "attn.k_norm"):
        convert(block.get_submodule(norm), _Watched, PerThread(_Last))


def seen(block: nn.Module, arguments: Mapping[str, Any], importance_BN: Tensor | None) -> Seen:
    """Return what the attention of a watched block compared last, and forget it.

    Args:
        block: The block.
        arguments: What it was called with.
        importance_BN: Mean attention that each token received (B, N), if it was captured.
    """
    query, key = (_take(block.get_submodule(norm)) for norm in ("attn.q_norm", "attn.k_norm"))
    if key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    if "rope" in arguments:
        query, key = (_rotated(x, arguments["rope"], block.get_submodule("attn")) for x in (query, key))
    return Seen(query, key, importance_BN)


def _take(norm: nn.Module) -> Tensor:
    assert isinstance(norm, _Watched)
    last = norm.mod_state.own
    value, last.value = last.value, None
    assert value is not None
    return value


def _rotated(x: Tensor, rope: Tensor, attention: Any) -> Tensor:
    prefix = attention.num_prefix_tokens
    rotated = apply_rot_embed_cat(x[:, :, prefix:], rope, half=getattr(attention, "rotate_half", False))
    return torch.cat([x[:, :, :prefix], rotated], dim=2).type_as(x)
