"""Move rows: the entry and the exit of a routed block.

Axes: B images, N tokens, K slots per image, D channels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gather_rows(x_BND: Tensor, index_BK: Tensor) -> Tensor:
    """Take the rows of every image that `index_BK` names.

    Args:
        x_BND: Tokens (B, N, D).
        index_BK: Indices into N (B, K).

    Returns:
        The named rows (B, K, D).

    Example:
        >>> gather_rows(torch.arange(6.0).view(1, 3, 2), torch.tensor([[0, 2]])).tolist()
        [[[0.0, 1.0], [4.0, 5.0]]]
    """
    return torch.gather(x_BND, 1, index_BK.unsqueeze(-1).expand(-1, -1, x_BND.shape[-1]))


def scatter_rows(x_BND: Tensor, index_BK: Tensor, y_BKD: Tensor) -> Tensor:
    """Return the tokens with the rows that `index_BK` names replaced.

    The result is a new tensor: hosts keep a block's input (`forward_intermediates` returns it), so writing into it
    would change what they return.

    Args:
        x_BND: Tokens (B, N, D).
        index_BK: Indices into N, unique in every row (B, K).
        y_BKD: The new rows (B, K, D), of x's dtype.

    Example:
        >>> scatter_rows(torch.zeros(1, 3, 1), torch.tensor([[1]]), torch.ones(1, 1, 1)).flatten().tolist()
        [0.0, 1.0, 0.0]
    """
    return torch.scatter(x_BND, 1, index_BK.unsqueeze(-1).expand_as(y_BKD), y_BKD)


def lerp_rows(z_BKD: Tensor, y_BKD: Tensor, gate_BK: Tensor | None) -> Tensor:
    """Weigh the update from z to y by a gate: `z + gate * (y - z)`.

    `torch.lerp` returns y exactly at gate 1, in half precision too, which the written-out form does not.

    Args:
        z_BKD: Rows before the block (B, K, D) or packed (T, D).
        y_BKD: Rows after it.
        gate_BK: Weight of the update (B, K) or (T), or None for 1.

    Returns:
        The weighted rows, like z.

    Source: Raposo et al., arXiv 2404.02258, Eq. 1, with f the residual update.

    Example:
        >>> lerp_rows(torch.zeros(1, 1, 1), torch.ones(1, 1, 1), torch.tensor([[0.25]])).item()
        0.25
    """
    y_BKD = y_BKD.to(z_BKD.dtype)
    if gate_BK is None:
        return y_BKD
    return torch.lerp(z_BKD, y_BKD, gate_BK.unsqueeze(-1).to(z_BKD.dtype))
