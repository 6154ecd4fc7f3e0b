"""Old name of `mmod.registry.timm`."""

from mmod.lazy import moved_module

moved_module(__name__, "mmod.registry.timm")
