"""The commands that run studies: `mmod tradeoff CONFIG` and `mmod isoflop CONFIG [--dry-run]`, with `[--key value]`.

The line becomes the config of a kind of study, from which `run_study` makes the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmod.config.parse import parse_config
from mmod.studies.chat_config import ChatStudyConfig
from mmod.studies.config import ImageStudyConfig, StudyConfig
from mmod.studies.features_config import FeaturesStudyConfig
from mmod.studies.isoflop_config import IsoflopConfig
from mmod.studies.pairs_config import PairsStudyConfig

if TYPE_CHECKING:
    from mmod.studies.report import StudyResult

ISOFLOP = "isoflop"
_DRY = "--dry-run"
CONFIGS: dict[str, type[StudyConfig]] = {
    "image": ImageStudyConfig,
    "features": FeaturesStudyConfig,
    "pairs": PairsStudyConfig,
    "chat": ChatStudyConfig,
}
"""Configs of studies by kind, imported without torch, so that `--help` is fast; `study_kind` has the rest of a kind.

The first kind is that of a config that names none.
"""


def main(arguments: Sequence[str], command: str = "") -> Iterator[Path]:
    """Run the study of a command line and those that follow it; print the table of each and yield its folder.

    `--dry-run` only describes a study of the command "isoflop".
    """
    if command == ISOFLOP:
        yield from _isoflop(arguments)
        return
    # A dense model that is not there is refused before the routings are checked, which imports torch.
    config: StudyConfig | None = parse_config(arguments, CONFIGS, check=lambda kind, fields: kind.check_dense(fields))
    # Imported late: help is answered without torch.
    from mmod.studies.study import run_study

    said: set[str] = set()
    while config is not None:
        yield _shown(run_study(config), said)
        config = config.following()


def _isoflop(arguments: Sequence[str]) -> Iterator[Path]:
    config = parse_config([word for word in arguments if word != _DRY], IsoflopConfig)
    from mmod.studies.isoflop import describe, run_study

    if _DRY in arguments:
        print(describe(config))
        return
    yield _shown(run_study(config), set())


def _shown(result: StudyResult, said: set[str]) -> Path:
    """Print the outcome of a study and return its folder.

    Args:
        said: The sentences on images that studies before it have printed. Verdicts are printed, however alike.
    """
    parts = [part for part in result.printed if part not in said]
    said.update(part for part in result.printed if part.startswith("Images: "))
    # A log of several studies is read faster without blank lines and fences of code, which the page in the folder has.
    lines = [line for line in "\n".join(parts).splitlines() if line and not line.startswith("```")]
    print("", *lines, sep="\n")
    return result.folder
