"""Options of command lines: dotted keys and values in YAML, on top of the plain fields of a config."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence

from docstring_parser import parse

from mmod.io.yaml import BASE_KEY, DENSE_KEY, merged, parse_option, switch_fault
from mmod.plain import dataclass_in, required_fields
from mmod.values import fits


def split_options(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield key and value of the options `--key value` and `--key=value`."""
    # An iterator, from which an option takes the word after it.
    remaining = iter(words)
    for word in remaining:
        if not word.startswith("--"):
            raise ValueError(f"unrecognized arguments: {word}")
        key, equals, value = word[2:].partition("=")
        if not equals:
            value = next(remaining, "--")
            # A following option is no value: `--key --other` misses one.
            if value.startswith("--"):
                raise ValueError(f"argument --{key}: expected one argument")
        yield key, value


def with_options(
    fields: Mapping[str, object], options: Iterable[tuple[str, str]], config_class: type | None
) -> dict[str, object]:
    """Return the plain fields of a config with those of options: dotted keys, and values in YAML.

    A mapping is merged into the one of the config key by key, as a file over its `base`; an empty one or null empties
    it first. A group is read before the keys in it, and a `base` before the keys beside it, wherever they stand on the
    line. Keys of a `dense` that a path stands for are changed there: the path becomes their `base`.
    """
    result = dict(fields)
    for key, text in sorted(options, key=_order):
        try:
            result = _with_option(result, key.split("."), text, config_class)
        except ValueError as error:
            raise ValueError(f"--{key}: {error}") from error
    return result


def _order(option: tuple[str, str]) -> tuple[int, bool]:
    *groups, last = option[0].split(".")
    return len(groups), last != BASE_KEY


def _with_option(
    fields: Mapping[str, object], keys: Sequence[str], text: str, config_class: type | None
) -> dict[str, object]:
    name, *inner = keys
    hint: object = object
    if config_class is not None:
        hint = typing.get_type_hints(config_class).get(name, object)
    group = dataclass_in(hint)
    old = fields.get(name)
    if inner:
        inner_fields: Mapping[str, object] = {}
        if isinstance(old, Mapping):
            inner_fields = old
        if name == DENSE_KEY:
            if inner == [BASE_KEY] and inner_fields.get(BASE_KEY) != text:
                # Another config takes the place of the old one, whose keys are not its own.
                inner_fields = {}
            elif isinstance(old, str):
                inner_fields = {BASE_KEY: old}
        return {**fields, name: _with_option(inner_fields, inner, text, group)}
    is_text = fits(text, hint)
    # A name may be one of these where nothing is true or false.
    if switch_fault(text) and fits(True, hint):
        raise ValueError(switch_fault(text))
    # Where anything is valid, a text that begins with a bracket is: a regular expression, or a prompt.
    value = parse_option(text, nested=not is_text or (hint is not object and fits({}, hint)))
    if is_text and not fits(value, hint):
        # A name that YAML reads as something else, such as 2024 or no.
        value = text
    # An empty mapping with free keys would change nothing, and nothing else can remove these.
    is_emptied = group is None and value == {}
    if is_emptied:
        return {**fields, name: value}
    return merged(fields, {name: value})


def add_fields(parser: argparse.ArgumentParser, config_class: type) -> None:
    """Add the fields of a config without groups to a parser: those without a default by position, others as options.

    The parser keeps their texts; see `with_options`.
    """
    required = required_fields(config_class)
    meanings = field_meanings(config_class)
    for item in dataclasses.fields(config_class):
        name = item.name if item.name in required else f"--{item.name}"
        # argparse formats its texts.
        text = meanings.get(item.name, "").replace("%", "%%")
        parser.add_argument(name, default=argparse.SUPPRESS, help=text)


def field_meanings(config_class: type) -> dict[str, str]:
    """Return the descriptions of a dataclass's fields, its bases' among them."""
    meanings = {}
    # Bases first: a class may describe an inherited field anew.
    for cls in reversed(config_class.__mro__):
        meanings.update({item.arg_name: item.description or "" for item in parse(cls.__doc__ or "").params})
    return meanings
