"""The `--help` of configs: every field, including those of optional groups and of routing."""

from __future__ import annotations

import dataclasses
import inspect
import json
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

import jsonargparse
from docstring_parser import parse

from mmod.config import PRESETS, Gate, LanguageRouting, Merged, RoutingConfig, Threshold
from mmod.io.yaml import STRICT
from mmod.values import describe


class _ConfigParser(jsonargparse.ArgumentParser):
    """A parser whose help also lists the fields that are no options."""

    kind: type | None = None

    def format_help(self, *arguments: Any, **options: Any) -> str:
        """Return the help, with the fields of groups that are null by default."""
        sections = [] if self.kind is None else list(_sections(self.kind))
        return "\n\n".join([super().format_help(*arguments, **options).rstrip(), *sections]) + "\n"


def create_parser(kind: type, **options: Any) -> jsonargparse.ArgumentParser:
    """Create a parser with one option per field of a config, named as in the YAML file."""
    parser = _ConfigParser(exit_on_error=False, parser_mode=STRICT, **options)
    parser.kind = kind
    parser.add_argument("--config", action="config", help="The config file; its place is the first argument.")
    parser.add_class_arguments(kind)
    return parser


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
