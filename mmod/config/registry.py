"""Registries of scores, presets and losses, which other packages can extend."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mmod.config.score import Score
from mmod.values import brief, check_value

if TYPE_CHECKING:
    from torch import Tensor

Entry = TypeVar("Entry")
Added = TypeVar("Added", bound=Callable[..., Any])
AnyScore = TypeVar("AnyScore", bound=Score)


class Registry(Generic[Entry]):
    """Entries by name; `home` registers those of this package and is imported at the first lookup."""

    def __init__(self, noun: str, home: str, register: str) -> None:
        self._noun = noun
        self._home = home
        self._register = register
        self._entries: dict[str, Entry] = {}
        self._places: dict[str, str] = {}

    def add(self, name: str, entry: Entry, source: Any) -> None:
        """Add the entry of a class or function `source`, which may be defined again, as in a notebook."""
        check_value(f"the name passed to mmod.{self._register}", name, str)
        if not callable(source):
            raise TypeError(f"mmod.{self._register} decorates a class or a function, got {brief(source)}")
        place = f"{source.__module__}.{source.__qualname__}"
        if not place.startswith("mmod."):
            importlib.import_module(self._home)
        taken = self._places.setdefault(name, place)
        if taken != place:
            raise ValueError(f"{self._noun} {name!r} is {taken} already; choose another name for {place}")
        self._entries[name] = entry

    def __getitem__(self, name: str) -> Entry:
        self.check(name)
        return self._entries[name]

    def check(self, name: str) -> None:
        """Raise a ValueError unless `name` is registered."""
        if not isinstance(name, str) or (name not in self._entries and name not in list(self)):
            valid = ", ".join(map(repr, sorted(self)))
            raise ValueError(
                f"{self._noun} must be one of {valid}, got {name!r}; for a name of another package, import the module "
                f"that calls mmod.{self._register}"
            )

    def __iter__(self) -> Iterator[str]:
        importlib.import_module(self._home)
        return iter(self._entries)


@dataclass(frozen=True)
class Loss:
    """An auxiliary loss of a routed block; where it reads importance, training computes that."""

    function: Callable[..., Tensor]
    reads_importance: bool = False

    def __call__(self, *arguments: Any) -> Tensor:
        """Return the loss of a block's `Routing` and the `Router` that made it."""
        return self.function(*arguments)


def check_frozen(entry: Any, base: type, title: str) -> None:
    """Raise a TypeError unless an entry is a frozen dataclass derived from a base class."""
    derived = isinstance(entry, type) and issubclass(entry, base)
    if not derived or not getattr(vars(entry).get("__dataclass_params__"), "frozen", False):
        raise TypeError(
            f"register a class derived from {title} and decorated by @dataclass(frozen=True), got {brief(entry)}"
        )


SCORES: Registry[type[Score]] = Registry("router", "mmod.routing.score", "register_score")
PRESETS: Registry[Callable[..., Mapping[str, Any]]] = Registry("preset", "mmod.planning.presets", "register_preset")
LOSSES: Registry[Loss] = Registry("a loss", "mmod.losses", "register_loss")


def register_score(name: str) -> Callable[[type[AnyScore]], type[AnyScore]]:
    """Return a decorator that lets configs name a score, a frozen dataclass derived from `mmod.Score`.

    Raises:
        TypeError: The class is no such dataclass.
        ValueError: The name is taken, or the score both learns and is shared.

    Example:
        >>> import dataclasses, mmod
        >>> from mmod.routing import NormScore
        >>> @register_score("length")
        ... @dataclasses.dataclass(frozen=True)
        ... class Length(mmod.Score):
        ...     def make(self, place):
        ...         return NormScore()
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


def register_preset(name: str) -> Callable[[Added], Added]:
    """Return a decorator that lets `mmod.preset` and configs name a preset, which no other may be called.

    Example:
        >>> @register_preset("half-norm")
        ... def half_norm():
        ...     return {"router": "norm", "capacity": 0.5}
        >>> import mmod
        >>> mmod.preset("half-norm", blocks="late").router.name
        'norm'
    """

    def add(preset: Added) -> Added:
        PRESETS.add(name, preset, preset)
        return preset

    return add


def register_loss(name: str, reads_importance: bool = False) -> Callable[[Added], Added]:
    """Return a decorator that lets `RoutingConfig(losses={name: weight})` name an auxiliary loss.

    The loss is a function from a block's `Routing` and the `Router` that made it to a scalar.

    Args:
        reads_importance: The loss reads `Routing.evidence.importance_BN`, which is then computed in training.
    """

    def add(loss: Added) -> Added:
        LOSSES.add(name, Loss(loss, reads_importance), loss)
        return loss

    return add
