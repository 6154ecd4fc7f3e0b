"""The command that runs an isoFLOP study: `mmod isoflop CONFIG [--dry-run] [--key value]`."""

from __future__ import annotations

from collections.abc import Sequence

from mmod.studies.isoflop.config import IsoflopConfig
from mmod.training.engine.parse import parse_config

__all__ = ["main"]

_DRY = "--dry-run"


def main(arguments: Sequence[str]) -> None:
    """Run the study that a command line names, and print its table.

    With `--dry-run` print what it would do, and train nothing.
    """
    config = parse_config([word for word in arguments if word != _DRY], IsoflopConfig)
    # A command line that asks for help only is answered without torch.
    from mmod.studies.isoflop.study import describe, run_study

    if _DRY in arguments:
        print(describe(config))
        return
    result = run_study(config)
    print(f"\n{result.table}\n\nTable and picture: {result.folder}\nCPU time: {result.cpu_seconds:.0f} seconds")
