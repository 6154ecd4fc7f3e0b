"""Mixture-of-Depths for vision transformers: each routed block computes only the tokens that need it."""

from mmod.config import Plan, RoutingConfig
from mmod.convert import capacities, is_routed, route_, routed_blocks, routing_config, set_capacity, unroute_
from mmod.measuring import FlopReport, Trace, flops, trace
from mmod.objectives import auxiliary_loss
from mmod.planning import preset
from mmod.pretrained import load_pretrained, save_pretrained
from mmod.routing import Routing

__all__ = [
    "FlopReport",
    "Plan",
    "Routing",
    "RoutingConfig",
    "Trace",
    "auxiliary_loss",
    "capacities",
    "flops",
    "is_routed",
    "load_pretrained",
    "preset",
    "route_",
    "routed_blocks",
    "routing_config",
    "save_pretrained",
    "set_capacity",
    "trace",
    "unroute_",
]
