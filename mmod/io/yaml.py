"""Strict YAML: no duplicate keys, aliases, yes or no; one-line errors with file and line; files extend base files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError

from mmod.io.configs import existing_config, shipped_config
from mmod.io.files import read_text
from mmod.names import one_line

BASE_KEY = "base"
"""Key of the config whose other keys are changed by those beside it."""
DENSE_KEY = "dense"
"""Key of a config within a config: its path, its fields, or a `base` with the fields that differ."""
_DEPTH = 100
_WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_SWITCHES = {"yes": "true", "on": "true", "no": "false", "off": "false"}
# Mappings and lists in one line.
_BRACKETS = {"{": "}", "[": "]"}
# Parsing takes seconds per 100 kB.
_BYTES = 1 << 18


class _DuplicateKeyError(yaml.MarkedYAMLError):
    """A mapping has a duplicate key."""


class _SwitchError(yaml.MarkedYAMLError):
    """A value is neither true nor false nor in quotes, and one of these to some readers."""


class _Loader(yaml.SafeLoader):
    """Loads a document; 1e-4 is a number, a date a text.

    Duplicate keys, aliases and deep nesting are refused, and yes, no, on and off, which mean true or false in YAML 1.1.
    """

    depth = 0
    # Without dates, which stay texts.
    yaml_implicit_resolvers = {  # noqa: RUF012  # as PyYAML declares it
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        start = self.peek_event().start_mark
        if self.check_event(yaml.AliasEvent):
            raise ComposerError(None, None, "aliases (*name) are not supported: write the value out", start)
        if self.depth == _DEPTH:
            raise ComposerError(None, None, f"values are nested more than {_DEPTH} deep", start)
        # The depth is that of the parser's recursion, which is exhausted by a hostile file otherwise.
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def compose_mapping_node(self, anchor: dict[object, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys: set[tuple[str, str]] = set()
        for key, _ in node.value:
            # Only scalars: other keys are refused later, when the mapping is made.
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in keys:
                    raise _DuplicateKeyError(None, None, f"the key {key.value!r} occurs twice", key.start_mark)
                keys.add((key.tag, key.value))
        return node

    def construct_yaml_bool(self, node: yaml.ScalarNode) -> bool:
        fault = switch_fault(node.value)
        if fault:
            raise _SwitchError(None, None, fault, node.start_mark)
        return super().construct_yaml_bool(node)


def switch_fault(text: str) -> str:
    """Say what to write for yes, no, on and off, which are true or false to YAML 1.1 alone; empty for another text."""
    value = _SWITCHES.get(text.lower(), "")
    return value and f"write {value} for {text}, or {text!r} in quotes if it is a text"


def parse_yaml(text: str, source: str = "the value") -> object:
    """Parse a YAML document into plain values."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = ""
        if mark is not None:
            line = f", line {mark.line + 1}"
        advice = ""
        if "'\\t'" in str(error.problem):
            advice = ": YAML is indented by spaces"
        raise ValueError(f"{source}{line}: {error.problem or error.context}{advice}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{source} is no YAML: {one_line(error)}") from error


def parse_option(text: str, nested: bool = False) -> Any:
    """Parse a value of a command line; one that is no YAML is a text, as yes is, and what is refused in it an error.

    Args:
        nested: The value may be a mapping or a list, which is refused where its closing bracket is missing.
    """
    try:
        return yaml.load(text, _Loader)
    except (_DuplicateKeyError, _SwitchError) as error:
        if switch_fault(text):
            return text
        raise ValueError(error.problem) from error
    except (yaml.YAMLError, ValueError) as error:
        opening = text.lstrip()[:1]
        closing = _BRACKETS.get(opening, "")
        if nested and closing and text.count(opening) > text.count(closing):
            raise ValueError(f"{text!r} lacks a closing {closing}") from error
        return text


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file, or a shipped config by name, merged over its key `base`.

    `base` is a path relative to the file's folder, the name of a shipped config, or a list of them; later ones win.
    """
    return _stack(existing_config(path), ())


def merged(
    fields: Mapping[str, object], changes: Mapping[str, object], null_removes: bool = False
) -> dict[str, object]:
    """Merge nested mappings key by key; other values are replaced, and None removes a key if `null_removes`.

    Under `dense`, a mapping that names another config that it changes, its `base`, replaces the old one as that
    config's name would. So does a `preset` in place of fields that are written out, which would leave nothing of it.

    Example:
        >>> merged({"a": 1, "b": {"c": 2, "d": 3}, "e": [5]}, {"b": {"d": 4}, "e": None})
        {'a': 1, 'b': {'c': 2, 'd': 4}, 'e': None}
        >>> merged({"dense": {"model": {"name": "a"}}}, {"dense": {"base": "run", "seed": 1}})
        {'dense': {'base': 'run', 'seed': 1}}
        >>> merged({"options": {"a": 1}}, {"options": {"base": "x"}})
        {'options': {'a': 1, 'base': 'x'}}
    """
    result = dict(fields)
    for name, value in changes.items():
        old = result.get(name)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and not _replaces(name, value, old):
            result[name] = merged(old, value, null_removes)
        elif null_removes and value is None and old is not None:
            del result[name]
        else:
            result[name] = value
    return result


def _replaces(name: str, fields: Mapping[str, object], old: Mapping[str, object]) -> bool:
    """Return whether a mapping starts from a config or preset of its own instead of changing an old one."""
    # Files are merged before the kind of their config is known: what is a config shows by its name alone.
    if name == DENSE_KEY and isinstance(fields.get(BASE_KEY), str):
        return fields[BASE_KEY] != old.get(BASE_KEY)
    return isinstance(fields.get("preset"), str) and "preset" not in old


def _stack(path: Path, above: tuple[Path, ...]) -> dict[str, object]:
    """Read a file merged over its bases; `above` are the files that extend it."""
    resolved = path.resolve()
    if resolved in above:
        circle = [*above[above.index(resolved) :], resolved]
        chain = " -> ".join(map(str, circle))
        raise ValueError(f"a config is a base of itself: {chain}; remove a `base`")
    fields = _read(path)
    stacked: dict[str, object] = {}
    bases = fields.pop(BASE_KEY, [])
    if not isinstance(bases, list):
        bases = [bases]
    for base in bases:
        if not isinstance(base, str):
            raise ValueError(f"{str(path)!r}: base must be a file or a name, or a list of them, got {base!r}")
        sibling = path.parent / base
        # A file next to the config wins over a shipped config of the same name.
        file = sibling if sibling.is_file() else shipped_config(base)
        if file is None:
            raise FileNotFoundError(f"{str(path)!r}: no base {base!r}, at {str(sibling)!r} or in `mmod configs`")
        stacked = merged(stacked, _stack(file, (*above, resolved)), null_removes=True)
    return merged(stacked, fields, null_removes=True)


def _read(path: Path) -> dict[str, object]:
    if path.suffix in _WEIGHTS:
        raise ValueError(f"{str(path)!r} is a file of weights, and no config: name it by --model.checkpoint")
    if path.stat().st_size > _BYTES:
        raise ValueError(
            f"{str(path)!r} has {path.stat().st_size} bytes; a config has at most {_BYTES}, and names weights by "
            "model.checkpoint"
        )
    fields = parse_yaml(read_text(path), str(path))
    if not isinstance(fields, dict):
        content = "nothing" if fields is None else type(fields).__name__
        raise ValueError(f"{str(path)!r} must hold a mapping of keys to values, got {content}")
    return fields


# It is registered as a function of another class.
_Loader.add_constructor("tag:yaml.org,2002:bool", _Loader.construct_yaml_bool)
# PyYAML reads a number with an exponent only if it has a decimal point and a sign.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
