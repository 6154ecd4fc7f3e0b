"""The random states of Python, NumPy and torch's CPU generator, even draws, and models without initial weights."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


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


def spread(labels: Sequence[int], count: int, seed: int = 0) -> np.ndarray:
    """Draw `count` ascending indices, as evenly over the classes as their sizes allow."""
    classes = np.asarray(labels)
    # Shuffled, then sorted stably by class: random within each class.
    order = np.random.default_rng(seed).permutation(len(classes))
    order = order[np.argsort(classes[order], kind="stable")]
    # Rank of each sample within its class. Sorted by rank, the first samples of all classes precede all second ones.
    first = np.searchsorted(classes[order], classes[order])
    rank = np.empty(len(classes), np.int64)
    rank[order] = np.arange(len(classes)) - first
    # Of equal rank the order is random, so that no class comes first when the count runs out.
    turns = np.lexsort((np.random.default_rng([seed, 1]).permutation(len(classes)), rank))
    return np.sort(turns[:count])


class Unfilled(TorchFunctionMode):
    """Leaves out the initial weights of models that are built: what fills parameters and tensors on the meta device."""

    filling = frozenset(f"{name}_" for name in ("uniform", "normal", "erfinv", "mul", "add", "clamp", "fill", "zero"))
    # Those of `torch.nn.init` that are a call of their own, inside which no mode sees what they fill with.
    filling |= {"kaiming_uniform_", "constant_"}

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Return the tensor to be filled, or call the function."""
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in self.filling:
            # `torch.nn.init` names its tensor; one that is named in another way is filled.
            filled = args[0] if args else kwargs.get("tensor")
            if isinstance(filled, Tensor) and (filled.is_meta or isinstance(filled, nn.Parameter)):
                return filled
        return func(*args, **kwargs)
