"""The command that runs a study: `mmod tradeoff CONFIG [--key value]`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mmod.io.yaml import stack_configs
from mmod.studies.config import (
    ChatStudyConfig,
    FeaturesStudyConfig,
    ImageStudyConfig,
    PairsStudyConfig,
    SegmentationStudyConfig,
    StudyConfig,
)
from mmod.training.engine.parse import parse_config
from mmod.values import one_of

__all__ = ["main"]


class _Kind(NamedTuple):
    config: type[StudyConfig]
    module: str
    study: str


_KINDS = {
    "image": _Kind(ImageStudyConfig, "image", "ImageStudy"),
    "features": _Kind(FeaturesStudyConfig, "features", "FeaturesStudy"),
    "segmentation": _Kind(SegmentationStudyConfig, "segmentation", "SegmentationStudy"),
    "pairs": _Kind(PairsStudyConfig, "pairs", "PairsStudy"),
    "chat": _Kind(ChatStudyConfig, "chat", "ChatStudy"),
}


def main(arguments: Sequence[str]) -> Path:
    """Run the study that a command line names, print its table and say where the pictures are.

    Args:
        arguments: The command line without the program's name: a config file, then options.

    Returns:
        The study's folder.

    Raises:
        SystemExit: The command line asks for help or does not fit.
        ValueError: The config file names a kind of study that there is not.
    """
    name = (stack_configs(arguments)[0] or {}).get("kind", "image")
    one_of("kind", name, list(_KINDS))
    kind = _KINDS[name]
    config = parse_config(arguments, kind.config)
    # A command line that asks for help only is answered without torch.
    module = importlib.import_module(f"mmod.studies.{kind.module}")
    result = getattr(module, kind.study)(config).run()
    used = sum(os.times()[:4])
    print(f"\n{result.table}\n\nTable and pictures: {result.folder}\nCPU time of all processes: {used:.0f} seconds")
    return Path(result.folder)
