"""YAML, read strictly: each key once, no aliases, errors of one line with file and line. Files may stand on others."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError
from yaml.parser import ParserError
from yaml.reader import ReaderError
from yaml.scanner import ScannerError

from mmod.io.configs import existing_config, shipped_config

__all__ = ["STRICT", "merged", "parse_yaml", "read_yaml", "stack_configs"]

STRICT = "strict"
"""Mode of a `jsonargparse.ArgumentParser` that reads files and values as this module does."""
_DEPTH = 100


class _DuplicateKeyError(yaml.MarkedYAMLError):
    """A mapping names a key twice."""


class _Composer(yaml.SafeLoader):
    """Builds the tree of a document and refuses what would surprise: keys named twice, aliases, bottomless nesting."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose a value, unless it is an alias or lies too deep."""
        start = self.peek_event().start_mark
        if self.check_event(yaml.AliasEvent):
            raise ComposerError(None, None, "aliases (*name) are not read: write the value out", start)
        if self.depth == _DEPTH:
            raise ComposerError(None, None, f"values are nested more than {_DEPTH} deep", start)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Compose a mapping whose keys differ."""
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in seen:
                    raise _DuplicateKeyError(None, None, f"the key {key.value!r} is given twice", key.start_mark)
                seen.add((key.tag, key.value))
        return node


def parse_yaml(text: str, source: str = "the value") -> Any:
    """Parse a YAML document into plain values.

    Args:
        text: The document.
        source: What it is called in messages.

    Raises:
        ValueError: If it is no YAML, names a key twice, or uses aliases or tags of its own.

    Example:
        >>> parse_yaml("{lr: 1e-4, lr: 1e-3}", "run.yaml")
        Traceback (most recent call last):
        ValueError: run.yaml, line 1: the key 'lr' is given twice
    """
    try:
        return _load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f", line {mark.line + 1}"
        raise ValueError(f"{source}{line}: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{source} is no YAML: {' '.join(str(error).split())}") from error


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping, on top of the files that its key `base` names.

    Args:
        path: The file, in UTF-8, or what else `find_config` takes. Its `base` is a file relative to its own folder or
            the name of a shipped config, or a list of them, later ones on top; see `merged` for how they meet.

    Returns:
        The mapping, without `base`.

    Raises:
        FileNotFoundError: If it or a base is not there.
        ValueError: If it holds something else, or what `parse_yaml` refuses, or is a base of itself.
    """
    return _stack(existing_config(path), ())


def stack_configs(arguments: Sequence[str]) -> tuple[dict[str, Any] | None, list[str]]:
    """Read the configs that a command line names, and return their keys and the other arguments.

    Args:
        arguments: `[CONFIG] [--config CONFIG ...] [--key value ...]`; later configs change earlier ones, as `merged`
            says.

    Returns:
        The mapping, None where no config is named; and what else the command line says.

    Raises:
        FileNotFoundError: If a file is not there.
        ValueError: See `read_yaml`.
    """
    words = list(arguments)
    first = [words.pop(0)] if words and not words[0].startswith("-") else []
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", action="append", default=first)
    try:
        known, options = parser.parse_known_args(words)
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from error
    files = map(read_yaml, known.config)
    return functools.reduce(merged, files) if known.config else None, options


def merged(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested fields with some of them changed.

    Mappings are merged key by key, anything else is replaced. Null removes a key, so that its default holds again.

    Args:
        fields: The fields.
        changes: What is different.

    Example:
        >>> merged({"a": 1, "b": {"c": 2, "d": 3}, "e": [5]}, {"b": {"d": 4}, "e": None})
        {'a': 1, 'b': {'c': 2, 'd': 4}}
    """
    result = dict(fields)
    for name, value in changes.items():
        old = result.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            result[name] = merged(old, value)
        elif value is None and old is not None:
            del result[name]
        else:
            result[name] = value
    return result


def _stack(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """Read a file on top of its bases; `above` are the files that name it as one."""
    place = path.resolve()
    if place in above:
        chain = " -> ".join(str(file) for file in (*above[above.index(place) :], place))
        raise ValueError(f"a config is a base of itself: {chain}; remove a `base`")
    fields, stacked = _read(path), dict[str, Any]()
    bases = fields.pop("base", [])
    for base in [bases] if isinstance(bases, str) else bases if isinstance(bases, list) else [bases]:
        if not isinstance(base, str):
            raise ValueError(f"{str(path)!r}: base must be a file or a name, or a list of them, got {base!r}")
        beside = path.parent / base
        found = beside if beside.is_file() else shipped_config(base)
        if found is None:
            raise FileNotFoundError(f"{str(path)!r}: no base {base!r}, at {str(beside)!r} or in `mmod configs`")
        stacked = merged(stacked, _stack(found, (*above, place)))
    return merged(stacked, fields)


def _read(path: Path) -> dict[str, Any]:
    """Read a file that holds a mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} is no text in UTF-8: {error.reason} at byte {error.start}") from error
    fields = parse_yaml(text, str(path))
    if not isinstance(fields, dict):
        found = "nothing" if fields is None else type(fields).__name__
        raise ValueError(f"{str(path)!r} must hold a mapping of keys to values, got {found}")
    return fields


def _load(text: str) -> Any:
    yaml.compose(text, _Composer)
    # Made by the parser of command lines, so that a number means the same in a file and as an option: 1e-4 is one.
    return get_loader("yaml")(text)


def _load_option(text: str) -> Any:
    try:
        return _load(text)
    except _DuplicateKeyError as error:
        raise ValueError(error.problem) from error


# What is no YAML at all is a plain text on a command line; a key given twice is a mistake there, too.
set_loader(STRICT, _load_option, exceptions=(ComposerError, ConstructorError, ParserError, ReaderError, ScannerError))
