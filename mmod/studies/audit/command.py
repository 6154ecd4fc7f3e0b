"""The command that audits a trained model: `mmod audit CONFIG_OR_RUN [--key value]`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from mmod.io.files import read_text
from mmod.studies.audit.config import AUDITS
from mmod.training.engine.arguments import parse_run


def main(arguments: Sequence[str]) -> list[Path]:
    """Audit as the command line `CONFIG_OR_RUN [--kind KIND] [--key value]` says and print the results."""
    config = parse_run(arguments, AUDITS)
    from mmod.studies.audit.run import audit_run

    audit_run(config, command=shlex.join(["mmod", "audit", *arguments]))
    folder = Path(config.output) / "audit"
    print(f"{read_text(folder / 'audit.md')}\nTables and pictures: {folder}")
    return [Path(config.output)]
