"""Move rows and attend; knows no model."""

from mmod.ops.capture import capture_importance
from mmod.ops.context import Projection, attend_to_all, keys_and_values
from mmod.ops.importance import attention_importance, attention_with_importance, importance_of_map
from mmod.ops.packed import Packing, attend_within, pack_rows, packed_attention
from mmod.ops.rows import gather_rows, lerp_rows, scatter_rows

__all__ = [
    "Packing",
    "Projection",
    "attend_to_all",
    "attend_within",
    "attention_importance",
    "attention_with_importance",
    "capture_importance",
    "gather_rows",
    "importance_of_map",
    "keys_and_values",
    "lerp_rows",
    "pack_rows",
    "packed_attention",
    "scatter_rows",
]
