"""Old name of `mmod.analysis`."""

from mmod.lazy import moved_module

moved_module(__name__, "mmod.analysis")
