"""Routed blocks: a host's block on the tokens that are kept; no host library is known here."""

# The one list of this package's names.
# ruff: noqa: F401
from mmod.blocks.branches import Branch
from mmod.blocks.call import BlockCall, Halves
from mmod.blocks.conversion import (
    StandingModule,
    convert,
    host_class,
    host_of,
    is_converted,
    make_dense,
    make_routed,
)
from mmod.blocks.decoder import ImportanceDecoderBlock, RoutedDecoderBlock
from mmod.blocks.grid import Grid, GridHook, GridOfPass, GridSource, grid_of_map
from mmod.blocks.hook import ModelHook, SpanHook, attach, detach_hooks, model_hooks
from mmod.blocks.record import Deciding, Record, Records, deciding_modules
from mmod.blocks.routed import ImportanceBlock, ImportanceState, RoutedBlock, RoutedState
from mmod.blocks.rows import Execution, Rows
from mmod.blocks.span import Pass, Passes, Span, SpanPass, StackCalls, recomputing
