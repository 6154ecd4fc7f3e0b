"""The command of studies that compare models: `mmod tradeoff CONFIG [--key value]`.

The line becomes the config of a kind of study, of which `run_study` makes a comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from mmod.config.parse import parse_config
from mmod.studies.config import StudyConfig
from mmod.studies.kind_configs import CONFIGS


def main(arguments: Sequence[str]) -> Iterator[Path]:
    """Run the study of a command line and those that follow it; print the table of each and yield its folder."""
    # A dense model that is not there is refused before the routings are checked, which imports torch.
    config: StudyConfig | None = parse_config(arguments, CONFIGS, check=lambda kind, fields: kind.check_dense(fields))
    # Imported late: help is answered without torch.
    from mmod.studies.study import run_study

    said: set[str] = set()
    while config is not None:
        result = run_study(config)
        result.show(said)
        yield result.folder
        config = config.following()
