"""Programs that a suite runs beside its benchmarks, such as tests and checks of the machine."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from mmod.io.tables import Column
from tools.benchmarks.report import Options, Row, Runs, UnavailableError

COLUMNS: dict[str, Column] = {"result": ("result", "")}


@dataclass(frozen=True, kw_only=True)
class ProgramConfig(Options):
    """A program whose result is the last paragraph of its output; one that ends with an error fails.

    Args:
        command: The program and its arguments. "python" is the running interpreter, and "{folder}" in an argument a
            temporary folder.
        environment: Further environment variables.
        needs: Files without which the program is skipped, relative to the working directory; it is skipped too where it
            is not installed.
    """

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    needs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.command:
            raise ValueError("command must name a program")

    def runs(self) -> Runs:
        """Return the only run; raise an UnavailableError where the program or a file is missing."""
        missing = [name for name in self.needs if not Path(name).exists()]
        if shutil.which(self._words("")[0]) is None:
            missing.append(self.command[0])
        if missing:
            raise UnavailableError(f"{', '.join(missing)} is not here")
        return Runs(" ".join(self.command), COLUMNS, {"program": functools.partial(_run, self)})

    def _words(self, folder: str) -> list[str]:
        words = [sys.executable if word == "python" else word for word in self.command]
        return [word.replace("{folder}", folder) for word in words]


def _run(config: ProgramConfig) -> list[Row]:
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            config._words(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **config.environment},
        )
        assert process.stdout is not None
        for line in process.stdout:
            # To the log of the part, as it comes.
            print(line, end="", flush=True)
            lines.append(line.rstrip())
        code = process.wait()
    result = "\n".join(lines).strip().split("\n\n")[-1].splitlines()
    if code:
        raise RuntimeError(f"{config.command[0]} ended with exit code {code}: {' | '.join(result[-5:])}")
    return [{"result": line} for line in result]
