"""Other ways to apply the same decisions, as controls: image by image, by computing everything, or by removing blocks.

Axes: B images, N tokens, K slots per image, D channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmod.benchmarks.models.free import sharing_copy
from mmod.blocks import RoutedBlock, convert, make_dense
from mmod.model import routed_blocks
from mmod.ops import lerp_rows

CONTROLS = ("loop", "masked", "removed")


class LoopedBlock(RoutedBlock):
    """Routed block that routes a batch image by image: one call of the host block for each."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the host block on the kept tokens of one image after the other.

        Args:
            x: Tokens (B, N, D).
            args: Further arguments of the host block, which must be off.
            kwargs: The same by name.
        """
        routing = self.mod_state.decide(self.router, x, self.training, lambda shared_BN: self.router(x, shared_BN), ())
        gates = [None] * x.shape[0] if routing.gate_BK is None else routing.gate_BK
        out = []
        for tokens_ND, index_K, gate_K in zip(x, routing.index_BK, gates):
            z_KD = tokens_ND[index_K]
            y_KD = super(RoutedBlock, self).forward(z_KD[None], *args, **kwargs)[0]
            out.append(tokens_ND.index_copy(0, index_K, lerp_rows(z_KD, y_KD, gate_K)))
        return torch.stack(out)


class MaskedBlock(RoutedBlock):
    """Routed block that computes every token, attending to kept ones only, and throws the skipped results away."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the host block on all tokens and take its result where a token is kept.

        Args:
            x: Tokens (B, N, D).
            args: Further arguments of the host block, which must be off.
            kwargs: The same by name.
        """
        routing = self.mod_state.decide(self.router, x, self.training, lambda shared_BN: self.router(x, shared_BN), ())
        keep_BN = routing.keep_BN
        y = super(RoutedBlock, self).forward(x, *args, **kwargs, attn_mask=keep_BN[:, None, None, :])
        gate_BN = None
        if routing.gate_BK is not None:
            gate_BN = torch.zeros_like(routing.score_BN).scatter(1, routing.index_BK, routing.gate_BK)
        return torch.where(keep_BN.unsqueeze(-1), lerp_rows(x, y, gate_BN), x)


class RemovedBlock(nn.Module):
    """Mixin that passes every token by."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the tokens as they came.

        Args:
            x: Tokens (B, N, D).
            args: Ignored.
            kwargs: Ignored.
        """
        return x


def control(model: nn.Module, path: str) -> nn.Module:
    """Return a copy of a routed model, sharing its weights, whose routed blocks run another way.

    Args:
        model: A model routed by top-k whose blocks take a mask and no rotary embeddings.
        path: "loop" and "masked" compute the same outputs: image by image, or every token and throw the skipped ones
            away. "removed" leaves the routed blocks out.

    Raises:
        ValueError: Unknown path.

    Example:
        >>> import timm, mmod
        >>> model = mmod.route_(timm.create_model("test_vit"))
        >>> type(control(model, "removed").blocks[1]).__name__
        'RemovedBlock'
    """
    mixins = {"loop": LoopedBlock, "masked": MaskedBlock, "removed": RemovedBlock}
    if path not in mixins:
        raise ValueError(f"path must be one of {', '.join(map(repr, CONTROLS))}, got {path!r}")
    copied = sharing_copy(model)
    for block in routed_blocks(copied).values():
        if path == "removed":
            make_dense(block)
            convert(block, RemovedBlock, None)
        else:
            convert(block, mixins[path], block.mod_state)
    return copied
