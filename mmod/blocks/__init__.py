"""How do they run? A host's block on kept tokens only; knows no host library."""

from mmod.blocks.conversion import convert, host_class, is_converted, make_dense, make_important, make_routed
from mmod.blocks.decoder import ImportanceDecoderBlock, RoutedDecoderBlock
from mmod.blocks.hook import ModelHook, attach, detach_hooks, model_hooks
from mmod.blocks.routed import ImportanceBlock, ImportanceState, RoutedBlock, merge
from mmod.blocks.state import BlockCall, RoutedState, SharedScore, Span

__all__ = [
    "BlockCall",
    "ImportanceBlock",
    "ImportanceDecoderBlock",
    "ImportanceState",
    "ModelHook",
    "RoutedBlock",
    "RoutedDecoderBlock",
    "RoutedState",
    "SharedScore",
    "Span",
    "attach",
    "convert",
    "detach_hooks",
    "host_class",
    "is_converted",
    "make_dense",
    "make_important",
    "make_routed",
    "merge",
    "model_hooks",
]
