"""Which blocks to route at which capacity: presets, schedules and plan search.

Also what is compared, by advice and by studies: candidates and their budgets.
"""

from typing import TYPE_CHECKING

from mmod.lazy import lazy_names

# For type checkers; at run time, lazy_names imports the same names on first use.
# ruff: noqa: F401
if TYPE_CHECKING:
    from mmod.config import preset
    from mmod.planning.advice import Advice
    from mmod.planning.arank import LayerRanks, attention_ranks
    from mmod.planning.candidate import Candidate, PlanOptions
    from mmod.planning.plan_search import Option, PlanSearch
    from mmod.planning.schedules import drop_once, falling, ratio_decay, stage_drop
    from mmod.planning.search import plan_divergence, search_plan
    from mmod.planning.trials import advise

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "mmod.config": ["preset"],
        "mmod.planning.advice": ["Advice"],
        "mmod.planning.arank": ["LayerRanks", "attention_ranks"],
        "mmod.planning.candidate": ["Candidate", "PlanOptions"],
        "mmod.planning.plan_search": ["Option", "PlanSearch"],
        "mmod.planning.schedules": ["drop_once", "falling", "ratio_decay", "stage_drop"],
        "mmod.planning.search": ["plan_divergence", "search_plan"],
        "mmod.planning.trials": ["advise"],
    },
)
