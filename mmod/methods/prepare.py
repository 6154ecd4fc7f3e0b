"""Preparation of a routing: routers and states, created and checked before the model changes."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any, cast

from torch import nn

from mmod.adapters import BlockStack
from mmod.blocks import BlockCall, GridOfPass, ImportanceState, RoutedState, StandingModule
from mmod.config import Merged, Plan, RoutingConfig, spelled
from mmod.routing import Router

# A block, its router, and its state; blocks that compute importance have no router.
Conversion = tuple[nn.Module, Router | None, RoutedState | ImportanceState]


def prepare(stack: BlockStack, config: RoutingConfig) -> list[Conversion]:
    """Return the conversions of a stack's blocks; on an error the model is unchanged."""
    plan = config.plan(len(stack.blocks))
    _check_part(stack, config, plan)
    attends = config.reads_importance(training=True)
    training_only = attends and not config.router.reads_importance
    shares, captioned = attends or config.scored_by_first, bool(stack.companions)
    common = {"captioned": captioned, "training_only": training_only}
    # A block that decides after its attention reads the importance there.
    observes = attends and config.merges_inside
    before = attends and not observes
    first = plan.blocks[0] - 1 if before else plan.blocks[0]
    readers: dict[int, list[Router]] = {}
    conversions: list[Conversion] = []
    configs, start = _configs_by_block(config, plan), 0
    for index, capacity in zip(plan.blocks, plan.capacities):
        block, block_config = stack.blocks[index], configs[index]
        call = stack.call_of(block, block_config)
        _check_block(stack, block_config, index, call)
        # Consecutive routed blocks are one span.
        start = start if index - 1 in plan.blocks else index
        if before and start == 0:
            raise ValueError(
                f"block {index} needs the importance of a dense block before it, but none precedes it: keep block 0 "
                f"dense (routed are {list(plan.blocks)})"
            )
        router = _make_router(stack, block_config, index, capacity)
        if config.router.learns and config.router.shared and index != start:
            # A weight that never scores would get no gradient.
            router.score = None
        check_zero(stack.names[index], router, router.capacity)
        readers.setdefault(start, []).append(router)
        state = RoutedState(
            call,
            stack.tracker,
            start if shares else None,
            writes=(config.scored_by_first or observes) and index == start,
            way=stack.mixins[0].choose_way(call, block_config),
            hands_on=configs.get(index + 1) is block_config and block_config.hands_on,
            observes=observes and index == start,
            begins=index == first and not captioned,
            ends=index == plan.blocks[-1],
            **common,
        )
        conversions.append((block, router, state))
    for start, routers in readers.items() if before else ():
        # The dense block before the span is the last one that updates the importance of every token.
        block = stack.blocks[start - 1]
        call, begins = stack.call_of(block, None), start - 1 == first and not captioned
        important = ImportanceState(
            call, stack.tracker, start, routers=tuple(routers), average=config.importance, begins=begins, **common
        )
        conversions.append((block, None, important))
    return conversions


def _check_part(stack: BlockStack, config: RoutingConfig, plan: Plan) -> None:
    first = stack.names[0]
    if not stack.language and spelled(config.language):
        options = ", ".join(f"language.{name}" for name in spelled(config.language))
        raise ValueError(f"{first} is no layer of a language model: remove the options {options}")
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
        for index in plan.blocks:
            if stack.prefix and stack.call_of(stack.blocks[index], None).needs_prefix:
                raise ValueError(
                    "protect_prefix must be True: rotary positions need the prefix tokens first in every block"
                )
    if config.router.reads_grid and stack.grid is None:
        raise ValueError(
            f"router {config.router.name!r} needs the rows and columns of an image's patches, which {first} does not "
            "show: it is no block of an image model, or of one whose patches are not made by one projection"
        )
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


def _configs_by_block(config: RoutingConfig, plan: Plan) -> dict[int, RoutingConfig]:
    """Return the config of every routed block; blocks with equal configs share one object."""
    by_options = {(config.operator, config.context): config}
    configs = {}
    for index, options in zip(plan.blocks, zip(plan.operators, plan.contexts)):
        if options not in by_options:
            by_options[options] = config.replace(operator=options[0], context=options[1])
        configs[index] = by_options[options]
    return configs


def _check_block(stack: BlockStack, config: RoutingConfig, index: int, call: BlockCall) -> None:
    """Raise a ValueError that names the option of a config that a block does not support, and says why."""
    name = stack.names[index]
    for refused, option, reason in _refusals(stack, config, stack.blocks[index], call):
        if refused:
            raise ValueError(f"{option} is not possible in {name}, {reason}")


def _refusals(
    stack: BlockStack, config: RoutingConfig, block: nn.Module, call: BlockCall
) -> Iterator[tuple[object, str, str]]:
    """Yield whether an option is refused, the option, and the reason."""
    context, operator, gate_on = f"context={config.context!r}", f"operator={config.operator!r}", config.language.gate_on
    reason = "'all' needs fused attention in a block of timm or open_clip or in a decoder layer"
    yield config.context not in call.contexts, context, f"which supports {', '.join(call.contexts)}: {reason}"
    reason = f"which has no such residual branch; possible are {', '.join(('block', *call.operators))}"
    yield config.operator not in ("block", *call.operators), operator, reason
    reason = "which reads text: only tokens of images can be grouped"
    reads_text = stack.language or stack.sequence is not None
    yield config.joins and reads_text, f"skipped={spelled(config.skipped)!r}", reason
    merges = isinstance(config.skipped, Merged) and not call.weighs_keys
    yield merges, "skipped='merge'", "whose attention takes no bias for group sizes"
    reason = "as only timm blocks with the MLP after attention support it; use before='block'"
    yield config.merges_inside and call.halves is None, "skipped.before='mlp'", reason
    # Another method's module in the block, such as a mixture of experts.
    standing = [module for module in block.modules() if isinstance(module, StandingModule)]
    in_training, in_evaluation = (any(module.chooses_together(mode) for module in standing) for mode in (True, False))
    together = in_training or in_evaluation
    mixture = bool(standing) and block.get_submodule(call.operators["mlp"]) in standing
    reason = "whose MLP is a mixture of experts: route its block, or give it experts that do nothing"
    apart = config.operator == "mlp" or (config.merges_inside and together)
    yield mixture and apart, "operator='mlp' or skipped.before='mlp'", reason
    weighed = cast(Any, call).branches(block, gate_on) if mixture and gate_on != "update" else ()
    reason = "whose MLP is a mixture of experts with its own gates: use gate_on='update'"
    yield any(branch in standing for branch in weighed), f"gate_on={gate_on!r}", reason
    reason = "where experts share the kept tokens of an image: the number of kept tokens would vary"
    yield together and config.select != "topk" and not config.router.per_image, "select=Threshold", reason
    reason = "where experts share the kept tokens in evaluation too: give them choice='score', 'predictor' or 'tokens'"
    yield in_evaluation and config.language.inference_threshold is not None, "inference_threshold", reason


def check_zero(name: str, router: Router, capacity: Fraction) -> None:
    """Refuse a capacity of 0 in a block where no token is always kept."""
    if not capacity and not router.always_keeps:
        raise ValueError(f"capacity 0 leaves {name} no token to run on: there it must be in (0, 1]")


def _make_router(stack: BlockStack, config: RoutingConfig, index: int, capacity: float) -> Router:
    block = stack.blocks[index]
    # The first floating-point weight: those of a quantized block are integers.
    parameter = next(weight for weight in block.parameters() if weight.is_floating_point())
    router = stack.router(
        config,
        dim=stack.dim,
        block=index,
        capacity=capacity,
        prefix=stack.prefix if config.protect_prefix and not config.router.per_image else 0,
        device=parameter.device,
        dtype=parameter.dtype,
        grid=None if stack.grid is None else GridOfPass(stack.tracker),
    )
    return router.train(block.training)


def check_budget(name: str, router: Router, capacity: Fraction) -> None:
    """Refuse a new capacity that has no effect or keeps no token."""
    check_zero(name, router, capacity)
    config = router.config
    if config.select != "topk":
        raise ValueError(
            f"{name} keeps the tokens whose scores reach a threshold, so no capacity applies: call mmod.unroute_ and "
            "mmod.route_ with another RoutingConfig(select=mmod.Threshold(...)), or with select='topk' and a capacity"
        )
    if config.language.inference_threshold is not None and router.capacity != capacity:
        raise ValueError(
            f"in evaluation {name} keeps tokens by inference_threshold={config.language.inference_threshold}, whatever "
            "the capacity: route with another capacity, or with inference_threshold=None"
        )
