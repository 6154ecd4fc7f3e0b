"""Training: image classifiers, image-text pairs, conversations and text.

`engine` has what the kinds share: the contract of a kind (`kind.py`), the model that a run starts from (`start.py`),
run folder, checkpoints, logs, processes, command lines, checks before the first step (`preflight.py`) and the loop.
Conversations run in transformers' Trainer and share everything else; the other kinds run in the loop.

Every kind is a folder with the same files:

- `config.py`: `ModelConfig`, with `has_weights` and `started_from`, and `TrainConfig`, a subclass of `LoopConfig`
  (`RunConfig` without the loop). It is imported without torch, so that `--help` is fast.
- `model.py`: opens the dense model (`mmod/opening`) and creates the objects around it.
- `task.py`: the objective, a subclass of `engine.task.Task`; a trainer if another library has the loop.
- `evaluate.py`: the rows of a batch, and `EvalResult`, a `RoutedResult` whose `columns()` are columns of the history.
- `kind.py`: the frozen object whose functions the loop and all commands call. It inherits nothing.

A new kind is such a folder, a row in `mmod/training/table.py`, and the same folder of tests.
"""

from typing import TYPE_CHECKING

from mmod.lazy import lazy_names

# For type checkers; at run time, lazy_names imports the same names on first use.
# ruff: noqa: F401
if TYPE_CHECKING:
    from mmod.training.engine.config import EmaConfig, OptimConfig, ScheduleConfig
    from mmod.training.engine.kind import Step
    from mmod.training.engine.run_folder import FitResult
    from mmod.training.image.config import (
        DistillConfig,
        ElasticConfig,
        InTrainingConfig,
        LossConfig,
        MixupConfig,
        ModelConfig,
        TrainConfig,
    )
    from mmod.training.image.evaluate import EvalResult, evaluate
    from mmod.training.image.task import ClassificationTask
    from mmod.training.kinds import fit

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "mmod.training.engine.config": ["EmaConfig", "OptimConfig", "ScheduleConfig"],
        "mmod.training.engine.kind": ["Step"],
        "mmod.training.engine.run_folder": ["FitResult"],
        "mmod.training.image.config": [
            "DistillConfig",
            "ElasticConfig",
            "InTrainingConfig",
            "LossConfig",
            "MixupConfig",
            "ModelConfig",
            "TrainConfig",
        ],
        "mmod.training.image.evaluate": ["EvalResult", "evaluate"],
        "mmod.training.image.task": ["ClassificationTask"],
        "mmod.training.kinds": ["fit"],
    },
)
