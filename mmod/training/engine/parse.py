"""Configs from YAML files and command lines, read strictly, and their `--help`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import textwrap
import typing
from argparse import ArgumentError
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import jsonargparse
import yaml
from docstring_parser import parse

from mmod.config import PRESETS, Gate, LanguageRouting, Merged, RoutingConfig, Threshold
from mmod.io.yaml import STRICT, stack_configs
from mmod.values import check_value, describe

# Messages of the parser itself, not of the config's classes.
_OF_PARSER = ("- Expected a", "- Problem with given class_path")
_PARSER_OPTIONS = ("--config", "--help", "--print_config", "--print_shtab")


class AnyConfig(typing.Protocol):
    """A dataclass."""

    __dataclass_fields__: typing.ClassVar[dict[str, Any]]


Config = TypeVar("Config", bound=AnyConfig)


def load_config(path: str | Path, overrides: Sequence[str] = (), *, kind: type[Config]) -> Config:
    """Read a config file and apply command-line overrides to it; see `RunConfig.load`."""
    return _parse(_create_parser(kind), [str(path), *overrides], kind)


def config_from(fields: Mapping[str, Any], kind: type[Config]) -> Config:
    """Make a config from plain nested values; see `RunConfig.from_dict`."""
    _check_tree(fields, kind)
    parser = _shared_parser(kind)
    return _instantiate(parser, lambda: parser.parse_object(dict(fields)), kind)


def parse_config(arguments: Sequence[str], kind: type[Config]) -> Config:
    """Create a config of class `kind` from the command line `CONFIG [--key.sub value ...]`.

    Raises:
        SystemExit: With code 2 and one line if a key is unknown or a value is refused.
    """
    parser = _create_parser(kind)
    with _refusing(parser):
        return _parse(parser, list(arguments), kind)


def make_config(parser: jsonargparse.ArgumentParser, kind: type[Config], fields: Mapping[str, Any]) -> Config:
    """Create a config from parsed values; end the program with code 2 and one line if it refuses them."""
    with _refusing(parser):
        return kind(**fields)


@contextmanager
def _refusing(parser: jsonargparse.ArgumentParser) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        parser.exit(2, f"error: {error}\n")


def _create_parser(kind: type[AnyConfig]) -> jsonargparse.ArgumentParser:
    """Create a parser with one option per field of a config, named as in the YAML file."""
    parser = _ConfigParser(
        exit_on_error=False,
        parser_mode=STRICT,
        usage="%(prog)s CONFIG [--key value] [--group.key value] [--print_config]",
        description="Do what a config file says; options override the file.",
    )
    parser.kind = kind
    parser.add_argument("--config", action="config", help="The config file; its place is the first argument.")
    parser.add_class_arguments(kind)
    return parser


# A study plans many configs, and making a parser takes twice as long as reading with it.
_shared_parser = functools.lru_cache(maxsize=16)(_create_parser)


def _parse(parser: jsonargparse.ArgumentParser, arguments: list[str], kind: type[Config]) -> Config:
    fields, options = stack_configs(arguments)
    names = (word.split("=")[0] for word in options if word.startswith("--"))
    if fields is not None:
        _check_tree(fields, kind)
        options = ["--config", yaml.safe_dump(fields, sort_keys=False), *options]
    _check_options((name[2:] for name in names if name not in _PARSER_OPTIONS), kind)
    try:
        return _instantiate(parser, lambda: parser.parse_args(options), kind)
    except ValueError as error:
        if "are required" in str(error) and fields is None:
            raise ValueError(f"{error}; name a CONFIG that has them before the options") from error
        raise


def _instantiate(
    parser: jsonargparse.ArgumentParser, parse: Callable[[], jsonargparse.Namespace], kind: type[Config]
) -> Config:
    try:
        fields = parser.instantiate(parse())
        return kind(**{item.name: fields[item.name] for item in dataclasses.fields(kind)})
    except ArgumentError as error:
        raise ValueError(_one_line(error.message, kind)) from error
    except ValueError as error:
        raise ValueError(_one_line(str(error), kind)) from error


def _one_line(message: str, kind: type[AnyConfig]) -> str:
    """Return a message of the parser in one line."""
    lines = [line.strip() for line in message.splitlines()]
    of_config = [line[2:] for line in lines if line.startswith("- ") and not line.startswith(_OF_PARSER)]
    keys = re.findall(r'Parser key "([^"]+)":', message)
    value = re.search(r"(?:Got|Given) value: (.*)", message)
    hint = _find_hint(".".join(keys), kind) if keys else None
    if of_config:
        return of_config[0]
    if hint is not None and value is not None:
        return f"{'.'.join(keys)} must be {describe(hint)}, got {value[1]}"
    return " ".join(lines)


def _check_tree(fields: Any, kind: type[AnyConfig], prefix: str = "") -> None:
    """Raise at the first key that is no field, group that is no mapping, or value of another type."""
    if not isinstance(fields, Mapping):
        name = prefix.rstrip(".") or "a config file"
        raise ValueError(f"{name} holds a mapping of keys to values, got {type(fields).__name__}")
    hints = typing.get_type_hints(kind)
    for key, value in fields.items():
        name = f"{prefix}{key}"
        if key not in hints:
            raise ValueError(_unknown(name, prefix.rstrip("."), hints))
        group = dataclass_in(hints[key])
        if group is not None and isinstance(value, Mapping):
            _check_tree(value, group, f"{name}.")
        elif group is not None and isinstance(value, list) and typing.get_origin(hints[key]) is list:
            for place, item in enumerate(value):
                _check_tree(item, group, f"{name}[{place}].")
        elif not isinstance(value, str):
            # A text may be a number in quotes, which the parser reads.
            check_value(name, value, hints[key])


def _check_options(names: Iterable[str], kind: type[AnyConfig]) -> None:
    """Raise at the first option that is no field of the config."""
    for key in names:
        owner: type | None = kind
        group = ""
        parts = key.split(".")
        for place, part in enumerate(parts):
            if owner is None:
                if place + 1 < len(parts):
                    # The parser would keep the last of several such options only.
                    raise ValueError(f"--{key} is nested too deep; give the mapping --{group}.{part} as a whole")
                break
            hints = typing.get_type_hints(owner)
            if part not in hints:
                raise ValueError(_unknown(key, group, hints))
            owner = dataclass_in(hints[part])
            group = f"{group}.{part}" if group else part


def _unknown(key: str, group: str, hints: Iterable[str]) -> str:
    where = f"in group {group!r}" if group else "at the top level"
    return f"unknown config key {key!r}; valid keys {where}: {', '.join(sorted(hints))}"


def _find_hint(key: str, kind: type | None) -> Any:
    """Return the type of the field with a dotted key; None without such a field."""
    hint: Any = None
    for part in key.split("."):
        if kind is None:
            return None
        hint = typing.get_type_hints(kind).get(part)
        kind = dataclass_in(hint)
    return hint


class _ConfigParser(jsonargparse.ArgumentParser):
    """A parser whose help also lists the fields that are no options."""

    kind: type | None = None

    def format_help(self, *arguments: Any, **options: Any) -> str:
        """Return the help, with the fields of groups that are null by default."""
        sections = [] if self.kind is None else list(_sections(self.kind))
        return "\n\n".join([super().format_help(*arguments, **options).rstrip(), *sections]) + "\n"


def dataclass_in(hint: Any) -> type | None:
    """Return the dataclass that a field's type is or allows; None if its keys are free."""
    for item in (hint, *typing.get_args(hint)):
        if isinstance(item, type) and dataclasses.is_dataclass(item):
            return item
    return None


def _sections(kind: type) -> Iterator[str]:
    yield from (_describe(group, key) for key, group in _optional_groups(kind))
    routing = typing.get_type_hints(kind).get("routing")
    if routing is None:
        return
    # A model of several parts has a routing for each of them.
    parts = dataclass_in(routing) is not None or dict[str, dict[str, Any]] in typing.get_args(routing)
    key = "routing.PART" if parts else "routing"
    yield _describe(RoutingConfig, key)
    for part, options in {"select": Threshold, "gate": Gate, "skipped": Merged, "language": LanguageRouting}.items():
        yield _describe(options, f"{key}.{part}")
    presets = f"Instead of all of them the fields to change of a preset: {', '.join(sorted(PRESETS))}."
    yield f"  {key}.preset\n{_fill(presets)}"


def _optional_groups(kind: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Yield the groups that may be null, which the parser lists as one option each."""
    for name, hint in typing.get_type_hints(kind).items():
        group = dataclass_in(hint)
        if group is None:
            continue
        if group is not hint:
            yield f"{prefix}{name}", group
        yield from _optional_groups(group, f"{prefix}{name}.")


def _describe(kind: Any, key: str) -> str:
    """Return the fields of a dataclass with descriptions, types and defaults, as options under a key."""
    document = parse(kind.__doc__ or "")
    meanings = {item.arg_name: item.description or "" for item in document.params}
    hints, signature = typing.get_type_hints(kind.__init__), inspect.signature(kind)
    lines = [document.short_description or kind.__name__]
    for item in dataclasses.fields(kind):
        factory = item.default_factory
        default = signature.parameters[item.name].default if factory is dataclasses.MISSING else factory()
        known = "required" if default is inspect.Parameter.empty else f"default: {json.dumps(default)}"
        lines.append(f"  {key}.{item.name}")
        lines.append(_fill(f"{meanings[item.name]} ({describe(hints[item.name])}; {known})"))
    return "\n".join(lines)


def _fill(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 80, initial_indent=" " * 24, subsequent_indent=" " * 24)
