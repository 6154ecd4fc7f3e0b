"""The kinds of training by name: the table of them, their configs, and what makes and trains them.

The command line reads the table without importing any of them.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from mmod.lazy import import_path
from mmod.values import one_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from mmod.io.store import Store
    from mmod.training.chat import config as chat
    from mmod.training.chat.evaluate import EvalResult as ChatResult
    from mmod.training.engine.config import RunConfig
    from mmod.training.engine.estimate import RunEstimate
    from mmod.training.engine.evaluate import RoutedResult
    from mmod.training.engine.kind import AfterStep, Kind, Streams
    from mmod.training.engine.run_folder import FitResult
    from mmod.training.image import config as image
    from mmod.training.image.evaluate import EvalResult as ImageResult
    from mmod.training.pairs import config as pairs
    from mmod.training.pairs.evaluate import EvalResult as PairsResult
    from mmod.training.text import config as text
    from mmod.training.text.evaluate import EvalResult as TextResult


class Row(NamedTuple):
    """A kind of training.

    Attributes:
        config: Path of the config of its runs, imported without torch, so that `--help` is fast.
        kind: Path of its `Kind`, imported with the libraries that it needs.
        purpose: What `mmod train KIND` does.
        example: A config that comes with mmod.
        advised: What `mmod advise` reads besides a model of this kind; empty where it gives no advice.
        study: The config of `mmod tradeoff` that takes a run of this kind as its dense model; empty for none.
    """

    config: str
    kind: str
    purpose: str
    example: str
    advised: str = ""
    study: str = ""


KINDS = {
    "image": Row(
        "mmod.training.image.config:TrainConfig",
        "mmod.training.image.kind:ImageKind",
        "train an image classifier",
        "digits/dense",
        "--images FOLDER",
        "my-model",
    ),
    "pairs": Row(
        "mmod.training.pairs.config:TrainConfig",
        "mmod.training.pairs.kind:PairsKind",
        "train a CLIP model on image-text pairs",
        "clip/scenes",
    ),
    "chat": Row(
        "mmod.training.chat.config:TrainConfig",
        "mmod.training.chat.kind:ChatKind",
        "fine-tune a vision-language model on conversations",
        "vlm/tiny-llava",
        "--prompts FILE",
    ),
    "text": Row(
        "mmod.training.text.config:TrainConfig",
        "mmod.training.text.kind:TextKind",
        "train a causal language model on text, byte by byte",
        "text/mod",
    ),
}
"""The kinds by name."""


def config_class(name: str) -> type[RunConfig]:
    """Return the config of a kind by name; imported without torch, so that `--help` is fast."""
    one_of("kind", name, tuple(KINDS))
    return import_path(KINDS[name].config)


def all_configs() -> dict[str, type[RunConfig]]:
    """Return the config of every kind by name."""
    return {name: config_class(name) for name in KINDS}


def extended(keys: type) -> dict[str, type[RunConfig]]:
    """Return the config of every kind with further keys.

    Args:
        keys: A frozen dataclass of the further keys.
    """
    configs: dict[str, type[RunConfig]] = {}
    for name, base in all_configs().items():
        # The base's description stands for the keys that both have.
        made = type(f"{name.capitalize()}{keys.__name__}", (keys, base), {"__doc__": base.__doc__})
        configs[name] = dataclasses.dataclass(frozen=True, kw_only=True)(made)
    return configs


def kind_of(config: object) -> Kind:
    """Return the kind of a run; imports its libraries. A TypeError for a config of no kind."""
    name = getattr(config, "kind", None)
    # Configs of commands are made from those of the kinds.
    if name not in KINDS or not isinstance(config, config_class(name)):
        raise TypeError(f"a run's config must be one of {', '.join(KINDS)}, got {type(config).__name__}")
    kind: Callable[[RunConfig], Kind] = import_path(KINDS[name].kind)
    return kind(config)


class FitArguments(TypedDict, total=False):
    """The options of `fit`; a `store` keeps what is computed of each evaluated batch."""

    streams: Streams
    progress: bool
    after_step: AfterStep
    store: Store


@typing.overload
def fit(config: image.TrainConfig, **options: Unpack[FitArguments]) -> FitResult[ImageResult]: ...
@typing.overload
def fit(config: pairs.TrainConfig, **options: Unpack[FitArguments]) -> FitResult[PairsResult]: ...
@typing.overload
def fit(config: chat.TrainConfig, **options: Unpack[FitArguments]) -> FitResult[ChatResult | None]: ...
@typing.overload
def fit(config: text.TrainConfig, **options: Unpack[FitArguments]) -> FitResult[TextResult]: ...
@typing.overload
def fit(config: RunConfig, **options: Unpack[FitArguments]) -> FitResult[RoutedResult | None]: ...
def fit(config: RunConfig, **options: object) -> FitResult[RoutedResult | None]:
    """Train a model of any kind, from scratch or from where the run in its folder stopped.

    Args:
        config: The `TrainConfig` of a kind: `mmod.training.TrainConfig` for images,
            `mmod.training.pairs.config.TrainConfig` for pairs, and likewise those of `chat` and `text`.
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
    return import_path(f"{config.engine}.loop:fit")(kind_of(config), **options)


def estimate(config: RunConfig) -> RunEstimate:
    """Count what a run would cost, without training."""
    return import_path(f"{config.engine}.estimate:estimate")(kind_of(config))
