"""The processes that train together: their ranks and devices, and sums over all of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mmod.data.corrupt import Fault


@dataclass(frozen=True)
class Process:
    """This process among those that train together.

    Args:
        rank: Its number, from 0.
        world: Number of processes.
    """

    rank: int
    world: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0


def choose_device(device: str = "auto") -> torch.device:
    """Return the device of a config: "auto" is the GPU if there is one.

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
    """Join the processes that `torchrun` started, with gloo on CPUs and nccl on GPUs; a single process without it.

    Yields:
        This process. A group that is created here is left at the end.
    """
    from timm.utils.distributed import init_distributed_device_so

    chosen = choose_device(device)
    if dist.is_initialized():
        if chosen == torch.device("cuda"):
            chosen = torch.device("cuda", dist.get_node_local_rank(0))
        yield Process(dist.get_rank(), dist.get_world_size(), chosen)
        return
    joined = init_distributed_device_so(str(chosen))
    try:
        yield Process(joined["global_rank"], joined["world_size"], torch.device(joined["device"]))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def merge_faults(faults: Iterable[Fault]) -> dict[Fault, None]:
    """Return the faults of all processes without duplicates: processes that read the same files meet the same ones."""
    parts: list[Iterable[Fault]] = [list(faults)]
    if dist.is_initialized():
        parts = [[]] * dist.get_world_size()
        dist.all_gather_object(parts, list(faults))
    return dict.fromkeys(sorted(fault for part in parts for fault in part))


def sum_over_processes(values: Tensor) -> Tensor:
    """Return the elementwise sum over all processes, whose tensors have the same shape and dtype."""
    if not dist.is_initialized():
        return values
    total = values.clone()
    dist.all_reduce(total)
    return total


def wait_for_all() -> None:
    """Wait until all processes reach this point."""
    if dist.is_initialized():
        dist.barrier()


def check_agreement(path: Path | None) -> None:
    """Raise a ValueError unless all processes would resume from the same checkpoint."""
    if dist.is_initialized():
        paths: list[Path | None] = [None] * dist.get_world_size()
        dist.all_gather_object(paths, path)
        if len(set(paths)) > 1:
            raise ValueError(f"the processes would go on from different checkpoints: {', '.join(map(str, paths))}")
