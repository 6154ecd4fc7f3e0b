"""What commands say besides results: one line for a refusal and a warning, and the exit codes that shells expect."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from mmod.io.builds import explain_unloaded
from mmod.lazy import name_missing_extra
from mmod.names import near_names

_PACKAGE = Path(__file__).parents[1]
_REFUSALS = (ValueError, TypeError, RuntimeError, OSError, ArithmeticError, ModuleNotFoundError)
# What the user gave is wrong: a value, a file or its name. Anything else may be right elsewhere or another time.
_WRONG = (ValueError, TypeError, FileExistsError, FileNotFoundError, NotADirectoryError, IsADirectoryError)

# EX_TEMPFAIL of sysexits.h: the same command may succeed.
_LOST = 75
# 128 + SIGPIPE, as of other programs whose output goes to `head`.
_READER_LEFT = 141


class OneLineParser(argparse.ArgumentParser):
    """Refuses a wrong command line in one line, which names similar options, without its usage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """End the program with code 2."""
        near = ""
        unknown = re.match(r"unrecognized arguments: (--[^\s=]+)", message)
        if unknown is not None:
            near = near_names(unknown[1], self._option_string_actions)
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        if choice is not None:
            near = near_names(choice[1], re.findall(r"[^\s',]+", choice[2]))
        line = "; ".join(filter(None, [message, near, f"`{self.prog} --help all` lists the options"]))
        self.exit(2, f"error: {line}\n")


class LostProcessError(RuntimeError):
    """Another process of the run has ended, or has not answered in time."""


@contextmanager
def one_line_errors(*folders: Path) -> Iterator[None]:
    """Context that ends the program with one line if mmod refuses something; other errors keep their traceback.

    `one_line_exit` has the exit code.

    Args:
        folders: Further code whose refusals are one line.

    Example:
        >>> from mmod.config import RoutingConfig
        >>> with one_line_errors():
        ...     RoutingConfig(capacity=2)
        Traceback (most recent call last):
        SystemExit: error: capacity must be a number in [0, 1] or several values, each a number in [0, 1], got 2
    """
    try:
        with name_missing_extra():
            yield
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from what was kept", file=sys.stderr)
        # As shells report a program that SIGINT ended.
        sys.exit(130)
    except LostProcessError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(_LOST)
    except _REFUSALS as error:
        mixed = explain_unloaded(error)
        if mixed:
            raise one_line_exit(RuntimeError(mixed)) from error
        if not _is_refusal(error, (_PACKAGE, *folders)):
            raise
        if isinstance(error, BrokenPipeError):
            # Python writes what is left when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(_READER_LEFT)
        raise one_line_exit(error) from error


def one_line_exit(error: BaseException) -> SystemExit:
    """Print an error in one line and return the exit with its code: 2 if what the user gave is wrong, else 1."""
    end = SystemExit(f"error: {error}")
    # Python prints a message only of an exit that has no code of its own.
    print(end, file=sys.stderr)
    end.code = 2 if isinstance(error, _WRONG) else 1
    return end


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Context in which a warning is one line without the place in the code that raised it, and is shown once."""
    shown: set[str] = set()

    def line_of(message: Warning | str, *_: object, **__: object) -> str:
        text = f"warning: {message}\n"
        if text in shown:
            return ""
        shown.add(text)
        return text

    formatted = warnings.formatwarning
    warnings.formatwarning = line_of
    try:
        yield
    finally:
        warnings.formatwarning = formatted


def _is_refusal(error: BaseException, folders: Sequence[Path]) -> bool:
    """Return whether code in the folders raised an error, or the system named its file."""
    if isinstance(error, OSError) and error.filename is not None:
        return True
    cause = error.__cause__
    if type(cause).__name__ == "_RemoteTraceback" or " in DataLoader worker process " in str(cause):
        # Raised in a worker process, whose traceback comes as text.
        raised = re.findall(r'^  File "(.+)", line \d+, in ', str(cause), flags=re.MULTILINE)[-1]
    else:
        raised = traceback.extract_tb(error.__traceback__)[-1].filename
    # The innermost frame decides: an error from inside torch or timm is no refusal of ours, and keeps its traceback.
    return any(folder in Path(raised).parents for folder in folders)
