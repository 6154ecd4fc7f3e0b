"""Figures of kept patches of a model's images; functions return matplotlib figures and write nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmod.analysis.tracing import trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_sample_maps(model: nn.Module, images: Tensor) -> Figure:
    """Draw which patches the routed blocks of an image model keep of images (B, C, height, width)."""
    with torch.inference_mode(), trace(model) as decisions:
        model(images.to(next(model.parameters()).device))
    return decisions.plot(images)
