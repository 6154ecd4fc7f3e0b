"""The linear layers before attention, by the names that hosts give them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mmod.ops.context import ProjectionName

# Layers of queries, keys or values alone: features that are used for the token itself, None for all of them. Layers of
# queries may hold a gate too.
_APART = {"q_proj": None, "gate": None, "k_proj": 0, "v_proj": 0}


def projections_of(path: str, attention: nn.Module) -> tuple[ProjectionName, ...]:
    """Return the layers before an attention that can be computed in part.

    Args:
        path: Name of the attention in its block; empty for the block itself.
    """
    projections = []
    # torch's attention and open_clip's have a weight of their own.
    weight = getattr(attention, "in_proj_weight", None)
    if isinstance(weight, Tensor):
        projections.append(ProjectionName(f"{path}.in_proj_weight", weight.shape[0] // 3, weight.shape[0]))
    for name, layer in attention.named_children():
        weight_name = f"{path}.{name}.weight".lstrip(".")
        # By size and not by class, because a LoRA layer around it has another class. Two factors instead of one layer
        # have no size, and compute all features.
        features = getattr(layer, "out_features", None)
        if name in _APART:
            projections.append(ProjectionName(weight_name, _APART[name]))
        elif isinstance(features, int) and name in _JOINT:
            projections.append(ProjectionName(weight_name, features - _JOINT[name](layer, attention), features))
    return tuple(projections)


def _keys_of_groups(layer: nn.Module, attention: Any) -> int:
    return 2 * int(attention.config.num_key_value_heads) * int(attention.head_dim)


# How many of the last features of a joint layer are keys and values.
_JOINT = {
    "qkv": lambda layer, attention: layer.out_features // 3 * 2,
    "qkv_proj": _keys_of_groups,
    # Fused MLP, query, key and value; keys and values are as wide as the tokens.
    "in_proj": lambda layer, attention: 2 * int(layer.in_features),
}
