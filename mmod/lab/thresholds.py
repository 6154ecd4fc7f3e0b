"""Thresholds that are calibrated to a mean cost, or to the kept count of top-k: easy images cost less than others.

Axes: B images, N tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import torch
from torch import Tensor, nn

from mmod.adapters import BlockStack
from mmod.analysis import flops, trace
from mmod.analysis.counting import meta_copy, pass_flops
from mmod.analysis.modes import in_mode
from mmod.blocks import RoutedBlock
from mmod.config import RoutingConfig, Threshold, preset, rescaled
from mmod.methods.route import routed_blocks
from mmod.planning.divergence import routed
from mmod.planning.search import dense_part
from mmod.routing import kept_count
from mmod.values import check_finite, check_value

# Each halves the interval in which the mean capacity lies; its width is 1 at first.
_HALVINGS = 10
# The kept count may differ from that of top-k by this share, so the threshold can lie in a wide gap between scores.
SLACK = 0.005


def calibrate_thresholds(
    model: nn.Module, images: Tensor, budget: float, config: RoutingConfig | str = "gradual"
) -> RoutingConfig:
    """Return a routing by thresholds that costs a share of the dense FLOPs on average, and less for easy images.

    The plan of `config` is scaled to the budget. Every routed block then gets the threshold at which it keeps as many
    tokens of all the images together as the plan says. Thresholds are numbers: what an image keeps does not depend on
    the other images. In a batch, images that keep fewer tokens than another are padded, so single images are
    fastest.

    Args:
        model: A dense image model; unchanged afterwards.
        images: A few typical images, as the model takes them (B, C, H, W).
        budget: Mean share of the dense model's FLOPs, in (0, 1).
        config: A routing or the name of a preset, which says what is scored and how tokens are merged; its capacities
            are the shape of the plan.

    Returns:
        The routing, whose capacities are the mean kept shares.

    Raises:
        TypeError: Images that are not one tensor of floating-point numbers.
        ValueError: The model is routed, the budget is out of reach, the router groups tokens by their place, or images
            are not finite or of another shape.

    Source: DyMU, arXiv 2504.17040, which calibrates a threshold for every layer on a batch; ATM, arXiv 2505.15160.

    Example:
        >>> import timm, torch, mmod
        >>> model = timm.create_model("test_vit").eval()
        >>> config = calibrate_thresholds(model, torch.randn(4, 3, 160, 160), budget=0.8)
        >>> len(config.select.threshold) == len(config.blocks)
        True
        >>> mmod.route_(model, config)(torch.randn(1, 3, 160, 160)).shape
        torch.Size([1, 1000])
    """
    check_value("budget", budget, float, "(0, 1)")
    if not isinstance(images, Tensor):
        raise TypeError(
            f"images must be one tensor (B, C, H, W), got {type(images).__name__}: join batches by torch.cat"
        )
    if images.ndim != 4:
        raise ValueError(f"images must be (B, C, H, W), got {tuple(images.shape)}")
    check_finite("images", images)
    _, stack = dense_part(model, "image")
    shape = preset(config) if isinstance(config, str) else config
    shape = shape.resolved(len(stack.blocks)).replace(select="topk")
    if shape.router.reads_grid:
        raise ValueError(
            f"router {shape.router.name!r} joins tokens of a cell however unlike they are: calibrate one that compares "
            "tokens, such as 'redundancy'"
        )
    with in_mode(False, model), torch.no_grad():
        topk = _scaled(model, shape, stack, images[:1].to("meta"), budget)
        by_threshold = topk.replace(select=Threshold())
        with routed(model, "image", by_threshold):
            match_topk_(model, images)
            selects = [block.router.config.select for block in routed_blocks(model).values()]
    thresholds = tuple(select.single for select in selects if isinstance(select, Threshold))
    return by_threshold.replace(select=Threshold(thresholds))


def _scaled(model: nn.Module, shape: RoutingConfig, stack: BlockStack, image: Tensor, budget: float) -> RoutingConfig:
    """Return a top-k routing whose capacities are scaled to a share of the dense FLOPs."""
    capacities = shape.capacity
    assert isinstance(capacities, tuple)

    def at(mean: float) -> RoutingConfig:
        return shape.replace(capacity=rescaled(capacities, mean))

    channels, height, width = image.shape[1:]
    with routed(model, "image", shape):
        report = flops(model, (channels, height, width))
    tokens = max(block.tokens for block in report.blocks)

    def share(mean: float) -> float:
        with routed(model, "image", at(mean)):
            return pass_flops(meta_copy(model), {"image": image}) / report.dense

    # Every block keeps a token beside the prefix, which others can join; capacities are rounded.
    least = (stack.prefix + 1.1) / (tokens * min(capacities))
    low = least * sum(capacities) / len(capacities)
    high = 1.0
    if share(low) > budget:
        raise ValueError(
            f"budget must be at least {share(low):.3f} of the dense FLOPs with blocks {list(shape.blocks)}, got "
            f"{budget:g}: route earlier blocks, or take a larger budget"
        )
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if share(middle) > budget:
            high = middle
        else:
            low = middle
    return at(low)


@torch.no_grad()
def match_topk_(model: nn.Module, images: Tensor, static: bool = False) -> None:
    """Set every routed block's threshold so that it keeps as many tokens of these images as its capacity would.

    Blocks are calibrated in order, and those that share a decision together. Images keep different numbers of tokens;
    their mean is within half a percent of top-k's. `static` sets `max_tokens` to the largest count, so that shapes do
    not depend on the data.
    """
    for _, members in groupby(list(routed_blocks(model).items()), _step_of):
        step = dict(members)
        # The first block of a step decides for all of it.
        name, block = next(iter(step.items()))
        router = block.router
        # A limit of an earlier calibration would hide scores that reach the threshold.
        _decide(step.values(), {"max_tokens": None})
        with trace(model) as decisions:
            model(images)
        score_BN = decisions[name].score_BN
        # What joined another token before competes no more.
        joined_BN = score_BN == -torch.inf
        valid_BN = None
        if joined_BN.any():
            valid_BN = ~joined_BN
        level_BN = router.config.router.normalised(score_BN, valid_BN)
        count = kept_count(level_BN.shape[1], router.capacity, router.prefix)
        free = level_BN[:, router.prefix :].masked_fill(joined_BN[:, router.prefix :], -torch.inf)
        # Over all images at once: easy ones keep fewer, and the mean is that of top-k.
        kept = free.shape[0] * (count - router.prefix)
        threshold = threshold_between(free[free > -torch.inf], kept)
        select: dict[str, float | None] = {"threshold": threshold, "max_tokens": None}
        if static:
            most = int((free >= threshold).sum(dim=1).max()) + router.prefix
            select["max_tokens"] = max(1, most)
        _decide(step.values(), select)


def _step_of(named: tuple[str, RoutedBlock]) -> object:
    """Return what the blocks of a step have in common, which decide once: those of a span with one rule."""
    name, block = named
    router = block.router
    span = block.mod_state.span
    shares = router.config.router.shared and router.rule.matches(router.rule)
    if span is None or not shares:
        return name
    return id(span), router.capacity


def _decide(blocks: Iterable[RoutedBlock], select: dict[str, float | None]) -> None:
    """Let blocks decide by changed thresholds; they share one config, by which they know each other."""
    config = None
    for block in blocks:
        config = config or block.router.config.replace(select=select)
        block.router.config = config


def threshold_between(level: Tensor, count: int) -> float:
    """Return a threshold that about `count` of the levels (L,) reach, in the widest gap nearby."""
    ranked = level.double().sort(descending=True).values
    slack = int(count * SLACK)
    first = max(count - slack, 1)
    last = min(count + slack, len(ranked) - 1)
    if first > last and count:
        # All reach it.
        return float(ranked[-1] - 1)
    if first > last:
        # None does.
        return float(ranked[0] + 1)
    # The widest gap: a small change of the weights moves few tokens across it.
    gap = ranked[first - 1 : last] - ranked[first : last + 1]
    best = first + int(gap.argmax())
    return float((ranked[best - 1] + ranked[best]) / 2)
