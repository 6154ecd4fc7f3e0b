"""Processes for tests, forked from one that has imported what they train with: none of them waits for imports."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload([f"mmod.training.{kind}.recipe" for kind in ("chat", "image", "pairs")])


def run_processes(task: Callable[..., Any], *args: Any, world: int = 1, log: Path | None = None) -> list[int | None]:
    """Call `task(*args)` in processes of their own, which find each other as those of `torchrun` do.

    Args:
        task: A function of a module.
        args: Its arguments, the same in every process.
        world: Number of processes.
        log: File to which what they write to standard error is appended.

    Returns:
        The exit code of each process, negative for the signal that killed it.
    """
    ranks: list[dict[str, Any]] = [{}]
    if world > 1:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        group = {"MASTER_ADDR": store.host, "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
        group |= {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        ranks = [{**group, "RANK": rank, "LOCAL_RANK": rank} for rank in range(world)]
    processes = [FORKSERVER.Process(target=_enter, args=(own, log, task, args)) for own in ranks]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join()
    finally:
        # A test that takes too long leaves none behind.
        for process in processes:
            process.kill()
    return [process.exitcode for process in processes]


def _enter(environment: dict[str, Any], log: Path | None, task: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    if log is not None:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    task(*args)
