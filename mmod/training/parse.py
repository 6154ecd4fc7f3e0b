"""Configs from YAML files and command lines, read strictly."""

from __future__ import annotations

import dataclasses
import typing
from argparse import ArgumentError
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonargparse
import yaml
from typing_extensions import TypeVar

from mmod.training.config import TrainConfig

__all__ = ["load_config", "make_config", "parse_config", "train_config"]

_PARSER_OPTIONS = ("--config", "--help", "--print_config", "--print_shtab")


class AnyConfig(typing.Protocol):
    """A dataclass."""

    __dataclass_fields__: typing.ClassVar[dict[str, Any]]


Config = TypeVar("Config", bound=AnyConfig, default=TrainConfig)


def load_config(path: str | Path, overrides: Sequence[str] = (), kind: type[Config] = TrainConfig) -> Config:  # type: ignore[assignment]
    """Read a config file and apply command-line overrides to it.

    Args:
        path: A YAML file with the fields of `TrainConfig`.
        overrides: Arguments such as `["--epochs", "1", "--optim.lr=1e-4"]`.
        kind: The dataclass whose fields the keys are.

    Returns:
        The checked config.

    Raises:
        ValueError: If a key is unknown (the valid ones are named) or a value does not fit its type.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "config.yaml"
        >>> _ = path.write_text("{output: run, model: {name: deit_tiny_patch16_224}, data: {source: digits}}")
        >>> load_config(path, ["--optim.lr", "2e-4"]).optim.lr
        0.0002
    """
    return parse_config([str(path), *overrides], kind, exit_on_error=False)


def train_config(fields: Mapping[str, Any], kind: type[Config] = TrainConfig) -> Config:  # type: ignore[assignment]
    """Make a config from plain nested values, as a YAML file holds them.

    Args:
        fields: Fields of the config.
        kind: Its dataclass.

    Returns:
        The checked config.

    Raises:
        ValueError: If a key is unknown (the valid ones are named) or a value does not fit its type.

    Example:
        >>> fields = {"output": "run", "model": {"name": "deit_tiny_patch16_224"}, "data": {"source": "digits"}}
        >>> train_config({**fields, "optim": {"lr": 2e-4}}).optim.lr
        0.0002
    """
    _check_keys(_flatten(fields), kind)
    parser = _create_parser(kind)
    try:
        return _instantiate(parser, parser.parse_object(dict(fields)), kind)
    except ArgumentError as error:
        raise ValueError(error.message) from error


def parse_config(
    arguments: Sequence[str],
    kind: type[Config] = TrainConfig,  # type: ignore[assignment]
    *,
    exit_on_error: bool = True,
) -> Config:
    """Turn the command line `CONFIG [--key.sub value ...]` into a config.

    Args:
        arguments: The command line without the program's name.
        kind: The dataclass whose fields the keys are.
        exit_on_error: Print errors and end the process, as a script does, instead of raising.

    Returns:
        The checked config.

    Raises:
        ValueError: If a key is unknown or a value does not fit its type, unless `exit_on_error`.
    """
    parser = _create_parser(kind)
    try:
        return _parse(parser, list(arguments), kind)
    except (ValueError, TypeError, OSError) as error:
        if not exit_on_error:
            raise
        parser.exit(2, f"error: {error}\n")
        raise AssertionError("unreachable") from error


def make_config(parser: jsonargparse.ArgumentParser, kind: type[Config], fields: Mapping[str, Any]) -> Config:
    """Make a config from parsed values, ending the program with one line when they do not fit each other.

    Args:
        parser: What read the command line.
        kind: The dataclass whose fields the keys are.
        fields: The values.

    Raises:
        SystemExit: The config refuses a value.
    """
    try:
        return kind(**fields)
    except (ValueError, TypeError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
        raise AssertionError("unreachable") from error


def _create_parser(kind: type[AnyConfig]) -> jsonargparse.ArgumentParser:
    """Build the parser: one option per field, named as in the YAML file."""
    parser = jsonargparse.ArgumentParser(
        usage="%(prog)s CONFIG [--key value] [--group.key value] [--print_config]",
        description="Train a dense or routed model as a config file says; options override the file.",
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help="The config file; its place is the first argument.")
    parser.add_class_arguments(kind)
    return parser


def _parse(parser: jsonargparse.ArgumentParser, arguments: list[str], kind: type[Config]) -> Config:
    if arguments and not arguments[0].startswith("-"):
        path = Path(arguments[0])
        if not path.is_file():
            raise FileNotFoundError(f"no config file at {str(path)!r}")
        _check_keys(_flatten(yaml.safe_load(path.read_text())), kind)
        arguments = ["--config", *arguments]
    names = (word.split("=")[0] for word in arguments if word.startswith("--"))
    _check_keys((name[2:] for name in names if name not in _PARSER_OPTIONS), kind, is_option=True)
    try:
        return _instantiate(parser, parser.parse_args(arguments), kind)
    except ArgumentError as error:
        raise ValueError(error.message) from error


def _instantiate(parser: jsonargparse.ArgumentParser, parsed: jsonargparse.Namespace, kind: type[Config]) -> Config:
    """Make the dataclasses from what the parser read."""
    fields = parser.instantiate(parsed)
    return kind(**{item.name: fields[item.name] for item in dataclasses.fields(kind)})


def _flatten(tree: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a nested mapping."""
    if not isinstance(tree, Mapping):
        raise ValueError(f"a config file holds a mapping of keys to values, got {type(tree).__name__}")
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")


def _check_keys(keys: Iterable[str], kind: type[AnyConfig], is_option: bool = False) -> None:
    """Raise at the first dotted key that is no field of the config, naming the fields there are."""
    for key in keys:
        owner: type | None = kind
        group = ""
        parts = key.split(".")
        for place, part in enumerate(parts):
            if owner is None:
                if is_option and place + 1 < len(parts):
                    # The parser would keep the last of several such options only.
                    raise ValueError(f"--{key} is nested too deep; give the mapping --{group}.{part} as a whole")
                break
            hints = typing.get_type_hints(owner)
            if part not in hints:
                where = f"in group {group!r}" if group else "at the top level"
                raise ValueError(f"unknown config key {key!r}; valid keys {where}: {', '.join(sorted(hints))}")
            owner = _dataclass_in(hints[part])
            group = f"{group}.{part}" if group else part


def _dataclass_in(hint: Any) -> type | None:
    """Return the dataclass that a field's type is or allows; None when its keys are free."""
    for item in (hint, *typing.get_args(hint)):
        if isinstance(item, type) and dataclasses.is_dataclass(item):
            return item
    return None
