"""Where do hosts keep their blocks? One module per host library, imported when such a model is met."""

from mmod.adapters.base import HostModel
from mmod.adapters.find import adapted_model, find_host, find_hosts, find_library, find_parts, load_adapter

__all__ = ["HostModel", "adapted_model", "find_host", "find_hosts", "find_library", "find_parts", "load_adapter"]
