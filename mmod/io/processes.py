"""The processes that were started together: ranks, and values of all of them. Alone, a process is the first of one."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist

Value = TypeVar("Value")


def process_rank() -> int:
    """Return the number of this process, from 0."""
    if not dist.is_initialized():
        return 0
    return dist.get_rank()


def process_count() -> int:
    """Return the number of processes that train together."""
    if not dist.is_initialized():
        return 1
    return dist.get_world_size()


def gathered(value: Value) -> list[Value]:
    """Return the values of all processes by rank."""
    if not dist.is_initialized():
        return [value]
    # Any value of the right length: gathering overwrites them.
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
