"""Mixture-of-Depths for vision transformers: each routed block computes only the tokens that need it."""

from typing import TYPE_CHECKING

from mmod.lazy import lazy_names

# For type checkers; at run time, lazy_names imports the same names on first use.
# ruff: noqa: F401
if TYPE_CHECKING:
    from mmod.adapters.tokens import Tokens
    from mmod.analysis import Prompt, Trace, flops, redundancy, to_all_tokens, trace
    from mmod.audits import audit
    from mmod.config import (
        AuditConfig,
        Gate,
        LanguageRouting,
        Merged,
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
    from mmod.opening.open import open_model
    from mmod.opening.opened import Opened
    from mmod.planning import (
        Option,
        advise,
        attention_ranks,
        plan_divergence,
        search_plan,
    )
    from mmod.pretrained import load_pretrained, save_pretrained
    from mmod.registry.hub import push_to_hub
    from mmod.routing import Routing
    from mmod.version import __version__

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "mmod.adapters.tokens": ["Tokens"],
        "mmod.analysis": ["Prompt", "Trace", "flops", "redundancy", "to_all_tokens", "trace"],
        "mmod.audits": ["audit"],
        "mmod.config": [
            "AuditConfig",
            "Gate",
            "LanguageRouting",
            "Merged",
            "RoutingConfig",
            "Score",
            "Threshold",
            "preset",
            "presets",
            "register_loss",
            "register_preset",
            "register_score",
            "score",
        ],
        "mmod.losses": ["auxiliary_loss"],
        "mmod.methods.base": ["undo_"],
        "mmod.methods.route": ["capacities", "is_routed", "routed_blocks", "routing_config"],
        "mmod.model": ["apply_", "freeze_dense_", "route_", "set_capacity_", "unroute_"],
        "mmod.opening.open": ["open_model"],
        "mmod.opening.opened": ["Opened"],
        "mmod.planning": [
            "Option",
            "advise",
            "attention_ranks",
            "plan_divergence",
            "search_plan",
        ],
        "mmod.pretrained": ["load_pretrained", "save_pretrained"],
        "mmod.registry.hub": ["push_to_hub"],
        "mmod.routing": ["Routing"],
        "mmod.version": ["__version__"],
    },
)
