"""Which blocks, what capacity? Presets by method name, and capacity by depth."""

from mmod.planning.presets import PRESETS, preset
from mmod.planning.schedules import ratio_decay

__all__ = ["PRESETS", "preset", "ratio_decay"]
