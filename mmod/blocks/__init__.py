"""Routed blocks: a host's block on the tokens that are kept; no host library is known here."""

# The one list of this package's names.
# ruff: noqa: F401
from mmod.blocks.branches import (
    Branch,
    SilencedHalves,
    Unchanged,
    Zero,
    make_halves,
    make_observed,
    warn_of_halves,
)
from mmod.blocks.call import Arguments, BlockCall, Halves
from mmod.blocks.conversion import (
    NO_SHELL,
    Container,
    HiddenClass,
    Mixin,
    Shell,
    convert,
    host_class,
    host_of,
    is_converted,
    make_dense,
    mixins_of,
    modules_of,
    parameters_of,
    remove,
)
from mmod.blocks.decoder import ImportanceDecoderBlock, RoutedDecoderBlock, SpannedDecoderBlock
from mmod.blocks.first_call import FirstCall, FirstGrid, OnceHook, has_replaced_forward
from mmod.blocks.grid import (
    GridHook,
    GridSource,
    PatchesOfPass,
    RowHook,
    RowSource,
    check_pixels,
    cut_patches,
    grid_of_map,
)
from mmod.blocks.hook import ModelHook, WholeBatchHook, attach, detach_hooks, model_hooks
from mmod.blocks.inner import BranchRunner
from mmod.blocks.owner import BlockOwner, OwnerState, disown, own_
from mmod.blocks.passes import Passes, ReadBlocks, SpanPass, StackCalls, recomputing
from mmod.blocks.record import Deciding, Record, Records, by_data, deciding_modules
from mmod.blocks.remaining import Remaining, Step
from mmod.blocks.routed import (
    ROUTED,
    BlockState,
    ConvertedBlock,
    ImportanceBlock,
    ImportanceState,
    RoutedBlock,
    RoutedMixins,
    RoutedState,
    SpannedBlock,
    make_importance,
    make_routed,
)
from mmod.blocks.rows import Execution, Rows
from mmod.blocks.segments import (
    GRIDS,
    MASKS,
    WINDOWS,
    FlatBlock,
    Segments,
    SegmentsBlock,
    SequenceImages,
    as_one_sequence,
    boundaries_of,
    map_rows,
    read_segments,
    split_rows,
)
from mmod.blocks.shell import KEY_BIAS, InterceptedBlock, NamedBlock, SuffixBlock, TupleBlock, UntupledBlock
from mmod.blocks.span import Span
