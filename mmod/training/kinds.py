"""The kinds of training by name: their configs, and what makes and trains them."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmod.config.parse import parse_config
from mmod.io.yaml import stack_configs
from mmod.lazy import import_path
from mmod.opening.runs import RUN_CONFIG, find_run, is_described
from mmod.training.engine.config import RunConfig
from mmod.training.table import KINDS
from mmod.values import one_of

if TYPE_CHECKING:
    from mmod.training.chat import config as chat
    from mmod.training.chat.evaluate import EvalResult as ChatResult
    from mmod.training.engine.evaluate import RoutedResult
    from mmod.training.engine.kind import AfterStep, Kind, Streams
    from mmod.training.engine.run_folder import FitResult
    from mmod.training.image import config as image
    from mmod.training.image.evaluate import EvalResult
    from mmod.training.pairs import config as pairs
    from mmod.training.pairs.evaluate import EvalResult as PairsResult
    from mmod.training.text import config as text
    from mmod.training.text.evaluate import EvalResult as TextResult


def config_class(name: str) -> type[RunConfig]:
    """Return the config of a kind by name; imported without torch, so that `--help` is fast."""
    one_of("kind", name, tuple(KINDS))
    config: type[RunConfig] = import_path(KINDS[name].config)
    return config


def extended(keys: type) -> dict[str, type[RunConfig]]:
    """Return the config of every kind with further keys.

    Args:
        keys: A frozen dataclass of the further keys.
    """
    configs: dict[str, type[RunConfig]] = {}
    for name in KINDS:
        base = config_class(name)
        # The base's description stands for the keys that both have.
        made = type(f"{name.capitalize()}{keys.__name__}", (keys, base), {"__doc__": base.__doc__})
        configs[name] = dataclasses.dataclass(frozen=True, kw_only=True)(made)
    return configs


def kind_of(config: object) -> Kind:
    """Return the kind of a run; imports its libraries. A TypeError for a config of no kind."""
    if not isinstance(config, RunConfig):
        raise TypeError(f"a run's config must be one of {', '.join(KINDS)}, got {type(config).__name__}")
    kind: Callable[[RunConfig], Kind] = import_path(KINDS[config.kind].kind)
    return kind(config)


@typing.overload
def fit(
    config: image.TrainConfig, *, streams: Streams = ..., progress: bool = ..., after_step: AfterStep = ...
) -> FitResult[EvalResult]: ...
@typing.overload
def fit(
    config: pairs.TrainConfig, *, streams: Streams = ..., progress: bool = ..., after_step: AfterStep = ...
) -> FitResult[PairsResult]: ...
@typing.overload
def fit(
    config: text.TrainConfig, *, streams: Streams = ..., progress: bool = ..., after_step: AfterStep = ...
) -> FitResult[TextResult]: ...
@typing.overload
def fit(
    config: chat.TrainConfig, *, progress: bool = ..., after_step: AfterStep = ...
) -> FitResult[ChatResult | None]: ...
def fit(config: RunConfig, **options: Any) -> FitResult[RoutedResult | None]:
    """Train a model of any kind, from scratch or from where the run in its folder stopped.

    Args:
        options: `progress=False` hides bars; `after_step` is a function that is called with a `Step` after each
            optimiser step, in every process, and is no part of the run's config; `streams` are training and evaluation
            batches to use instead of those that `config.data` names.

    Returns:
        The result; that of the earlier run if the folder holds a finished run of the same config.

    Raises:
        ValueError: The folder belongs to another config, or the config does not fit the data or the model.
        LockedError: Another process trains into the folder.
        FloatingPointError: The loss is no longer finite.
        SystemExit: SIGTERM, SIGINT or a scheduler's signal; raised after the current step, which is saved.

    Example:
        >>> import tempfile
        >>> from mmod.data.config import DataConfig
        >>> from mmod.training import ModelConfig, TrainConfig
        >>> folder = tempfile.mkdtemp()
        >>> args = {"img_size": 32, "patch_size": 8, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2}
        >>> model = ModelConfig("vit_tiny_patch16_224", {**args, "num_classes": 10})
        >>> data = DataConfig("digits:tiny", root=f"{folder}/digits")
        >>> config = TrainConfig(output=f"{folder}/run", model=model, data=data, epochs=1)
        >>> result = fit(config, progress=False)
        >>> result.steps, result.evaluation.samples
        (4, 64)
    """
    return kind_of(config).fit(**options)


def kind_named(arguments: Sequence[str]) -> str:
    """Return the kind that the files or options of a command line name; "image" unless they do."""
    kind = _named_kind(arguments) or "image"
    one_of("kind", kind, tuple(KINDS))
    return kind


def _named_kind(arguments: Sequence[str]) -> str | None:
    fields, words = stack_configs(arguments)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--kind", default=(fields or {}).get("kind"))
    return parser.parse_known_args(words)[0].kind


def parse_kind(arguments: Sequence[str], config_of: Callable[[str], type[RunConfig]] = config_class) -> Any:
    """Return the config of a command line as `parse_config` does; `config_of` returns the class for a kind.

    In place of the config, a run folder stands for its final model, and its `model`, `last` or a checkpoint, or a file
    in these, for the weights there; see `finished_run`. The folder of a saved model stands for that model, and options
    name its data.
    """
    if arguments and find_run(arguments[0]) is None and is_described(arguments[0]):
        folder, *options = arguments
        if (Path(folder) / "mmod.json").is_file():
            # Imports torch, which `--help` of a config leaves alone.
            from mmod.pretrained import refuse_own

            refuse_own(folder)
        kind = kind_named(options)
        model = {"name": folder, "pretrained": True} if kind == "image" else {"checkpoint": folder}
        return parse_config(options, config_of(kind), {"output": folder, "model": model})
    run = find_run(arguments[0]) if arguments else None
    words = arguments if run is None else [str(run / RUN_CONFIG), *arguments[1:]]
    kind = kind_named(words)
    try:
        # The run's own config first, whatever the words change of it.
        config = parse_config(words if run is None else [words[0], "--kind", kind], config_of(kind))
    except SystemExit as end:
        # The exit already printed the error; this adds what may explain it.
        if end.code and _named_kind(words) is None:
            print(f"without a key `kind`, a config is read as {kind}; valid are {', '.join(KINDS)}", file=sys.stderr)
        raise
    if run is None:
        return config
    finished = finished_run(config, run, arguments[0])
    return parse_config(arguments[1:], type(finished), finished.to_dict())


def finished_run(config: RunConfig, run: Path, weights: str | Path) -> RunConfig:
    """Return the config in a run folder, changed to start from the weights there."""
    return dataclasses.replace(config, output=str(run)).finished(str(weights))
