"""The command that runs a study: `mmod tradeoff CONFIG [--key value]`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
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


def main(arguments: Sequence[str]) -> Iterator[Path]:
    """Run the study that a command line names and those that follow it; print the table of each.

    Args:
        arguments: The command line without the program's name: a config file, then options.

    Yields:
        The folder of each study, as soon as it is done.

    Raises:
        SystemExit: The command line asks for help or does not fit.
        ValueError: The config file names a kind of study that there is not.
    """
    name = (stack_configs(arguments)[0] or {}).get("kind", "image")
    one_of("kind", name, list(_KINDS))
    kind = _KINDS[name]
    config: StudyConfig | None = parse_config(arguments, kind.config)
    # A command line that asks for help only is answered without torch.
    module = importlib.import_module(f"mmod.studies.{kind.module}")
    while config is not None:
        result = getattr(module, kind.study)(config).run()
        used = sum(os.times()[:4])
        print(f"\n{result.summary}\nTable and pictures: {result.folder}, after {used:.0f} CPU seconds")
        yield Path(result.folder)
        config = config.following
