"""Preparation of a routing: routers and states, created and checked before the model changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from mmod.adapters import BlockStack
from mmod.blocks import (
    BlockCall,
    ImportanceState,
    Mixin,
    RoutedState,
    Span,
    check_pixels,
    choose_execution,
    is_converted,
    patches_of_pass,
)
from mmod.config import CHANGE, Merged, RoutingConfig, Threshold, presets, spelled
from mmod.config.plan import PlannedBlock
from mmod.routing import DecoderRouter, Router

# A block, its router, and its state; blocks that compute importance have no router.
Conversion = tuple[nn.Module, Router | None, RoutedState | ImportanceState]


def prepare(stack: BlockStack, config: RoutingConfig) -> list[Conversion]:
    """Return the conversions of a stack's blocks; on an error the model is unchanged."""
    rows = config.resolved(len(stack.blocks)).rows
    blocks = [row.block for row in rows]
    _check_part(stack, config, blocks)
    configs = _configs_by_block(config, rows)
    capacities = {row.block: row.capacity for row in rows}
    conversions: list[Conversion] = []
    for run in _runs(blocks):
        routers = {}
        calls = {}
        for index in run:
            calls[index] = stack.call_of(stack.blocks[index], configs[index])
            _check_block(stack, configs[index], index, calls[index])
            routers[index] = _make_router(stack, configs[index], index, capacities[index])
            if config.router.learns and config.router.shared and index != run[0]:
                # A weight that never scores would get no gradient.
                routers[index].score = None
            check_zero(stack.names[index], routers[index], routers[index].capacity)
        span, importance_state = _make_span(stack, config, run, tuple(routers.values()))
        for index in run:
            following = configs.get(index + 1)
            state = RoutedState(
                call=calls[index],
                execution=choose_execution(calls[index], configs[index]),
                span=span,
                # The dense block in front has position 0 where the span reads its importance.
                position=index - run[0] + (importance_state is not None),
                number=index,
                passes_rows=_takes_rows(following, configs[index]),
                observes=span is not None and importance_state is None and not span.scored_by_first and index == run[0],
            )
            conversions.append((stack.blocks[index], routers[index], state))
        if importance_state is not None:
            conversions.append((stack.blocks[run[0] - 1], None, importance_state))
    if stack.captions is not None:
        # The embedding has position 0.
        stack.captions.last = blocks[-1] + 1
    return conversions


def _runs(blocks: Sequence[int]) -> list[list[int]]:
    """Return the runs of consecutive blocks.

    Example:
        >>> _runs((1, 2, 5))
        [[1, 2], [5]]
    """
    runs: list[list[int]] = []
    for index in blocks:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs


def _make_span(
    stack: BlockStack, config: RoutingConfig, run: Sequence[int], routers: tuple[Router, ...]
) -> tuple[Span | None, ImportanceState | None]:
    """Return the span of a run of routed blocks, and the state of the dense block in front if it reads importance."""
    reads_importance = config.reads_importance(training=True)
    if not reads_importance and not config.scored_by_first:
        return None, None
    first = run[0]
    # A block that decides after its own attention reads the importance there.
    in_front = reads_importance and not config.merges_inside
    if in_front and first == 0:
        raise ValueError(
            f"block {first} needs the importance of a dense block before it, but none precedes it: keep block 0 "
            f"dense (routed are {[row.block for row in config.resolved(len(stack.blocks)).rows]})"
        )
    start = first - 1 if in_front else first
    names = stack.names[start : run[-1] + 1]
    # A router with a score of its own, which a loss compares with importance.
    for_loss = reads_importance and not config.router.reads_importance
    span = Span(stack.calls, names, scored_by_first=not reads_importance, for_loss=for_loss)
    if not in_front:
        return span, None
    # The last block before the routed ones, in which every token attends.
    call = stack.call_of(stack.blocks[start], None)
    if stack.language and config.importance != CHANGE and "attention" not in call.operators:
        raise ValueError(
            f"block {first} needs the importance of the block before it, but the linear attention of "
            f"{stack.names[start]} has no map: choose a router and losses that read no importance, such as "
            "router='linear'"
        )
    return span, ImportanceState(call=call, span=span, routers=routers, importance=config.importance)


def _check_part(stack: BlockStack, config: RoutingConfig, blocks: Sequence[int]) -> None:
    first = stack.names[0]
    if not stack.language and spelled(config.language):
        options = ", ".join(f"language.{name}" for name in spelled(config.language))
        for_images = presets("image")
        for_language = [name for name in presets() if name not in for_images]
        raise ValueError(
            f"{first} is no layer of a language model: remove the options {options}, or the preset that sets them. "
            f"Presets for language models alone are {', '.join(map(repr, for_language))}; presets for images are "
            f"{', '.join(map(repr, for_images))}"
        )
    if config.router.tied and not stack.language:
        raise ValueError(f"router.tied is for layers of a language model, and {first} is none")
    if config.router.learns and config.router.shared and stack.language:
        raise ValueError(f"router.shared is for images and captions, and {first} generates text")
    if config.router.per_image and stack.language:
        raise ValueError(
            f"a score per sequence is for images and captions: {first} generates text, so its router must decide per "
            "token"
        )
    if not config.protect_prefix and not config.router.per_image:
        for index in blocks:
            if stack.prefix and stack.call_of(stack.blocks[index], None).needs_prefix:
                raise ValueError(
                    "protect_prefix must be True: rotary positions need the prefix tokens first in every block"
                )
    if config.router.reads_frames and not stack.language:
        raise ValueError(
            f"router {config.router.name!r} compares frames of videos in language models: {first} is no layer of one"
        )
    # A language model reads the pixels of its tower's patches, and some towers get pixels in rows.
    elsewhere = config.router.reads_pixels and (stack.language or stack.rows is not None)
    if config.router.reads_grid and stack.grid is None and not elsewhere:
        raise ValueError(
            f"router {config.router.name!r} needs the rows and columns of an image's patches, which {first} does not "
            "show: it is no block of an image model, or of one whose patches are not made by one projection; or its "
            "patches are rows in an order that the tower does not tell, by a spatial_merge_size and, if blocks see "
            "windows, by calling transformers' get_vision_window_index"
        )
    if config.router.reads_pixels and stack.grid is not None:
        check_pixels(stack.grid, config.router, first)
    elif config.router.reads_pixels and stack.rows is not None:
        config.router.see(torch.zeros(1, 1, 1, stack.rows.channels, 1), None)
    if config.router.reads_grid and stack.prefix and not config.protect_prefix:
        raise ValueError(
            f"protect_prefix must be True: router {config.router.name!r} reads the grid of patches, and {stack.prefix} "
            f"leading tokens of {first} are none"
        )
    importance = config.importance if config.wants_importance(training=True) else ""
    if importance == "class_token" and not stack.class_token:
        raise ValueError(f"router.importance='class_token': the tokens of {first} do not begin with a class token")
    if importance in ("last_token", "vision_tower") and not stack.language:
        raise ValueError(f"router.importance={importance!r} is for language models: {first} is no layer of one")


def _configs_by_block(config: RoutingConfig, rows: Sequence[PlannedBlock]) -> dict[int, RoutingConfig]:
    """Return the config of every routed block; blocks with equal configs share one object."""
    options: list[dict[str, Any]] = [{"operator": row.operator, "context": row.context} for row in rows]
    if isinstance(config.select, Threshold) and isinstance(config.select.threshold, tuple):
        for fields, threshold in zip(options, config.select.threshold):
            fields["select"] = dataclasses.replace(config.select, threshold=threshold)
    shared = [config]
    configs = {}
    for row, fields in zip(rows, options):
        chosen = next((other for other in shared if _has(other, fields)), None) or config.replace(**fields)
        if chosen not in shared:
            shared.append(chosen)
        configs[row.block] = chosen
    return configs


def _has(config: RoutingConfig, fields: dict[str, Any]) -> bool:
    return all(getattr(config, name) == value for name, value in fields.items())


def _takes_rows(following: RoutingConfig | None, config: RoutingConfig) -> bool:
    """Return whether the next block, None for a dense one, can run on the rows of a block."""
    if following is None or not config.passes_rows:
        return False
    # Blocks that decide by another threshold choose among the rows where the others joined them.
    return following is config or (config.joins and following.passes_rows)


def _check_block(stack: BlockStack, config: RoutingConfig, index: int, call: BlockCall) -> None:
    """Raise a ValueError that names the option of a config that a block does not support, and says why."""
    name = stack.names[index]
    block = stack.blocks[index]
    if config.context not in call.contexts:
        raise ValueError(
            f"context={config.context!r} is not possible in {name}, which supports {', '.join(call.contexts)}: 'all' "
            "needs fused attention in a block of timm or open_clip or in a decoder layer"
        )
    if config.operator not in ("block", *call.operators):
        raise ValueError(
            f"operator={config.operator!r} is not possible in {name}, which has no such residual branch; possible are "
            f"{', '.join(('block', *call.operators))}"
        )
    if config.joins and (stack.language or stack.sequence is not None):
        raise ValueError(
            f"skipped={spelled(config.skipped)!r} is not possible in {name}, which reads text: only tokens of images "
            "can be grouped"
        )
    if isinstance(config.skipped, Merged) and not call.weighs_keys:
        raise ValueError(f"skipped='merge' is not possible in {name}, whose attention takes no bias for group sizes")
    if config.merges_inside and call.halves is None:
        raise ValueError(
            f"skipped.before='mlp' is not possible in {name}, whose attention and MLP cannot run separately; use "
            "before='block'"
        )
    # Modules of other methods in the block, such as a mixture of experts.
    others = [module for module in block.modules() if isinstance(module, Mixin)]
    if others:
        _check_others(name, block, config, call, others)


def _check_others(name: str, block: nn.Module, config: RoutingConfig, call: BlockCall, others: Sequence[Mixin]) -> None:
    """Raise a ValueError that names the option that does not fit the modules of other methods in a block."""
    in_training = any(module.chooses_together(True) for module in others)
    in_evaluation = any(module.chooses_together(False) for module in others)
    together = in_training or in_evaluation
    is_mixture = block.get_submodule(call.operators["mlp"]) in others
    if is_mixture and (config.operator == "mlp" or (config.merges_inside and together)):
        raise ValueError(
            f"operator='mlp' or skipped.before='mlp' is not possible in {name}, whose MLP is a mixture of experts: "
            "route its block, or give it experts that do nothing"
        )
    branch = call.operators.get(str(config.operator))
    if branch is not None and is_converted(block.get_submodule(branch)):
        raise ValueError(
            f"operator={config.operator!r} is not possible in {name}, whose residual branch another method has "
            "changed: route its block"
        )
    gate_on = config.language.gate_on
    if is_mixture and gate_on != "update":
        # Only decoder layers have an option of language models.
        weighed = cast(Any, call).branches(block, gate_on)
        if any(branch in others for branch in weighed):
            raise ValueError(
                f"gate_on={gate_on!r} is not possible in {name}, whose MLP is a mixture of experts with its own gates: "
                "use gate_on='update'"
            )
    if together and config.select != "topk" and not config.router.per_image:
        raise ValueError(
            f"select=Threshold is not possible in {name}, where experts share the kept tokens of an image: the number "
            "of kept tokens would vary"
        )
    if in_evaluation and config.language.inference_threshold is not None:
        raise ValueError(
            f"inference_threshold is not possible in {name}, where experts share the kept tokens in evaluation too: "
            "give them choice='score', 'predictor' or 'tokens'"
        )


def check_zero(name: str, router: Router, capacity: Fraction) -> None:
    """Refuse a capacity of 0 in a block where no token is always kept, or skipped tokens join kept ones."""
    if not capacity and (router.config.joins or not router.always_keeps):
        raise ValueError(
            f"capacity 0 leaves {name} no token to run on, or for skipped ones to join: there it must be in (0, 1]"
        )


def _make_router(stack: BlockStack, config: RoutingConfig, index: int, capacity: float) -> Router:
    block = stack.blocks[index]
    # The first floating-point weight: those of a quantized block are integers.
    parameter = next(weight for weight in block.parameters() if weight.is_floating_point())
    make = DecoderRouter if stack.language else Router
    router = make(
        config,
        dim=stack.dim,
        block=index,
        capacity=capacity,
        prefix=stack.prefix if config.protect_prefix and not config.router.per_image else 0,
        device=parameter.device,
        dtype=parameter.dtype,
        patches=None if stack.grid is None and stack.rows is None else partial(patches_of_pass, stack.calls),
    )
    return router.train(block.training)


def check_new_capacity(name: str, router: Router, capacity: Fraction) -> None:
    """Refuse a new capacity that has no effect or keeps no token."""
    check_zero(name, router, capacity)
    config = router.config
    if config.select != "topk":
        raise ValueError(
            f"{name} keeps the tokens whose scores reach a threshold, so no capacity applies: call mmod.unroute_ and "
            "mmod.route_ with another mmod.RoutingConfig(select=mmod.Threshold(...)), or with select='topk' and a "
            "capacity"
        )
    if config.language.inference_threshold is not None and router.capacity != capacity:
        raise ValueError(
            f"in evaluation {name} keeps tokens by inference_threshold={config.language.inference_threshold}, whatever "
            "the capacity: route with another capacity, or with inference_threshold=None"
        )
