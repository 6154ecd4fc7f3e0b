"""Gates: a kept token's score becomes the weight of the block's update."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_gate(score: Tensor, gate: str, scale: float = 1.0) -> Tensor | None:
    """Return the weight of a block's update, of the scores' shape, or None where it is 1.

    Args:
        score: Raw scores.
        gate: How a score weighs:
            - "identity": not at all (A-MoD);
            - "step": not at all in evaluation, see `step_gate`;
            - "linear": `scale * score` (MoD, Eq. 1 at scale 1);
            - "sigmoid": `scale * sigmoid(score)` (MoR at scale 0.1, MoDification at 1);
            - "tanh": `1 + scale * tanh(score)` (p-MoD at scale 0.2).
        scale: Factor of the gate.

    Raises:
        ValueError: Unknown gate.

    Example:
        >>> apply_gate(torch.zeros(2), "tanh", 0.2)
        tensor([1., 1.])
    """
    if gate in ("identity", "step"):
        return None
    # A scale of 1 takes no operation.
    if gate == "linear":
        return score if scale == 1 else scale * score
    if gate == "sigmoid":
        share = torch.sigmoid(score)
        return share if scale == 1 else scale * share
    if gate == "tanh":
        # One operation for `1 + scale * tanh`: at batch 1 launch overhead dominates.
        return torch.rsub(torch.tanh(score), 1, alpha=-scale)
    raise ValueError(f"gate must be 'identity', 'step', 'linear', 'sigmoid' or 'tanh', got {gate!r}")


def step_gate(level: Tensor, threshold: float) -> Tensor:
    """Return 1 where a normalised score reaches the threshold and 0 elsewhere, with a straight-through gradient.

    Source: the straight-through estimator, Bengio et al., arXiv 1308.3432, as in Router-Tuning, arXiv 2410.13184.

    Example:
        >>> step_gate(torch.tensor([0.4, 0.6]), 0.5)
        tensor([0., 1.])
    """
    # The difference is zero, and carries the gradient.
    return (level >= threshold).to(level.dtype) + (level - level.detach())
