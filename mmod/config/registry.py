"""Registries of scores, presets and losses, which other packages can extend."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from mmod.config.parts import Gate, LanguageRouting, Merged, Score, Threshold, spelled
from mmod.names import near_names
from mmod.plain import without_none
from mmod.values import brief, check_value, one_of, refuse_unknown

if TYPE_CHECKING:
    from torch import Tensor

Entry = TypeVar("Entry")
AnyPreset = TypeVar("AnyPreset", bound=Callable[..., Mapping[str, object]])
AnyLoss = TypeVar("AnyLoss", bound="Callable[..., Tensor]")
AnyScore = TypeVar("AnyScore", bound=Score)


class Registry(Generic[Entry]):
    """Entries by name; `homes` register those of this package, and are imported when a name is unknown."""

    def __init__(self, noun: str, homes: Sequence[str], register: str, others: str = "") -> None:
        self._noun = noun
        # What is no entry, and where it is.
        self._others = others
        self._homes = homes
        self._register = register
        self._entries: dict[str, Entry] = {}
        self._places: dict[str, str] = {}

    def add(self, name: str, entry: Entry, source: Callable[..., object]) -> None:
        """Add the entry of a class or function `source`, which may be defined again, as in a notebook."""
        check_value(f"the name passed to mmod.{self._register}", name, str)
        if not callable(source):
            raise TypeError(f"mmod.{self._register} decorates a class or a function, got {brief(source)}")
        place = f"{_importable(source.__module__)}.{source.__qualname__}"
        if not place.startswith("mmod."):
            # Names of this package come first, so that another one finds them taken.
            self._import_homes()
        # Defined again at the same place, as when a cell runs twice, it replaces itself.
        taken = self._places.setdefault(name, place)
        if taken != place:
            raise ValueError(f"{self._noun} {name!r} is {taken} already; choose another name for {place}")
        self._entries[name] = entry

    def __getitem__(self, name: object) -> Entry:
        return self._entries[self.check(name)]

    def check(self, name: object) -> str:
        """Return `name` if it is registered; raise a ValueError otherwise."""
        # Iterating imports the entries of this package, which a name that is known already can do without.
        if not isinstance(name, str) or (name not in self._entries and name not in list(self)):
            valid = ", ".join(map(repr, sorted(self)))
            elsewhere = f"for a name of another package, import the module that calls mmod.{self._register}"
            told = [f"{self._noun} must be one of {valid}, got {name!r}", elsewhere]
            hints = [hint for hint in (near_names(name, self), self._others) if hint]
            if hints:
                # What may be meant first, which few read behind a long list.
                told = [f"{self._noun} {name!r} is unknown", *hints, f"valid ones are {valid}", elsewhere]
            raise ValueError("; ".join(told))
        return name

    def __iter__(self) -> Iterator[str]:
        self._import_homes()
        return iter(self._entries)

    def _import_homes(self) -> None:
        for home in self._homes:
            importlib.import_module(home)


def _importable(module: str) -> str:
    """Return the name under which a module is imported, also for the script that runs."""
    if module != "__main__":
        return module
    script = sys.modules[module]
    spec = getattr(script, "__spec__", None)
    # `python -m` knows the name; a notebook has no file.
    if spec is not None:
        return spec.name
    return Path(getattr(script, "__file__", module)).stem


@dataclass(frozen=True)
class Loss:
    """An auxiliary loss of a routed block; where it reads importance, training computes that."""

    function: Callable[..., Tensor]
    reads_importance: bool = False

    def __call__(self, *arguments: object) -> Tensor:
        """Return the loss of a block's `Routing` and the `Router` that made it."""
        return self.function(*arguments)


def check_frozen(entry: object, base: type, title: str) -> None:
    """Raise a TypeError unless an entry is a frozen dataclass derived from a base class."""
    derived = isinstance(entry, type) and issubclass(entry, base)
    if not derived or not getattr(vars(entry).get("__dataclass_params__"), "frozen", False):
        raise TypeError(
            f"register a class derived from {title} and decorated by @dataclass(frozen=True), got {brief(entry)}"
        )


METHODS_ELSEWHERE = (
    "ToMe, pruning and the like are methods: mmod.apply_(model, mmod.methods.Merge(r=8)), in a config "
    "methods: [{kind: merge, r: 8}]"
)
"""What no option of a routing and no preset is, for messages."""

SCORES: Registry[type[Score]] = Registry("router", ("mmod.routing.score",), "register_score")
PRESETS: Registry[Callable[..., Mapping[str, object]]] = Registry(
    "preset",
    ("mmod.planning.presets",),
    "register_preset",
    METHODS_ELSEWHERE,
)
LOSSES: Registry[Loss] = Registry("a loss", ("mmod.losses",), "register_loss")


def register_score(name: str) -> Callable[[type[AnyScore]], type[AnyScore]]:
    """Return a decorator that lets configs name a score, a frozen dataclass derived from `mmod.Score`.

    Raises:
        TypeError: The class is no such dataclass.
        ValueError: The name is taken, or the score both learns and is shared.

    Example:
        >>> import dataclasses, mmod
        >>> from mmod.routing import FunctionScore
        >>> @register_score("length")
        ... @dataclasses.dataclass(frozen=True)
        ... class Length(mmod.Score):
        ...     def make(self, placement):
        ...         return FunctionScore(lambda x_BND: x_BND.norm(dim=-1))
        >>> mmod.RoutingConfig(router="length").gate.name
        'identity'
    """

    def add(score: type[AnyScore]) -> type[AnyScore]:
        check_frozen(score, Score, "mmod.Score")
        if score.learns and score.shared:
            raise ValueError(f"{score.__name__} cannot be shared by blocks, since it learns")
        SCORES.add(name, score, score)
        score.name = name
        return score

    return add


def register_preset(name: str) -> Callable[[AnyPreset], AnyPreset]:
    """Return a decorator that registers a preset under a new name, for `mmod.preset` and configs.

    Example:
        >>> @register_preset("half-norm")
        ... def half_norm():
        ...     return {"router": "norm", "capacity": 0.5}
        >>> import mmod
        >>> mmod.preset("half-norm", blocks="late").router.name
        'norm'
    """

    def add(preset: AnyPreset) -> AnyPreset:
        PRESETS.add(name, preset, preset)
        return preset

    return add


def register_loss(name: str, reads_importance: bool = False) -> Callable[[AnyLoss], AnyLoss]:
    """Return a decorator that lets `RoutingConfig(losses={name: weight})` name an auxiliary loss.

    The loss takes a block's `Routing` and the `Router` that made it, and returns a scalar.

    Args:
        reads_importance: The loss reads `Routing.importance_BN`, which is then computed in training.
    """

    def add(loss: AnyLoss) -> AnyLoss:
        LOSSES.add(name, Loss(loss, reads_importance), loss)
        return loss

    return add


class _Part(NamedTuple):
    """A part of a routing config.

    Args:
        cls: Its class.
        plain_names: Values that are names, without options.
        valid: What it may be, for messages.
    """

    cls: type[Any]
    plain_names: tuple[str, ...]
    valid: str


_PARTS = {
    "router": _Part(Score, (), "a name, a score or a function"),
    "select": _Part(Threshold, ("topk",), "a name or options of Threshold"),
    "gate": _Part(Gate, (), "a name or options of Gate"),
    "skipped": _Part(Merged, ("pass", "scale", "follow"), "a name or options of Merged"),
    "language": _Part(LanguageRouting, (), "options of LanguageRouting"),
}
PARTS = tuple(_PARTS)


def place_of(option: str, value: object, parts: Mapping[str, Any] | None = None) -> str:
    """Return the part of a routing that has an option, and how it is passed there; empty if none has it.

    Args:
        parts: As `read_parts` returns them; None for the defaults.
    """
    if parts is None:
        parts = {"gate": Gate("identity")}
    for field, known in _PARTS.items():
        part = parts.get(field, "")
        cls, present = known.cls, {}
        if not isinstance(part, str):
            cls, present = type(part), _named_options(part)
        if option not in _options_of(cls):
            continue
        if field == "router":
            return _place_in_score(part.name, {**present, option: value})
        return f"{field}, pass {field}={brief({**present, option: value})}"
    others = [name for name in SCORES if option in _options_of(SCORES[name])]
    if not others:
        return ""
    return _place_in_score(others[0], {option: value})


def _place_in_score(name: str, options: Mapping[str, object]) -> str:
    arguments = [f"{option}={brief(value)}" for option, value in options.items() if option != "name"]
    return f"the score {name!r}, pass router=mmod.score({', '.join([repr(name), *arguments])})"


def _options_of(cls: type) -> list[str]:
    return [item.name for item in dataclasses.fields(cls) if item.name != "name"]


def _named_options(part: object) -> dict[str, object]:
    short = spelled(part)
    if isinstance(short, str):
        return {"name": short}
    return dict(short)


def score(name: str, **options: object) -> Score:
    """Return a score with options, for `RoutingConfig(router=...)`.

    Args:
        name: Name of the score, such as "linear" or "attention".
        options: The score's options, such as `bias` of "linear", `seed` of "random" or `importance` of "attention".

    Raises:
        ValueError: No score has that name, or it has no such option.

    Example:
        >>> score("attention", importance="class_token")
        Attention(importance='class_token')
    """
    return read_part("router", {"name": name, **options})


def read_part(field: str, value: object) -> Any:
    """Return a part of a routing config: a value of its class, or what a name, options, or both describe.

    Example:
        >>> read_part("gate", "tanh"), read_part("select", {"threshold": 0.3}), read_part("select", "topk")
        (Gate(name='tanh', scale=0.2), Threshold(threshold=0.3, min_tokens=0, max_tokens=None), 'topk')
    """
    part = _PARTS[field]
    cls = part.cls
    if isinstance(value, cls):
        return value
    if field == "router" and callable(value) and not isinstance(value, type):
        # A function is the score "function".
        value = {"name": "function", "function": value}
    if isinstance(value, str) and field != "language":
        value = {"name": value}
    if not isinstance(value, Mapping):
        raise TypeError(f"{field} must be {part.valid}, got {brief(value)}")
    options = dict(value)
    if field == "router":
        cls = SCORES[options.pop("name", None)]
    elif part.plain_names:
        name = options.pop("name", cls.name)
        one_of(field, name, (*part.plain_names, cls.name))
        if name in part.plain_names:
            if options:
                raise ValueError(f"{field}={name!r} has no options, got {', '.join(options)}; {cls.name!r} has some")
            return name
    title = f"{field} {value['name']!r}" if "name" in value else field
    valid_options = [item.name for item in dataclasses.fields(cls)]
    # The first unknown option, which the message names.
    unknown = next((name for name in options if name not in valid_options), None)
    elsewhere = ""
    if unknown is not None:
        place = place_of(unknown, options[unknown])
        if place:
            elsewhere = f"it belongs to {place}"
    refuse_unknown(f"option of {title}:", options, valid_options, elsewhere)
    return cls(**options)


def read_parts(fields: Mapping[str, object]) -> dict[str, Any]:
    """Return the parts that fields of `RoutingConfig` describe, defaults where one is missing."""
    router = read_part("router", fields.get("router", "attention"))
    gate = fields.get("gate")
    language = fields.get("language")
    if language is None:
        language = {}
    # A score that does not learn gives a gate nothing to learn from.
    if gate is None:
        gate = "tanh" if router.learns else "identity"
    return {
        "router": router,
        "select": read_part("select", fields.get("select", "topk")),
        "gate": read_part("gate", gate),
        "skipped": read_part("skipped", fields.get("skipped", "pass")),
        "language": read_part("language", language),
    }


def check_options(values: Mapping[str, object], valid: Sequence[str], fields: Mapping[str, object]) -> None:
    """Raise a ValueError unless all names are valid options of a routing; that of a part's option says where it goes.

    Args:
        fields: The routing that the options change, which says what its parts are.

    Example:
        >>> check_options({"scale": 0.1}, ("gate",), {"gate": "sigmoid"})
        Traceback (most recent call last):
        ValueError: unknown routing option scale: it belongs to gate, pass gate={'name': 'sigmoid', 'scale': 0.1}
    """
    for name in [name for name in values if name not in valid]:
        parts = {field: values.get(field, fields.get(field)) for field in PARTS}
        place = place_of(name, values[name], read_parts(without_none(parts)))
        owners = [repr(owner) for owner in PRESETS if name in inspect.signature(PRESETS[owner]).parameters]
        if not place and owners:
            place = f"preset {' or '.join(owners)}"
        if place:
            raise ValueError(f"unknown routing option {name}: it belongs to {place}")
    refuse_unknown("routing option", values, valid, METHODS_ELSEWHERE)


def revised(fields: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """Return fields of a routing config with changes; a mapping without a `name` changes options of the present part.

    Example:
        >>> revised({"gate": Gate("sigmoid"), "capacity": 0.5}, {"gate": {"scale": 0.1}})["gate"]
        Gate(name='sigmoid', scale=0.1)
    """
    revised_fields = {**fields, **changes}
    for field in PARTS:
        options = changes.get(field)
        if not isinstance(options, Mapping) or "name" in options:
            continue
        present = read_parts(fields)[field]
        # A plain name such as "topk" has no options; those of the part that has some replace it.
        if not isinstance(present, str):
            options = {**vars(present), **options}
            # A score's name is its class's, and no option.
            if hasattr(present, "name"):
                options = {"name": present.name, **options}
        revised_fields[field] = read_part(field, options)
    return revised_fields
