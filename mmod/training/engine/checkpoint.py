"""Checkpoints that are either whole or not there, and the reading of weights from files others wrote."""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from mmod.io.files import DamagedFileError, replacing
from mmod.io.tensors import read_tensors, write_tensors
from mmod.values import one_of

__all__ = [
    "Checkpoint",
    "find_weights",
    "list_checkpoints",
    "load_checkpoint",
    "read_newest",
    "read_weights",
    "remove_checkpoints",
    "save_checkpoint",
    "set_aside",
]

Content = TypeVar("Content")

# What a checkpoint is called; with a prefix or ending, one that was never finished or was found damaged.
_NAME = re.compile(r"(?:\.|partial-|damaged-)?step-(\d{9,})-epoch-(\d{5,})(?:\.partial)?")
_KEPT = 2
_WEIGHTS = "model.safetensors"
# What open_clip calls the weights in a folder of its own.
_CLIP_WEIGHTS = "open_clip_model.safetensors"
_AVERAGE = "ema.safetensors"
_TRAINING = "training.pt"
# Weights that come with the package.
_SHIPPED, _SHIPPED_FOLDER = "mmod:", Path(__file__).parents[2] / "data" / "weights"


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on as if it had never stopped.

    Args:
        weights: The model's state dict.
        average: The moving average's state dict; None when there is none.
        training: Optimiser, loss scaler, position and metrics so far, of plain values and tensors.
    """

    weights: dict[str, Tensor]
    average: dict[str, Tensor] | None
    training: dict[str, Any]


def save_checkpoint(folder: Path, epoch: int, step: int, checkpoint: Checkpoint, metadata: Mapping[str, Any]) -> Path:
    """Write a checkpoint beside the earlier ones, then remove all but the newest two.

    It is written under a temporary name and renamed when it is on disk, so a process killed at any
    moment leaves the earlier checkpoint whole.

    Args:
        folder: Where the checkpoints of the run lie.
        epoch: Epochs finished, their evaluation included.
        step: Optimiser steps done.
        checkpoint: What to write.
        metadata: Written as JSON into the header of the weight files, such as the routing config.

    Returns:
        The checkpoint's folder. One that is there already stays as it is: position decides content.

    Raises:
        UnwrittenError: If the disk is full; the message names the checkpoint that is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"step-{step:09d}-epoch-{epoch:05d}"
    if target.exists():
        return target
    header = {key: json.dumps(value) for key, value in metadata.items()}
    with replacing(target, kept=next(iter(list_checkpoints(folder)), None)) as partial:
        partial.mkdir()
        write_tensors(partial / _WEIGHTS, checkpoint.weights, header)
        if checkpoint.average is not None:
            write_tensors(partial / _AVERAGE, checkpoint.average, header)
        torch.save(checkpoint.training, partial / _TRAINING)
    unfinished = [path for path in _own(folder) if "partial" in path.name]
    for path in (*list_checkpoints(folder)[_KEPT:], *unfinished):
        shutil.rmtree(path)
    return target


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the whole checkpoints in a folder, the newest first.

    Args:
        folder: Where the checkpoints of the run lie. What else lies there is passed over.
    """
    return sorted((path for path in _own(folder) if path.name.startswith("step-")), key=_place, reverse=True)


def remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints in a folder, and the folder when nothing else is in it."""
    for path in _own(folder):
        shutil.rmtree(path)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def set_aside(folder: Path, chosen: Path) -> None:
    """Rename the checkpoints that are newer than the one a run goes on from, so that it can write them again."""
    for path in list_checkpoints(folder):
        if path == chosen:
            break
        aside = folder / f"damaged-{path.name}"
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(path, aside)


def load_checkpoint(path: Path, *, averaged: bool = False) -> Checkpoint:
    """Read a checkpoint that `save_checkpoint` wrote, onto the CPU.

    Args:
        path: Its folder.
        averaged: Whether it must hold a moving average.

    Raises:
        DamagedFileError: If a part is missing or cannot be read.
    """
    average = path / _AVERAGE
    training = _load_pickle(path / _TRAINING)
    if not isinstance(training, dict):
        raise DamagedFileError(f"{str(path / _TRAINING)!r} holds no state of a training run")
    return Checkpoint(
        weights=read_tensors(path / _WEIGHTS)[0],
        average=read_tensors(average)[0] if averaged or average.exists() else None,
        training=training,
    )


def read_newest(paths: Iterable[Path], read: Callable[[Path], Content]) -> tuple[Path, Content] | None:
    """Read the newest checkpoint that can be read, and warn of those that cannot.

    Args:
        paths: The checkpoints of a run, the newest first.
        read: From a checkpoint's path to its content; raises a `DamagedFileError` when it cannot.

    Returns:
        Its path and its content; None when there is no checkpoint.

    Raises:
        DamagedFileError: If there are checkpoints and none can be read.
    """
    faults: list[str] = []
    for path in paths:
        try:
            found = read(path)
        except DamagedFileError as error:
            faults.append(str(error))
            continue
        if faults:
            warnings.warn(f"going on from {str(path)!r}, because {'; '.join(faults)}", stacklevel=2)
        return path, found
    if faults:
        raise DamagedFileError(
            f"no checkpoint can be read, so the run cannot go on: {'; '.join(faults)}. Remove the damaged checkpoints "
            "to train from the start, or choose another output"
        )
    return None


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read a state dict from a file or folder without running code from it.

    Args:
        path: A `.safetensors` file, a PyTorch file (a state dict, or one under `state_dict`, `model` or
            `model_ema`), a folder that holds one `model.safetensors`, or a run folder.

    Returns:
        Parameter names to CPU tensors; a `module.` prefix is removed.

    Raises:
        FileNotFoundError: If nothing is there.
        ValueError: If the file is damaged, holds no state dict, or holds more than tensors and plain values.
    """
    file = find_weights(path)
    if file.suffix == ".safetensors":
        return read_tensors(file)[0]
    content = _load_pickle(file)
    for key in ("state_dict", "model", "model_ema"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict):
        raise DamagedFileError(f"{str(file)!r} holds no state dict, but a {type(content).__name__}")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise DamagedFileError(
                f"{str(file)!r} holds no state dict, which maps names to tensors: it maps {name!r} to a "
                f"{type(value).__name__}"
            )
    return {name.removeprefix("module."): value for name, value in content.items()}


def find_weights(path: str | Path) -> Path:
    """Find the file that holds the weights: the path itself, or one in a run folder or a saved model's folder.

    Args:
        path: A file, a folder, or `mmod:NAME` for weights that come with the package.

    Raises:
        FileNotFoundError: If nothing is there.
    """
    if str(path).startswith(_SHIPPED):
        name = str(path).removeprefix(_SHIPPED)
        one_of("weights of mmod", name, [file.stem for file in sorted(_SHIPPED_FOLDER.glob("*.safetensors"))])
        return _SHIPPED_FOLDER / f"{name}.safetensors"
    path = Path(path)
    if path.is_file():
        return path
    if path.is_dir():
        folders = [path, path / "model", *list_checkpoints(path / "checkpoints")[:1]]
        for candidate in (folder / name for folder in folders for name in (_WEIGHTS, _CLIP_WEIGHTS)):
            if candidate.is_file():
                return candidate
        raise FileNotFoundError(f"no {_WEIGHTS} in the folder {str(path)!r}")
    raise FileNotFoundError(f"no checkpoint at {str(path)!r}")


def _own(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, those that were never finished included."""
    return [path for path in folder.glob("*step-*") if _NAME.fullmatch(path.name) and path.is_dir()]


def _place(path: Path) -> tuple[int, int]:
    """Return step and epoch of a checkpoint."""
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found[1]), int(found[2])


def _load_pickle(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may fail in any way
        # Torch's advice, to read it with code allowed, is not handed on.
        code = re.search(r"GLOBAL ([\w.]+)", str(error))
        plain = str(error).strip().split("\n")[0] or type(error).__name__
        reason = f"it holds {code[1]} besides; save the state dict alone" if code else plain
        raise DamagedFileError(f"{str(path)!r} is no whole file of tensors and plain values: {reason}") from error
