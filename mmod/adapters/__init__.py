"""Where do hosts keep their blocks? One module per host library, imported when such a model is met."""

from mmod.adapters.base import BlockStack
from mmod.adapters.find import adapted_model, find_library, find_parts, find_stack, find_stacks, load_adapter

__all__ = ["BlockStack", "adapted_model", "find_stack", "find_stacks", "find_library", "find_parts", "load_adapter"]
