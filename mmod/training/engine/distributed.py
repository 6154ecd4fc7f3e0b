"""The processes that train together: their ranks and devices, sums over all of them, and signals that end all."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mmod.data.corrupt import CorruptReport
from mmod.io.environment import choose_device
from mmod.io.processes import gathered
from mmod.io.refusals import LostProcessError
from mmod.io.stop import Stop, exit_after, signal_name


@dataclass(frozen=True)
class Process:
    """This process among those that train together."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0


def is_first_process() -> bool:
    """Return whether this process is the first, or the only one, that `torchrun` or Slurm started."""
    from timm.utils.distributed import world_info_from_env

    return world_info_from_env()[1] == 0


def check_launch() -> None:
    """Raise a ValueError if the variables of a launcher are no numbers, or name several processes without an address.

    A scheduler, or an earlier command of a shell, may leave some of them.
    """
    given = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in os.environ}
    if given.get("LOCAL_RANK") == "-1" and given.get("WORLD_SIZE", "1") == "1":
        # A common value for a process alone, which does not need it.
        del given["LOCAL_RANK"]
    told = ", ".join(f"{name}={value}" for name, value in given.items())
    fault = ""
    if not all(value.isdecimal() for value in given.values()):
        fault = "must be numbers"
    elif int(given.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized() and "MASTER_ADDR" not in os.environ:
        fault = "name several processes, and MASTER_ADDR is not set, by which they meet"
    if fault:
        raise ValueError(f"the environment variables {told} {fault}: start by torchrun, or unset them to train alone")


@contextmanager
def process_group(device: str = "auto", *, grouped: bool = False, timeout: float | None = None) -> Iterator[Process]:
    """Join the processes that `torchrun` or Slurm started, with gloo on CPUs and nccl on GPUs; one process without.

    The context gives this process, and leaves the group at the end if it created it.

    Args:
        grouped: A single process makes a group too.
        timeout: Seconds to wait for another process; None for torch's limit.

    Raises:
        LostProcessError: Another process has ended, or has not answered in time.
    """
    from timm.utils.distributed import world_info_from_env

    check_launch()
    chosen = choose_device(device)
    # timm reads the variables of torchrun, Slurm and MPI alike.
    local, rank, world = world_info_from_env()
    joined = dist.is_initialized()
    if joined:
        local = dist.get_node_local_rank(0)
        rank = dist.get_rank()
        world = dist.get_world_size()
    if (joined or world > 1) and chosen.type != "cpu":
        chosen = torch.device(chosen.type, local)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if not joined and (world > 1 or grouped):
        limit = None if timeout is None else timedelta(seconds=timeout)
        backend = dist.get_default_backend_for_device(chosen)
        store = None
        if world == 1:
            # FSDP needs a group even for one process; a store in memory needs no address and no port.
            store = dist.HashStore()
        dist.init_process_group(backend, rank=rank, world_size=world, timeout=limit, store=store)
    try:
        with _released_by_errors():
            yield Process(rank, world, chosen)
    except RuntimeError as error:
        # The errors with which communication ends.
        if not isinstance(error, dist.DistError) and not re.search("gloo|NCCL", str(error)):
            raise
        reason = str(error).splitlines()[0]
        raise LostProcessError(
            f"another process of the run ended or did not answer in time ({reason}); its own error says why. The same "
            "command goes on from the last checkpoint"
        ) from error
    finally:
        # A group that the caller made is the caller's to end.
        if not joined and dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _released_by_errors() -> Iterator[None]:
    """Context whose errors hold no DistributedDataParallel of a process group.

    Their frames would be the last to hold the group. When they are freed, which happens with Python's lock, the group
    waits for its threads, and one of these may wait for the lock.
    """
    try:
        yield
    except BaseException as error:
        if dist.is_initialized():
            traceback.clear_frames(error.__traceback__)
        raise


def faults_of_all(report: CorruptReport) -> CorruptReport:
    """Return the faults that all processes met; collective over processes."""
    faults = chain.from_iterable(gathered(list(report.faults)))
    # Without duplicates: processes that read the same files meet the same faults.
    return CorruptReport(report.on_corrupt, dict.fromkeys(sorted(set(faults))))


def sum_over_processes(values: Tensor) -> Tensor:
    """Return the elementwise sum over all processes, whose tensors have the same shape and dtype."""
    if not dist.is_initialized():
        return values
    # A clone, because `all_reduce` writes in place and callers add to their sums later.
    total = values.clone()
    dist.all_reduce(total)
    return total


def wait_for_all() -> None:
    """Wait until all processes reach this point."""
    if dist.is_initialized():
        dist.barrier()


class StopRequest(Stop):
    """The first stop signal in any of the processes that train together."""

    def __init__(self) -> None:
        super().__init__()
        self._agreed = 0
        # A separate group, so that no step waits for a GPU.
        self._group: object = None
        if dist.is_initialized():
            self._group = dist.new_group(backend="gloo")

    def agreed(self) -> bool:
        """Return whether any process got a signal to stop; collective over processes."""
        # A snapshot: a signal that arrives after this must not make one process leave alone.
        self._agreed = self.number
        # Versions of torch differ in what they say a new group is.
        if isinstance(self._group, dist.ProcessGroup):
            number = torch.tensor(self.number)
            dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._group)
            self._agreed = int(number)
        return self._agreed > 0

    def leave(self, folder: str | Path, step: int, *, loud: bool) -> None:
        """Exit with code 128 + signal after `step` saved steps; print a message if `loud`."""
        line = ""
        if loud:
            name = signal_name(self._agreed)
            line = f"{folder}: {name} after step {step}, which is saved; the same command goes on"
        exit_after(self._agreed, line)
