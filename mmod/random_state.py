"""The random states of Python, NumPy and torch's CPU generator."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore the random states on exit."""
    state = random.getstate(), np.random.get_state(), torch.default_generator.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])  # noqa: NPY002
        torch.default_generator.set_state(state[2])


def drawn_from() -> tuple[object, ...]:
    """Return what changes when a number is drawn from any of them."""
    numpy_state: Any = np.random.get_state()  # noqa: NPY002
    torch_state = torch.default_generator.get_state()
    return random.getstate(), numpy_state[1].tobytes(), numpy_state[2], torch_state.numpy().tobytes()
