"""Activation memory of a forward pass, counted on shapes alone."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class ActivationMemory(TorchDispatchMode):
    """Context manager that follows the storage made inside it, on any device, the meta device included.

    Args:
        known: Tensors that are no activations, such as parameters and inputs; their storage and views of it are free.

    Attributes:
        live: Bytes made inside and still held.
        peak: The largest `live` seen.

    Example:
        >>> x = torch.zeros(256, device="meta")
        >>> with ActivationMemory([x]) as memory:
        ...     y = (x + 1) * 2
        >>> memory.live, memory.peak
        (1024, 2048)
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known = [tensor.untyped_storage() for tensor in known]
        self._addresses = {storage._cdata for storage in self._known}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation and follow the storage of what it returns."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._follow(leaf.untyped_storage())
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._addresses:
            return
        self._addresses.add(address)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, address, size)

    def _release(self, address: int, size: int) -> None:
        self._addresses.discard(address)
        self.live -= size
