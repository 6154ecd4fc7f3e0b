"""Mixture-of-Depths for vision transformers: each routed block computes only the tokens that need it."""

from mmod.config import Plan, RoutingConfig
from mmod.convert import capacities, is_routed, route_, routed_blocks, routing_config, set_capacity, unroute_
from mmod.measuring import FlopReport, Trace, flops, prefill_flops, trace
from mmod.objectives import auxiliary_loss
from mmod.planning import attention_ranks, preset
from mmod.pretrained import load_pretrained, save_pretrained
from mmod.routing import Routing

__all__ = [
    "FlopReport",
    "Plan",
    "Routing",
    "RoutingConfig",
    "Trace",
    "attention_ranks",
    "auxiliary_loss",
    "capacities",
    "flops",
    "is_routed",
    "load_pretrained",
    "prefill_flops",
    "preset",
    "route_",
    "routed_blocks",
    "routing_config",
    "save_pretrained",
    "set_capacity",
    "trace",
    "unroute_",
]
