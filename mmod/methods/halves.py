"""Queries, keys and importance of a timm block's attention, by which tokens are pruned or merged after it.

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
from mmod.blocks.forward_pass import PassTracker


class AttentionInputs(NamedTuple):
    """Rotated queries and keys of an attention (B, H, N, E), and the mean attention that tokens received, if
    captured.
    """

    query: Tensor
    key: Tensor
    importance_BN: Tensor | None = None


class _Outputs(dict[nn.Module, Tensor]):
    """The last outputs of the watched modules of a stack."""


class _Watched(nn.Module):
    """Mixin of the last module that queries or keys pass before attention; it stores its output."""

    mod_state: PassTracker

    def forward(self, x: Tensor) -> Tensor:
        """Run the host's module and store its output."""
        y: Tensor = super().forward(x)
        self.mod_state.running.slot(_Outputs)[self] = y
        return y


def check_halves(name: str, block: nn.Module) -> None:
    """Raise a ValueError that says why a block's halves cannot run separately."""
    if not isinstance(block, SPLIT):
        raise ValueError(
            f"{name} is a {host_class(block).__name__}, whose attention and MLP cannot run separately; supported are "
            f"{', '.join(dict.fromkeys(block_type.__name__ for block_type in SPLIT))}"
        )
    attention = block.get_submodule("attn")
    if not all(hasattr(attention, norm) for norm in ("q_norm", "k_norm")) or hasattr(attention, "lambda_init"):
        raise ValueError(f"{name} has a {type(attention).__name__}, whose queries and keys cannot be read")


def watch(block: nn.Module, tracker: PassTracker) -> None:
    """Make a block store the queries and keys of its attention until `take_inputs` reads them."""
    for norm in ("attn.q_norm", "attn.k_norm"):
        convert(block.get_submodule(norm), _Watched, tracker)


def take_inputs(block: nn.Module, arguments: Mapping[str, Any], importance_BN: Tensor | None) -> AttentionInputs:
    """Return and drop the last queries and keys of a watched block, with its importance if captured."""
    query, key = (_take(block.get_submodule(norm)) for norm in ("attn.q_norm", "attn.k_norm"))
    if key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    if "rope" in arguments:
        query, key = (_rotated(x, arguments["rope"], block.get_submodule("attn")) for x in (query, key))
    return AttentionInputs(query, key, importance_BN)


def _take(norm: nn.Module) -> Tensor:
    assert isinstance(norm, _Watched)
    return norm.mod_state.running.slot(_Outputs).pop(norm)


def _rotated(x: Tensor, rope: Tensor, attention: Any) -> Tensor:
    prefix = attention.num_prefix_tokens
    rotated = apply_rot_embed_cat(x[:, :, prefix:], rope, half=getattr(attention, "rotate_half", False))
    return torch.cat([x[:, :, :prefix], rotated], dim=2).type_as(x)
