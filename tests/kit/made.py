"""Models that many tests make, each built once in a process: tests get copies of their own."""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

P = ParamSpec("P")
Model = TypeVar("Model")


class _Built:
    """A model as Python pickles it, but for its tensors, and the random state that its building left."""

    def __init__(self, model: Any) -> None:
        self.tensors: list[Tensor] = []
        # By id; the tensors themselves stay until all are written, so that no other gets an id of theirs.
        self.numbers: dict[int, tuple[int, Tensor]] = {}
        self.state = torch.get_rng_state()
        written = io.BytesIO()
        pickler = pickle.Pickler(written, pickle.HIGHEST_PROTOCOL)
        pickler.persistent_id = self._number_of  # type: ignore[method-assign]
        pickler.dump(model)
        self.numbers.clear()
        self.written = written.getvalue()

    def _number_of(self, value: object) -> int | None:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.tensors), value
            self.tensors.append(_copy_of(value))
        return self.numbers[id(value)][0]

    def copy(self) -> Any:
        """Return the model again, with weights of its own."""
        unpickler = pickle.Unpickler(io.BytesIO(self.written))
        unpickler.persistent_load = [_copy_of(tensor) for tensor in self.tensors].__getitem__  # type: ignore[method-assign]
        model = unpickler.load()
        torch.set_rng_state(self.state)
        return model


def _copy_of(tensor: Tensor) -> Tensor:
    copied = tensor.detach().clone()
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


def made_once(make: Callable[P, Model]) -> Callable[P, Model]:
    """Build each model of a function once, which draws from a seed of its own; then return copies.

    A model on another device or of another dtype, or one that cannot be pickled, is built each time.
    """
    built: dict[str, _Built] = {}

    @functools.wraps(make)
    def made(*args: P.args, **options: P.kwargs) -> Model:
        asked = repr((args, sorted(options.items())))
        usual = torch.get_default_device().type == "cpu" and torch.get_default_dtype() == torch.float32
        if asked in built and usual:
            copied: Model = built[asked].copy()
            return copied
        model = make(*args, **options)
        # Objects that show where they lie may be others at the same place.
        if usual and " at 0x" not in asked:
            with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
                built[asked] = _Built(model)
        return model

    return made
