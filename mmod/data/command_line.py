"""The command lines of `datasets/`: builds with named parameter sets, and conversions from a source to a folder."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from jsonargparse import ArgumentParser, Namespace

from mmod.io.yaml import STRICT

Config = TypeVar("Config")


def create_build_parser(description: str, levels: Mapping[str, Any], arguments: Sequence[str]) -> ArgumentParser:
    """Return a parser with `--level` and a flag for each parameter of a build.

    Args:
        description: What `--help` says first.
        levels: Named parameter sets.
        arguments: What will be parsed; the level it names gives the defaults, flags change them.
    """
    parser = _create_parser(description=description)
    parser.add_argument("--level", choices=list(levels), default="default", help="named parameters to start from")
    level_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    level_parser.add_argument("--level", choices=levels, default="default")
    level = levels[level_parser.parse_known_args(arguments)[0].level]
    parser.add_class_arguments(type(level))
    parser.set_defaults(dataclasses.asdict(level))
    return parser


def build_config(levels: Mapping[str, Config], options: Namespace) -> Config:
    """Return the parameters that a parser of `create_build_parser` found.

    Args:
        levels: The named parameter sets it was made with.
        options: What it found.
    """
    kind = type(levels["default"])
    return kind(**{name: options[name] for name in kind.__dataclass_fields__})  # type: ignore[attr-defined]


def parse_conversion(description: str, kind: type[Config], arguments: Sequence[str]) -> Config:
    """Read the config of a conversion from `SOURCE OUTPUT [--key value]`.

    Args:
        description: What `--help` says first.
        kind: The config's class.
        arguments: The words of the command line.
    """
    parser = _create_parser(description=description, usage="%(prog)s SOURCE OUTPUT [--key value]")
    parser.add_class_arguments(kind)
    words = list(arguments)
    if len(words) > 1 and not words[0].startswith("-"):
        words = ["--source", words[0], "--output", *words[1:]]
    return kind(**parser.parse_args(words).as_dict())


def _create_parser(**options: Any) -> ArgumentParser:
    return ArgumentParser(
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, parser_mode=STRICT, **options
    )
