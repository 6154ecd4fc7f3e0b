"""The command that runs an isoFLOP study: `mmod isoflop CONFIG [--dry-run] [--key value]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmod.studies.isoflop.config import IsoflopConfig
from mmod.training.engine.parse import parse_config

_DRY = "--dry-run"


def main(arguments: Sequence[str]) -> list[Path]:
    """Run the study that a command line names, print its table and return its folder; `--dry-run` only describes it."""
    config = parse_config([word for word in arguments if word != _DRY], IsoflopConfig)
    # Imported late: a command line that only asks for help is answered without torch.
    from mmod.studies.isoflop.study import describe, run_study

    if _DRY in arguments:
        print(describe(config))
        return []
    result = run_study(config)
    print(f"\n{result.table}\n\nTable and picture: {result.folder}\nCPU time: {result.cpu_seconds:.0f} seconds")
    return [result.folder]
