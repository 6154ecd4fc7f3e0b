"""Calibration of thresholds to the kept count of top-k.

Axes: B images, N tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmod.analysis.trace import trace
from mmod.blocks import RoutedBlock
from mmod.methods.route import routed_blocks
from mmod.routing import kept_count

# The kept count may differ from that of top-k by this share, so the threshold can lie in a wide gap between scores.
SLACK = 0.005


@torch.no_grad()
def match_topk_(model: nn.Module, images: Tensor, static: bool = False) -> None:
    """Set every routed block's threshold so that it keeps as many tokens of these images as its capacity would.

    Blocks are calibrated in order, and those that share a decision together. Images keep different numbers of tokens;
    their mean is within half a percent of top-k's. `static` sets `max_tokens` to the largest count, so that shapes do
    not depend on the data.
    """
    for step in _steps(routed_blocks(model)):
        name, block = next(iter(step.items()))
        router = block.router
        # A limit of an earlier calibration would hide scores that reach the threshold.
        _decide(step, {"max_tokens": None})
        with trace(model) as decisions:
            model(images)
        score_BN = decisions[name].score_BN
        # What joined another token before competes no more.
        joined_BN = score_BN == -torch.inf
        level_BN = router.config.router.normalised(score_BN, ~joined_BN if joined_BN.any() else None)
        count = kept_count(level_BN.shape[1], router.capacity, router.prefix)
        free = level_BN[:, router.prefix :].masked_fill(joined_BN[:, router.prefix :], -torch.inf)
        threshold = between(free[free > -torch.inf], free.shape[0] * (count - router.prefix))
        most = int((free >= threshold).sum(dim=1).max()) + router.prefix
        _decide(step, {"threshold": threshold, "max_tokens": max(1, most) if static else None})


def _steps(blocks: dict[str, RoutedBlock]) -> list[dict[str, RoutedBlock]]:
    """Return the blocks in order, those together that share a decision."""
    steps: list[dict[str, RoutedBlock]] = []
    earlier: RoutedBlock | None = None
    for name, block in blocks.items():
        if earlier is not None and _shares_decision(earlier, block):
            steps[-1][name] = block
        else:
            steps.append({name: block})
        earlier = block
    return steps


def _shares_decision(one: RoutedBlock, other: RoutedBlock) -> bool:
    """Return whether consecutive blocks of a span decide by one rule."""
    is_span = one.mod_state.span is not None and one.mod_state.span is other.mod_state.span
    return is_span and one.router.shares_decisions and one.router.capacity == other.router.capacity


def _decide(step: dict[str, RoutedBlock], select: dict[str, float | None]) -> None:
    """Let the blocks of a step decide by changed thresholds; they share one config, by which they know each other."""
    config = next(iter(step.values())).router.config.replace(select=select)
    for block in step.values():
        block.router.config = config


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
