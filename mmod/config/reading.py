"""The parts of a routing config from the ways to say them: a name, a value, or a plain mapping."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from mmod.config.parts import Gate, LanguageRouting, Threshold
from mmod.config.registry import SCORES
from mmod.config.score import Score
from mmod.values import one_of, refuse_unknown

PARTS = ("router", "select", "gate", "language")
Part = TypeVar("Part")


def score(name: str, **options: Any) -> Score:
    """Return a score with options, for `RoutingConfig(router=...)`.

    Args:
        name: A registered name.
        options: The score's options, such as `bias` of "linear" and `seed` of "random".

    Raises:
        TypeError: An option of the wrong type.
        ValueError: An unknown name or option, or one that is out of range.

    Example:
        >>> score("linear", bias=True)
        Linear(normalize=True, bias=True, init_std=None, per='token', initial=None)
    """
    return _part("router", SCORES[name], options)


def read_parts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts that fields of `RoutingConfig` mean, defaults where one is missing."""
    router = _score(fields.get("router", "attention"))
    gate, language = fields.get("gate"), fields.get("language")
    if gate is None:
        gate = "tanh" if router.learns else "identity"
    return {
        "router": router,
        "select": _selection(fields.get("select", "topk")),
        "gate": _part("gate", Gate, {"name": gate} if isinstance(gate, str) else gate),
        "language": _part("language", LanguageRouting, {} if language is None else language),
    }


def revised(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a routing config with changes.

    Args:
        fields: Fields of `RoutingConfig`.
        changes: Other values for some. A mapping that does not name its part changes options of the one there.

    Example:
        >>> revised({"gate": Gate("sigmoid"), "capacity": 0.5}, {"gate": {"scale": 0.1}})["gate"]
        Gate(name='sigmoid', scale=0.1, reweight_skipped=False)
    """
    found = {**fields, **changes}
    for name in PARTS:
        options = changes.get(name)
        if isinstance(options, Mapping) and "name" not in options:
            found[name] = revise(name, read_parts(fields)[name], options)
    return found


def revise(name: str, part: Any, options: Mapping[str, Any]) -> Any:
    """Return a part of a routing config, called `name`, with some options changed."""
    kind, present = (Threshold, {}) if part == "topk" else (type(part), vars(part))
    return _part(name, kind, {**present, **options})


def _score(router: Any) -> Score:
    if isinstance(router, Score):
        return router
    if isinstance(router, str):
        return score(router)
    if isinstance(router, Mapping) and isinstance(router.get("name"), str):
        return score(**router)
    if callable(router):
        return score("function", function=router)
    raise TypeError(f"router must be a name, a score or a function, got {router!r}")


def _selection(select: Any) -> Literal["topk"] | Threshold:
    if isinstance(select, (Threshold, Mapping)):
        return _part("select", Threshold, select)
    one_of("select", select, ("topk", "threshold"))
    return Threshold() if select == "threshold" else "topk"


def _part(name: str, kind: type[Part], value: Any) -> Part:
    """Return a part from a value of its kind or a mapping of its options."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a name or options of {kind.__name__}, got {value!r}")
    refuse_unknown(f"option of {name}", value, [item.name for item in dataclasses.fields(kind)])  # type: ignore[arg-type]
    return kind(**value)
