"""Configs and results from the plain values of files, and messages about their keys."""

from __future__ import annotations

import collections.abc
import dataclasses
import math
import re
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING
from typing import Any, TypeVar, Union

from mmod.names import MANY, say_near, similar, with_hint
from mmod.values import FINITE, Limit, Mistakes, brief, check_named, check_value, hints_of, limits_of

Config = TypeVar("Config")
Key = TypeVar("Key")
Value = TypeVar("Value")


def from_plain(cls: type[Config], values: object, name: str = "", limit: Limit | None = FINITE) -> Config:
    """Build a dataclass, and the dataclasses and tuples in it, from the plain values of a file.

    Args:
        name: Dotted key of the values in their file, for messages; empty for all of it.
        limit: Range of all numbers; None allows NaN, which results may hold, and reads it where their file has null.

    Raises:
        ValueError: A value is wrong, a key unknown or missing; several mistakes are told together.
        TypeError: The only mistake is a value of another type.

    Example:
        >>> @dataclasses.dataclass
        ... class Span:
        ...     ends: tuple[float, ...]
        >>> from_plain(Span, {"ends": [1, 4.5]})
        Span(ends=(1.0, 4.5))
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"{name or 'a config file'} must be a mapping of keys to values, got {brief(values)}")
    # mypy takes a type variable for nothing that a cache can hash.
    config_class: type = cls
    hints = hints_of(config_class)
    prefix = f"{name}." if name else ""
    fields: dict[str, object] = {}
    limits = {} if limit is None else limits_of(config_class)
    if "kind" in hints and "kind" in values:
        # The keys of another kind would all be unknown, and hide this mistake.
        check_value(f"{prefix}kind", values["kind"], hints["kind"])
    mistakes = Mistakes()
    with mistakes.collected():
        check_keys(config_class, values, name)
    for key, value in values.items():
        if key not in hints:
            continue
        with mistakes.collected():
            fields[key] = _from_plain(hints[key], value, f"{prefix}{key}", limit)
            check_named(cls, key, f"{prefix}{key}", fields[key])
            check_value(f"{prefix}{key}", fields[key], hints[key], limits.get(key, limit))
    missing = [prefix + key for key in required_fields(config_class) if key not in values]
    if missing:
        mistakes.errors.append(ValueError(f"keys that are required: {', '.join(missing)}"))
    mistakes.tell()
    return cls(**fields)


def check_keys(cls: type, values: Mapping[str, object], name: str = "") -> None:
    """Raise a ValueError for keys that a config does not have; see `from_plain`."""
    unknown = [key for key in values if key not in hints_of(cls)]
    if unknown:
        raise ValueError(_told_unknown(cls, unknown, name))


def _from_plain(hint: object, value: object, name: str, limit: Limit | None) -> object:
    """Return a value with mappings, lists and integers replaced by the dataclasses, tuples and floats of its type."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    # What `without_nan` wrote.
    if hint is float and value is None and limit is None:
        return math.nan
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        # At most one type of a union is a dataclass or a container, so the others leave the value unchanged.
        for option in arguments:
            value = _from_plain(option, value, name, limit)
        return value
    if origin in (list, tuple) and isinstance(value, list):
        types_of_items = arguments[:1] * len(value)
        has_fixed_length = origin is tuple and arguments[-1] is not Ellipsis
        if has_fixed_length:
            types_of_items = arguments
        pairs = enumerate(zip(types_of_items, value))
        items = [_from_plain(kind, item, f"{name}[{i}]", limit) for i, (kind, item) in pairs]
        # A list of the wrong length stays a list, which `check_value` refuses.
        if len(types_of_items) != len(value):
            return value
        return origin(items)
    if origin in (dict, collections.abc.Mapping) and isinstance(value, Mapping):
        return {key: _from_plain(arguments[1], item, f"{name}.{key}", limit) for key, item in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return from_plain(typing.cast(type, hint), value, name, limit)
    # Integers that a float holds exactly.
    if hint is float and type(value) is int and abs(value) <= 2**53:
        return float(value)
    return value


def _told_unknown(cls: type, keys: Sequence[object], name: str) -> str:
    """Return the message for unknown keys of a config: similar ones, also in its groups, and once all valid ones."""
    valid = sorted(hints_of(cls))
    listed = f"valid keys at the top level: {', '.join(valid)}"
    prefix = ""
    if name:
        listed = f"valid keys in group {name!r}: {', '.join(valid)}"
        prefix = f"{name}."
    inside = list(_paths_in_groups(cls))
    # Of another config, which a key stands for.
    elsewhere = list(_paths_in_groups(cls, "config"))
    named = []
    hints = []
    for key in keys:
        dotted = f"{prefix}{key}"
        named.append(repr(dotted))
        near = _ending_in([key], inside) or [*similar(key, valid), *_ending_in([key], elsewhere)]
        if not near:
            paths = [*inside, *elsewhere]
            near = _ending_in(similar(key, map(_last, paths)), paths)
        hints.append(say_near(near))
    if len(keys) > 1:
        told = ", ".join(map(with_hint, named, hints))
        return f"unknown config keys {told}; {listed}"
    message = f"unknown config key {named[0]}"
    if hints[0]:
        message += f"; {hints[0]}"
    # Of many keys, all are listed only where none is near.
    if len(valid) <= MANY or not hints[0]:
        message += f"; {listed}"
    return message


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _ending_in(names: Sequence[object], paths: Sequence[str]) -> list[str]:
    return [path for path in paths if _last(path) in names]


def _paths_in_groups(cls: Any, described: str = "") -> Iterator[str]:
    """Yield the dotted keys of the groups in a config; or of those that metadata describe under a name."""
    for name, hint in hints_of(cls).items():
        group = dataclass_in(hint)
        unnamed: Sequence[str] = ()
        if described:
            metadata = cls.__dataclass_fields__[name].metadata
            describe = metadata.get(described)
            group = describe and describe(cls)
            # What the described config has, and a user does not write there.
            unnamed = metadata.get("unnamed", ())
        # Items of a list have no key of their own.
        if group is not None and typing.get_origin(hint) not in (list, tuple):
            keys = [key for key in hints_of(group) if key not in unnamed]
            yield from (f"{name}.{key}" for key in (*keys, *_paths_in_groups(group)))


def required_fields(cls: type) -> list[str]:
    """Return the fields of a dataclass that have no default."""
    return [field.name for field in dataclasses.fields(cls) if field.default is field.default_factory is MISSING]


def dataclass_in(hint: object) -> type | None:
    """Return the dataclass that a field's type is or allows; None if its keys are free."""
    for item in (hint, *typing.get_args(hint)):
        if isinstance(item, type) and dataclasses.is_dataclass(item):
            return item
    return None


def with_keys_in(group: str, config: object, message: str) -> str:
    """Return a message about a config with its dotted keys as keys in a group of another config; "" for none.

    Example:
        >>> @dataclasses.dataclass
        ... class Run:
        ...     schedule: dict[str, int]
        >>> with_keys_in("finetune", Run({}), "Set schedule.warmup to 0")
        'Set finetune.schedule.warmup to 0'
    """
    if not group:
        return message
    # Not the name of a file, which stands in quotes or behind its folder.
    cls: type = type(config)
    names = "|".join(hints_of(cls))
    return re.sub(rf"(?<![\w./'\"])(?=(?:{names})\.\w)", f"{group}.", message)


def without(values: Mapping[Key, Value], keys: Collection[object]) -> dict[Key, Value]:
    """Return values by key, without those of some keys."""
    return {key: value for key, value in values.items() if key not in keys}


def without_none(values: Mapping[Key, Value | None]) -> dict[Key, Value]:
    """Return values by key, without those that are None."""
    return {key: value for key, value in values.items() if value is not None}


def without_nan(values: object) -> Any:
    """Return the plain values of a file, with None for numbers that are not finite: JSON and tables have none.

    Example:
        >>> without_nan({"kept": [0.5, math.nan]})
        {'kept': [0.5, None]}
    """
    if isinstance(values, Mapping):
        return {key: without_nan(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [without_nan(value) for value in values]
    if isinstance(values, float) and not math.isfinite(values):
        return None
    return values
