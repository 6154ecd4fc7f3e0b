"""Routing as a method, and queries about a routed model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain
from typing import Annotated

from torch import nn

from mmod.adapters import BlockStack, find_parts
from mmod.blocks import (
    GridSource,
    ModelHook,
    RoutedBlock,
    RoutedState,
    RowSource,
    attach,
    is_converted,
    make_importance,
    make_routed,
    warn_of_halves,
)
from mmod.config import Merged, Preset, RoutingConfig, Threshold, rational, read_routing, rescaled
from mmod.methods.base import (
    Method,
    method_owners,
    methods_inside,
    methods_of,
    owner_of,
    refuse_evaluated,
    register_method,
)
from mmod.methods.prepare import prepare
from mmod.routing import BorrowedScore, Router, share_score, unshare_score
from mmod.routing.joiner import ToLeader
from mmod.values import check_module, check_value


@register_method("routing")
@dataclass(frozen=True)
class Route(Method):
    """Mixture-of-Depths routing of the parts of a model, with one config per part.

    Args:
        parts: The `RoutingConfig` of every routed part, by name: "image", "text", "language", ...; or its plain values,
            with `preset` in place of fields. A preset that depends on the depth takes it from the model.
        capacities: Capacities of the routed blocks in order, if set after routing; else empty.

    Source: Raposo et al., arXiv 2404.02258 (MoD); Gadhikar et al., arXiv 2412.20875 (attention routing).
    """

    follows = ("routing",)
    added = (".router.",)
    decoders = True
    recomputes = True
    parts: Mapping[str, RoutingConfig]
    capacities: Annotated[tuple[float, ...], "[0, 1]"] = ()

    def __post_init__(self) -> None:
        check_value("method.parts", self.parts, Mapping)
        parts: dict[str, RoutingConfig] = {}
        for name, config in self.parts.items():
            # A config that was read from a file is plain values.
            parts[name] = config if isinstance(config, RoutingConfig) else read_routing(config)
        if len({config.training_only for config in parts.values()}) > 1:
            raise ValueError(f"training_only must be the same for all parts, {', '.join(parts)}")
        if not parts:
            raise ValueError("method.parts must name at least one part with its routing, as {'image': {}}, got {}")
        object.__setattr__(self, "parts", parts)
        super().__post_init__()

    def fitted(self, model: nn.Module) -> Route:
        """Return the routing with presets at the depth of the model's parts."""
        if not any(isinstance(config, Preset) for config in self.parts.values()):
            return self
        stacks = self.find(model)
        parts = {name: config.at_depth(len(stacks[name].blocks)) for name, config in self.parts.items()}
        return Route(parts, self.capacities)

    def to_dict(self) -> dict[str, object]:
        """Return plain values from which `mmod.methods.read_method` rebuilds the method."""
        parts = {name: config.to_dict(complete=True) for name, config in self.parts.items()}
        return {"kind": self.kind, "parts": parts, "capacities": list(self.capacities)}

    def joined(self, earlier: tuple[Method, ...]) -> tuple[Method, ...]:
        """Return the methods of a model, in order; consecutive routings become one."""
        if earlier and isinstance(earlier[-1], Route):
            return (*earlier[:-1], Route({**earlier[-1].parts, **self.parts}))
        return (*earlier, self)

    def with_settings_of(self, model: nn.Module) -> Route:
        """Return the routing of a model, or of a model inside the routed one, with its current capacities."""
        parts = self.parts
        if not method_owners(model):
            parts = {name: parts[name] for name in find_parts(model) if name in parts}
        for name, config in parts.items():
            _check_plan(model, name, config)
        return Route(parts, tuple(capacities(model).values()))

    def card(self, model: nn.Module) -> str:
        """Return plan and options of every part, in Markdown; kept shares stand with the FLOPs."""
        stacks = find_parts(model)
        sections = []
        for name, config in self.parts.items():
            plan = config.resolved(len(stacks[name]().blocks))
            values = json.dumps(config.to_dict(), indent=2)
            sections.append(f"`{name}`:\n\n```\n{plan}\n```\n\n```json\n{values}\n```")
        return "\n\n".join(sections)

    @property
    def training_only(self) -> bool:
        """Whether the parts are routed in training alone."""
        return any(config.training_only for config in self.parts.values())

    @property
    def adds_weights(self) -> bool:
        """Whether a router has weights."""
        return any(config.router.learns for config in self.parts.values())

    @property
    def has_loss(self) -> bool:
        """Whether routers have auxiliary losses."""
        return any(config.losses for config in self.parts.values())

    @property
    def two_ways(self) -> bool:
        """Whether a language model selects by top-k in training and by threshold in evaluation."""
        return any(config.language.inference_threshold is not None for config in self.parts.values())

    @property
    def causal(self) -> bool:
        """Whether evaluation decides a token from itself and earlier tokens only."""
        if self.training_only or self.two_ways:
            return True
        return all(config.decides_alone(training=False) for config in self.parts.values())

    @contextmanager
    def deciding_together(self, model: nn.Module) -> Iterator[None]:
        """Context in which routers select by top-k in evaluation too."""
        language = {"inference_threshold": None, "predictor": False}
        with deciding_by(model, lambda config: config.replace(language=language)):
            yield

    def find(self, model: nn.Module) -> dict[str, BlockStack]:
        """Return the block stacks of the parts, by name."""
        available = find_parts(model)
        unknown = sorted(set(self.parts) - set(available))
        if unknown:
            raise ValueError(f"this model has no part {', '.join(unknown)}; it has {', '.join(available)}")
        return {name: available[name]() for name in self.parts}

    def check(self, model: nn.Module, stacks: Mapping[str, BlockStack]) -> None:
        """Raise a ValueError if a part is already routed; `change` runs all other checks before it changes anything."""
        others = [method for method in methods_of(model) if isinstance(method, Route)]
        # In evaluation, blocks that are routed in training alone are dense.
        is_routed = any(self.parts.keys() & method.parts.keys() for method in others)
        blocks = chain.from_iterable(stack.blocks for stack in stacks.values())
        if is_routed or any(map(is_converted, blocks)):
            raise ValueError(
                f"this {type(model).__name__} is already routed; call mmod.undo_ first, or mmod.set_capacity_"
            )
        if any(method.training_only != self.training_only for method in others):
            raise ValueError(
                f"another part of this {type(model).__name__} is routed in training and evaluation, or in training "
                "alone: training_only must be the same for all parts"
            )

    def change(self, model: nn.Module, stacks: Mapping[str, BlockStack]) -> None:
        """Convert the blocks of each part in place."""
        # All parts are checked before the first one changes.
        conversions = {}
        for name, stack in stacks.items():
            try:
                conversions[name] = prepare(stack, self.parts[name])
            except ValueError as error:
                others = [other for other in stacks if other != name]
                if not others:
                    raise
                raise ValueError(
                    f"{error}. This is part {name!r}: `mmod.route_(model, {others[0]}=...)` leaves it dense"
                ) from error
            # Where capacities were set after routing, they are those of a saved model, which ran.
            if not self.capacities and not stack.language:
                _refuse_no_choice(stack, self.parts[name])
        hooks: list[tuple[nn.Module, ModelHook]] = []
        for name, stack in stacks.items():
            hooks += stack.hooks(self.parts[name])
            score = self.parts[name].router
            source: GridSource | RowSource | None = None
            if score.reads_grid:
                source = stack.grid
            # Hosts that get patches as rows of pixels have no grid.
            if source is None and score.reads_pixels:
                source = stack.rows
            if source is not None:
                hooks.append((source.module, source.hook(stack.calls, score)))
        for name, stack in stacks.items():
            config = self.parts[name]
            for block, router, state in conversions[name]:
                if isinstance(state, RoutedState):
                    assert router is not None
                    make_routed(block, router, state)
                else:
                    make_importance(block, state)
            owner = owner_of(model, stack)
            if config.router.tied:
                share_score(owner, [router for _, router, _ in conversions[name] if router is not None])
            if config.protect_prefix and not config.router.per_image:
                stack.watch_grid(stack.converted)
            if _runs_inside(stack, config):
                stack.refuse_divided(owner)
            shares = any(state.span is not None for _, _, state in conversions[name])
            # Blocks that share nothing never ask for the call that they run in.
            if stack.captions is not None or shares:
                stack.own_(stack.owner_in(model))
        for module, hook in hooks:
            attach(module, hook)
        if self.capacities:
            assign_capacities(model, self.capacities)
        for name, stack in stacks.items():
            routed = [state for *_, state in conversions[name] if isinstance(state, RoutedState)]
            halved = {stack.names[state.number]: state.call for state in routed if state.execution.between_halves}
            warn_of_halves(
                halved,
                len(stack.blocks),
                ", or decide before the block, as mmod.preset('gradual', skipped={'before': 'block'}) does",
            )

    def restore(self, model: nn.Module) -> None:
        """Restore the host's classes and remove the routers."""
        super().restore(model)
        for module in model.modules():
            unshare_score(module)


def _refuse_no_choice(stack: BlockStack, config: RoutingConfig) -> None:
    """Raise a ValueError if a config says capacity 0 of all its blocks, and whole blocks see kept tokens alone."""
    # A plan that lists capacities means a 0 among them, as searches do.
    if config.capacity != 0 or config.select != "topk":
        return
    for row in config.resolved(len(stack.blocks)).rows:
        # Where they attend to all, or miss one branch alone, they see the patches.
        if row.operator == "block" and row.context == "kept":
            raise ValueError(
                f"capacity 0 leaves {stack.names[row.block]} no token but those that are always kept: capacity must be "
                "in (0, 1]. To run on these alone, as on a class token, list a capacity for each block"
            )


def _runs_inside(stack: BlockStack, config: RoutingConfig) -> bool:
    """Return whether a routing reads or narrows what is inside a block: branches, keys, or rows of arguments."""
    hides_keys = isinstance(config.skipped, Merged) or (config.select != "topk" and not config.router.per_image)
    has_rows = stack.proof is not None and bool(stack.proof.rows)
    return config.operator != "block" or hides_keys or has_rows or config.reads_attention(training=True)


def is_routed(model: nn.Module) -> bool:
    """Return whether any block of a model is routed."""
    check_module(model)
    return any(isinstance(module, RoutedBlock) for module in model.modules())


def routers_of(model: nn.Module) -> list[nn.Module]:
    """Return the router of every routed block, and the scores that some of them share, once each; none if none is."""
    routers = [module.router for module in model.modules() if isinstance(module, RoutedBlock)]
    # A shared score is held by the module that owns the blocks: its weights are in none of the routers.
    shared: list[nn.Module] = [router.score.held for router in routers if isinstance(router.score, BorrowedScore)]
    return [*routers, *dict.fromkeys(shared)]


def routed_blocks(model: nn.Module) -> dict[str, RoutedBlock]:
    """Return the routed blocks of a model, possibly wrapped or compiled, by their module names, in order.

    Raises:
        ValueError: Nothing in the model is routed.

    Example:
        >>> import timm, mmod
        >>> model = mmod.route_(timm.create_model("test_vit"), "a-mod")
        >>> {name: float(block.router.capacity) for name, block in routed_blocks(model).items()}
        {'blocks.1': 0.5, 'blocks.3': 0.5, 'blocks.5': 0.5}
    """
    check_module(model)
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, RoutedBlock)}
    if not blocks:
        refuse_evaluated(model)
        others = " and ".join(method.kind for method in methods_inside(model))
        hint = f"; mmod.undo_ undoes its {others}" if others else ""
        raise ValueError(
            f"nothing in this {type(model).__name__} is routed: call mmod.route_(model, config) first{hint}"
        )
    return blocks


def unreplaceable(model: nn.Module) -> str:
    """Return why a routed model cannot keep other tokens than its routers choose, as audits ask it to; else nothing."""
    for name, block in routed_blocks(model).items():
        router = block.router.config.router
        if isinstance(block.router.joiner, ToLeader):
            return (
                f"{name} has router={router.name!r}, whose tokens join the first of their group: decisions can be "
                "replaced where a token may join any that is kept, as with 'redundancy'"
            )
        if router.per_image:
            return f"{name} keeps or skips whole images: decisions can be replaced where a router chooses among tokens"
    return ""


def _check_plan(model: nn.Module, part: str, config: RoutingConfig) -> None:
    """Raise a ValueError if other blocks of a part are routed than its config says, as after blocks were removed."""
    blocks = find_parts(model)[part]().blocks
    routed = [index for index, block in enumerate(blocks) if isinstance(block, RoutedBlock)]
    try:
        planned: list[int] | None = [row.block for row in config.resolved(len(blocks)).rows]
    except ValueError:
        # It names blocks that are gone.
        planned = None
    if planned != routed:
        raise ValueError(
            f"blocks of {part} were removed or moved since this {type(model).__name__} was routed: of {len(blocks)}, "
            f"{routed} are routed, and its config has blocks={config.blocks!r}. Call mmod.undo_ and mmod.route_ again"
        )


def assign_capacities(model: nn.Module, capacity: float | Sequence[float] | Mapping[str, float]) -> None:
    """Set the capacities of routed blocks, see `mmod.set_capacity_`, also of those that decide by a threshold."""
    blocks = routed_blocks(model)
    for name, value in exact_capacities(model, capacity).items():
        for router in _router_and_copies(blocks[name]):
            router.capacity = value


def _router_and_copies(block: RoutedBlock) -> list[Router]:
    """Return the router of a block, and the copies of it that peft trains in a wrapper."""
    return [module for module in block.router.modules() if isinstance(module, Router)]


def exact_capacities(model: nn.Module, capacity: float | Sequence[float] | Mapping[str, float]) -> dict[str, Fraction]:
    """Return capacities as exact fractions, by name of the routed block; see `assign_capacities`."""
    blocks = routed_blocks(model)
    if isinstance(capacity, Mapping):
        unknown = sorted(set(capacity) - set(blocks))
        if unknown:
            raise ValueError(f"{', '.join(unknown)} is not a routed block; routed are {', '.join(blocks)}")
        by_name = dict(capacity)
    elif isinstance(capacity, Sequence) and not isinstance(capacity, str):
        if len(capacity) != len(blocks):
            raise ValueError(f"{len(blocks)} blocks are routed, got {len(capacity)} capacities")
        by_name = dict(zip(blocks, capacity))
    else:
        by_name = {name: _at_mean(block.router, capacity) for name, block in blocks.items()}
    return {name: rational(value) for name, value in by_name.items()}


def _at_mean(router: Router, mean: float) -> float:
    """Return the capacity of a block where the routed blocks of its part have a mean, see `mmod.set_capacity_`."""
    planned = router.config.capacity
    if not isinstance(planned, tuple):
        return mean
    scaled = dict(zip(map(rational, planned), rescaled(planned, mean)))
    return scaled[router.planned]


def capacities(model: nn.Module) -> dict[str, float]:
    """Return the capacity of every routed block by module name.

    Raises:
        ValueError: Nothing in the model is routed.
    """
    return {name: float(block.router.capacity) for name, block in routed_blocks(model).items()}


@contextmanager
def deciding_by(model: nn.Module, change: Callable[[RoutingConfig], RoutingConfig]) -> Iterator[None]:
    """Context in which a routed model decides by changed configs in this thread, with the same weights and no cache.

    Example:
        >>> import timm, mmod
        >>> model = mmod.route_(timm.create_model("test_vit"), RoutingConfig(router="linear"))
        >>> with deciding_by(model, lambda config: config.replace(select={"threshold": 0.0})):
        ...     next(iter(routed_blocks(model).values())).router.config.select
        Threshold(threshold=0.0, min_tokens=0, max_tokens=None)
    """
    routers = list(chain.from_iterable(map(_router_and_copies, routed_blocks(model).values())))
    rules = [router.rule for router in routers]
    # Blocks with equal configs share one object.
    changed = {id(rule.config): change(rule.config) for rule in rules}
    outer = []
    for router, rule in zip(routers, rules):
        config = changed[id(rule.config)]
        outer.append(router.override(replace(rule, config=config)))
    try:
        yield
    finally:
        for router, before in zip(routers, outer):
            router.override(before)


def all_kept(config: RoutingConfig) -> RoutingConfig:
    """Return a config by which the same router keeps all tokens: normalised scores reach 0, and no loss counts."""
    return config.replace(select=Threshold(0.0), losses={}, language={"inference_threshold": None, "predictor": False})


def every_token(model: nn.Module) -> AbstractContextManager[None]:
    """Context in which all tokens of a routed model run in all blocks, weighted by their gates."""
    return deciding_by(model, all_kept)


def routing_config(model: nn.Module, part: str | None = None) -> RoutingConfig:
    """Return the config that a model was routed with.

    Args:
        part: Name of the part, needed if parts were routed differently.

    Raises:
        ValueError: Nothing in the model is routed, the named part is not, or parts differ and none is named.
    """
    configs = routing_configs(model)
    if part is not None and part not in configs:
        raise ValueError(f"part {part!r} of this {type(model).__name__} is not routed; routed are {', '.join(configs)}")
    if part is not None:
        return configs[part]
    first, *others = configs.values()
    if any(other != first for other in others):
        raise ValueError(f"{' and '.join(configs)} were routed differently: name the part")
    return first


def routing_configs(model: nn.Module) -> dict[str, RoutingConfig]:
    """Return the configs that a model was routed with, by part; a ValueError unless one model in it was routed."""
    routed_blocks(model)
    routes = [method for method in methods_of(model) if isinstance(method, Route)]
    if len(routes) != 1:
        raise ValueError(
            f"{len(routes)} models in this {type(model).__name__} were routed: read the config of one of them"
        )
    return dict(routes[0].parts)
