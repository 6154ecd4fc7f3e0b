"""Vision towers: how their layers are found, and which of them a running call collects."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import _active_collector
from transformers.vision_utils import get_vision_window_index

from mmod.adapters.base import BlockStack, Part
from mmod.adapters.probe import PIXELS
from mmod.adapters.tokens import find_blocks
from mmod.adapters.transformers.families import is_decoder_layer, modules_around
from mmod.blocks import GRIDS, RowSource, host_class, parameters_of
from mmod.config import Grid

# The argument of models that read text, beside images or alone.
_TEXT = "input_ids"


def find_tower(model: nn.Module, name: str) -> tuple[str, nn.Module] | None:
    """Return the innermost model around a list of layers that takes images, by its name; None if it reads text too."""
    for path, module in modules_around(model, name):
        arguments = parameters_of(module)
        if _TEXT in arguments:
            return None
        if any(argument in arguments for argument in (*PIXELS, GRIDS)):
            return path, module
    return None


def vision_part(model: nn.Module) -> Part | None:
    """Return the first vision tower of a model, of transformers or of timm; None if it has none."""
    for name, module in model.named_modules():
        if module.__class__.__module__.startswith("timm.models."):
            return functools.partial(find_wrapped, name, module)
        if not isinstance(module, nn.ModuleList) or not len(module) or is_decoder_layer(module[0]):
            continue
        tower = find_tower(model, name)
        if tower is not None:
            return functools.partial(find_vision, *tower)
    return None


def row_source(tower: nn.Module, windows: bool) -> RowSource | None:
    """Return where a tower gets each patch of its images as a row, with their grid beside them.

    Args:
        windows: Layers see windows, and get the rows in the order of these.

    Returns:
        None if the tower gets none, or if nothing says in which order they are.
    """
    parameters = parameters_of(tower)
    side: int | None = getattr(tower, "spatial_merge_size", None)
    cuts = [module for module in tower.modules() if isinstance(module, (nn.Conv2d, nn.Conv3d))]
    if GRIDS not in parameters or not cuts or (side is None and "merge_sizes" not in parameters):
        return None
    order = None
    if windows:
        # The order of windows is known where the tower's code asks transformers' function for it.
        code = inspect.unwrap(host_class(tower).forward).__code__
        if get_vision_window_index.__name__ not in code.co_names:
            return None
        order = window_order
    return RowSource(tower, next(iter(parameters)), side, cuts[0].in_channels, order)


def find_vision(path: str, tower: nn.Module) -> BlockStack:
    """Return the layers of a vision tower, with their names in the model around it."""
    stack = find_blocks(tower, "transformers")
    assert stack.proof is not None
    reads = functools.partial(read_blocks, frozenset(stack.proof.read))
    rows = row_source(tower, bool(stack.proof.windows))
    return dataclasses.replace(stack.below(path), read_blocks=reads, rows=rows)


def window_order(tower: Any, grid: Grid) -> Tensor:
    """Return which row of a frame comes at each place, where those of a window follow each other (N).

    Args:
        grid: Rows and columns of patches.
    """
    side: int = tower.spatial_merge_size
    grids = torch.tensor([[1, *grid]])
    token_T, _ = get_vision_window_index(grids, side, tower.window_size, tower.patch_size)
    return (side**2 * token_T.unsqueeze(1) + torch.arange(side**2)).flatten()


def read_blocks(always: frozenset[int]) -> Collection[int] | None:
    """Return the numbers of the layers whose output the running call collects; None for all.

    transformers collects hidden states by hooks: those of all layers, or of some that a model reads features from.

    Args:
        always: Numbers of the layers whose output the model reads in every call.
    """
    # A graph reads no context variable, so transformers keeps a copy of it for compiled code.
    compiles = torch.compiler.is_compiling()
    collected = _active_collector.global_var if compiles else _active_collector.get()
    if not collected or "hidden_states" not in collected:
        return always
    selected = collected.get("_hidden_states_layers")
    # The first hidden state is the embedding in most models, so that number i is the output of layer i - 1.
    if selected is None:
        return None
    return always | set(selected) | {index - 1 for index in selected}


def find_wrapped(path: str, inner: nn.Module) -> BlockStack:
    """Return the blocks of a timm model that a model of transformers wraps."""
    from mmod.adapters import timm

    return timm.find_blocks(inner).below(path)
