"""Which blocks, what capacity? Presets by method name, and capacity by depth."""

from mmod.planning.arank import LayerRanks, attention_ranks
from mmod.planning.presets import PRESETS, preset
from mmod.planning.schedules import ratio_decay

__all__ = ["PRESETS", "LayerRanks", "attention_ranks", "preset", "ratio_decay"]
