"""Routed blocks: a host's block on the tokens that are kept; no host library is known here."""

# The one list of this package's names.
# ruff: noqa: F401
from mmod.blocks.branches import (
    Branch,
    MethodWarning,
    ModuleRunner,
    SilencedHalves,
    make_halves,
    make_observed,
    noting_methods,
    return_input,
    return_zeros,
    warn_of_halves,
)
from mmod.blocks.call import Arguments, BlockCall, CallForm, Halves, name_arguments
from mmod.blocks.calls import ReadBlocks, SpanPass, StackCalls
from mmod.blocks.conversion import (
    NO_SHELL,
    Container,
    HiddenClass,
    Mixin,
    Shell,
    convert,
    copy_modules,
    host_class,
    host_of,
    is_converted,
    make_dense,
    mixins_of,
    modules_of,
    parameters_of,
    parameters_of_block,
    positional_names,
    remove,
)
from mmod.blocks.converted import ConvertedBlock
from mmod.blocks.execution import choose_execution
from mmod.blocks.first_call import compare_grid, has_replaced_forward, watch_first_call
from mmod.blocks.grid import GridSource, PictureSize, RowSource, grid_of_map, patches_of_pass, picture_sizes
from mmod.blocks.hook import ModelHook, attach, check_whole_batch, detach_hooks, model_hooks
from mmod.blocks.importance import ImportanceBlock, ImportanceState, make_importance
from mmod.blocks.owner import BlockOwner, OwnerState
from mmod.blocks.record import Deciding, Record, deciding_modules, make_records, recomputing
from mmod.blocks.remaining import Reduced, Remaining
from mmod.blocks.routed import RoutedBlock, RoutedState, SpannedBlock, make_routed
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
from mmod.blocks.shell import KEY_BIAS, FormBlock, InterceptedBlock
from mmod.blocks.span import BlockState, Span
