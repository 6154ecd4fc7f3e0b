"""Checkpoints that are either whole or not there, and the reading of weights from files others wrote."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmod.data.files import sync

__all__ = [
    "Checkpoint",
    "find_weights",
    "latest_checkpoint",
    "load_checkpoint",
    "read_weights",
    "save_checkpoint",
]

_PREFIX = "step-"
_WEIGHTS = "model.safetensors"
# What open_clip calls the weights in a folder of its own.
_CLIP_WEIGHTS = "open_clip_model.safetensors"
_AVERAGE = "ema.safetensors"
_TRAINING = "training.pt"


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
    """Write a checkpoint beside the earlier ones, then remove those.

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
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{_PREFIX}{step:09d}-epoch-{epoch:05d}"
    if target.exists():
        return target
    partial = folder / f"partial-{target.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    header = {key: json.dumps(value) for key, value in metadata.items()}
    save_file(_storable(checkpoint.weights), partial / _WEIGHTS, metadata=header)
    if checkpoint.average is not None:
        save_file(_storable(checkpoint.average), partial / _AVERAGE, metadata=header)
    torch.save(checkpoint.training, partial / _TRAINING)
    for path in (*partial.iterdir(), partial):
        sync(path)
    os.replace(partial, target)
    sync(folder)
    for path in folder.iterdir():
        if path != target:
            shutil.rmtree(path)
    return target


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint in `folder`; None when there is none."""
    return max(folder.glob(f"{_PREFIX}*"), default=None)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint that `save_checkpoint` wrote, onto the CPU."""
    from safetensors.torch import load_file

    average = path / _AVERAGE
    return Checkpoint(
        weights=load_file(path / _WEIGHTS),
        average=load_file(average) if average.exists() else None,
        training=torch.load(path / _TRAINING, map_location="cpu", weights_only=True),
    )


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read a state dict from a file or folder without running code from it.

    Args:
        path: A `.safetensors` file, a PyTorch file (a state dict, or one under `state_dict`, `model` or
            `model_ema`), a folder that holds one `model.safetensors`, or a run folder.

    Returns:
        Parameter names to CPU tensors; a `module.` prefix is removed.

    Raises:
        FileNotFoundError: If nothing is there.
        ValueError: If the file holds no state dict.
    """
    from safetensors.torch import load_file

    file = find_weights(path)
    if file.suffix == ".safetensors":
        return load_file(file)
    content = torch.load(file, map_location="cpu", weights_only=True)
    for key in ("state_dict", "model", "model_ema"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    values = content.values() if isinstance(content, dict) else [None]
    if not all(isinstance(value, Tensor) for value in values):
        raise ValueError(f"{str(file)!r} holds no state dict (a mapping of names to tensors)")
    return {name.removeprefix("module."): value for name, value in content.items()}


def find_weights(path: str | Path) -> Path:
    """Find the file that holds the weights: the path itself, or one in a run folder or a saved model's folder.

    Args:
        path: A file or a folder.

    Raises:
        FileNotFoundError: If nothing is there.
    """
    path = Path(path)
    if path.is_file():
        return path
    if path.is_dir():
        newest = latest_checkpoint(path / "checkpoints")
        folders = [path, path / "model", *([newest] if newest else [])]
        for candidate in (folder / name for folder in folders for name in (_WEIGHTS, _CLIP_WEIGHTS)):
            if candidate.is_file():
                return candidate
        raise FileNotFoundError(f"no {_WEIGHTS} in the folder {str(path)!r}")
    raise FileNotFoundError(f"no checkpoint at {str(path)!r}")


def _storable(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous CPU tensors, as safetensors wants them."""
    return {name: value.detach().cpu().contiguous() for name, value in state.items()}
