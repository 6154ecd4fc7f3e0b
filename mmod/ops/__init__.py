"""Ops on rows and attention: a definition in torch, and registered kernels."""

# The one list of this package's names.
# ruff: noqa: F401

import importlib
import pkgutil

from mmod.ops.alike import nearest_rows, redundancy_scores, regroup_rows, signed_sums, spread_evenly, unit_rows
from mmod.ops.backend import Backend, choices, use
from mmod.ops.capture import add_key_bias, capture_importance, capture_inputs
from mmod.ops.context import Projection, attend_to_captured, keys_and_values, project_part
from mmod.ops.duplicates import FIRST, Duplicates, find_duplicates, first_of_cells
from mmod.ops.hashing import random_scores
from mmod.ops.importance import (
    attention_importance,
    attention_with_importance,
    class_token_importance,
    importance_of_map,
)
from mmod.ops.merging import add_updates, group_sizes, held_slots, mean_rows, size_groups
from mmod.ops.packed import (
    Packing,
    attend_by_image,
    attend_by_length,
    attend_within,
    pack_rows,
    packed_attention,
)
from mmod.ops.rows import gather_norm, gather_rows, inverse_rows, lerp_rows, merge_rows
from mmod.ops.select import Kept, select_topk

# Every module that defines an op registers it, so that `use` and `choices` know all of them.
for _module in pkgutil.iter_modules(__path__):
    if not _module.ispkg:
        importlib.import_module(f"{__name__}.{_module.name}")
