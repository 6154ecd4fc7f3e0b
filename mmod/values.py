"""Strict values: the type and the range of each field of a config, with errors that name what is valid."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import math
import numbers
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, Union

__all__ = ["check_distinct", "check_fields", "check_value", "describe", "one_of", "refuse_unknown"]

_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
    type(None): "null",
}


Limit = str | tuple[str, ...]
"""What narrows a type: the interval of its numbers, as "[0, 1)", or the texts that it takes."""

_FINITE = "(-inf, inf)"


def one_of(name: str, value: object, valid: Sequence[str]) -> None:
    """Raise a ValueError that names the value and the valid ones unless `value` is one of `valid`."""
    if value not in valid:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, valid))}, got {_brief(value)}")


def refuse_unknown(kind: str, names: Iterable[str], valid: Sequence[str]) -> None:
    """Raise a ValueError that names the unknown ones and the valid ones unless all of `names` are among `valid`."""
    unknown = sorted(map(str, set(names) - set(valid)))
    if unknown:
        raise ValueError(f"unknown {kind} {', '.join(unknown)}; valid ones are {', '.join(valid)}")


def check_distinct(config: Any, *names: str) -> None:
    """Raise a ValueError unless each of some fields, which are lists, names at least one value, and none twice."""
    for name in names:
        values = getattr(config, name)
        if not values or len(set(values)) != len(values):
            raise ValueError(f"{name} must name at least one value, and each once, got {values}")


def check_fields(config: Any, group: str = "", **limits: Limit) -> None:
    """Raise unless each field of a dataclass holds a value of its annotated type and within its limit.

    Args:
        config: An instance of the dataclass.
        group: What the fields stand under in a config file, for messages.
        limits: Names of fields to what narrows their types. All numbers are finite.

    Raises:
        TypeError: A value of another type. True and false are no numbers, and a text is no number.
        ValueError: A number outside its interval, or a text that is none of those its field takes.

    Example:
        >>> @dataclasses.dataclass
        ... class Average:
        ...     decay: float = 0.9
        >>> check_fields(Average(2), "ema", decay="[0, 1)")
        Traceback (most recent call last):
        ValueError: ema.decay must be a number in [0, 1), got 2
    """
    kind: Any = type(config)
    hints = _hints(kind)
    assert limits.keys() <= hints.keys(), f"no fields of {kind.__name__}: {limits.keys() - hints.keys()}"
    for name, hint in hints.items():
        check_value(f"{group}.{name}" if group else name, getattr(config, name), hint, limits.get(name, _FINITE))


def check_value(name: str, value: object, hint: Any, limit: Limit = _FINITE) -> None:
    """Raise unless a value is of a type and within a limit; see `check_fields`.

    Args:
        name: What the value is called.
        value: The value.
        hint: Its type, as an annotation says it.
        limit: What narrows the type.

    Raises:
        TypeError: A value of another type.
        ValueError: A number outside the interval, or a text that is none of those it may be.
    """
    fault = _fault(value, hint, limit)
    if fault is not None:
        raise fault(f"{name} must be {describe(hint, limit)}, got {_brief(value)}")


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _fault(value: object, hint: Any, limit: Limit) -> type[Exception] | None:
    """Return the kind of error that a value is; None when it is valid."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return None
    if origin in (Union, types.UnionType):
        faults = {_fault(value, one, limit) for one in arguments}
        return None if None in faults else ValueError if ValueError in faults else TypeError
    if origin is Literal:
        return _fault(value, str, arguments)
    if hint in (int, float):
        kind = numbers.Integral if hint is int else numbers.Real
        if isinstance(value, bool) or not isinstance(value, kind):
            return TypeError
        return None if _within(value, limit) else ValueError
    if hint is str and isinstance(limit, tuple) and isinstance(value, str):
        return None if value in limit else ValueError
    if origin in (list, tuple, dict, collections.abc.Mapping):
        return _fault_within(value, hint, limit)
    if origin is collections.abc.Callable:
        return None if callable(value) else TypeError
    return None if isinstance(value, hint) else TypeError


def _fault_within(value: object, hint: Any, limit: Limit) -> type[Exception] | None:
    """Return the kind of error that a sequence or mapping, or the first bad value in it, is."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin not in (list, tuple):
        if not isinstance(value, Mapping):
            return TypeError
        pairs = [pair for item in value.items() for pair in zip(item, arguments)]
    elif not isinstance(value, (list, tuple)):
        return TypeError
    elif origin is tuple and arguments[-1] is not Ellipsis:
        if len(value) != len(arguments):
            return ValueError
        pairs = list(zip(value, arguments))
    else:
        pairs = [(item, arguments[0]) for item in value]
    return next(filter(None, (_fault(item, one, limit) for item, one in pairs)), None)


def _within(value: Any, limit: Limit) -> bool:
    interval = limit if isinstance(limit, str) else _FINITE
    low, high = _bounds(interval)
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return bool(above and below)


@functools.cache
def _bounds(interval: str) -> tuple[float, float]:
    low, high = map(float, interval[1:-1].split(", "))
    return low, high


def describe(hint: Any, limit: Limit = _FINITE) -> str:
    """Say which values a type and a limit allow, as messages do; see `check_fields`.

    Args:
        hint: The type, as an annotation says it.
        limit: What narrows it.

    Example:
        >>> describe(float | None, "[0, 1)")
        'a number in [0, 1) or null'
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(one, limit) for one in arguments)
    if origin is Literal:
        return describe(str, arguments)
    if hint is str and isinstance(limit, tuple):
        return ("one of " if len(limit) > 1 else "") + ", ".join(map(repr, limit))
    if hint in (int, float):
        return _describe_number(_NAMES[hint], limit)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"{len(arguments)} values, each {describe(arguments[0], limit)}"
    if origin in (list, tuple):
        return f"several values, each {describe(arguments[0], limit)}"
    if origin in (dict, collections.abc.Mapping):
        return "a mapping of names" + ("" if arguments[1] is Any else f" to {describe(arguments[1], limit)}")
    if origin is collections.abc.Callable:
        return "a function"
    return _NAMES.get(hint) or f"a {hint.__name__}"


def _describe_number(name: str, limit: Limit) -> str:
    interval = limit if isinstance(limit, str) else _FINITE
    low, high = _bounds(interval)
    if math.isinf(low) and math.isinf(high):
        return name if name == _NAMES[int] else "a finite number"
    if math.isinf(high):
        return f"{name} {'of at least' if interval[0] == '[' else 'above'} {low:g}"
    return f"{name} in {interval}"


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
