"""Routing configs, plans and their parts; registries of scores, presets and losses."""

from mmod.config.parts import (
    GATES,
    IMPORTANCE,
    Gate,
    LanguageRouting,
    Merged,
    Placement,
    Score,
    Threshold,
    WithImportance,
    differing,
    spelled,
)
from mmod.config.plan import Plan, rational
from mmod.config.registry import LOSSES, PRESETS, SCORES, register_loss, register_preset, register_score, revised, score
from mmod.config.routing import ROUTING_FIELDS, RoutingConfig

__all__ = [
    "GATES",
    "IMPORTANCE",
    "LOSSES",
    "PRESETS",
    "ROUTING_FIELDS",
    "SCORES",
    "Gate",
    "LanguageRouting",
    "Merged",
    "Placement",
    "Plan",
    "RoutingConfig",
    "Score",
    "Threshold",
    "WithImportance",
    "differing",
    "rational",
    "register_loss",
    "register_preset",
    "register_score",
    "revised",
    "score",
    "spelled",
]
