"""Adapters: one module per host library, named after it and imported on first use."""

# The one list of this package's names.
# ruff: noqa: F401
from mmod.adapters.base import BlockStack, Wrapper
from mmod.adapters.find import (
    ADAPTERS,
    adapted_model,
    by_first_batch,
    find_library,
    find_part,
    find_parts,
    find_stack,
    find_stacks,
    has_blocks,
    load_adapter,
    used_parameters,
)
from mmod.adapters.images import (
    ImageFacts,
    SeenGrid,
    grid_of_squares,
    image_facts,
    image_output,
    image_stack,
    patch_grid,
    tensor_of,
    watch_grid,
)
