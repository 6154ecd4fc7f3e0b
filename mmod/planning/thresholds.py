"""Thresholds of similarity that are calibrated to a mean cost, so that images of few details cost less than others."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmod.adapters import BlockStack, find_part
from mmod.analysis.calibrate import match_topk_
from mmod.analysis.flops import flops
from mmod.analysis.modes import in_mode
from mmod.config import RoutingConfig, Threshold, preset, rescaled
from mmod.methods.route import is_routed, routed_blocks
from mmod.planning.divergence import routed
from mmod.values import check_finite, check_value

# Each halves the interval in which the mean capacity lies; its width is 1 at first.
_HALVINGS = 10


def calibrate_thresholds(
    model: nn.Module, images: Tensor, budget: float, config: RoutingConfig | str = "gradual"
) -> RoutingConfig:
    """Return a routing by thresholds that costs a share of the dense FLOPs on average, and less for easy images.

    The plan of `config` is scaled to the budget. Every routed block then gets the threshold at which it keeps as many
    tokens of all the images together as the plan says. Thresholds are numbers: what an image keeps does not depend on
    the images beside it. In a batch, images that keep fewer tokens than another are padded, so single images are
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
    if is_routed(model):
        raise ValueError(f"this {type(model).__name__} is routed already: call mmod.unroute_ first")
    _, stack = find_part(model, "image")
    shape = preset(config) if isinstance(config, str) else config
    shape = shape.resolved(len(stack.blocks)).replace(select="topk")
    if shape.router.reads_grid:
        raise ValueError(
            f"router {shape.router.name!r} joins tokens of a cell however unlike they are: calibrate one that compares "
            "tokens, such as 'redundancy'"
        )
    channels, height, width = images.shape[1:]
    with in_mode(False, model), torch.no_grad():
        topk = _scaled(model, shape, stack, (channels, height, width), budget)
        by_threshold = topk.replace(select=Threshold())
        with routed(model, "image", by_threshold):
            match_topk_(model, images)
            selects = [block.router.config.select for block in routed_blocks(model).values()]
    thresholds = tuple(select.single for select in selects if isinstance(select, Threshold))
    return by_threshold.replace(select=Threshold(thresholds))


def _scaled(
    model: nn.Module, shape: RoutingConfig, stack: BlockStack, size: tuple[int, int, int], budget: float
) -> RoutingConfig:
    """Return a top-k routing whose capacities are scaled to a share of the dense FLOPs."""
    capacities = shape.capacity
    assert isinstance(capacities, tuple)

    def at(mean: float) -> RoutingConfig:
        return shape.replace(capacity=rescaled(capacities, mean))

    def share(mean: float) -> float:
        with routed(model, "image", at(mean)):
            return 1 / flops(model, size).speedup

    with routed(model, "image", shape):
        tokens = max(block.tokens for block in flops(model, size).blocks)
    # Every block keeps a token beside the prefix, which others can join; capacities are rounded.
    low = (stack.prefix + 1.1) / (tokens * min(capacities)) * sum(capacities) / len(capacities)
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
