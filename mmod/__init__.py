"""Mixture-of-Depths for vision transformers: each routed block computes only the tokens that need it."""

from typing import TYPE_CHECKING

from mmod.lazy import lazy_names
from mmod.own_folder import hide_own_folder
from mmod.registry.dense_loads import watch_dense_loads

if TYPE_CHECKING:
    from mmod.analysis import FlopReport, Trace, flops, prefill_flops, trace
    from mmod.config import (
        Gate,
        LanguageRouting,
        Plan,
        RoutingConfig,
        Score,
        Threshold,
        register_loss,
        register_preset,
        register_score,
        score,
    )
    from mmod.losses import auxiliary_loss
    from mmod.model import capacities, is_routed, route_, routed_blocks, routing_config, set_capacity, unroute_
    from mmod.planning import attention_ranks, preset
    from mmod.pretrained import load_pretrained, save_pretrained
    from mmod.routing import Routing

__all__ = [
    "FlopReport",
    "Gate",
    "LanguageRouting",
    "Plan",
    "Routing",
    "RoutingConfig",
    "Score",
    "Threshold",
    "Trace",
    "attention_ranks",
    "auxiliary_loss",
    "capacities",
    "flops",
    "is_routed",
    "load_pretrained",
    "prefill_flops",
    "preset",
    "register_loss",
    "register_preset",
    "register_score",
    "route_",
    "routed_blocks",
    "routing_config",
    "save_pretrained",
    "score",
    "set_capacity",
    "trace",
    "unroute_",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "config": (
            "Gate",
            "LanguageRouting",
            "Plan",
            "RoutingConfig",
            "Score",
            "Threshold",
            "register_loss",
            "register_preset",
            "register_score",
            "score",
        ),
        "model": (
            "capacities",
            "is_routed",
            "route_",
            "routed_blocks",
            "routing_config",
            "set_capacity",
            "unroute_",
        ),
        "analysis": ("FlopReport", "Trace", "flops", "prefill_flops", "trace"),
        "losses": ("auxiliary_loss",),
        "ops": (),
        "planning": ("attention_ranks", "preset"),
        "pretrained": ("load_pretrained", "save_pretrained"),
        "routing": ("Routing",),
    },
)

hide_own_folder()
watch_dense_loads()
