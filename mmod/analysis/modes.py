"""Models in training or evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["in_mode"]


@contextmanager
def in_mode(training: bool, *models: nn.Module | None) -> Iterator[None]:
    """Put models into training or evaluation mode, and each of their modules back into its own at the end.

    Args:
        training: Whether it is training mode.
        models: The models; None is passed over.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Dropout(), nn.Dropout().eval())
        >>> with in_mode(True, model):
        ...     print(model[1].training)
        True
        >>> model[0].training, model[1].training
        (True, False)
    """
    given = [model for model in models if model is not None]
    modes = {module: module.training for model in given for module in model.modules()}
    for model in given:
        model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
