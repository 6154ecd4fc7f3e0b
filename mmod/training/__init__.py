"""Training: one loop, tasks as objects."""

from typing import TYPE_CHECKING

from mmod.lazy import lazy_names

if TYPE_CHECKING:
    from mmod.training.engine.parse import load_config, parse_config, train_config
    from mmod.training.engine.run_folder import FitResult
    from mmod.training.image.config import (
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
    from mmod.training.image.evaluate import EvalResult, evaluate
    from mmod.training.image.recipe import fit
    from mmod.training.image.task import ClassificationTask

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
        "image.recipe": ("fit",),
        "image.config": (
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
        "image.evaluate": ("EvalResult", "evaluate"),
        "engine.parse": ("load_config", "parse_config", "train_config"),
        "engine.run_folder": ("FitResult",),
        "image.task": ("ClassificationTask",),
    },
)
