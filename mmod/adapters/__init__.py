"""Where do hosts keep their blocks? One module per host library, imported when such a model is met."""

from mmod.adapters.base import HostModel, find_host, find_hosts, find_library, find_parts, load_adapter

__all__ = ["HostModel", "find_host", "find_hosts", "find_library", "find_parts", "load_adapter"]
