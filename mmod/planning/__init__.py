"""Which blocks, what capacity? Presets by method name, and capacity by depth."""

from typing import TYPE_CHECKING

from mmod.lazy import lazy_names

if TYPE_CHECKING:
    from mmod.planning.arank import LayerRanks, attention_ranks
    from mmod.planning.presets import preset
    from mmod.planning.schedules import ratio_decay


__all__ = ["LayerRanks", "attention_ranks", "preset", "ratio_decay"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "arank": ("LayerRanks", "attention_ranks"),
        "presets": ("preset",),
        "schedules": ("ratio_decay",),
    },
)
