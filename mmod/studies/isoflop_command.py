"""The command of isoFLOP studies: `mmod isoflop CONFIG [--dry-run] [--key value]`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mmod.config.parse import parse_config
from mmod.studies.isoflop_config import IsoflopConfig

_DRY = "--dry-run"


def main(arguments: Sequence[str]) -> Iterator[Path]:
    """Run the study of a command line, print its table and yield its folder; `--dry-run` only describes it."""
    config = parse_config([word for word in arguments if word != _DRY], IsoflopConfig)
    # Imported late: help is answered without torch.
    from mmod.studies.isoflop import describe, run_study

    if _DRY in arguments:
        print(describe(config))
        return
    result = run_study(config)
    result.show(set())
    yield result.folder
