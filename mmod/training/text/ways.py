"""How a routed language model decides in a pass over a whole text: its best tokens together, or all of them."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from mmod.config import RoutingConfig, Threshold
from mmod.model import deciding_by

__all__ = ["decides_both_ways", "every_token", "together"]

_NO_DECISION_ALONE = {"inference_threshold": None, "predictor": False}


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
    return deciding_by(model, lambda config: config.replace(language=_NO_DECISION_ALONE))


def every_token(model: nn.Module) -> AbstractContextManager[None]:
    """Let all tokens of a routed model run through all of its layers, at the weights that their gates give them.

    Args:
        model: A routed model.
    """
    return deciding_by(model, all_kept)


def all_kept(config: RoutingConfig) -> RoutingConfig:
    """Return a config by which the same router keeps every token, whatever the scores: each of them reaches 0.

    Args:
        config: A config.
    """
    return config.replace(select=Threshold(0.0), language=_NO_DECISION_ALONE)
