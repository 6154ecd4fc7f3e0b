"""Routing configs and their parts; registries of scores, presets and losses."""

# The one list of this package's names.
# ruff: noqa: F401
from mmod.config.audit import AuditConfig
from mmod.config.named import Preset, preset, preset_arguments, presets, read_routing
from mmod.config.parts import (
    CHANGE,
    GATES,
    IMPORTANCE,
    Gate,
    Grid,
    LanguageRouting,
    Merged,
    Patches,
    Placement,
    Score,
    Threshold,
    WithImportance,
    spelled,
)
from mmod.config.plan import rational, rescaled
from mmod.config.registry import (
    LOSSES,
    PRESETS,
    SCORES,
    place_of,
    register_loss,
    register_preset,
    register_score,
    revised,
    score,
)
from mmod.config.routing import LAYOUTS, ROUTING_FIELDS, RoutingConfig
