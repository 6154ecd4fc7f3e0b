"""Training: image classifiers, image-text pairs, conversations and text.

Each kind of training is a folder with these files and more of its own:

- `config.py`: the options, as `ModelConfig` and `TrainConfig`. It is imported without torch, so that `--help` is fast.
- `task.py`: the objective, a subclass of `engine.task.Task`; conversations have transformers' Trainer, `trainer.py`.
- `evaluate.py`: evaluates one batch, and sums up an evaluation as `EvalResult`.
- `kind.py`: the object whose ten members all commands call (`engine.kind.LoopKind`).

`engine` holds what the kinds share: functions over a kind, run folders, checkpoints, logs, processes, checks before the
first step, and the training loop. `opened.py` opens their runs for `mmod.open_model`. A new kind is one file or such a
folder, and a row in `mmod/training/kinds.py`.
"""

from typing import TYPE_CHECKING

from mmod.lazy import lazy_names

# For type checkers; at run time, lazy_names imports the same names on first use.
# ruff: noqa: F401
if TYPE_CHECKING:
    from mmod.training.engine.groups import EmaConfig, OptimConfig, ScheduleConfig
    from mmod.training.engine.kind import Step
    from mmod.training.engine.run_folder import FitResult
    from mmod.training.image.config import (
        DistillConfig,
        ElasticConfig,
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
        "mmod.training.engine.groups": ["EmaConfig", "OptimConfig", "ScheduleConfig"],
        "mmod.training.engine.kind": ["Step"],
        "mmod.training.engine.run_folder": ["FitResult"],
        "mmod.training.image.config": [
            "DistillConfig",
            "ElasticConfig",
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
