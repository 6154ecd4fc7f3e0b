"""Change a model by methods in place, and undo it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from mmod.adapters import adapted_model, find_parts
from mmod.adapters.base import Part
from mmod.config import Plan, RoutingConfig
from mmod.methods.base import Method, Model, method_owners, methods_of, undo_, undo_last_
from mmod.methods.prepare import check_budget
from mmod.methods.route import (
    Route,
    assign_capacities,
    capacities,
    deciding_by,
    exact_capacities,
    is_routed,
    routed_blocks,
    routing_config,
    routing_configs,
)

__all__ = [
    "apply_",
    "capacities",
    "deciding_by",
    "freeze_dense",
    "is_routed",
    "route_",
    "routed_blocks",
    "routing_config",
    "routing_configs",
    "set_capacity",
    "undo_",
    "unroute_",
]

HowToRoute = RoutingConfig | Plan | None


def apply_(model: Model, method: Method | RoutingConfig | Plan | Mapping[str, Any]) -> Model:
    """Change a model in place by a method that makes it cheaper; `mmod.undo_` takes it back.

    Classes of single modules change and nothing is wrapped, so the keys of a dense state dict keep their names wherever
    the method keeps the weights.

    Args:
        model: A model of a supported library, not yet wrapped or compiled; peft may wrap it before or afterwards.
        method: A method of `mmod.methods`, a `RoutingConfig` or `Plan` for every part of the model, or the plain values
            of a method as configs hold them, `{"kind": "merge", "r": 8}`.

    Returns:
        The same model.

    Raises:
        TypeError: Not a module, or no method.
        ValueError: A model that the method cannot change, or that another one changed which it cannot follow. The model
            is then unchanged.

    Example:
        >>> import timm, mmod
        >>> model = mmod.apply_(timm.create_model("test_vit"), mmod.methods.Prune(keep=0.5, blocks=(1, 3)))
        >>> [method.kind for method in mmod.methods.methods_of(model)]
        ['prune']
    """
    if isinstance(method, (RoutingConfig, Plan)):
        return route_(model, method)
    if isinstance(method, Mapping):
        # Reading imports every method, some of which need timm.
        from mmod.methods.read import read_method

        method = read_method(method)
    if not isinstance(method, Method):
        raise TypeError(f"method must be a method of mmod.methods, a RoutingConfig or a Plan, got {method!r}")
    method.apply_(adapted_model(model))
    return model


def route_(model: Model, config: HowToRoute = None, **parts: HowToRoute) -> Model:
    """Route a model in place: its planned blocks run on the tokens their routers keep; see also `apply_`.

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
    inner = adapted_model(model)
    available = find_parts(inner)
    wanted = _by_part(list(available), config, parts)
    Route({name: _completed(value, available[name]) for name, value in wanted.items()}).apply_(inner)
    return model


def _completed(config: RoutingConfig | Plan, part: Part) -> RoutingConfig:
    if isinstance(config, RoutingConfig):
        return config
    depth = len(part().blocks)
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
    """Take routing back, and leave other methods in place: routers are dropped, blocks get their host's classes.

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
    for owner in method_owners(model):
        if isinstance(methods_of(owner)[-1], Route):
            undo_last_(owner)
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
    exact = exact_capacities(model, capacity)
    blocks = routed_blocks(model)
    for name, value in exact.items():
        check_budget(name, blocks[name].router, value)
    assign_capacities(model, capacity)
