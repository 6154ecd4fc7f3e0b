"""Adapters: one module per host library, named after it and imported on first use."""

from mmod.adapters.base import BlockStack
from mmod.adapters.find import (
    ADAPTERS,
    adapted_model,
    find_library,
    find_part,
    find_parts,
    find_stack,
    find_stacks,
    load_adapter,
)

__all__ = [
    "ADAPTERS",
    "BlockStack",
    "adapted_model",
    "find_part",
    "find_stack",
    "find_stacks",
    "find_library",
    "find_parts",
    "load_adapter",
]
