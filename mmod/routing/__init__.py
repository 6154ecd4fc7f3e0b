"""Who runs? Scores, selection, gates and the router that joins them; torch only, knows no model."""

from mmod.routing.gate import apply_gate
from mmod.routing.router import Router, Routing
from mmod.routing.score import FunctionScore, LinearScore, NormScore, RandomScore, StrideScore
from mmod.routing.select import kept_count, select_threshold, select_topk

__all__ = [
    "FunctionScore",
    "LinearScore",
    "NormScore",
    "RandomScore",
    "Router",
    "Routing",
    "StrideScore",
    "apply_gate",
    "kept_count",
    "select_threshold",
    "select_topk",
]
