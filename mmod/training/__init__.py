"""Training: image classifiers, image-text pairs, conversations and text.

`engine` holds what the kinds share: the run folder, checkpoints, logs, processes, command lines, and a training loop.
Conversations run in transformers' Trainer and share the rest; the other kinds run in that loop.

Each kind is a folder of the same files, of which the engine imports none:

- `config.py`: `ModelConfig` and `TrainConfig`, a subclass of `LoopConfig` (or of `RunConfig` without the loop). It is
  imported without torch, so that `--help` is answered at once.
- `model.py`: `create_models`, from the config to the model and its teacher, by way of `engine.model.prepare_models`.
- `task.py`: the objective, a subclass of `engine.task.Task`; `trainer.py` where another library has the loop.
- `evaluate.py`: `evaluate` and `EvalResult`, a `RoutedResult` whose `columns()` become columns of the history.
- `recipe.py`: `fit(config)`, and the subclass of `engine.recipe.Recipe` through which the loop and all commands work.
- `command.py`: `main(arguments)`, from a command line to `print(fit(config))`.

A new kind is such a folder, a row in `mmod/training/kinds.py` and in `mmod/cli.py`, and the same folder of tests.
"""

from typing import TYPE_CHECKING, Any

from mmod.lazy import lazy_names

# The one list of this package's names, see lazy_names.
# ruff: noqa: F401
if TYPE_CHECKING:
    from mmod.training.engine.config import EmaConfig, OptimConfig, ScheduleConfig
    from mmod.training.engine.run_folder import FitResult
    from mmod.training.image.config import (
        CapacityScheduleConfig,
        DistillConfig,
        ElasticConfig,
        InTrainingConfig,
        LearnCapacityConfig,
        LossConfig,
        MixupConfig,
        ModelConfig,
        TrainConfig,
    )
    from mmod.training.image.evaluate import EvalResult, evaluate
    from mmod.training.image.recipe import fit
    from mmod.training.image.task import ClassificationTask

_get, __dir__, __all__ = lazy_names(__name__)
# Functions of the last version, of which image classifiers were the default, and what takes their place.
_RENAMED = {
    "load_config": ("load_config", "TrainConfig.load"),
    "train_config": ("config_from", "TrainConfig.from_dict"),
    "parse_config": ("parse_config", "mmod.training.engine.parse.parse_config"),
}


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        return _get(name)
    import warnings
    from functools import partial

    from mmod.training.engine import parse
    from mmod.training.image.config import TrainConfig

    function, successor = _RENAMED[name]
    warnings.warn(f"mmod.training.{name} is deprecated: use {successor}", DeprecationWarning, stacklevel=2)
    return partial(getattr(parse, function), kind=TrainConfig)
