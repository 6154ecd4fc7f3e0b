"""Processes for tests, forked from a server that has imported what the tests import: none of them waits for imports."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch.distributed import TCPStore

FORK = multiprocessing.get_context("fork")
# In place of `multiprocessing` in a module that starts its processes anew.
FORKING = SimpleNamespace(
    get_context=lambda _: FORK, active_children=FORK.active_children, parent_process=FORK.parent_process
)
_server: Connection | None = None


def start_server() -> None:
    """Fork the server, after the tests are imported and before any of them runs: autograd does not survive a fork."""
    global _server
    os.register_at_fork(after_in_child=_forget_capture)
    _server, there = FORK.Pipe()
    FORK.Process(target=_serve, args=(_server, there)).start()
    there.close()
    # Before multiprocessing waits for the server.
    atexit.register(_server.close)


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
    assert _server is not None
    ranks: list[dict[str, Any]] = [{}]
    if world > 1:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        group = {"MASTER_ADDR": store.host, "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
        group |= {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        ranks = [{**group, "RANK": rank, "LOCAL_RANK": rank} for rank in range(world)]
    _server.send((Path.cwd(), [(environment, log, task, args) for environment in ranks]))
    running = _server.recv()
    try:
        ended: list[int | None] = _server.recv()
    except BaseException:
        # A test that takes too long leaves none behind.
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        _server.recv()
        raise
    return ended


def _forget_capture() -> None:
    """Write to the files of the process, which it may redirect, and not to what pytest put in their place."""
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__


def _serve(parent: Connection, tests: Connection) -> None:
    parent.close()
    while True:
        try:
            place, calls = tests.recv()
        except EOFError:
            return
        os.chdir(place)
        processes = [FORK.Process(target=_enter, args=call) for call in calls]
        for process in processes:
            process.start()
        tests.send([process.pid for process in processes])
        for process in processes:
            process.join()
        tests.send([process.exitcode for process in processes])


def _enter(environment: dict[str, Any], log: Path | None, task: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update({name: str(value) for name, value in environment.items()})
    if log is not None:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    task(*args)
