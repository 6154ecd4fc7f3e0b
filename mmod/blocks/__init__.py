"""How do they run? A host's block on kept tokens only; knows no host library."""

from mmod.blocks.conversion import convert, host_class, is_converted, make_dense, make_important, make_routed
from mmod.blocks.routed import ImportanceBlock, ImportanceState, RoutedBlock, merge
from mmod.blocks.state import BlockHost, Handover, RoutedState

__all__ = [
    "BlockHost",
    "Handover",
    "ImportanceBlock",
    "ImportanceState",
    "RoutedBlock",
    "RoutedState",
    "convert",
    "host_class",
    "is_converted",
    "make_dense",
    "make_important",
    "make_routed",
    "merge",
]
