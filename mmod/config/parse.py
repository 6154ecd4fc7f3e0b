"""Configs from YAML files and command lines, read strictly, and their `--help`.

Plain fields come from the files of a line, the later over the earlier ones, and its options over these; files are read
by `mmod/io/yaml.py`, and options by `mmod/io/options.py`. There is no config before `from_plain` makes the dataclass of
these fields, which checks itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import yaml
from docstring_parser import parse

from mmod.config.parts import Gate, LanguageRouting, Merged, Threshold
from mmod.config.registry import PRESETS
from mmod.config.routing import RoutingConfig
from mmod.io.files import check_place
from mmod.io.options import field_meanings, split_options, with_options
from mmod.io.yaml import merged, read_yaml
from mmod.plain import dataclass_in, from_plain
from mmod.values import describe, one_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")
ConfigClasses = type[Config] | Mapping[str, type[Config]]
Check = Callable[[type[Config], Mapping[str, object]], None]
"""Raises for what is wrong in the plain fields of a config of some class, before one is made of them."""
_PRINT = "--print_config"


def parse_config(
    arguments: Sequence[str],
    config_class: ConfigClasses[Config],
    start: Mapping[str, object] | None = None,
    check: Check[Config] | None = None,
) -> Config:
    """Create a config from the command line `CONFIG [--key.sub value ...]`.

    `--help` prints the keys and `--print_config` the config with its defaults; both end the program. An unknown key or
    a refused value ends it with code 2 and one line.

    Args:
        config_class: The class of the config; or classes by kind, of which the line names one, see `named_kind`.
        start: Plain fields that the command line changes.
        check: Refuses what cannot be run, such as a missing file, before the checks of the config itself, which may
            import torch. A config that is only printed needs no file.
    """
    words = [word for word in arguments if word != _PRINT]
    is_printed = len(words) < len(arguments)
    if is_printed:
        check = None
    try:
        if {"-h", "--help"} & set(words):
            print(_help(_read_line(words, config_class, start)[0]))
            sys.exit(0)
        config = read_config(words, config_class, start, check)
    except BrokenPipeError:
        # The program that reads the help ended, as `head` does.
        raise
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    # After all checks, so that the config that is printed can be run.
    if is_printed:
        print(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False), end="")
        sys.exit(0)
    return config


def read_config(
    arguments: Sequence[str],
    config_class: ConfigClasses[Config],
    start: Mapping[str, object] | None = None,
    check: Check[Config] | None = None,
) -> Config:
    """Create a config from a command line as `parse_config` does; errors are raised."""
    chosen, plain = read_fields(arguments, config_class, start)
    if check is not None:
        check(chosen, plain)
    try:
        return from_plain(chosen, plain)
    except ValueError as error:
        # Without a file all required keys are missing, and the list of them hides the one mistake.
        if stack_configs(arguments)[0] is None and "required: " in str(error):
            hint = "name a CONFIG that has them before the options"
            if start:
                hint = "name them in --config FILE or as options, which `--help all` lists"
            raise ValueError(f"{error}; {hint}") from error
        raise


def check_output(kind: object, fields: Mapping[str, object]) -> None:
    """Refuse a file in the place of the folder that a command writes; a `Check` of any config with an `output`."""
    output = fields.get("output")
    if isinstance(output, str):
        check_place(output)


def read_fields(
    arguments: Sequence[str], config_class: ConfigClasses[Config], start: Mapping[str, object] | None = None
) -> tuple[type[Config], dict[str, object]]:
    """Return the class of the config of a command line, and its plain fields, whose values are not checked yet."""
    chosen, fields, options = _read_line(arguments, config_class, start)
    plain = merged(start or {}, fields or {})
    # The config in a run folder also records the number of processes.
    plain.pop("world_size", None)
    return chosen, with_options(plain, split_options(options), chosen)


def stack_configs(arguments: Sequence[str]) -> tuple[dict[str, object] | None, list[str]]:
    """Merge the configs of a command line `[CONFIG] [--config CONFIG ...] [--key value ...]`; later ones win."""
    words = list(arguments)
    first = []
    if words and not words[0].startswith("-"):
        first = [words.pop(0)]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", action="append", default=first)
    try:
        known, options = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        # argparse exits on other errors; this one is raised with a message of its own.
        raise ValueError(str(error)) from error
    if not known.config:
        return None, options
    return functools.reduce(merged, map(read_yaml, known.config)), options


def named_kind(arguments: Sequence[str]) -> str | None:
    """Return the kind that a command line names in its options, or else in its configs; None unless it does."""
    return _kind_in(*stack_configs(arguments))


def _kind_in(fields: Mapping[str, object] | None, options: Sequence[str]) -> str | None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--kind", default=(fields or {}).get("kind"))
    try:
        kind: str | None = parser.parse_known_args(options)[0].kind
    except argparse.ArgumentError as error:
        # argparse exits on other errors; this one is raised with a message of its own.
        raise ValueError(str(error)) from error
    return kind


def _read_line(
    arguments: Sequence[str], config_class: ConfigClasses[Config], start: Mapping[str, object] | None
) -> tuple[type[Config], dict[str, object] | None, list[str]]:
    """Return the class of the config of a command line, the fields of its files, None without one, and its options."""
    if start is not None and arguments and not arguments[0].startswith("-"):
        # The word before it stands for what `start` holds.
        raise ValueError(f"unrecognized arguments: {arguments[0]}; further configs are merged by --config FILE")
    fields, options = stack_configs(arguments)
    if isinstance(config_class, Mapping):
        # The first kind is that of a line that names none.
        kind = _kind_in(fields, options) or next(iter(config_class))
        one_of("kind", kind, tuple(config_class))
        config_class = config_class[kind]
    return config_class, fields, options


def _help(config_class: type) -> str:
    usage = f"usage: {Path(sys.argv[0]).name} CONFIG [--config CONFIG ...] [--key value] [--group.key value] [{_PRINT}]"
    purpose = "Do what a config file says; options override the file. --print_config prints the result."
    return "\n\n".join([usage, purpose, *_sections(config_class, "--"), *_routing_sections(config_class)])


def _sections(config_class: type, prefix: str) -> Iterator[str]:
    """Yield the description of a config, then those of its groups."""
    yield _describe(config_class, prefix)
    for name, hint in typing.get_type_hints(config_class).items():
        group = dataclass_in(hint)
        if group is not None:
            yield from _sections(group, f"{prefix}{name}.")


def _routing_sections(config_class: type) -> Iterator[str]:
    if "routing" not in typing.get_type_hints(config_class):
        return
    # A model of several parts has a routing for each of them.
    key = "--routing." if getattr(config_class, "part", "") else "--routing.PART."
    yield _describe(RoutingConfig, key)
    for part, options in {"select": Threshold, "gate": Gate, "skipped": Merged, "language": LanguageRouting}.items():
        yield _describe(options, f"{key}{part}.")
    yield _entry(f"{key}preset", f"In place of the others, a preset and the fields to change: {', '.join(PRESETS)}.")


def _describe(config_class: type, prefix: str) -> str:
    """Return the fields of a dataclass that are no groups with descriptions, types and defaults, as options."""
    meanings = field_meanings(config_class)
    hints = typing.get_type_hints(config_class)
    lines = [parse(config_class.__doc__ or "").short_description or config_class.__name__]
    for item in dataclasses.fields(config_class):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint):
            continue
        shown = shown_default(config_class, item)
        known = f"default: {shown}" if shown else "required"
        meaning = meanings.get(item.name, "")
        lines.append(_entry(f"{prefix}{item.name}", f"{meaning} ({describe(hint)}; {known})"))
    return "\n".join(lines)


def shown_default(config_class: type, item: dataclasses.Field[object]) -> str:
    """Return the default of a field as JSON; empty if the field is required."""
    if item.default_factory is not dataclasses.MISSING:
        return json.dumps(item.default_factory(), default=vars)
    # Not the field's: an `__init__` that converts what it gets has defaults of its own.
    default = inspect.signature(config_class).parameters[item.name].default
    if default is inspect.Parameter.empty:
        return ""
    return json.dumps(default, default=vars)


def _entry(option: str, text: str) -> str:
    indent = " " * 24
    lines = [f"  {option}"]
    # A list has a line for each of its entries.
    for part in re.split(r"\n(?=\s*- )", text):
        lines.append(textwrap.fill(" ".join(part.split()), 80, initial_indent=indent, subsequent_indent=indent))
    return "\n".join(lines)
