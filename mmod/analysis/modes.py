"""A context for training or evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from mmod.methods.base import TrainingOnly


@contextmanager
def in_mode(training: bool, *models: nn.Module | None) -> Iterator[None]:
    """Put models into training or evaluation mode, and restore the mode of every module at the end."""
    modes: dict[nn.Module, bool] = {}
    for model in models:
        if model is not None:
            modes.update({module: module.training for module in model.modules()})
    # All modes are read before any is set: models may share modules.
    for model in models:
        if model is not None:
            model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            # Module by module: a model in training may have parts in evaluation mode.
            module.training = mode
        for module in modes:
            if isinstance(module, TrainingOnly):
                module.mod_follow_mode()
