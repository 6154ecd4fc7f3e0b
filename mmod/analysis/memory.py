"""Activation memory: from shapes, and measured in a run."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmod.analysis.timing import without_garbage_collection


class ActivationMemory(TorchDispatchMode):
    """Context manager that tracks storage allocated inside it, on any device including meta.

    `live` counts bytes that are still held and `peak` is its maximum. Tensors in `known` and views of them do not
    count.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known = [tensor.untyped_storage() for tensor in known]
        self._addresses = {storage._cdata for storage in self._known}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the operation and track the storage of its results."""
        result = func(*args, **(kwargs or {}))
        self.follow(result)
        return result

    def follow(self, result: object) -> None:
        """Track the storage of the results of an operation."""
        # Most operations return one tensor, for which the walk through the tree would cost more than the operation.
        leaves = [result] if isinstance(result, Tensor) else tree_leaves(result)
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self._follow_storage(leaf.untyped_storage())

    def _follow_storage(self, storage: torch.UntypedStorage) -> None:
        # Of the storage object: on the meta device there is no data that could have an address.
        address = storage._cdata
        if address in self._addresses:
            return
        size = storage.nbytes()
        self._addresses.add(address)
        self.live += size
        self.peak = max(self.peak, self.live)
        # When the last tensor on it is gone: a storage outlives the tensors that share it.
        weakref.finalize(storage, self._release, address, size)

    def _release(self, address: int, size: int) -> None:
        self._addresses.discard(address)
        self.live -= size


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """Return the peak memory of a function in bytes beyond that at its start, including its result.

    Every allocation of torch counts, also inside custom ops; scratch memory of libraries (oneDNN, MKL, cuBLAS) does
    not. The allocator counts on a GPU, the profiler elsewhere.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # The profiler reads this once; its messages would break into progress bars.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # Not `torch.profiler`, which makes a tree of all events.
    with without_garbage_collection(), torch.autograd.profiler.profile(profile_memory=True) as profiler:
        function()
    assert profiler.kineto_results is not None
    # Events of memory alone: its size, negative where it was freed.
    changes = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        live += change.nbytes()
        peak = max(peak, live)
    return peak
