"""Calibration of thresholds to the kept count of top-k.

Axes: B images, N tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmod.analysis.trace import trace
from mmod.methods.route import routed_blocks
from mmod.routing import kept_count

# The kept count may differ from that of top-k by this share, so the threshold can lie in a wide gap between scores.
SLACK = 0.005


@torch.no_grad()
def match_topk_(model: nn.Module, images: Tensor, static: bool = False) -> None:
    """Set every routed block's threshold so that it keeps as many tokens of these images as its capacity would.

    Blocks are calibrated in order. Images keep different numbers of tokens; their mean is within half a percent of
    top-k's. `static` sets `max_tokens` to the largest count, so that shapes do not depend on the data.
    """
    for name, block in routed_blocks(model).items():
        router = block.router
        # A limit of an earlier calibration would hide scores that reach the threshold.
        router.config = router.config.replace(select={"max_tokens": None})
        with trace(model) as decisions:
            model(images)
        level_BN = router.config.router.squashed(decisions[name].score_BN)
        count = kept_count(level_BN.shape[1], router.capacity, router.prefix)
        free = level_BN[:, router.prefix :]
        threshold = between(free.flatten(), free.shape[0] * (count - router.prefix))
        most = int((free >= threshold).sum(dim=1).max()) + router.prefix
        select = {"threshold": threshold, "max_tokens": max(1, most) if static else None}
        router.config = router.config.replace(select=select)


def between(level: Tensor, count: int) -> float:
    """Return a threshold that about `count` of the levels (L,) reach, in the widest gap nearby."""
    ranked = level.double().sort(descending=True).values
    slack = int(count * SLACK)
    first = max(count - slack, 1)
    last = min(count + slack, len(ranked) - 1)
    if first > last:
        # All or none.
        return float(ranked[-1] - 1) if count else float(ranked[0] + 1)
    # The widest gap: a small change of the weights moves few tokens across it.
    gap = ranked[first - 1 : last] - ranked[first : last + 1]
    best = first + int(gap.argmax())
    return float((ranked[best - 1] + ranked[best]) / 2)
