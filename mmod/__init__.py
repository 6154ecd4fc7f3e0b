"""Mixture-of-Depths for vision transformers: each routed block computes only the tokens that need it."""

from typing import TYPE_CHECKING

from mmod.lazy import lazy_names

# The one list of this package's names, see lazy_names.
# ruff: noqa: F401
if TYPE_CHECKING:
    from mmod.analysis import Trace, audit, flops, prefill_flops, redundancy, to_all_tokens, trace
    from mmod.config import (
        AuditConfig,
        Gate,
        LanguageRouting,
        Merged,
        Plan,
        RoutingConfig,
        Score,
        Threshold,
        preset,
        presets,
        register_loss,
        register_preset,
        register_score,
        score,
    )
    from mmod.losses import auxiliary_loss
    from mmod.methods.base import undo_
    from mmod.methods.route import capacities, is_routed, routed_blocks, routing_config
    from mmod.model import apply_, freeze_dense_, route_, set_capacity_, unroute_
    from mmod.planning import (
        Option,
        advise,
        attention_ranks,
        learn_capacity_,
        plan_divergence,
        search_plan,
        settle_capacity_,
    )
    from mmod.pretrained import load_pretrained, save_pretrained
    from mmod.registry.hub import push_to_hub
    from mmod.routing import Routing
    from mmod.version import __version__

__getattr__, __dir__, __all__ = lazy_names(__name__)
