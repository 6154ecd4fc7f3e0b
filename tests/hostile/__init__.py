"""Hostile input of every kind, read in a process of its own that may not hang, write elsewhere or start anything."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from mmod.data.corrupt import CorruptReport

Documented = Literal["refused", "counted", "read"]
"""An error of one line; or that, which advises to skip, and with it one count; or no error."""
SECONDS, MEBIBYTES = 20.0, 2048.0
"""Limits of a case."""
_MOST_LETTERS = 1500
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Events of `sys.addaudithook`: position of the path that changes, or None for what no input may cause.
_CHANGES = {
    **dict.fromkeys(("os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "os.utime", "shutil.rmtree"), 0),
    **dict.fromkeys(("os.rename", "os.link", "os.symlink", "shutil.copyfile", "shutil.move"), 1),
    **dict.fromkeys(("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect"), None),
}


class Case(NamedTuple):
    """One hostile input.

    Attributes:
        group: The format.
        name: What is wrong with it.
        documented: The outcome.
        read: Writes the input into the current folder and reads it, with `on_corrupt` as its argument. For "counted",
            returns the number of sound samples and the report.
        says: What the message and the fault that is counted say, as a regular expression.
        sound: Number of sound samples; of other documented outcomes, only where it is returned.
    """

    group: str
    name: str
    documented: Documented
    read: Callable[[Any], Any]
    says: str = ""
    sound: int = 1


class Outcome(NamedTuple):
    """What happened; `fault` is empty if it is as documented."""

    case: Case
    fault: str
    message: str
    seconds: float
    mebibytes: float


def run(case: Case) -> Outcome:
    """Run a case in a new process."""
    start = time.monotonic()
    # Forked, so that a case takes milliseconds; the parent has imported everything.
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as outside:
        folder = Path(outside, "run")
        folder.mkdir()
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(case, folder, there))
        process.start()
        there.close()
        try:
            fault, message, peak = here.recv() if here.poll(SECONDS) else (f"no end within {SECONDS:g} s", "", 0.0)
        except EOFError:
            fault, message, peak = "the process died", "", 0.0
        process.kill()
        process.join()
        here.close()
        if (folder / "executed").exists() or (folder / "ran").exists():
            fault = "code in the input was run"
        elif [path.name for path in Path(outside).iterdir()] != ["run"]:
            fault = "a file was written outside the folder"
    return Outcome(case, fault or _excess(peak), message, time.monotonic() - start, peak)


def _excess(peak: float) -> str:
    return f"{peak:.0f} MiB of memory" if peak > MEBIBYTES else ""


def _child(case: Case, folder: Path, answer: Connection) -> None:
    os.chdir(folder)
    sys.dont_write_bytecode = True
    # Libraries may write temporary files.
    tempfile.tempdir = str(folder)
    # The threads of the parent do not exist here.
    torch.set_num_threads(1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    deeds: list[str] = []
    sys.addaudithook(lambda event, arguments: _watch(event, arguments, str(folder), deeds))
    fault, message = evaluate(case)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    answer.send((fault or "; ".join(deeds[:3]), message, peak))


def _watch(event: str, arguments: tuple[Any, ...], folder: str, deeds: list[str]) -> None:
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, int) or not isinstance(flags, int) or not flags & _WRITES:
            return
    elif event in _CHANGES:
        place = _CHANGES[event]
        if place is None:
            deeds.append(f"{event} {arguments[:2]}")
            return
        path = arguments[place]
    else:
        return
    full = os.path.abspath(os.fsdecode(path))
    if full != os.devnull and os.path.commonpath([full, folder]) != folder:
        deeds.append(f"{event} {full}")


def evaluate(case: Case) -> tuple[str, str]:
    """Run a case in the current folder, and return what differs from the documented outcome, and the message."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as written:
        try:
            return _outcome(case, written)
        except BaseException:
            return f"unexpected: {traceback.format_exc(limit=-3)}", ""


def _outcome(case: Case, written: io.StringIO) -> tuple[str, str]:
    try:
        result = case.read("raise")
    except (ValueError, TypeError, OSError, FloatingPointError, SystemExit) as error:
        message = written.getvalue().strip() if isinstance(error, SystemExit) else str(error)
        if case.documented == "read":
            return f"refused: {message[:300]}", message
        fault = _fault_of(message, case)
        return fault or (_fault_of_count(case) if case.documented == "counted" else ""), message
    is_read = case.documented == "read" and (not isinstance(result, tuple) or result[0] == case.sound)
    return ("" if is_read else f"not as documented, but read as {str(result)[:200]!r}"), ""


def _fault_of_count(case: Case) -> str:
    for path in Path().iterdir():
        if path.is_file() or path.is_symlink():
            path.unlink()
    sound, report = case.read("skip")
    assert isinstance(report, CorruptReport)
    text = "".join(map(str, report.faults))
    if sound != case.sound or len(report.faults) != 1 or len(text) > _MOST_LETTERS or not re.search(case.says, text):
        return f"{sound} sound samples and {len(report.faults)} faults: {text[:300]}"
    return ""


def _fault_of(message: str, case: Case) -> str:
    if "\n" in message:
        return f"a message of several lines: {message[:300]!r}"
    if not message or len(message) > _MOST_LETTERS:
        return f"a message of {len(message)} letters: {message[:300]!r}"
    if not re.search(case.says, message):
        return f"the message does not say {case.says}: {message[:300]!r}"
    if case.documented == "counted" and not re.search("on_corrupt(=|: )'?skip", message):
        return f"the message does not say how to go on: {message[:300]!r}"
    return ""
