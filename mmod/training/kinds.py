"""The kinds of training by name: their configs, recipes and commands `mmod train KIND`."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import typing
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mmod.io.options import dataclass_in
from mmod.io.yaml import parse_option, stack_configs
from mmod.training.chat import config as chat
from mmod.training.engine.config import RunConfig
from mmod.training.engine.parse import parse_config
from mmod.training.image import config as image
from mmod.training.pairs import config as pairs
from mmod.training.text import config as text
from mmod.values import check_value, one_of, required_fields

if TYPE_CHECKING:
    from mmod.training.chat.evaluate import EvalResult as ChatResult
    from mmod.training.engine.recipe import Recipe
    from mmod.training.engine.run_folder import FitResult
    from mmod.training.image.evaluate import EvalResult
    from mmod.training.pairs.evaluate import EvalResult as PairsResult
    from mmod.training.text.evaluate import EvalResult as TextResult

CONFIGS: dict[str, type[RunConfig]] = {
    "image": image.TrainConfig,
    "pairs": pairs.TrainConfig,
    "chat": chat.TrainConfig,
    "text": text.TrainConfig,
}
"""Configs by kind; imported without torch, so that `--help` is fast."""


def recipe_of(config: Any) -> Recipe[Any, Any]:
    """Return the recipe of a run; imports the libraries of its kind.

    Args:
        config: A config of one of the classes of `CONFIGS`, or derived from it.

    Raises:
        TypeError: A config of no kind.
    """
    for kind, cls in CONFIGS.items():
        if isinstance(config, cls):
            module = importlib.import_module(f"mmod.training.{kind}.recipe")
            recipe: Recipe[Any, Any] = getattr(module, f"{kind.capitalize()}Recipe")(config)
            return recipe
    raise TypeError(f"a run's config must be one of {', '.join(CONFIGS)}, got {type(config).__name__}")


@typing.overload
def fit(config: image.TrainConfig, *, streams: Any = None, progress: bool = True) -> FitResult[EvalResult]: ...
@typing.overload
def fit(config: pairs.TrainConfig, *, streams: Any = None, progress: bool = True) -> FitResult[PairsResult]: ...
@typing.overload
def fit(config: text.TrainConfig, *, streams: Any = None, progress: bool = True) -> FitResult[TextResult]: ...
@typing.overload
def fit(config: chat.TrainConfig, *, progress: bool = True) -> FitResult[ChatResult | None]: ...
def fit(config: RunConfig, **options: Any) -> Any:
    """Train a model of any kind, from scratch or from where the run in its folder stopped.

    Args:
        options: `progress=False` hides bars; `streams` are training and evaluation batches to use instead of those that
            `config.data` names.

    Returns:
        The result; that of the earlier run if the folder holds a finished run of the same config.

    Raises:
        ValueError: The folder belongs to another config, or the config does not fit the data or the model.
        LockedError: Another process trains into the folder.
        FloatingPointError: The loss is no longer finite.
        SystemExit: SIGTERM or SIGINT; raised after the current step, which is saved.

    Example:
        >>> import tempfile
        >>> from mmod.data.config import DataConfig
        >>> folder = tempfile.mkdtemp()
        >>> args = {"img_size": 32, "patch_size": 8, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2}
        >>> model = image.ModelConfig("vit_tiny_patch16_224", {**args, "num_classes": 10})
        >>> data = DataConfig("digits:tiny", root=f"{folder}/digits")
        >>> config = image.TrainConfig(output=f"{folder}/run", model=model, data=data, epochs=1)
        >>> result = fit(config, progress=False)
        >>> result.steps, result.evaluation.samples
        (4, 64)
    """
    return recipe_of(config).fit(**options)


@functools.cache
def config_with(kind: str, group: str, options: type, purpose: str) -> Any:
    """Return the config of a kind of training with one more group of options.

    Args:
        purpose: What the group is for, in `--help`.
    """
    doc = "The keys of a training config, whose model, data and device say what is examined.\n\nArgs:\n"
    return dataclasses.make_dataclass(
        f"{options.__name__}Of{kind.capitalize()}", [(group, options, dataclasses.field(default_factory=options))],
        bases=(CONFIGS[kind],), namespace={"__doc__": f"{doc}    {group}: {purpose}\n"}, frozen=True, kw_only=True,
    )  # fmt: skip


def kind_of(fields: Mapping[str, Any]) -> str:
    """Return the kind of a config file: the first one whose config differs least in its keys.

    Example:
        >>> kind_of({"model": {"name": "vit_tiny_patch16_224"}, "data": {"source": "digits"}})
        'image'
        >>> kind_of({"model": {"checkpoint": "run"}, "data": {"length": 256}})
        'text'
    """
    return min(CONFIGS, key=lambda kind: _misfit(fields, CONFIGS[kind]))


def _misfit(fields: Mapping[str, Any], config: type) -> int:
    """Return the number of keys in a file that a config lacks, and of required keys that the file lacks."""
    hints, known = typing.get_type_hints(config), {field.name: field for field in dataclasses.fields(config)}
    required = set(required_fields(config)) - {"output"}
    groups = ((value, dataclass_in(hints[name])) for name, value in fields.items() if name in known)
    inner = sum(_misfit(value, group) for value, group in groups if group is not None and isinstance(value, Mapping))
    return len(set(fields) - set(known)) + len(required - set(fields)) + inner


def split_kind(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Return the kind of a command line, and the command line without `--kind`.

    Args:
        arguments: `[CONFIG] [--kind NAME] [--key value]`; without `--kind` the keys of the files decide.

    Raises:
        ValueError: An unknown kind.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--kind")
    options, others = parser.parse_known_args(list(arguments))
    if options.kind is not None:
        one_of("kind", options.kind, tuple(CONFIGS))
        return str(options.kind), others
    return kind_of(stack_configs(others)[0] or {}), others


_DRY = "--dry-run"


def main(arguments: Sequence[str], kind: str) -> None:
    """Train as the command line says and print the result, or what the run would cost.

    Args:
        arguments: `CONFIG [--key value] [--dry-run[=RATE]]`; with a rate, in TFLOP/s of each process, hours too.
        kind: A key of `CONFIGS`.
    """
    dry = [word for word in arguments if word.partition("=")[0] == _DRY]
    config = parse_config([word for word in arguments if word not in dry], CONFIGS[kind])
    if not dry:
        print(recipe_of(config).fit())
        return
    rate = parse_option(dry[-1].partition("=")[2])
    # Before the model is made.
    check_value(_DRY, rate, float | None, "(0, inf)")
    estimate = recipe_of(config).estimate()
    print(estimate)
    if rate is not None:
        print(f"{estimate.hours(rate):.4g} hours at {rate:g} TFLOP/s in each process")
