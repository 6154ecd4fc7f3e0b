"""What was tried and does not pay by the figures of our pages.

Methods: mixtures of experts and of recursions, and channels of ResNets. Configs name them as they do those of
`mmod.methods`. Functions: learned capacities, drafts, thresholds, the horizon. In a run, these work in a function of
`after_step` of `mmod.training.fit`.

Nothing else in the package imports from here. The registry of methods knows modules by name, and imports them when one
of their methods is asked for, or all are listed.
"""

from typing import TYPE_CHECKING

from mmod.lazy import lazy_names

# For type checkers; at run time, lazy_names imports the same names on first use.
# ruff: noqa: F401
if TYPE_CHECKING:
    from mmod.lab.capacity import LearnedCapacity, learn_capacity_, settle_capacity_
    from mmod.lab.channels import Channels
    from mmod.lab.drafts import full_pass
    from mmod.lab.experts import Experts
    from mmod.lab.image_horizon import Horizon, horizon
    from mmod.lab.recursions import Recursions
    from mmod.lab.thresholds import calibrate_thresholds, match_topk_

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "mmod.lab.capacity": ["LearnedCapacity", "learn_capacity_", "settle_capacity_"],
        "mmod.lab.channels": ["Channels"],
        "mmod.lab.drafts": ["full_pass"],
        "mmod.lab.experts": ["Experts"],
        "mmod.lab.image_horizon": ["Horizon", "horizon"],
        "mmod.lab.recursions": ["Recursions"],
        "mmod.lab.thresholds": ["calibrate_thresholds", "match_topk_"],
    },
)
