"""How a routed language model decides in a pass over a whole text: as in training, or each token alone."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from mmod.config import RoutingConfig
from mmod.model import deciding_by

__all__ = ["decides_both_ways", "together"]


def decides_both_ways(config: RoutingConfig) -> bool:
    """Return whether a model takes the top-k in training and decides each token alone in evaluation.

    Args:
        config: How it is routed.
    """
    return config.language.inference_threshold is not None


def together(model: nn.Module) -> AbstractContextManager[None]:
    """Let a model that decides each token alone take the top-k among all tokens, as in training.

    Args:
        model: A routed model for which `decides_both_ways`.
    """
    language = {"inference_threshold": None, "predictor": False}
    return deciding_by(model, lambda config: config.replace(language=language))
