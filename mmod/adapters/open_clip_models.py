"""Old name of `mmod.registry.open_clip`."""

from mmod.lazy import moved_module

moved_module(__name__, "mmod.registry.open_clip")
