"""Routing configs by the name of the method that proposed them."""

from __future__ import annotations

from typing import Any

from mmod.config import RoutingConfig, one_of
from mmod.planning.schedules import ratio_decay

PRESETS = ("mod", "a-mod", "p-mod", "modification", "distilled")


def preset(name: str, depth: int | None = None, **changes: Any) -> RoutingConfig:
    """Return the routing config of a published method, or this library's recommended learned router.

    - "mod": Raposo et al., arXiv 2404.02258. A linear score of the raw tokens is its own gate (Eq. 1), capacity 0.125
      in every other block. Causal sampling's auxiliary loss is left out: image models see all tokens, so top-k needs
      none. The score starts around 1 instead of around 0, so that a pretrained model starts from its own function.
      Trained from scratch the raw gate is known to diverge (Mixture-of-Recursions, arXiv 2507.10524, table 13); use
      `preset("mod", gate="sigmoid", gate_scale=0.1)` there.
    - "a-mod": Gadhikar et al., arXiv 2412.20875. Importance of the preceding dense block, no gate, no parameter,
      capacity 0.5 in every other block. The paper leaves open whether the class token is protected; here it is.
    - "p-mod": Zhang et al., arXiv 2412.04449. Linear score with bias of the raw tokens, both starting at zero, gate
      1 + 0.2 tanh, capacity falling over depth by a shifted cosine between 0.85 and 0.15, so it needs `depth`. Skipped
      tokens are multiplied by the gate, as in paper and code. For kept tokens the paper weighs the block's output and
      the code its MLP branch; here the gate weighs the whole update, which both agree with while it is 1.
    - "modification": Zhang et al., arXiv 2410.14268. Threshold 0.5 on a sigmoid score, which is also the gate, and the
      load penalty at 0.01. The paper gates the attention and MLP outputs one by one; here the gate weighs their sum.
    - "distilled": this library's learned router. Gate 1 + 0.2 tanh, and a score that is also trained to select what
      importance would select. Importance is computed in training only, so inference needs no attention map.

    Args:
        name: One of the names above.
        depth: Number of blocks of the model; needed by "p-mod".
        changes: Fields of `RoutingConfig` to set differently.

    Raises:
        ValueError: Unknown name or field, or "p-mod" without a depth.

    Example:
        >>> preset("a-mod", capacity=0.25).capacity
        0.25
    """
    one_of("preset", name, PRESETS)
    if name == "mod":
        fields: dict[str, Any] = {"router": "linear", "gate": "linear", "capacity": 0.125, "normalize": False}
    elif name == "a-mod":
        fields = {"router": "attention", "capacity": 0.5}
    elif name == "p-mod":
        fields = {"router": "linear", "gate": "tanh", "gate_scale": 0.2, "reweight_skipped": True, "bias": True}
        fields |= {"normalize": False, "init_std": 0.0}
        if not {"capacity", "blocks"} <= set(changes):
            fields |= _decaying(depth)
    elif name == "modification":
        fields = {"router": "linear", "gate": "sigmoid", "select": "threshold", "threshold": 0.5}
        fields |= {"losses": {"load": 0.01}}
    else:
        fields = {"router": "linear", "gate": "tanh", "losses": {"importance": 1.0}}
    return RoutingConfig.from_dict({**fields, **changes})


def _decaying(depth: int | None) -> dict[str, Any]:
    if depth is None:
        raise ValueError("preset 'p-mod' sets capacity by depth: give depth=len(model.blocks), or capacity and blocks")
    plan = ratio_decay(depth)
    return {"blocks": plan.blocks, "capacity": plan.capacities}
