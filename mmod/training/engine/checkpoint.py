"""Atomic checkpoints with checksums, from which a run resumes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmod.io.files import DamagedFileError, replacing
from mmod.io.processes import gathered, process_rank
from mmod.io.sums import check_sums, write_sums
from mmod.io.tensors import WEIGHTS, read_tensors, unshared, write_tensors
from mmod.opening.runs import checkpoint_folders, list_checkpoints, shards_of
from mmod.opening.weights import load_pickle, plain_errors
from mmod.plain import without_none
from mmod.training.engine.distributed import wait_for_all

Content = TypeVar("Content")

_KEPT = 2
_AVERAGE = "ema.safetensors"
_MOMENTS = "optimizer.safetensors"
_TRAINING = "training.pt"


@dataclass(frozen=True)
class Checkpoint:
    """The state from which a run resumes.

    Args:
        training: Optimiser, loss scaler, position and metrics so far, as plain values and tensors.
        moments: The optimiser's tensors by weight, if they are sharded over processes.
    """

    weights: dict[str, Tensor]
    average: dict[str, Tensor] | None
    training: dict[str, Any]
    moments: dict[str, Tensor] | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        average: nn.Module | None,
        training: dict[str, object],
        moments: dict[str, Tensor] | None,
    ) -> Checkpoint:
        """Return the state of a model, and of its moving average if it has one."""
        weights_of_average = None
        if average is not None:
            weights_of_average = average.state_dict()
        return cls(model.state_dict(), weights_of_average, training, moments)

    @property
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The state dicts by name of their file."""
        named = {WEIGHTS: self.weights, _AVERAGE: self.average, _MOMENTS: self.moments}
        return without_none(named)


def save_checkpoint(folder: Path, epoch: int, step: int, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint atomically, then remove all but the newest two; collective over processes.

    The first process writes what all have; of a state dict with shards each process writes its own. An existing
    checkpoint is not written again: the position determines the content.
    """
    target = folder / f"step-{step:09d}-epoch-{epoch:05d}"
    first = process_rank() == 0
    if any(gathered(target.exists())):
        return target
    kept = next(iter(list_checkpoints(folder)), None)
    # Only the first process renames the folder in the end; the others get its temporary name below.
    written = replacing(target, kept=kept) if first else nullcontext(target)
    with written as partial:
        if first:
            # Without parents: a run folder that is gone is not created anew.
            folder.mkdir(exist_ok=True)
            partial.mkdir()
            torch.save(checkpoint.training, partial / _TRAINING)
        # All processes write into the folder that the first has created.
        partial = gathered(partial)[0]
        for name, state in checkpoint.tensors.items():
            # Shards are written by all processes together, whole tensors by the first alone.
            if any(isinstance(value, DTensor) for value in state.values()):
                with plain_errors():
                    writer = dcp.HuggingFaceStorageWriter(str(shards_of(partial / name)), save_distributed=True)
                    dcp.save(unshared(state), storage_writer=writer)
            elif first:
                write_tensors(partial / name, state)
        write_sums(partial, together=True)
    if first:
        # What killed processes left too: no later save would rename it.
        for path in set(checkpoint_folders(folder)) - set(list_checkpoints(folder)[:_KEPT]):
            shutil.rmtree(path)
    # No process may load, or save again, before the old ones are gone.
    wait_for_all()
    return target


def remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints in a folder, and the folder if it is then empty."""
    for path in checkpoint_folders(folder):
        shutil.rmtree(path)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def load_checkpoint(path: Path, *, averaged: bool = False, into: Checkpoint | None = None) -> Checkpoint:
    """Read a checkpoint onto the CPU, or into given tensors; collective over processes.

    Args:
        averaged: It must have a moving average.
        into: A checkpoint with shards, whose tensors are overwritten with those that any number of processes saved.
    """
    check_sums(path, together=True)
    training = load_pickle(path / _TRAINING)
    if not isinstance(training, dict):
        raise DamagedFileError(f"{str(path / _TRAINING)!r} holds no state of a training run")
    # Shards are read into the tensors of the running model: no process has room for whole ones.
    if into is not None:
        for name, state in into.tensors.items():
            shards = shards_of(path / name)
            with plain_errors(shards):
                dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(shards)))
        return replace(into, training=training)
    weights, _ = read_tensors(path / WEIGHTS)
    average = None
    if averaged or (path / _AVERAGE).exists():
        average, _ = read_tensors(path / _AVERAGE)
    return Checkpoint(weights=weights, average=average, training=training)


def read_newest(paths: Sequence[Path], read: Callable[[Path], Content]) -> tuple[Path, Content] | None:
    """Read the newest checkpoint of a run by a function that raises a `DamagedFileError` if it cannot."""
    if not paths:
        return None
    newest, *earlier = paths
    try:
        return newest, read(newest)
    # Not passed over silently: the user decides whether an earlier state is good enough.
    except DamagedFileError as error:
        start = "train from the start"
        if earlier:
            start = f"go on from {str(earlier[0])!r}"
        raise DamagedFileError(
            f"the run cannot go on: {error}. Remove the folder {str(newest)!r} to {start}, or choose another output"
        ) from error
