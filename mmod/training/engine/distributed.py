"""One process or several: where this one stands, and sums over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mmod.data.corrupt import Fault

__all__ = ["Process", "choose_device", "merge_faults", "process_group", "sum_over_processes", "wait_for_all"]


@dataclass(frozen=True)
class Process:
    """This process among those that train together.

    Args:
        rank: Number of this process, from 0.
        world: Number of processes.
        device: The device of this process.
    """

    rank: int
    world: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0


def choose_device(device: str = "auto") -> torch.device:
    """Return the device that a config asks for.

    Args:
        device: "auto" for the GPU when there is one, otherwise a torch device.

    Raises:
        ValueError: If `device` is CUDA and no GPU is there, or is no device of torch.

    Example:
        >>> choose_device("cpu")
        device(type='cpu')
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device {device!r} was asked for and torch sees no GPU; use 'cpu' or 'auto'")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or another torch device, got {device!r}") from error


@contextmanager
def process_group(device: str = "auto") -> Iterator[Process]:
    """Join the processes that `torchrun` started, gloo on CPU and nccl on GPUs; alone without it.

    Args:
        device: "auto" for the GPU when there is one, otherwise a torch device.

    Yields:
        Where this process stands. A group made here is left at the end.

    Raises:
        ValueError: If `device` is CUDA and no GPU is there.
    """
    from timm.utils.distributed import init_distributed_device_so

    chosen = choose_device(device)
    if dist.is_initialized():
        if chosen == torch.device("cuda"):
            chosen = torch.device("cuda", dist.get_node_local_rank(0))
        yield Process(dist.get_rank(), dist.get_world_size(), chosen)
        return
    found = init_distributed_device_so(str(chosen))
    try:
        yield Process(found["global_rank"], found["world_size"], torch.device(found["device"]))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def merge_faults(faults: Iterable[Fault]) -> dict[Fault, None]:
    """Return the faults of all processes, each once: several meet the same one where all read the same files."""
    parts: list[Iterable[Fault]] = [list(faults)]
    if dist.is_initialized():
        parts = [[]] * dist.get_world_size()
        dist.all_gather_object(parts, list(faults))
    return dict.fromkeys(sorted(fault for part in parts for fault in part))


def sum_over_processes(values: Tensor) -> Tensor:
    """Return the elementwise sum over all processes; the values themselves when there is one process.

    Args:
        values: The same shape and dtype in each process.
    """
    if not dist.is_initialized():
        return values
    total = values.clone()
    dist.all_reduce(total)
    return total


def wait_for_all() -> None:
    """Let all processes reach this point."""
    if dist.is_initialized():
        dist.barrier()
