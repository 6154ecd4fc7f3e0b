"""Atomic checkpoints with checksums, and weights from the files of others."""

from __future__ import annotations

import json
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from mmod.io.files import DamagedFileError, read_json_object, replacing, sha256, write_atomically
from mmod.io.tensors import read_tensors, unshared, write_tensors
from mmod.training.engine.distributed import gathered, process_count, process_rank, wait_for_all
from mmod.training.engine.foreign import STAND_INS, Unread, clean_names, select_weights
from mmod.values import one_of

Content = TypeVar("Content")

# With a prefix and suffix, a checkpoint that was never finished.
_NAME = re.compile(r"\.?step-\d{9,}-epoch-\d{5,}(\.partial)?")
_KEPT = 2
_WEIGHTS = "model.safetensors"
_CLIP_WEIGHTS = "open_clip_model.safetensors"
_AVERAGE = "ema.safetensors"
_MOMENTS = "optimizer.safetensors"
_TRAINING = "training.pt"
# Weights that come with the package.
_SHIPPED = "mmod:"
_SHIPPED_FOLDER = Path(__file__).parents[2] / "data" / "weights"
SUMS = "sha256.json"
"""File of the checksums in a checkpoint."""


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

    @property
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """The state dicts by name of their file."""
        named = {_WEIGHTS: self.weights, _AVERAGE: self.average, _MOMENTS: self.moments}
        return {name: state for name, state in named.items() if state is not None}


def save_checkpoint(folder: Path, epoch: int, step: int, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint atomically, then remove all but those of the newest two steps; collective over processes.

    The first process writes what all have; of a state dict with shards each process writes its own. An existing
    checkpoint is not written again: the position determines the content.
    """
    target = folder / f"step-{step:09d}-epoch-{epoch:05d}"
    first = process_rank() == 0
    if any(gathered(target.exists())):
        return target
    kept = next(iter(list_checkpoints(folder)), None)
    with replacing(target, kept=kept) if first else nullcontext(target) as partial:
        if first:
            # Without parents: a run folder that is gone is not created anew.
            folder.mkdir(exist_ok=True)
            partial.mkdir()
            torch.save(checkpoint.training, partial / _TRAINING)
        # All processes write into the folder that the first has created.
        partial = gathered(partial)[0]
        for name, state in checkpoint.tensors.items():
            if any(isinstance(value, DTensor) for value in state.values()):
                with _plain_errors():
                    writer = dcp.HuggingFaceStorageWriter(str(_shards(partial / name)), save_distributed=True)
                    dcp.save(unshared(state), storage_writer=writer)
            elif first:
                write_tensors(partial / name, state)
        write_sums(partial, together=True)
    if first:
        unfinished = [path for path in _checkpoints(folder) if "partial" in path.name]
        for path in (*_superseded(list_checkpoints(folder)), *unfinished):
            shutil.rmtree(path)
    wait_for_all()
    return target


def _superseded(newest_first: Sequence[Path]) -> list[Path]:
    """Return all checkpoints but the newest of each of the last steps: one may be saved before and after evaluation."""
    by_step: dict[str, Path] = {}
    for path in newest_first:
        by_step.setdefault(path.name.partition("-epoch")[0], path)
    kept = list(by_step.values())[:_KEPT]
    return [path for path in newest_first if path not in kept]


def write_sums(folder: Path, *, together: bool = False) -> None:
    """Write the checksums of the files in a folder beside them; `together` shares the work of processes."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != SUMS]
    names = [str(path.relative_to(folder)) for path in files]
    sums = _sums(folder, names, together)
    if not together or process_rank() == 0:
        write_atomically(folder / SUMS, json.dumps(sums, indent=2) + "\n")


def check_sums(folder: Path, *names: str, together: bool = False) -> None:
    """Refuse files, all or those of some names or folders, that differ from their checksums; see `write_sums`."""
    if not (folder / SUMS).is_file():
        return
    try:
        sums = read_json_object(folder / SUMS)
    except ValueError as error:
        raise DamagedFileError(str(error)) from error
    chosen = [name for name in sorted(sums) if not names or name in names or Path(name).parts[0] in names]
    for name, digest in _sums(folder, chosen, together).items():
        if digest != sums[name]:
            state = "is missing" if digest is None else "differs from its checksum"
            raise DamagedFileError(f"{str(folder / name)!r} is damaged: it {state} in {SUMS}")


def _sums(folder: Path, names: Sequence[str], together: bool) -> dict[str, str | None]:
    """Return the checksum of each file, None if it is missing."""
    mine = names[process_rank() :: process_count()] if together else names
    sums = {name: sha256(folder / name) if (folder / name).is_file() else None for name in mine}
    if not together:
        return sums
    return dict(chain.from_iterable(part.items() for part in gathered(sums)))


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the finished checkpoints in a folder, newest first; other files are ignored."""
    return newest_first(path for path in _checkpoints(folder) if path.name.startswith("step-"))


def newest_first(checkpoints: Iterable[Path]) -> list[Path]:
    """Return paths by the numbers in their names, the largest first."""
    return sorted(checkpoints, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)], reverse=True)


def remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints in a folder, and the folder if it is then empty."""
    for path in _checkpoints(folder):
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
    average = path / _AVERAGE
    training = _load_pickle(path / _TRAINING)
    if not isinstance(training, dict):
        raise DamagedFileError(f"{str(path / _TRAINING)!r} holds no state of a training run")
    if into is not None:
        for name, state in into.tensors.items():
            with _plain_errors(_shards(path / name)):
                dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(_shards(path / name))))
        return replace(into, training=training)
    return Checkpoint(
        weights=read_tensors(path / _WEIGHTS)[0],
        average=read_tensors(average)[0] if averaged or average.exists() else None,
        training=training,
    )


def read_newest(paths: Sequence[Path], read: Callable[[Path], Content]) -> tuple[Path, Content] | None:
    """Read the newest checkpoint of a run by a function that raises a `DamagedFileError` if it cannot."""
    if not paths:
        return None
    newest, *earlier = paths
    try:
        return newest, read(newest)
    except DamagedFileError as error:
        start = f"go on from {str(earlier[0])!r}" if earlier else "train from the start"
        raise DamagedFileError(
            f"the run cannot go on: {error}. Remove the folder {str(newest)!r} to {start}, or choose another output"
        ) from error


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read a state dict onto the CPU, without running code from the file.

    A checkpoint of timm's, DeiT's, torchvision's, open_clip's, Lightning's or DINO's training is read as timm reads its
    own: if it holds a moving average, that is taken, which the first process says on standard error.

    Args:
        path: A `.safetensors` file; a PyTorch file, with a state dict or a checkpoint that holds one; a folder with one
            `model.safetensors`; or a run folder.
    """
    file = find_weights(path)
    if file.is_dir():
        return _read_shards(file)
    try:
        check_sums(file.parent, file.name)
    except DamagedFileError as error:
        others = [other for other in list_checkpoints(file.parent.parent) if other != file.parent]
        hint = f". An earlier checkpoint is {str(others[0])!r}" if others else ""
        raise DamagedFileError(f"{error}{hint}") from error
    if file.suffix == ".safetensors":
        return clean_names(read_tensors(file)[0])
    content = _load_pickle(file, STAND_INS)
    if not isinstance(content, dict):
        raise DamagedFileError(f"{str(file)!r} holds no state dict, but a {type(content).__name__}")
    try:
        state, choice = select_weights(content)
    except ValueError as error:
        raise DamagedFileError(f"{str(file)!r}: {error}") from error
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            kind = "an object that is not read" if isinstance(value, Unread) else f"a {type(value).__name__}"
            raise DamagedFileError(
                f"{str(file)!r} holds no state dict, which maps names to tensors: it maps {name!r} to {kind}"
            )
    if choice and process_rank() == 0:
        print(f"{file}: {choice}, were read", file=sys.stderr)
    return state


def find_weights(path: str | Path) -> Path:
    """Find the file that holds the weights: the path itself, or one in a run folder or a saved model's folder.

    `mmod:NAME` names weights that come with the package. Those of a sharded checkpoint are a folder of files.
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
        for folder, name in product(folders, (_WEIGHTS, _CLIP_WEIGHTS)):
            candidate = folder / name
            if candidate.is_file():
                return candidate
            if any(_shards(candidate).glob("shard-*.safetensors")):
                return _shards(candidate)
        raise FileNotFoundError(f"no {_WEIGHTS} in the folder {str(path)!r}")
    raise FileNotFoundError(f"no checkpoint at {str(path)!r}")


def _shards(file: Path) -> Path:
    """Return the folder of what would be a file if it were not sharded."""
    return file.with_suffix("")


def _read_shards(folder: Path) -> dict[str, Tensor]:
    """Read the whole tensors of a sharded state dict onto the CPU."""
    check_sums(folder.parent, folder.name)
    with _plain_errors(folder):
        reader = dcp.HuggingFaceStorageReader(str(folder))
        known: Any = reader.read_metadata().state_dict_metadata
        state = {name: torch.empty(of.size, dtype=of.properties.dtype) for name, of in known.items()}
        with warnings.catch_warnings():
            # It warns that this process reads alone.
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(state, storage_reader=reader, no_dist=True)
    return state


@contextmanager
def _plain_errors(read: Path | None = None) -> Iterator[None]:
    """Raise the cause of torch's `CheckpointException`, which is no `Exception`; `read` is the state being read."""
    try:
        yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if read is None:
            raise cause from None
        raise DamagedFileError(f"{str(read)!r} is no whole sharded state: {cause}") from error


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, finished or not."""
    return [path for path in folder.glob("*step-*") if _NAME.fullmatch(path.name) and path.is_dir()]


def _load_pickle(path: Path, stand_ins: Sequence[tuple[type, str]] = ()) -> Any:
    """Read tensors and plain values, and classes by their names as others that stand in for them."""
    try:
        with torch.serialization.safe_globals(list(stand_ins)):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle may fail in any way
        # Torch's message advises to allow code; this one does not.
        code = re.search(r"GLOBAL ([\w.]+)", str(error))
        plain = str(error).strip().split("\n")[0] or type(error).__name__
        reason = f"it holds {code[1]} besides; save the state dict alone" if code else plain
        raise DamagedFileError(f"{str(path)!r} is no whole file of tensors and plain values: {reason}") from error
