"""Routing configs by the name of the method that proposed them, also where they depend on a model's depth."""

from __future__ import annotations

import inspect
import json
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mmod.config.parts import Score, Threshold, spelled
from mmod.config.plan import DEPTH, rescaled
from mmod.config.registry import PARTS, PRESETS, check_options, revised
from mmod.config.routing import ROUTING_FIELDS, RoutingConfig
from mmod.io.tables import markdown_table
from mmod.values import check_value, one_of

# Stands for a depth that is not known yet, or that changes leave nothing to.
_USUAL_DEPTH = 24
# Two ways to say what a plan keeps on average.
_MEANS = ("mean", "capacity")
_BY_DEPTH = ("blocks", "capacity")
# Losses that read what a threshold keeps, and not how much it should keep.
_WITHOUT_CAPACITY = {"load", "membership"}


def preset(name: str, depth: int | None = None, **changes: object) -> RoutingConfig:
    """Return the routing config of a published method, or this library's recommended learned router.

    `mmod.presets()` lists the presets. The page "Configs and scores" of the docs has their options and differences from
    the papers. As in these, the last block may be routed: where a loss reads a class token or text alone, its router
    gets no gradient from other tokens, and still chooses those that the class token or text attend to.

    Args:
        name: A name of that list.
        depth: Number of blocks of the model. "p-mod", "mindskip", "gradual", "gamma-mod", "evenly-spread", "ipcv",
            "v2drop" and "tread" choose blocks by it. Without it, they choose when a model is routed, or in `at_depth`
            of the result.
        changes: Options of the preset, such as `mean` of "gradual", and fields of `RoutingConfig` to override. A
            mapping overrides single options of a part. One `capacity` holds for every routed block. If the preset plans
            a capacity per block, as "gradual" and "p-mod" do, the number becomes their mean and the plan keeps its
            shape. Several capacities replace the planned ones. Another number of `blocks` needs a `capacity`.

    Raises:
        ValueError: Unknown name or field.

    Example:
        >>> preset("a-mod", capacity=0.25).capacity
        0.25
        >>> preset("gradual", depth=6).capacity
        (0.866667, 0.733333, 0.6, 0.466667, 0.333333)
        >>> preset("gradual", depth=6, capacity=0.45).capacity
        (0.65, 0.55, 0.45, 0.35, 0.25)
        >>> preset("gradual", mean=0.7)
        preset('gradual', mean=0.7)
    """
    make = PRESETS[name]
    accepted = inspect.signature(make).parameters
    if "mean" in accepted and {"mean", "capacity"} <= set(changes):
        raise ValueError(
            f"preset {name!r} takes mean or capacity, got mean={changes['mean']!r} and "
            f"capacity={changes['capacity']!r}: leave one out. capacity is the mean over all routed blocks"
        )
    if not set(changes) <= set(preset_arguments(name)):
        check_options(changes, preset_arguments(name), vars(preset(name)))
    if depth is not None:
        check_value("depth", depth, int, DEPTH)
    elif "depth" in accepted and not set(_BY_DEPTH) <= set(changes):
        # Kept open until a model says how many blocks it has.
        return Preset(name, changes)
    options = {option: changes.pop(option) for option in accepted if option in changes}
    if "depth" in accepted:
        options["depth"] = _USUAL_DEPTH if depth is None else depth
    fields = make(**options)
    planned = fields.get("capacity")
    if isinstance(planned, tuple):
        changes = _fitted_to_plan(name, planned, changes, depth)
    config = RoutingConfig.from_dict(revised(fields, changes))
    # Another loss may read the capacity of a threshold, and who names both knows that one decides.
    is_threshold_of_preset = isinstance(config.select, Threshold) and "select" not in changes
    if "capacity" in changes and is_threshold_of_preset and set(config.losses) <= _WITHOUT_CAPACITY:
        aimed = {**config.losses, "capacity": 1.0}
        trained = f", or losses={aimed}, which aim at it in training" if config.losses else ""
        raise ValueError(
            f"preset {name!r} selects by a threshold and not by capacity: leave out "
            f"capacity={changes['capacity']!r}, or pass select='topk' too{trained}"
        )
    return config


def _fitted_to_plan(
    name: str, planned: tuple[float, ...], changes: Mapping[str, Any], depth: int | None
) -> dict[str, object]:
    """Return the changes of a preset that plans a capacity for each block; raise if its blocks become more or fewer."""
    mean = changes.get("capacity")
    # A mean in place of the plan's own: its shape stays, which 0 has none of.
    if "blocks" not in changes and isinstance(mean, numbers.Real) and mean:
        return {**changes, "capacity": rescaled(planned, changes["capacity"])}
    if "blocks" in changes and "capacity" not in changes and depth is not None:
        chosen = RoutingConfig(blocks=changes["blocks"]).resolved(depth).blocks
        if len(chosen) != len(planned):
            raise ValueError(
                f"preset {name!r} plans capacities for {len(planned)} blocks, and blocks={changes['blocks']!r} are "
                f"{len(chosen)}: pass capacity too, one number or one per block"
            )
    return dict(changes)


def preset_arguments(name: str) -> tuple[str, ...]:
    """Return what may be changed of a preset besides the depth: its options and the fields of `RoutingConfig`.

    Example:
        >>> preset_arguments("gradual")[:3]
        ('mean', 'start', 'router')
    """
    options = inspect.signature(PRESETS[name]).parameters
    return (*(option for option in options if option != "depth"), *ROUTING_FIELDS)


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Preset(RoutingConfig):
    """A preset whose blocks depend on the depth of the model, before it is known.

    It has all fields of a routing config but `blocks` and `capacity`, where the depth decides about them. Routing a
    model resolves it; `at_depth` does so without a model.

    Args:
        preset_name: Its name.
        changes: Options and fields to change, see `mmod.preset`.

    Example:
        >>> config = preset("mindskip", gate={"scale": 1.0})
        >>> config.gate.name, config.at_depth(6).blocks
        ('step', (3, 4, 5))
    """

    preset: str
    changes: Mapping[str, Any]

    def __init__(self, preset_name: str, changes: Mapping[str, object]) -> None:
        # Blocks of the model's depth say nothing at the usual one.
        config = preset(preset_name, _USUAL_DEPTH, **{name: changes[name] for name in changes if name != "blocks"})
        if "blocks" in changes:
            config = config.replace(blocks=changes["blocks"])
        fields = dict(vars(config))
        for name in _BY_DEPTH:
            # A number stands for every depth, a tuple for one: also that with a given mean.
            is_given = name in changes and not (name == "capacity" and isinstance(changes[name], numbers.Real))
            if not is_given and not isinstance(fields[name], (int, float)):
                del fields[name]
        # A frozen dataclass refuses assignments.
        vars(self).update(fields, preset=preset_name, changes=dict(changes))

    def __getattr__(self, name: str) -> NoReturn:
        """Say what to do where a field is not known yet."""
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        if name in _BY_DEPTH:
            message = (
                f"{name} of a preset depends on the number of blocks: route a model by it, or read it from "
                "preset.at_depth(number of blocks)"
            )
        raise AttributeError(message)

    def at_depth(self, depth: int) -> RoutingConfig:
        """Return the routing config for a model of `depth` blocks."""
        return preset(self.preset, depth, **self.changes)

    def resolved(self, depth: int | None = None) -> RoutingConfig:
        """Return the routing config for a model of `depth` blocks, with every block written out."""
        if depth is None:
            depth = self._known_depth()
        return self.at_depth(depth).resolved(depth)

    def replace(self, **changes: object) -> RoutingConfig:
        """Return the preset with further changes, see `mmod.preset`; a mapping changes some options of a part.

        Example:
            >>> preset("gradual").replace(mean=0.7, protect_prefix=False)
            preset('gradual', mean=0.7, protect_prefix=False)
        """
        parts = revised({name: getattr(self, name) for name in PARTS}, changes)
        former = dict(self.changes)
        if set(_MEANS) & set(changes):
            # A capacity takes the place of a mean, and the other way round.
            for name in _MEANS:
                former.pop(name, None)
        return preset(self.preset, **{**former, **{name: parts[name] for name in changes}})

    def to_dict(self, complete: bool = False) -> dict[str, object]:
        """Return the preset's name and the changes as plain JSON values, which `read_routing` reads.

        Example:
            >>> preset("gradual", mean=0.7).to_dict()
            {'preset': 'gradual', 'mean': 0.7}
        """
        values: dict[str, object] = {"preset": self.preset}
        for name, value in self.changes.items():
            # A score that JSON cannot hold raises here.
            plain = value.to_dict() if isinstance(value, Score) else spelled(value)
            # JSON has no tuples.
            if isinstance(plain, tuple):
                plain = list(plain)
            values[name] = plain
        return values

    def save(self, path: str | Path, overwrite: bool = False) -> None:
        """Refuse to write what only a model's depth completes, and name the ways that do.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"the blocks of {self!r} depend on the model: save preset.at_depth(number of blocks), or write "
            f"routing: {json.dumps(self.to_dict())} into a config"
        )

    def __eq__(self, other: object) -> bool:
        """Whether another preset gives the same routing in every model."""
        return isinstance(other, Preset) and self.preset == other.preset and self.changes == other.changes

    __hash__ = None  # type: ignore[assignment]  # changes may hold mappings

    def __repr__(self) -> str:
        """Return the call that makes it."""
        changes = [f"{name}={spelled(value)!r}" for name, value in self.changes.items()]
        return f"preset({', '.join([repr(self.preset), *changes])})"


def read_routing(fields: Mapping[str, object]) -> RoutingConfig:
    """Return the routing that plain values describe: fields of `RoutingConfig`, or `preset: NAME` with its arguments.

    Null leaves out an option of another preset, and one of `mean` and `capacity` beside the other.

    Example:
        >>> read_routing({"preset": "a-mod", "capacity": 0.25}).capacity
        0.25
    """
    if isinstance(fields, Mapping) and "preset" in fields:
        options = dict(fields)
        name = options.pop("preset")
        if name is not None:
            own = preset_arguments(PRESETS.check(name))
            of_others = set().union(*map(preset_arguments, PRESETS)) - {*own, *ROUTING_FIELDS}
            # Over another config, null leaves out what this preset has no option for, or a second way to say the mean.
            unset = set(of_others)
            if "mean" in own:
                unset.update(_MEANS)
            options = {one: value for one, value in options.items() if value is not None or one not in unset}
            foreign = [option for option in options if option in of_others]
            if foreign:
                raise ValueError(
                    f"preset {name!r} has no option {foreign[0]}, which is one of another preset: leave it out, by "
                    f"`{foreign[0]}: null` where a config that this one changes names it"
                )
            make: Callable[..., RoutingConfig] = preset
            return make(name, **options)
        fields = options
    return RoutingConfig.from_dict(fields)


class PresetList(tuple[str, ...]):
    """Names of presets, which print as a table of what each is for."""

    def __repr__(self) -> str:
        """Return a table with a row for each preset."""
        rows = []
        for name in self:
            models = [part for part in ("image", "language") if _fits(name, part)]
            summary, *_ = (inspect.getdoc(PRESETS[name]) or "").split("\n\n")
            trained = "yes" if _needs_training(name) else "no"
            rows.append((name, ", ".join(models), trained, " ".join(summary.split())))
        return markdown_table(("preset", "models", "needs training", "what it does"), rows)

    __str__ = __repr__
    _repr_markdown_ = __repr__  # Notebooks show it.


def presets(part: str | None = None, needs_training: bool | None = None) -> PresetList:
    """Return the names of the presets, as `mmod.route_` takes them; printed, they are a table.

    Args:
        part: Those for models of "image" or for "language" models alone; None for all.
        needs_training: True for those that have router weights or are for training alone, False for the others; None
            for all.

    Example:
        >>> "gradual" in presets("image", needs_training=False), "mod" in presets("image", needs_training=False)
        (True, False)
    """
    if part is not None:
        one_of("part", part, ("image", "language"))
    names = [name for name in sorted(PRESETS) if part is None or _fits(name, part)]
    if needs_training is not None:
        names = [name for name in names if _needs_training(name) == needs_training]
    return PresetList(names)


def _needs_training(name: str) -> bool:
    """Return whether a preset has no use without training."""
    config = preset(name)
    return config.router.learns or config.training_only


def _fits(name: str, part: str) -> bool:
    """Return whether a preset can route models of images and captions, or language models."""
    config = preset(name)
    router = config.router
    if part == "image":
        # What says which tokens of a prompt may be skipped, and a router in the model that all layers share.
        return not (spelled(config.language) or router.tied)
    # Layers of a language model have no grid, and what they skip joins nothing; an image is no sequence of theirs.
    return not (config.joins or router.per_image or (router.reads_grid and not router.reads_pixels))
