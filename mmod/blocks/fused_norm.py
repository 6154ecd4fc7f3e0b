"""The entry of a routed block: kept rows are normalised while they are gathered, and the host's first norm takes them.

Axes: B images, N tokens, K slots per image, D channels.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from mmod.blocks.forward_pass import PassValue
from mmod.ops import Backend, gather_norm, gather_rows
from mmod.ops.backend import choose
from mmod.routing import Routing


class FusedNorm(nn.Module):
    """Mixin for a block's first norm, which returns rows handed to it instead of computing them again.

    Attributes:
        mod_state: Plain state: the kind of norm, and what was handed over.
    """

    mod_state: FusedNormState

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of the rows, taken as handed over where they are the very rows that was done for.

        Args:
            x: Tokens (B, K, D).
        """
        normed = self.mod_state.pop(x)
        return super().forward(x) if normed is None else normed


class FusedNormState:
    """The state of a routed block's first norm.

    Args:
        kind: "layer" or "rms".
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._handed: PassValue[tuple[Tensor, Tensor]] = PassValue()

    def store(self, z_BKD: Tensor, normed_BKD: Tensor) -> None:
        """Hand rows over together with what the norm makes of them."""
        self._handed.put((z_BKD, normed_BKD))

    def pop(self, x: Tensor) -> Tensor | None:
        """Return what was handed over for these rows, once."""
        handed = self._handed.get()
        if handed is None or handed[0] is not x:
            return None
        self._handed.put(None)
        return handed[1]


def gather_kept(x_BND: Tensor, routing: Routing, norm: nn.Module | None) -> Tensor:
    """Gather the kept rows of a routed block.

    Args:
        x_BND: All tokens (B, N, D).
        routing: The decision.
        norm: The block's first norm if it is an `FusedNorm`, else None.

    Returns:
        The kept tokens (B, K, D).
    """
    if not isinstance(norm, FusedNorm) or not _fuses(x_BND):
        return gather_rows(x_BND, routing.index_BK, routing.inverse_BN)
    state, plain = norm.mod_state, cast(nn.LayerNorm, norm)
    # An RMS norm has the same fields but no bias.
    bias = getattr(norm, "bias", None)
    z_BKD, normed_BKD = gather_norm(x_BND, routing.index_BK, plain.weight, bias, plain.eps, state.kind)
    state.store(z_BKD, normed_BKD)
    return z_BKD


def _fuses(x_BND: Tensor) -> bool:
    # Under autocast a norm computes and returns fp32; the op keeps the type of its rows. Torch has no answer for meta,
    # where nothing is computed.
    device = x_BND.device.type
    if device == "meta" or torch.is_autocast_enabled(device):
        return False
    return choose("gather_norm", x_BND, channels=x_BND.shape[2]).backend is not Backend.TORCH
