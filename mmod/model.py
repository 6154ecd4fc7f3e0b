"""Route a model in place, and undo it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import TypeVar

from torch import nn

from mmod.adapters import adapted_model, find_parts
from mmod.blocks import (
    RoutedBlock,
    RoutedState,
    SpanHook,
    StandingModule,
    attach,
    convert,
    detach_hooks,
    is_converted,
    make_dense,
    make_important,
    make_routed,
)
from mmod.config import Plan, RoutingConfig, rational
from mmod.prepare import check_budget, prepare
from mmod.routing import Router, share_score, unshare_score
from mmod.values import check_module

Model = TypeVar("Model", bound=nn.Module)
HowToRoute = RoutingConfig | Plan | None


def route_(model: Model, config: RoutingConfig | Plan | None = None, **parts: RoutingConfig | Plan | None) -> Model:
    """Route a model in place: its planned blocks run on the tokens their routers keep.

    Classes of single blocks change, nothing is wrapped: every key of the dense state dict keeps its name, and a dense
    checkpoint loads before or after (`strict=False` where routers have parameters).

    Args:
        model: A model of a supported library, not yet wrapped or compiled; peft may wrap it before or afterwards.
        config: How to route every part of the model, or a plan, see `RoutingConfig.from_plan`. None means
            `RoutingConfig()`, attention routing at capacity 0.5 in every other block, unless parts are named.
        parts: How to route single parts, by name, instead of `config`: `image` and `text` of a CLIP model; None leaves
            a part dense. With no `config`, parts that are not named stay dense.

    Returns:
        The same model.

    Raises:
        TypeError: Not a module, or neither a `RoutingConfig` nor a `Plan`.
        ValueError: Already routed, a part that does not exist or cannot be routed, or a plan that does not fit it. The
            model is then unchanged.

    Source: Raposo et al., arXiv 2404.02258 (MoD); Gadhikar et al., arXiv 2412.20875 (attention routing).

    Example:
        >>> import timm
        >>> model = route_(timm.create_model("test_vit"), RoutingConfig(capacity=0.25))
        >>> list(routed_blocks(model))
        ['blocks.1', 'blocks.3', 'blocks.5']
    """
    _route(adapted_model(model), config, parts)
    return model


def _route(model: nn.Module, config: HowToRoute, parts: Mapping[str, HowToRoute]) -> None:
    available = find_parts(model)
    given = _by_part(list(available), config, parts)
    stacks = {name: available[name]() for name in given}
    configs = {name: _completed(own, len(stacks[name].blocks)) for name, own in given.items()}
    for stack in stacks.values():
        if any(is_converted(block) for block in stack.blocks):
            raise ValueError(
                f"this {type(model).__name__} is already routed; call unroute_ first or set_capacity, or "
                "mmod.methods.undo_ where a method of mmod.methods changed it"
            )
    conversions = {name: prepare(stack, configs[name]) for name, stack in stacks.items()}
    hooks = [pair for name, stack in stacks.items() for pair in stack.hooks(configs[name])]
    for name, stack in stacks.items():
        for block, router, state in conversions[name]:
            if isinstance(state, RoutedState):
                assert router is not None
                make_routed(block, router, state, stack.mixins[0])
            else:
                make_important(block, state, stack.mixins[1])
        *path, block_list, _ = stack.names[0].split(".")
        owner = model.get_submodule(".".join(path))
        if configs[name].language.shared:
            share_score(owner, [router for _, router, _ in conversions[name] if router is not None])
        if any(state.shares for _, _, state in conversions[name]):
            hooks.append((owner, SpanHook(stack.tracker, block_list, stack.blocks, stack.hands_on)))
        for module, mixin, shared in stack.companions:
            convert(module, mixin, shared)
    for module, hook in hooks:
        attach(module, hook)
    model.routing_configs = {**vars(model).get("routing_configs", {}), **configs}  # type: ignore[assignment]


def _completed(config: RoutingConfig | Plan, depth: int) -> RoutingConfig:
    if isinstance(config, RoutingConfig):
        return config
    if config.depth != depth:
        raise ValueError(f"the plan is for {config.depth} blocks, and there are {depth}")
    return RoutingConfig.from_plan(config)


def _by_part(
    names: Sequence[str], config: HowToRoute, parts: Mapping[str, HowToRoute]
) -> dict[str, RoutingConfig | Plan]:
    unknown = sorted(set(parts) - set(names))
    if unknown:
        raise ValueError(f"this model has no part {', '.join(unknown)}; it has {', '.join(names)}")
    for name, value in {"config": config, **parts}.items():
        if value is not None and not isinstance(value, (RoutingConfig, Plan)):
            raise TypeError(f"{name} must be a RoutingConfig or a Plan, got {value!r}")
    if config is None and not parts:
        config = RoutingConfig()
    wanted = {name: parts.get(name, config) for name in names}
    given = {name: value for name, value in wanted.items() if value is not None}
    if not given:
        raise ValueError(f"nothing to route: give a config, or one for {' or '.join(names)}")
    return given


def unroute_(model: Model) -> Model:
    """Make a routed model dense again: its own classes and keys; routers are dropped.

    Args:
        model: A routed model.

    Returns:
        The same model.

    Raises:
        ValueError: Nothing in it is routed.

    Example:
        >>> import timm
        >>> model = unroute_(route_(timm.create_model("test_vit")))
        >>> type(model.blocks[1]).__name__
        'Block'
    """
    routed_blocks(model)
    detach_hooks(model)
    for module in list(model.modules()):
        if is_converted(module) and not isinstance(module, StandingModule):
            make_dense(module)
    for module in model.modules():
        if "routing_configs" in vars(module):
            del module.routing_configs
        unshare_score(module)
    return model


def freeze_dense(model: Model) -> Model:
    """Leave the routers of a routed model alone to learn; its other parameters take no gradient.

    Args:
        model: A routed model, possibly wrapped. `model.requires_grad_(True)` lets all of it learn again.

    Returns:
        The same model.

    Raises:
        ValueError: Nothing in it is routed, or its routers have no parameters.

    Source: Router-Tuning, He et al., arXiv 2410.13184.

    Example:
        >>> import timm
        >>> model = freeze_dense(route_(timm.create_model("test_vit"), RoutingConfig(router="linear")))
        >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad][:2]
        ['blocks.1.router.score.weight', 'blocks.3.router.score.weight']
    """
    routers = [block.router for block in routed_blocks(model).values()]
    learning = [parameter for router in routers for parameter in router.parameters()]
    if not learning:
        raise ValueError(f"router {routers[0].config.router.name!r} has no parameters that could learn")
    model.requires_grad_(False)
    for parameter in learning:
        parameter.requires_grad_()
    return model


def routed_blocks(model: nn.Module) -> dict[str, RoutedBlock]:
    """Return the routed blocks of a model by their module names, in order.

    Args:
        model: A routed model, possibly wrapped or compiled.

    Raises:
        ValueError: Nothing in it is routed.
    """
    check_module(model)
    found = {name: module for name, module in model.named_modules() if isinstance(module, RoutedBlock)}
    if not found:
        raise ValueError(f"nothing in this {type(model).__name__} is routed: call mmod.route_(model, config) first")
    return found


def set_capacity(model: nn.Module, capacity: float | Sequence[float] | Mapping[str, float]) -> None:
    """Give a routed model another budget; its weights stay.

    Capacity is no part of the state dict: copies made before, such as an EMA model, keep theirs. Set it there, too.

    Args:
        model: A routed model.
        capacity: Share of tokens kept: one number, one for each routed block in order, or some by module name.

    Raises:
        TypeError: A capacity that is no number.
        ValueError: A capacity outside [0, 1], a wrong number of them, a block that is not routed, or one that decides
            by a threshold, in evaluation at least, so that its kept share follows from the scores.

    Example:
        >>> import timm
        >>> model = route_(timm.create_model("test_vit"))
        >>> set_capacity(model, 0.25)
    """
    exact = _exact_capacities(model, capacity)
    blocks = routed_blocks(model)
    for name, value in exact.items():
        check_budget(name, blocks[name].router, value)
    _assign(model, exact)


def restore_capacities(model: nn.Module, capacity: Sequence[float] | Mapping[str, float]) -> None:
    """Give the routed blocks of a model the capacities they were saved with.

    Args:
        model: A routed model.
        capacity: Share of tokens kept: one for each routed block in order, or by module name.

    Raises:
        ValueError: A capacity outside [0, 1], a wrong number of them, or a block that is not routed.
    """
    _assign(model, _exact_capacities(model, capacity))


def _exact_capacities(model: nn.Module, capacity: float | Sequence[float] | Mapping[str, float]) -> dict[str, Fraction]:
    blocks = routed_blocks(model)
    if isinstance(capacity, Mapping):
        unknown = sorted(set(capacity) - set(blocks))
        if unknown:
            raise ValueError(f"{', '.join(unknown)} is not a routed block; routed are {', '.join(blocks)}")
        wanted = dict(capacity)
    elif isinstance(capacity, Sequence) and not isinstance(capacity, str):
        if len(capacity) != len(blocks):
            raise ValueError(f"{len(blocks)} blocks are routed, got {len(capacity)} capacities")
        wanted = dict(zip(blocks, capacity))
    else:
        wanted = dict.fromkeys(blocks, capacity)
    return {name: rational(value) for name, value in wanted.items()}


def _assign(model: nn.Module, exact: Mapping[str, Fraction]) -> None:
    blocks = routed_blocks(model)
    for name, value in exact.items():
        # A router may be wrapped, as by peft, around copies that are trained.
        for router in blocks[name].router.modules():
            if isinstance(router, Router):
                router.capacity = value


def capacities(model: nn.Module) -> dict[str, float]:
    """Return the capacity of every routed block by module name.

    Args:
        model: A routed model.

    Raises:
        ValueError: Nothing in it is routed.
    """
    return {name: float(block.router.capacity) for name, block in routed_blocks(model).items()}


@contextmanager
def deciding_by(model: nn.Module, change: Callable[[RoutingConfig], RoutingConfig]) -> Iterator[None]:
    """Let the routers of a model decide by another config as long as the context lasts; weights are the same.

    Args:
        model: A routed model. Passes in the context take no cache.
        change: From a router's config to another one that the same router can follow.

    Raises:
        ValueError: Nothing in it is routed.

    Example:
        >>> import timm
        >>> model = route_(timm.create_model("test_vit"), RoutingConfig(router="linear"))
        >>> with deciding_by(model, lambda config: config.replace(select={"threshold": 0.0})):
        ...     next(iter(routed_blocks(model).values())).router.config.select
        Threshold(threshold=0.0, min_tokens=0, max_tokens=None)
    """
    blocks = routed_blocks(model).values()
    # A router may be wrapped, as by peft, around copies that are trained.
    routers = [router for block in blocks for router in block.router.modules() if isinstance(router, Router)]
    own = [router.config for router in routers]
    # Blocks that agree share one object.
    others = {id(config): change(config) for config in own}
    try:
        for router, config in zip(routers, own):
            router.config = others[id(config)]
        yield
    finally:
        for router, config in zip(routers, own):
            router.config = config


def is_routed(model: nn.Module) -> bool:
    """Return whether any block of a model is routed.

    Args:
        model: Any model.
    """
    check_module(model)
    return any(isinstance(module, RoutedBlock) for module in model.modules())


def routing_config(model: nn.Module, part: str | None = None) -> RoutingConfig:
    """Return the config a model was routed with.

    Args:
        model: A routed model, possibly wrapped.
        part: The part meant, where parts were routed differently.

    Raises:
        ValueError: Nothing in it is routed, no such part is, or parts differ and none is named.
    """
    configs = routing_configs(model)
    if part is not None and part not in configs:
        raise ValueError(f"part {part!r} of this {type(model).__name__} is not routed; routed are {', '.join(configs)}")
    first, *others = configs.values() if part is None else [configs[part]]
    if any(other != first for other in others):
        raise ValueError(f"{' and '.join(configs)} were routed differently: name the part")
    return first


def routing_configs(model: nn.Module) -> dict[str, RoutingConfig]:
    """Return the configs a model was routed with, by the name of the routed part.

    Args:
        model: A routed model, possibly wrapped.

    Raises:
        ValueError: Nothing in it is routed, or several models in it were, each by a call of its own.
    """
    routed_blocks(model)
    found = [module.routing_configs for module in model.modules() if "routing_configs" in vars(module)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} models in this {type(model).__name__} were routed; ask each for its config")
    configs = found[0]
    assert isinstance(configs, dict)
    return dict(configs)
