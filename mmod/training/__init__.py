"""Training: one loop, tasks as objects."""

from typing import TYPE_CHECKING

from mmod.lazy import lazy_names

if TYPE_CHECKING:
    from mmod.training.classification import fit
    from mmod.training.config import (
        CapacityScheduleConfig,
        DistillConfig,
        EmaConfig,
        LossConfig,
        MixupConfig,
        ModelConfig,
        OptimConfig,
        ScheduleConfig,
        TrainConfig,
    )
    from mmod.training.evaluation import EvalResult, evaluate
    from mmod.training.parse import load_config, parse_config, train_config
    from mmod.training.run import FitResult
    from mmod.training.task import ClassificationTask

__all__ = [
    "CapacityScheduleConfig",
    "ClassificationTask",
    "DistillConfig",
    "EmaConfig",
    "EvalResult",
    "FitResult",
    "LossConfig",
    "MixupConfig",
    "ModelConfig",
    "OptimConfig",
    "ScheduleConfig",
    "TrainConfig",
    "evaluate",
    "fit",
    "load_config",
    "parse_config",
    "train_config",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "classification": ("fit",),
        "config": (
            "CapacityScheduleConfig",
            "DistillConfig",
            "EmaConfig",
            "LossConfig",
            "MixupConfig",
            "ModelConfig",
            "OptimConfig",
            "ScheduleConfig",
            "TrainConfig",
        ),
        "evaluation": ("EvalResult", "evaluate"),
        "parse": ("load_config", "parse_config", "train_config"),
        "run": ("FitResult",),
        "task": ("ClassificationTask",),
    },
)
