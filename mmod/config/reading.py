"""Reads the parts of a routing config, each written as a name, as a value, or as a plain mapping."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from mmod.config.parts import Gate, LanguageRouting, Merged, Threshold
from mmod.config.registry import SCORES
from mmod.config.score import Score
from mmod.values import one_of, refuse_unknown

PARTS = ("router", "select", "gate", "skipped", "language")
# Parts that are a plain name, or a value with options which has a name of its own.
_CHOICES: dict[str, tuple[type[Any], tuple[str, ...]]] = {
    "select": (Threshold, ("topk",)),
    "skipped": (Merged, ("pass", "scale", "follow")),
}
Value = TypeVar("Value")


def score(name: str, **options: Any) -> Score:
    """Return a score with options, for `RoutingConfig(router=...)`.

    Args:
        name: A registered name.
        options: The score's options, such as `bias` of "linear", `seed` of "random" or `importance` of "attention".

    Example:
        >>> score("attention", importance="class_token")
        Attention(importance='class_token')
    """
    return _read("router", SCORES[name], options)


def read_parts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts that fields of `RoutingConfig` describe, defaults where one is missing."""
    router = _score(fields.get("router", "attention"))
    gate, language = fields.get("gate"), fields.get("language")
    if gate is None:
        gate = "tanh" if router.learns else "identity"
    return {
        "router": router,
        "select": _choice("select", fields.get("select", "topk")),
        "gate": _read("gate", Gate, {"name": gate} if isinstance(gate, str) else gate),
        "skipped": _choice("skipped", fields.get("skipped", "pass")),
        "language": _read("language", LanguageRouting, {} if language is None else language),
    }


def revised(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a routing config with changes; a mapping without a `name` changes options of the present part.

    Example:
        >>> revised({"gate": Gate("sigmoid"), "capacity": 0.5}, {"gate": {"scale": 0.1}})["gate"]
        Gate(name='sigmoid', scale=0.1)
    """
    revised_fields = {**fields, **changes}
    for name in PARTS:
        options = changes.get(name)
        if isinstance(options, Mapping) and "name" not in options:
            value = read_parts(fields)[name]
            cls, present = (_CHOICES[name][0], {}) if isinstance(value, str) else (type(value), vars(value))
            revised_fields[name] = _read(name, cls, {**present, **options})
    return revised_fields


def _score(router: Any) -> Score:
    if isinstance(router, Score):
        return router
    if isinstance(router, str):
        return score(router)
    if isinstance(router, Mapping) and isinstance(router.get("name"), str):
        return score(**router)
    if callable(router) and not isinstance(router, type):
        return score("function", function=router)
    raise TypeError(f"router must be a name, a score or a function, got {router!r}")


def _choice(field: str, value: Any) -> Any:
    """Return a part that is a plain name or a value with options, which has a name too."""
    cls, names = _CHOICES[field]
    if isinstance(value, Mapping):
        options = dict(value)
        name = options.pop("name", cls.name)
        if name == cls.name:
            return _read(field, cls, options)
        if options:
            raise ValueError(f"{field}={name!r} has no options, got {', '.join(options)}; {cls.name!r} has some")
        return _choice(field, name)
    if isinstance(value, cls):
        return value
    one_of(field, value, (*names, cls.name))
    return cls() if value == cls.name else value


def _read(name: str, cls: type[Value], value: Any) -> Value:
    """Return a part from a value of its class or a mapping of its options."""
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        names = "a name or " if name in ("gate", *_CHOICES) else ""
        raise TypeError(f"{name} must be {names}options of {cls.__name__}, got {value!r}")
    refuse_unknown(f"option of {name}", value, [item.name for item in dataclasses.fields(cls)])  # type: ignore[arg-type]
    return cls(**value)
