"""Strict values: checks of type and range, with errors that name the valid values."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import itertools
import math
import numbers
import operator
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Union

from mmod.names import near_names, similar, valid_names

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self

_NAMES: dict[object, str] = {
    Mapping: "a mapping of names to values",
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
    type(None): "null",
}


Limit = str | tuple[str, ...]
"""Valid values within a type: an interval such as "[0, 1)" for numbers, or the valid strings."""

IGNORED = -100
"""Label of a patch or token without a class, as torch's `ignore_index`: losses and figures leave it out."""
FINITE = "(-inf, inf)"
_PRESET = "preset"


def one_of(name: str, value: object, valid: Sequence[str]) -> None:
    """Raise a ValueError unless `value` is one of `valid`."""
    if value not in valid:
        told = f"{name} must be one of {', '.join(map(repr, valid))}, got {brief(value)}"
        raise ValueError("; ".join(filter(None, [told, near_names(value, valid)])))


def refuse_unknown(noun: str, names: Iterable[str], valid: Sequence[str], elsewhere: str = "") -> None:
    """Raise a ValueError unless all `names` are among `valid`; see `valid_names`.

    Args:
        elsewhere: What a name that is near none may be, and where that goes.

    Example:
        >>> refuse_unknown("argument", ["learning_rat"], [*map(str, range(30)), "learning_rate"])
        Traceback (most recent call last):
        ValueError: unknown argument learning_rat; near ones: learning_rate
    """
    unknown = sorted(map(str, set(names) - set(valid)))
    if not unknown:
        return
    told = f"unknown {noun} {', '.join(unknown)}; {valid_names(unknown[0], valid, 'valid ones are')}"
    # A near name is what was meant, wherever else the name may go.
    if elsewhere and not similar(unknown[0], valid):
        told += f"; {elsewhere}"
    raise ValueError(told)


def check_distinct(config: object, *names: str) -> None:
    """Raise a ValueError if one of these list fields is empty or has duplicates."""
    for name in names:
        values = getattr(config, name)
        if not values or len(set(values)) != len(values):
            raise ValueError(f"{name} must name at least one value, and each once, got {values}")


def check_fields(config: object, group: str = "") -> None:
    """Raise unless every field of a dataclass has its annotated type and is within its limit; numbers must be finite.

    The limit of a field stands in its annotation: `Annotated[int | None, "[1, inf)"]`. Numbers of numpy are replaced by
    Python's, which files can hold, and lists and ranges by tuples where the type is a tuple. `group` is the fields'
    section in messages.
    """
    cls: type = type(config)
    limits = limits_of(cls)
    mistakes = Mistakes()
    for name, hint in hints_of(cls).items():
        given = getattr(config, name)
        value = given
        if isinstance(given, range):
            value = list(given)
        key = f"{group}.{name}" if group else name
        with mistakes.collected():
            check_named(cls, name, key, value)
            check_value(key, value, hint, limits.get(name, FINITE))
        plain = _builtin(value)
        options = (hint, *typing.get_args(hint))
        # A field's tuple that came from a file is a list.
        if isinstance(plain, list) and any(typing.get_origin(option) is tuple for option in options):
            plain = tuple(plain)
        if plain is not given:
            # A frozen dataclass refuses assignments.
            object.__setattr__(config, name, plain)
    mistakes.tell()


class _OfInit:
    """The signature of a class as `inspect` finds it: that of its `__init__`, whatever its `__new__` takes."""

    def __get__(self, instance: object, cls: type) -> inspect.Signature:
        return _signature_of(cls)


@functools.cache
def _signature_of(cls: Any) -> inspect.Signature:
    whole = inspect.signature(cls.__init__)
    _, *parameters = whole.parameters.values()
    return whole.replace(parameters=parameters)


class Checked:
    """Base of dataclasses whose fields are checked when they are made, see `check_fields`.

    Classes name the fields' `group` after their bases, and inherit it.

    Example:
        >>> @dataclasses.dataclass
        ... class Average(Checked, group="ema"):
        ...     decay: typing.Annotated[float, "[0, 1)"] = 0.9
        >>> Average(decay=50)
        Traceback (most recent call last):
        ValueError: ema.decay must be a number in [0, 1), got 50; write 0.5 if 50 % is meant
        >>> Average(deacy=0.9)
        Traceback (most recent call last):
        TypeError: Average has no field 'deacy'; near ones: decay; valid ones are decay
    """

    _group: typing.ClassVar[str] = ""
    __signature__ = _OfInit()

    def __new__(cls, *_: object, **fields: object) -> Self:
        """Refuse unknown names with the near ones, which `__init__` would not name."""
        known = inspect.signature(cls).parameters
        for name in fields:
            if name not in known:
                hint = valid_names(name, list(known), "valid ones are")
                hints = filter(None, [hint, owner_of(name, cls)])
                raise TypeError(f"{cls.__name__} has no field {name!r}; {'; '.join(hints)}")
        return super().__new__(cls)

    def __init_subclass__(cls, group: str | None = None) -> None:
        super().__init_subclass__()
        if group is not None:
            cls._group = group

    def __post_init__(self) -> None:
        check_fields(self, self._group)


def owner_of(field: str, cls: type) -> str:
    """Return as a hint which classes like another one, derived from the same base below `Checked`, have a field."""
    family = [base for base in cls.__mro__ if issubclass(base, Checked) and base is not Checked][-1]
    owners = []
    derived = family.__subclasses__()
    while derived:
        relative = derived.pop(0)
        derived += relative.__subclasses__()
        if field in inspect.signature(relative).parameters:
            owners.append(relative.__name__)
    if not owners:
        return ""
    return f"it is a field of {' and '.join(sorted(owners))}"


def check_value(name: str, value: object, hint: object, limit: Limit | None = FINITE) -> None:
    """Raise unless a value is of a type and within a limit, None for any value; see `check_fields`."""
    fault = _fault(value, hint, limit)
    if fault is not None:
        told = f"{name} must be {describe(hint, limit)}, got {brief(value)}"
        near = ""
        if isinstance(value, str):
            near = near_names(value, _choices(hint, limit))
        alone = ""
        if _fault([value], hint, limit) is None:
            alone = f"write [{brief(value)}], in quotes on a command line"
        raise fault("; ".join(filter(None, [told, near, alone, _share_hint(value, limit)])))


def _share_hint(value: object, limit: Limit | None) -> str:
    """Return how to write a percentage that stands where a share belongs; empty for other values."""
    if not isinstance(limit, str):
        return ""
    least, most = _bounds(limit)
    if least < 0 or most != 1:
        return ""
    percent = re.fullmatch(r"(\d+(?:\.\d+)?) ?%?", str(value))
    # Up to 2, a number alone is rather a slip than a percentage.
    if percent is None or (float(percent[1]) <= 2 and "%" not in percent[0]):
        return ""
    share = float(percent[1]) / 100
    # Whether a share is meant is not known: a decay rate has the same limits.
    if _within(share, limit):
        return f"write {share:g} if {percent[1]} % is meant"
    return ""


def _choices(hint: object, limit: Limit | None) -> list[str]:
    """Return the texts that a type and a limit allow, where these are a few."""
    if hint is str and isinstance(limit, tuple):
        return list(limit)
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return [option for option in arguments if isinstance(option, str)]
    return list(itertools.chain.from_iterable(_choices(option, limit) for option in arguments))


def check_named(cls: Any, field: str, name: str, value: object) -> None:
    """Raise a TypeError if a value lacks the names that a field's metadata lists, and is what belongs below one.

    Below the names of parts, the name of a preset alone is meant as a mapping with it.
    """
    names = cls.__dataclass_fields__[field].metadata.get("names")
    hint = hints_of(cls)[field]
    if not names or fits(value, hint):
        return
    guesses: list[dict[str, object]] = []
    if isinstance(value, str):
        guesses = [{names[0]: value}, {names[0]: {_PRESET: value}}]
    elif isinstance(value, Mapping):
        presets = {key: {_PRESET: item} if isinstance(item, str) else item for key, item in value.items()}
        # One that has the names is not what belongs below one.
        guesses = [presets if value.keys() & set(names) else {names[0]: value}]
    for right in guesses:
        if fits(right, hint):
            listed = " and ".join(names)
            raise TypeError(f"{name} is a mapping with {listed}: write {name}: {_flow(right)}, got {brief(value)}")


def _flow(value: object) -> str:
    """Return a mapping of a message as YAML in one line."""
    if isinstance(value, Mapping):
        items = ", ".join(f"{key}: {_flow(item)}" for key, item in value.items())
        return f"{{{items}}}"
    return str(value)


def fits(value: object, hint: object) -> bool:
    """Return whether a value is of a type; see `check_fields`."""
    return _fault(value, hint, FINITE) is None


def _builtin(value: Any) -> object:
    """Return numbers of other libraries as int or float, also inside lists and tuples."""
    if type(value) in (list, tuple):
        items = [_builtin(item) for item in value]
        # The same list if nothing changed, so that callers see by identity whether anything did.
        if all(map(operator.is_, items, value)):
            return value
        return type(value)(items)
    if isinstance(value, (int, float)) or not isinstance(value, numbers.Real):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value)


def check_finite(name: str, values: Tensor) -> None:
    """Raise unless all values of a tensor are finite floating-point numbers.

    Example:
        >>> import torch
        >>> check_finite("images", torch.tensor([1.0, torch.nan, torch.inf]))
        Traceback (most recent call last):
        ValueError: images must be finite, got 2 of 3 values that are NaN or infinite
    """
    if not values.is_floating_point():
        raise TypeError(f"{name} must be floating-point numbers, got {values.dtype}")
    bad = values.numel() - int(values.isfinite().sum())
    if bad:
        raise ValueError(f"{name} must be finite, got {bad} of {values.numel()} values that are NaN or infinite")


def check_module(model: object) -> None:
    """Raise a TypeError unless a model is a `torch.nn.Module`, for example if it is a model's name."""
    from torch import nn

    if isinstance(model, Mapping):
        raise TypeError(
            f"model must be a torch.nn.Module, got a mapping of {len(model)} names: build the model first, then "
            "load weights by its load_state_dict"
        )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {brief(model)}")


class _SeveralError(ValueError):
    """Several mistakes in one file, which a user mends at once."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        self.mistakes = mistakes
        numbered = "; ".join(f"({number}) {mistake}" for number, mistake in enumerate(mistakes, 1))
        super().__init__(f"{len(mistakes)} mistakes: {numbered}")


class Mistakes:
    """Errors of several checks, which are told together, so that the user mends them at once.

    Example:
        >>> mistakes = Mistakes()
        >>> for name in ("epochs", "steps"):
        ...     with mistakes.collected():
        ...         check_value(name, 0, int, "[1, inf)")
        >>> mistakes.errors[1]
        ValueError('steps must be an integer of at least 1, got 0')
    """

    def __init__(self) -> None:
        self.errors: list[Exception] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Context whose ValueError, TypeError or OSError, as of a missing file, is kept, and does not leave it."""
        try:
            yield
        except (TypeError, ValueError, OSError) as error:
            self.errors.append(error)

    def tell(self) -> None:
        """Raise the only error, or one that tells all; those of a group inside count one by one."""
        if len(self.errors) == 1:
            raise self.errors[0]
        told: list[str] = []
        for error in self.errors:
            if isinstance(error, _SeveralError):
                told += error.mistakes
            else:
                told.append(str(error))
        if self.errors:
            raise _SeveralError(told)


@functools.cache
def hints_of(cls: type) -> dict[str, object]:
    """Return the types of a dataclass's fields, by name."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


@functools.cache
def limits_of(cls: type) -> dict[str, Limit]:
    """Return the limits in the annotations of a dataclass's fields, by name."""
    limits: dict[str, Limit] = {}
    # Bases first: a class may set the limit of an inherited field anew.
    for base in reversed(cls.__mro__):
        hints = typing.get_type_hints(base, include_extras=True)
        for name in inspect.get_annotations(base):
            # A field that a class declares again, such as for another default, keeps the limit of its base.
            for note in getattr(hints[name], "__metadata__", ()):
                if isinstance(note, (str, tuple)):
                    limits[name] = note
    return limits


def _fault(value: object, hint: object, limit: Limit | None) -> type[Exception] | None:
    """Return the type of the error for a value; None for a valid one."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if hint is Any:
        return None
    if origin in (Union, types.UnionType):
        faults = {_fault(value, option, limit) for option in arguments}
        if None in faults:
            return None
        # A value of a valid type that is out of range is told the range, not the types.
        if ValueError in faults:
            return ValueError
        return TypeError
    if origin in (list, tuple, dict, collections.abc.Mapping):
        return _fault_within(value, hint, limit)
    if not _has_type(value, hint):
        return TypeError
    if not _is_allowed(value, hint, limit):
        return ValueError
    return None


def _has_type(value: object, hint: Any) -> bool:
    """Return whether a value is of a type that is neither a union nor a container; of a set, items are not checked."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        # True equals 1, and is none.
        return type(value) in map(type, typing.get_args(hint))
    if hint in (int, float):
        abstract = numbers.Integral if hint is int else numbers.Real
        # `True` is an integer to Python, and no number to a reader of a config.
        return isinstance(value, abstract) and not isinstance(value, bool)
    if origin is collections.abc.Callable:
        return callable(value)
    return isinstance(value, origin or hint)


def _is_allowed(value: object, hint: object, limit: Limit | None) -> bool:
    """Return whether a value of the right type is one of its choices, and within its limit."""
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    if hint in (int, float):
        return _within(value, limit)
    if hint is str and isinstance(limit, tuple):
        return value in limit
    return True


def _fault_within(value: object, hint: object, limit: Limit | None) -> type[Exception] | None:
    """Return the type of the error for a sequence or mapping or its first invalid item; None for a valid one."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    pairs: list[tuple[object, object]] = []
    if origin not in (list, tuple):
        if not isinstance(value, Mapping):
            return TypeError
        for key, item in value.items():
            pairs += [(key, arguments[0]), (item, arguments[1])]
    elif not isinstance(value, (list, tuple)):
        return TypeError
    elif origin is tuple and arguments[-1] is not Ellipsis:
        if len(value) != len(arguments):
            return ValueError
        pairs += zip(value, arguments)
    else:
        pairs += [(item, arguments[0]) for item in value]
    for item, item_type in pairs:
        fault = _fault(item, item_type, limit)
        if fault is not None:
            return fault
    return None


def _within(value: Any, limit: Limit | None) -> bool:
    if limit is None:
        return True
    interval = limit if isinstance(limit, str) else FINITE
    low, high = _bounds(interval)
    # A bound itself is allowed beside a square bracket. NaN is within no bounds.
    if value == low:
        return interval[0] == "["
    if value == high:
        return interval[-1] == "]"
    return bool(low < value < high)


@functools.cache
def _bounds(interval: str) -> tuple[float, float]:
    low, high = map(float, interval[1:-1].split(", "))
    return low, high


def describe(hint: Any, limit: Limit | None = FINITE) -> str:
    """Return the description of a type and a limit for messages; see `check_fields`.

    Example:
        >>> describe(float | None, "[0, 1)")
        'a number in [0, 1) or null'
    """
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(option, limit) for option in arguments)
    if origin is Literal:
        return describe(str, arguments)
    if hint is str and isinstance(limit, tuple):
        choices = ", ".join(map(repr, limit))
        if len(limit) > 1:
            return f"one of {choices}"
        return choices
    if hint in (int, float):
        return _describe_number(_NAMES[hint], limit)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"{len(arguments)} values, each {describe(arguments[0], limit)}"
    if origin in (list, tuple):
        return f"several values, each {describe(arguments[0], limit)}"
    if origin in (dict, collections.abc.Mapping):
        keys = "numbers" if arguments[0] in (int, float) else "names"
        if arguments[1] in (Any, object):
            return f"a mapping of {keys}"
        values = describe(arguments[1], limit)
        if " or " in values:
            values = f"({values})"
        return f"a mapping of {keys} to {values}"
    if origin is collections.abc.Callable:
        return "a function"
    if hint in _NAMES:
        return _NAMES[hint]
    article = "an" if hint.__name__[0] in "AEIOU" else "a"
    return f"{article} {hint.__name__}"


def _describe_number(name: str, limit: Limit | None) -> str:
    interval = limit if isinstance(limit, str) else FINITE
    low, high = _bounds(interval)
    if math.isinf(low) and math.isinf(high):
        # An integer has no infinity.
        if name == _NAMES[int]:
            return name
        return "a finite number"
    if math.isinf(high):
        bound = "of at least" if interval[0] == "[" else "above"
        return f"{name} {bound} {low:g}"
    return f"{name} in {interval}"


def brief(value: object) -> str:
    """Return the representation of a value for messages, truncated if long.

    Tensors and arrays are named by type and shape.

    Example:
        >>> len(brief("a" * 10**6))
        203
        >>> import torch
        >>> brief({"images": torch.rand(2, 3, 8, 8)})
        "{'images': Tensor (2, 3, 8, 8)}"
    """
    try:
        text = repr(_without_data(value))
    except ValueError:
        # Python refuses to format integers of more than 4300 digits.
        return f"a {type(value).__name__} too long to be written"
    if len(text) > _LETTERS:
        text = f"{text[:_LETTERS]}..."
    return text


# Of a value in a message.
_LETTERS = 200


class _Shown(str):
    """A text that is its own representation."""

    __slots__ = ()
    __repr__ = str.__str__


def _without_data(value: Any, depth: int = 3) -> object:
    """Return a value with type and shape instead of tensors and arrays, down to a depth: values may hold themselves.

    More items than letters are not shown.
    """
    if getattr(value, "shape", ()) and hasattr(value, "dtype"):
        return _Shown(f"{type(value).__name__} {tuple(value.shape)}")
    if depth and isinstance(value, Mapping):
        return {key: _without_data(item, depth - 1) for key, item in itertools.islice(value.items(), _LETTERS)}
    if depth and type(value) in (list, tuple):
        return type(value)(_without_data(item, depth - 1) for item in itertools.islice(value, _LETTERS))
    return value
