"""What to route and how, as values; names of scores, presets and losses."""

from mmod.config.parts import GATES, Gate, LanguageRouting, Threshold
from mmod.config.plan import Plan, rational
from mmod.config.reading import revised, score
from mmod.config.registry import LOSSES, PRESETS, SCORES, register_loss, register_preset, register_score
from mmod.config.routing import ROUTING_FIELDS, RoutingConfig
from mmod.config.score import Placement, Score

__all__ = [
    "GATES",
    "LOSSES",
    "PRESETS",
    "ROUTING_FIELDS",
    "SCORES",
    "Gate",
    "LanguageRouting",
    "Placement",
    "Plan",
    "RoutingConfig",
    "Score",
    "Threshold",
    "rational",
    "register_loss",
    "register_preset",
    "register_score",
    "revised",
    "score",
]
