"""Preparation of a routing: routers and states, created and checked before the model changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from functools import partial

from torch import nn

from mmod.adapters import BlockStack
from mmod.blocks import (
    BlockCall,
    ImportanceState,
    Mixin,
    RoutedState,
    Span,
    choose_execution,
    is_converted,
    patches_of_pass,
)
from mmod.config import CHANGE, Merged, RoutingConfig, Threshold, presets, spelled
from mmod.config.plan import PlannedBlock
from mmod.routing import DecoderRouter, Router

# A block, its router, and its state; blocks that compute importance have no router.
Conversion = tuple[nn.Module, Router | None, RoutedState | ImportanceState]

# Kept tokens are whole numbers, and how many tokens an image has is known in the pass alone, which refuses any rise in
# them. A share that rises by this much keeps more of 4 x 4 patches or more; less may be lost in rounding: 0.5 and 0.503
# of 101 tokens are both 50.
_VISIBLE_RISE = 1 / 16


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
            passes_rows = _takes_rows(following, configs[index])
            if passes_rows and config.joins and config.select == "topk":
                _check_rise(stack.names[index], config, capacities[index], capacities[index + 1])
            state = RoutedState(
                call=calls[index],
                execution=choose_execution(calls[index], configs[index]),
                span=span,
                # The dense block in front has position 0 where the span reads its importance.
                position=index - run[0] + (importance_state is not None),
                number=index,
                passes_rows=passes_rows,
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
        other = ""
        # That router takes neither losses nor gates, which scores that learn have.
        if not stack.language and not config.router.learns:
            other = ", or choose by router='redundancy', which reads none"
        routed = [row.block for row in config.resolved(len(stack.blocks)).rows]
        raise ValueError(
            f"block {first} needs the importance of a dense block before it, but none precedes it: keep block 0 "
            f"dense, as blocks='late' does{other} (routed are {routed})"
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
    """Raise a ValueError that names what a config asks of a part of another kind."""
    first = stack.names[0]
    score = config.router
    importance = config.importance
    # What language models have, and images lack.
    for_text = [f"language.{name}" for name in spelled(config.language)]
    if score.tied:
        for_text.append("router.tied")
    if score.reads_frames:
        for_text.append(f"router={score.name!r}, which compares frames of videos")
    if config.wants_importance(training=True) and importance in ("last_token", "vision_tower"):
        for_text.append(f"router.importance={importance!r}")
    # What images have, and language models lack.
    for_images: list[str] = []
    if score.learns and score.shared:
        for_images.append("router.shared")
    if score.per_image:
        for_images.append("router.per='sequence'")
    if not stack.language and for_text:
        others = presets("image")
        own = [name for name in presets() if name not in others]
        raise ValueError(
            f"{first} is no layer of a language model: remove {', '.join(for_text)}, or the preset that sets it. "
            f"Presets for language models alone are {', '.join(map(repr, own))}; presets for images are "
            f"{', '.join(map(repr, others))}"
        )
    if stack.language and for_images:
        raise ValueError(
            f"{' and '.join(for_images)} is for images and captions, and {first} generates text, one token at a time"
        )
    unprotected = not config.protect_prefix and bool(stack.prefix)
    if unprotected and score.reads_grid:
        raise ValueError(
            f"protect_prefix must be True: router {score.name!r} reads the grid of patches, and {stack.prefix} leading "
            f"tokens of {first} are none"
        )
    rotary = unprotected and any(stack.call_of(stack.blocks[index], None).needs_prefix for index in blocks)
    if rotary and not score.per_image:
        raise ValueError("protect_prefix must be True: rotary positions need the prefix tokens first in every block")
    if importance == "class_token" and not stack.class_token:
        raise ValueError(f"router.importance='class_token': the tokens of {first} do not begin with a class token")
    _check_grid(stack, config, first)


def _check_grid(stack: BlockStack, config: RoutingConfig, first: str) -> None:
    """Raise a ValueError unless a part shows what the score reads of its images."""
    score = config.router
    # A language model reads the pixels of its tower's patches, and some towers get pixels in rows.
    elsewhere = score.reads_pixels and (stack.language or stack.rows is not None)
    if score.reads_grid and stack.grid is None and not elsewhere:
        raise ValueError(
            f"router {score.name!r} needs the rows and columns of an image's patches, which {first} does not show: it "
            "is no block of an image model, or of one whose patches are not made by one projection; or its patches are "
            "rows in an order that the tower does not tell, by a spatial_merge_size and, if blocks see windows, by "
            "calling transformers' get_vision_window_index"
        )
    source = stack.grid or stack.rows
    if score.reads_pixels and source is not None:
        source.check(score, first)


def _check_rise(name: str, config: RoutingConfig, capacity: float, following: float) -> None:
    """Raise a ValueError if the block behind one, which chooses among its kept tokens, keeps more of any image."""
    if following - capacity >= _VISIBLE_RISE:
        raise ValueError(
            f"skipped={spelled(config.skipped)!r} lets capacity fall from block to block and not rise: "
            f"{float(capacity)} in {name}, {float(following)} in the next"
        )


def _configs_by_block(config: RoutingConfig, rows: Sequence[PlannedBlock]) -> dict[int, RoutingConfig]:
    """Return the config of every routed block; blocks with equal configs share one object."""
    configs: dict[int, RoutingConfig] = {}
    for number, row in enumerate(rows):
        select = config.select
        if isinstance(select, Threshold) and isinstance(select.threshold, tuple):
            select = dataclasses.replace(select, threshold=select.threshold[number])
        own = config.replace(operator=row.operator, context=row.context, select=select)
        for other in (config, *configs.values()):
            if other == own:
                own = other
                break
        configs[row.block] = own
    return configs


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
    # Modules of other methods in the block.
    others = [module for module in block.modules() if isinstance(module, Mixin)]
    unfit = _unfit(stack, config, call)
    if unfit is None and others:
        unfit = _unfit_with(block, config, call, others)
    if unfit is not None:
        option, reason = unfit
        raise ValueError(f"{option} is not possible in {name}, {reason}")


def _unfit(stack: BlockStack, config: RoutingConfig, call: BlockCall) -> tuple[str, str] | None:
    """Return an option that a host's block does not support, and why; None for none."""
    if config.context not in call.contexts:
        return f"context={config.context!r}", (
            f"which supports {', '.join(call.contexts)}: 'all' needs fused attention in a block of timm or open_clip "
            "or in a decoder layer"
        )
    operators = ("block", *call.operators)
    if config.operator not in operators:
        return f"operator={config.operator!r}", (
            f"which has no such residual branch; possible are {', '.join(operators)}"
        )
    if config.joins and (stack.language or stack.sequence is not None):
        return f"skipped={spelled(config.skipped)!r}", "which reads text: only tokens of images can be grouped"
    if isinstance(config.skipped, Merged) and not call.weighs_keys:
        return "skipped='merge'", "whose attention takes no bias for group sizes"
    if config.merges_inside and call.halves is None:
        return "skipped.before='mlp'", "whose attention and MLP cannot run separately; use before='block'"
    return None


def _unfit_with(
    block: nn.Module, config: RoutingConfig, call: BlockCall, others: Sequence[Mixin]
) -> tuple[str, str] | None:
    """Return an option that does not fit the modules of other methods in a block, and why; None for none."""
    in_evaluation = any(module.mod_chooses_together(False) for module in others)
    together = in_evaluation or any(module.mod_chooses_together(True) for module in others)
    mlp_changed = block.get_submodule(call.operators["mlp"]) in others
    methods = [module.mod_method for module in others if module.mod_method is not None]
    kinds = ", ".join(dict.fromkeys(repr(method.kind) for method in methods))
    branch = call.operators.get(str(config.operator))
    if branch is not None and is_converted(block.get_submodule(branch)):
        return f"operator={config.operator!r}", "whose residual branch another method has changed: route its block"
    if mlp_changed and config.merges_inside and together:
        return "skipped.before='mlp'", f"in whose MLP {kinds} chooses among the tokens: use before='block'"
    gate_on = config.language.gate_on
    if mlp_changed and gate_on != "update" and any(one in others for one in call.branches(block, gate_on)):
        return f"gate_on={gate_on!r}", f"whose MLP {kinds} weighs already: use gate_on='update'"
    if together and config.select != "topk" and not config.router.per_image:
        return "select=Threshold", (
            f"where {kinds} chooses among the kept tokens of an image: the number of kept tokens would vary"
        )
    if in_evaluation and config.language.inference_threshold is not None:
        return "inference_threshold", (
            f"where {kinds} chooses among the kept tokens in evaluation too: apply it so that it decides each token "
            "alone, as experts do with choice='score', 'predictor' or 'tokens'"
        )
    return None


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
    prefix = 0
    # Whole images are kept or skipped with their leading tokens.
    if config.protect_prefix and not config.router.per_image:
        prefix = stack.prefix
    patches = None
    if stack.grid is not None or stack.rows is not None:
        patches = partial(patches_of_pass, stack.calls)
    router = make(
        config,
        dim=stack.dim,
        block=index,
        capacity=capacity,
        prefix=prefix,
        device=parameter.device,
        dtype=parameter.dtype,
        patches=patches,
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
