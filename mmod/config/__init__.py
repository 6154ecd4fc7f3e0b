"""What to route and how, as values."""

from mmod.config.plan import Plan, rational
from mmod.config.registry import (
    LOSSES,
    PRESETS,
    SCORES,
    Registry,
    register_loss,
    register_preset,
    register_score,
)
from mmod.config.routing import GATES, LANGUAGE_OPTIONS, RoutingConfig
from mmod.config.score import Placement, Score, relative_to_mean

__all__ = [
    "GATES",
    "LANGUAGE_OPTIONS",
    "LOSSES",
    "PRESETS",
    "SCORES",
    "Placement",
    "Plan",
    "Registry",
    "RoutingConfig",
    "Score",
    "rational",
    "register_loss",
    "register_preset",
    "register_score",
    "relative_to_mean",
]
