"""Apply methods to a model in place, and undo them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from mmod.adapters import adapted_model, find_parts
from mmod.adapters.base import Part
from mmod.adapters.tokens import Tokens, declared, share_proofs
from mmod.blocks import copy_modules
from mmod.config import LAYOUTS, PRESETS, ROUTING_FIELDS, SCORES, RoutingConfig, place_of, preset, preset_arguments
from mmod.methods.base import Method, Model, method_owners, own_methods, undo_last_
from mmod.methods.prepare import check_new_capacity
from mmod.methods.route import Route, assign_capacities, exact_capacities, routed_blocks
from mmod.names import similar
from mmod.values import brief, check_value

HowToRoute = RoutingConfig | str | None


def apply_(
    model: Model, method: Method | RoutingConfig | str | Mapping[str, object], *, tokens: Tokens | None = None
) -> Model:
    """Apply a method to a model in place, which makes it cheaper; `mmod.undo_` undoes it.

    The classes of single modules change and nothing is wrapped, so weights keep their names in the state dict unless
    the method replaces them.

    Args:
        model: A model of a supported library, not yet wrapped or compiled; it may be a peft model, or become one later.
        method: A method of `mmod.methods`, or its plain values as in configs, `{"kind": "merge", "r": 8}`. A
            `RoutingConfig` or the name of a preset routes every part of the model.
        tokens: Blocks and prefix of a model that no adapter knows, if its structure does not show them.

    Raises:
        TypeError: Not a module, or no method.
        ValueError: The method does not support the model, or cannot follow a method applied before. The model is then
            unchanged.

    Example:
        >>> import timm, mmod
        >>> model = mmod.apply_(timm.create_model("test_vit"), mmod.methods.Prune(keep=0.5, blocks=(1, 3)))
        >>> [method.kind for method in mmod.methods.methods_of(model)]
        ['prune']
    """
    if isinstance(method, (RoutingConfig, str)):
        return route_(model, method, tokens=tokens)
    if isinstance(method, Mapping):
        # Reading imports every method, and early exit the compiler.
        from mmod.methods.read import read_method

        method = read_method(method)
    if not isinstance(method, Method):
        raise TypeError(f"method must be a method of mmod.methods or a RoutingConfig, got {brief(method)}")
    change_(model, method, tokens)
    caution = method.caution(adapted_model(model))
    if caution:
        warnings.warn(caution, stacklevel=2)
    return model


def copy_of(model: Model) -> Model:
    """Return a copy of a model that shares its weights."""
    # With the weights in its memo, the modules alone are copied.
    shared: dict[int, object] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    copied = copy_modules(model, shared)
    share_proofs(model, copied)
    return copied


def change_(model: Model, method: Method, tokens: Tokens | None = None) -> Model:
    """Apply a method as `apply_` does, without its warnings: searches and studies know what they try."""
    inner = adapted_model(model)
    with declared(inner, tokens):
        method.apply_(inner)
    return model


def route_(
    model: Model,
    config: HowToRoute = None,
    *,
    tokens: Tokens | None = None,
    training_only: bool | None = None,
    **parts: HowToRoute,
) -> Model:
    """Route a model in place: planned blocks run on the tokens that their routers keep; see also `apply_`.

    The classes of single blocks change and nothing is wrapped, so all weights keep their names in the state dict. A
    dense checkpoint loads before or after routing (with `strict=False` if routers have parameters).

    Args:
        model: A model of a supported library, not yet wrapped or compiled; it may be a peft model, or become one later.
        config: How to route every part of the model; or the name of a preset, see `mmod.presets`.
        tokens: Blocks and prefix of a model that no adapter knows, if its structure does not show them.
        training_only: Whether the model is routed in training mode alone: `eval()` makes it dense, with its host's
            classes and keys, and `train()` routes it again. None leaves it to the configs.
        parts: Configs by part, such as `image` and `text` of a CLIP model, which override `config`; None leaves a part
            dense. Without `config`, all other parts stay dense.

    Raises:
        TypeError: Not a module, or neither a `RoutingConfig` nor a name.
        ValueError: The model is already routed, a part or preset does not exist or cannot be routed, or a plan does not
            fit it. The model is then unchanged.

    Source: Raposo et al., arXiv 2404.02258 (MoD); Gadhikar et al., arXiv 2412.20875 (attention routing).

    Example:
        >>> import timm
        >>> model = route_(timm.create_model("test_vit"), RoutingConfig(capacity=0.25))
        >>> list(routed_blocks(model))
        ['blocks.1', 'blocks.3', 'blocks.5']
        >>> len(routed_blocks(route_(timm.create_model("test_vit"), "gradual")))
        5
        >>> model = route_(timm.create_model("test_vit"), RoutingConfig(router="random"), training_only=True)
        >>> type(model.blocks[1]).__name__, type(model.eval().blocks[1]).__name__
        ('RoutedBlock', 'Block')
    """
    check_value("training_only", training_only, bool | None)
    inner = adapted_model(model)
    with declared(inner, tokens):
        configs = _configs_by_part(find_parts(inner), config, parts)
        if training_only is not None:
            configs = {name: value.replace(training_only=training_only) for name, value in configs.items()}
        Route(configs).apply_(inner)
    return model


def _refuse_parts(available: Iterable[str], config: HowToRoute, parts: Mapping[str, object]) -> None:
    """Raise a ValueError unless a model has all parts; arguments of configs and presets are a common mistake."""
    unknown = sorted(set(parts) - set(available))
    if not unknown:
        return
    reason = f"this model has no part {', '.join(unknown)}; it has {', '.join(available)}"
    name = parts.get("preset", config)
    fields: dict[str, Any] = {field: parts[field] for field in unknown if field != "preset"}
    arguments = ", ".join(f"{field}={value!r}" for field, value in fields.items())
    if isinstance(name, str) and _are_options(fields, preset_arguments(name)):
        # Raises for a misspelt option and a wrong value, which the advice would repeat.
        preset(name, **fields)
        call = repr(name)
        if arguments:
            call = f"mmod.preset({name!r}, {arguments})"
        raise ValueError(f"call mmod.route_(model, {call}): options of a preset go into it, and {reason}")
    # A preset for the part "language" is no value of the field "language".
    is_of_language = str(parts.get("language")) in PRESETS
    if config is None and fields and not is_of_language and _are_options(fields, ROUTING_FIELDS):
        RoutingConfig.from_dict(fields)
        call = f"mmod.route_(model, mmod.RoutingConfig({arguments}))"
        raise ValueError(f"call {call}: fields of a config go into one, and {reason}")
    # A preset or a config was meant for a part.
    names_parts = any(isinstance(value, (str, RoutingConfig)) for value in fields.values())
    if isinstance(name, str) and not names_parts:
        reason = f"{reason}; options of a preset go into mmod.preset({name!r}, ...)"
    raise ValueError(reason)


def _are_options(names: Iterable[str], options: Sequence[str]) -> bool:
    """Return whether all names are options, or misspelt ones, or belong to a part of a config."""
    return all(similar(name, options, cutoff=0.8) or place_of(name, None) for name in names)


def _check_how(name: str, value: object) -> None:
    """Raise a TypeError unless an argument says how to route; values of a config's field are a common mistake."""
    if isinstance(value, str) and value in (*LAYOUTS, *SCORES) and value not in PRESETS:
        field = "blocks" if value in LAYOUTS else "router"
        raise TypeError(
            f"{name} must be a RoutingConfig, got {brief(value)}, which is a value of {field}: pass "
            f"mmod.RoutingConfig({field}={value!r})"
        )
    if value is not None and not isinstance(value, (RoutingConfig, str)):
        hint = ""
        if isinstance(value, Method):
            hint = "; a method goes to mmod.apply_"
        raise TypeError(
            f"{name} must be a RoutingConfig, got {brief(value)}, or the name of a preset, which mmod.presets() "
            f"lists{hint}"
        )


def _configs_by_part(
    available: Mapping[str, Part], config: HowToRoute, parts: Mapping[str, HowToRoute]
) -> dict[str, RoutingConfig]:
    _refuse_parts(available, config, parts)
    for name, value in {"config": config, **parts}.items():
        _check_how(name, value)
    routed: dict[str, RoutingConfig] = {}
    for name in available:
        how = parts.get(name, config)
        if isinstance(how, str):
            how = preset(how)
        # None leaves a part dense.
        if how is not None:
            routed[name] = how
    if not routed:
        raise ValueError(
            "nothing to route: name a preset, such as 'gradual' without training, or pass a mmod.RoutingConfig; a part "
            f"({' or '.join(available)}) may have its own, as mmod.route_(model, {next(iter(available))}='gradual')"
        )
    return routed


def unroute_(model: Model) -> Model:
    """Undo routing only: routers are removed, blocks get their host's classes, other methods stay.

    Raises:
        ValueError: Nothing in the model is routed.

    Example:
        >>> import timm
        >>> model = unroute_(route_(timm.create_model("test_vit"), "gradual"))
        >>> type(model.blocks[1]).__name__
        'Block'
    """
    routed_blocks(model)
    for owner in method_owners(model):
        if isinstance(own_methods(owner)[-1], Route):
            undo_last_(owner)
    return model


def freeze_dense_(model: Model) -> Model:
    """Freeze all parameters of a routed model, possibly wrapped, but the routers'; `requires_grad_(True)` undoes it.

    Raises:
        ValueError: Nothing in the model is routed, or its routers have no parameters.

    Source: Router-Tuning, He et al., arXiv 2410.13184.

    Example:
        >>> import timm
        >>> model = freeze_dense_(route_(timm.create_model("test_vit"), RoutingConfig(router="linear")))
        >>> [name for name, parameter in model.named_parameters() if parameter.requires_grad][:2]
        ['blocks.1.router.score.weight', 'blocks.3.router.score.weight']
    """
    routers = [block.router for block in routed_blocks(model).values()]
    learning = list(chain.from_iterable(router.parameters() for router in routers))
    if not learning:
        raise ValueError(f"router {routers[0].config.router.name!r} has no parameters to train")
    model.requires_grad_(False)
    for parameter in learning:
        parameter.requires_grad_()
    return model


def set_capacity_(model: Model, capacity: float | Sequence[float] | Mapping[str, float]) -> Model:
    """Set the capacity of a routed model in place, the share of tokens that its blocks keep; weights stay as they are.

    Capacity is not in the state dict: set it on existing copies, such as an EMA model, too.

    Args:
        capacity: Share of tokens kept: one per routed block in order, a mapping by module name, or one number. A number
            sets the capacity of all blocks. If the routing config has several capacities, as a plan or the presets
            "gradual" and "p-mod" do, a number sets their mean and keeps their shape. For a lower mean, one factor
            multiplies all capacities; for a higher mean, all skipped shares.

    Raises:
        TypeError: A capacity that is no number.
        ValueError: A capacity outside [0, 1], a wrong number of them, a block that is not routed, or a block that
            decides by a threshold, at least in evaluation.

    Example:
        >>> import timm
        >>> model = set_capacity_(route_(timm.create_model("test_vit"), "gradual"), 0.3)
        >>> [round(float(block.router.capacity), 3) for block in routed_blocks(model).values()]
        [0.433, 0.367, 0.3, 0.233, 0.167]
    """
    exact = exact_capacities(model, capacity)
    blocks = routed_blocks(model)
    for name, value in exact.items():
        check_new_capacity(name, blocks[name].router, value)
    assign_capacities(model, capacity)
    return model
