"""Training: one loop, tasks as objects."""

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
