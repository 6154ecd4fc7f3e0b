"""Dense weights for routed models, which host libraries load strictly."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from mmod.methods.route import routed_blocks


def keep_new_routers(model: nn.Module, state: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Return weights for a routed model: dense ones with the model's new routers added, others as they are."""
    routers = tuple(f"{name}.router." for name in routed_blocks(model))
    # Weights that hold a router must hold all of them, which loading checks.
    if any(name.startswith(tuple(prefix + router for router in routers)) for name in state):
        return dict(state)
    new = {prefix + name: value for name, value in model.state_dict().items() if name.startswith(routers)}
    return {**state, **new}
