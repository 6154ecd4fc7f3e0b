"""The folder of a training run, as far as opening its model needs it. Imported without torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from mmod.data.labels import CLASSES, read_classes

RUN_CONFIG = "config.yaml"
"""The config in a run folder."""
FINAL_MODEL = "model"
"""Folder of the final model in a run folder."""
LAST_WEIGHTS = "last"
"""Folder of the last weights where the final model is their moving average."""
CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a run folder."""
# Each of these files describes a model, and stands in one folder with its weights.
_DESCRIPTIONS = ("config.json", "mmod.json", "open_clip_config.json")


def find_run(path: str | Path) -> Path | None:
    """Return the folder of a run for itself, for its `model`, `last` or checkpoints, and for a file in these.

    None for any other path, such as the config in a run folder.
    """
    path = Path(path)
    if not path.exists():
        return None
    # The deepest is a file in a checkpoint: checkpoints/step-000000002-epoch-00001/ema.safetensors.
    for folder in (path, *list(path.parents)[:3]):
        if (folder / RUN_CONFIG).is_file():
            # Other files in a run folder, such as a user's own weights, are not the run's.
            below = path.relative_to(folder).parts[:1]
            known = not below or below[0] in (FINAL_MODEL, LAST_WEIGHTS, CHECKPOINTS)
            return folder if known else None
    return None


def model_folder(path: str | Path) -> Path | None:
    """Return the folder that describes the model a path stands for; None if there is none.

    A run folder stands for its final model, or its newest checkpoint by transformers' trainer, and a file for the model
    in its folder.
    """
    path = Path(path)
    folders = [path if path.is_dir() else path.parent]
    if find_run(path) == path:
        # Trainers of transformers number their checkpoints, and an unfinished run opens by the last.
        folders = [path / FINAL_MODEL, *newest_first((path / CHECKPOINTS).glob("checkpoint-*"))]
    return next((folder for folder in folders if is_described(folder)), None) if path.exists() else None


def is_described(folder: str | Path) -> bool:
    """Return whether a folder holds the description of a model that a host library or mmod saved."""
    return any((Path(folder) / name).is_file() for name in _DESCRIPTIONS)


def newest_first(checkpoints: Iterable[Path]) -> list[Path]:
    """Return paths by the numbers in their names, the largest first."""
    return sorted(checkpoints, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)], reverse=True)


def run_classes(checkpoint: str | Path | None) -> dict[str, int] | None:
    """Return the numbers of the classes of a run by name; None unless the path is in a run folder that names them."""
    run = None if checkpoint is None else find_run(checkpoint)
    if run is None or not (run / CLASSES).is_file():
        return None
    return read_classes(run / CLASSES)
