"""Activation memory: counted from shapes, measured while a function runs, and held by each block for training."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mmod.adapters import find_stack
from mmod.analysis.modes import in_mode


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
        result = self.compute(func, args, kwargs or {})
        for leaf in [result] if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._follow(leaf.untyped_storage())
        return result

    def compute(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the operation."""
        return func(*args, **kwargs)

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


def peak_bytes(function: Callable[[], Any], device: torch.device) -> int:
    """Return the most memory a function holds at once beyond what is held when it starts, its result included.

    Every allocation of torch's allocator counts, those inside custom ops too; scratch memory that a library (oneDNN,
    MKL, cuBLAS) takes on its own does not.

    Args:
        function: Called once.
        device: Where it runs: on a GPU the allocator keeps count, elsewhere the profiler does.

    Example:
        >>> x = torch.zeros(1024)
        >>> peak_bytes(lambda: (x + 1) * 2, torch.device("cpu")) // 1024
        8
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # The profiler's own log, read once, which would tell of its start and stop in the middle of a progress bar.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        function()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    changes = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        live += change.nbytes()
        peak = max(peak, live)
    return peak


class HeldBytes(NamedTuple):
    """Memory that one block of a model holds for the backward pass.

    Args:
        block: Bytes made inside it and still held when it returns, its output included.
        stream: Bytes of its output, the tokens that it hands on.
    """

    block: int
    stream: int


def held_by_blocks(model: nn.Module, images: Tensor) -> dict[str, HeldBytes]:
    """Run a training forward pass and return what each block holds for the backward pass, by module name.

    Args:
        model: A model of a supported library, dense or routed; left in evaluation or training as it was.
        images: Images (B, C, height, width).
    """
    stack, held = find_stack(model), {}
    memory = ActivationMemory([images, *model.parameters(), *model.buffers()])
    hooks = []
    for name, block in zip(stack.names, stack.blocks):
        entered: list[int] = []

        def enter(module: nn.Module, args: Any, entered: list[int] = entered) -> None:
            entered.append(memory.live)

        def leave(module: nn.Module, args: Any, out: Tensor, name: str = name, entered: list[int] = entered) -> None:
            held[name] = HeldBytes(memory.live - entered.pop(), out.untyped_storage().nbytes())

        hooks += [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]
    try:
        with in_mode(True, model), torch.enable_grad(), memory:
            output = model(images)
        del output
    finally:
        for hook in hooks:
            hook.remove()
    return held
