"""The kinds of training by name: what their configs are, and which object does the work."""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmod.io.yaml import stack_configs
from mmod.training.chat import config as chat
from mmod.training.engine.config import RunConfig
from mmod.training.engine.help import dataclass_in
from mmod.training.image import config as image
from mmod.training.pairs import config as pairs
from mmod.training.text import config as text
from mmod.values import one_of

if TYPE_CHECKING:
    from mmod.training.engine.recipe import Recipe

__all__ = ["CONFIGS", "kind_of", "recipe_of", "split_kind"]

CONFIGS: dict[str, type[RunConfig]] = {
    "image": image.TrainConfig,
    "pairs": pairs.TrainConfig,
    "chat": chat.TrainConfig,
    "text": text.TrainConfig,
}
"""Name of each kind to the config of its runs; imported without torch, so that `--help` is answered at once."""


def recipe_of(config: Any) -> Recipe[Any, Any]:
    """Return the recipe of a run, importing the libraries of its kind.

    Args:
        config: A config of one of the classes of `CONFIGS`, or derived from it.

    Raises:
        TypeError: A config of no kind.
    """
    if isinstance(config, image.TrainConfig):
        from mmod.training.image.recipe import ImageRecipe

        return ImageRecipe(config)
    if isinstance(config, pairs.TrainConfig):
        from mmod.training.pairs.recipe import PairsRecipe

        return PairsRecipe(config)
    if isinstance(config, chat.TrainConfig):
        from mmod.training.chat.recipe import ChatRecipe

        return ChatRecipe(config)
    if isinstance(config, text.TrainConfig):
        from mmod.training.text.recipe import TextRecipe

        return TextRecipe(config)
    raise TypeError(f"a run's config must be one of {', '.join(CONFIGS)}, got {type(config).__name__}")


def kind_of(fields: Mapping[str, Any]) -> str:
    """Return the kind of training whose config has the keys of a file: the first of those that lack fewest of them.

    Args:
        fields: The file, nested.

    Example:
        >>> kind_of({"model": {"name": "vit_tiny_patch16_224"}, "data": {"source": "digits"}})
        'image'
        >>> kind_of({"model": {"checkpoint": "run"}, "data": {"length": 256}})
        'text'
    """
    return min(CONFIGS, key=lambda kind: _misfit(fields, CONFIGS[kind]))


def _misfit(fields: Mapping[str, Any], kind: type) -> int:
    """Return how many keys of a file a config lacks, and how many that it needs the file lacks."""
    hints, known = typing.get_type_hints(kind), {field.name: field for field in dataclasses.fields(kind)}
    needed = [
        name
        for name, field in known.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING and name != "output"
    ]
    groups = ((value, dataclass_in(hints[name])) for name, value in fields.items() if name in known)
    inner = sum(_misfit(value, group) for value, group in groups if group is not None and isinstance(value, Mapping))
    return len(set(fields) - set(known)) + len(set(needed) - set(fields)) + inner


def split_kind(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the kind that a command line is about, and the command line without `--kind`.

    Args:
        arguments: `[CONFIG] [--kind NAME] [--key value]`; without `--kind` the keys of the files decide.

    Raises:
        ValueError: A kind that there is not.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--kind")
    options, others = parser.parse_known_args(list(arguments))
    if options.kind is not None:
        one_of("kind", options.kind, tuple(CONFIGS))
        return str(options.kind), others
    return kind_of(stack_configs(others)[0] or {}), others
