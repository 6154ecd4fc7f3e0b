"""Scripts of the repository, run in the process of the test."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

ROOT = Path(__file__).parents[2]


def run_script(script: str, *arguments: str) -> CompletedProcess[str]:
    """Run a script as if it had been started in the root of the repository, and return how it ended and what it said.

    Args:
        script: A file, or the name of a module after `-m `.
        arguments: What is said after its name.
    """
    out, err, code, before = io.StringIO(), io.StringIO(), 0, Path.cwd()
    run = runpy.run_module if script.startswith("-m ") else runpy.run_path
    name = script.removeprefix("-m ")
    with (
        mock.patch.object(sys, "argv", [name, *arguments]),
        mock.patch.object(sys, "path", sys.path.copy()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        os.chdir(ROOT)
        try:
            run(name, run_name="__main__")
        except SystemExit as end:
            if isinstance(end.code, str):
                print(end.code, file=sys.stderr)
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            os.chdir(before)
    return CompletedProcess([name, *arguments], code, out.getvalue(), err.getvalue())
