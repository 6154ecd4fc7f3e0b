"""Kept rows of a routed block, normalised while they are gathered; the host's first norm returns them.

Axes: B images, N tokens, K slots per image, D channels.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from mmod.blocks.forward_pass import PassTracker
from mmod.ops import Backend, gather_norm, gather_rows
from mmod.ops.backend import choose
from mmod.routing import Routing


class FusedNorm(nn.Module):
    """Mixin for a block's first norm, which returns rows that were normalised already instead of computing them again.

    Attributes:
        mod_state: Knows the rows of the running block.
    """

    mod_state: PassTracker

    def forward(self, x: Tensor) -> Tensor:
        """Return the precomputed norm if `x` is the tensor it was computed for, else compute it.

        Args:
            x: Tokens (B, K, D).
        """
        running = self.mod_state.running
        if running.normed is None or running.normed[0] is not x:
            return super().forward(x)
        normed, running.normed = running.normed[1], None
        return normed


def gather_kept(x_BND: Tensor, routing: Routing, norm: nn.Module | None) -> Tensor:
    """Gather the kept rows of a routed block.

    Args:
        x_BND: All tokens (B, N, D).
        routing: The decision.
        norm: The block's first norm if it is a `FusedNorm`, else None.

    Returns:
        The kept tokens (B, K, D).
    """
    if not isinstance(norm, FusedNorm) or not _fuses(x_BND):
        return gather_rows(x_BND, routing.index_BK, routing.inverse_BN)
    # An RMS norm has the same fields but no bias.
    bias, plain = getattr(norm, "bias", None), cast(nn.LayerNorm, norm)
    kind = "layer" if isinstance(norm, nn.LayerNorm) else "rms"
    z_BKD, normed_BKD = gather_norm(x_BND, routing.index_BK, plain.weight, bias, plain.eps, kind)
    norm.mod_state.running.normed = z_BKD, normed_BKD
    return z_BKD


def _fuses(x_BND: Tensor) -> bool:
    # Under autocast a norm computes and returns fp32; the op keeps the type of its rows. Torch has no answer for meta,
    # where nothing is computed.
    device = x_BND.device.type
    if device == "meta" or torch.is_autocast_enabled(device):
        return False
    return choose("gather_norm", x_BND, channels=x_BND.shape[2]).backend is not Backend.TORCH
