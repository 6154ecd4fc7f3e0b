"""The run folder: which config it belongs to, whether the run is finished, and what came out of it."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from mmod.io.claim import check_same, read_claim
from mmod.io.files import DamagedFileError, parse_json, write_atomically
from mmod.io.locks import locked
from mmod.io.tensors import check_complete
from mmod.training.engine.config import RunConfig
from mmod.training.engine.distributed import wait_for_all
from mmod.training.engine.evaluate import RoutedResult

__all__ = ["FitResult", "portable", "read_fit", "read_result", "run_once", "write_result"]

_CONFIG = "config.yaml"
_RESULT = "result.json"
Found = TypeVar("Found", bound=RoutedResult)
Done = TypeVar("Done")


@dataclass(frozen=True)
class FitResult(Generic[Found]):
    """The outcome of a training run.

    Args:
        folder: The run folder. `model/` holds the final weights, `ema/` their moving average.
        epochs: Epochs trained.
        steps: Optimiser steps done.
        evaluation: The final weights on the evaluation data.
        average: Their moving average on it; None without one.
        history: One row for each epoch, as in `metrics.csv`.
        skipped: For "train" and "val", the files that were unreadable in part and passed over, with the
            number of samples each.
        reused: Whether the run had finished before and its result was read from the folder.
    """

    folder: str
    epochs: int
    steps: int
    evaluation: Found
    average: Found | None
    history: list[dict[str, float]]
    skipped: dict[str, dict[str, int]] = field(default_factory=dict)
    reused: bool = False

    @property
    def best(self) -> Found:
        """What is to be reported: the moving average where there is one."""
        return self.average or self.evaluation

    def __str__(self) -> str:
        state = "had finished before" if self.reused else "finished"
        lines = [
            f"{self.folder}: {state} after {self.epochs} epochs, {self.steps} steps",
            f"weights: {self.evaluation}",
        ]
        if self.average is not None:
            lines.append(f"moving average: {self.average}")
        for split, counts in self.skipped.items():
            lines += [f"{split} data, unreadable and passed over: {count} in {file}" for file, count in counts.items()]
        return "\n".join(lines)


def run_once(
    config: RunConfig,
    rank: int,
    world: int,
    read: Callable[[Path], Done | None],
    train: Callable[[Callable[[], object]], Done],
) -> Done:
    """Train unless the run in the config's folder has finished, in a folder that no other process writes to.

    Args:
        config: The run's config.
        rank: Number of this process; the first one holds the folder's lock.
        world: Number of processes.
        read: From the folder to the result of a finished run; None when it is not finished.
        train: Trains; what it is given writes the config into the folder.

    Returns:
        The result.

    Raises:
        ValueError: If the folder belongs to another config.
        LockedError: If another process trains into the folder.
    """
    folder = Path(config.output)
    record = {**config.to_dict(), "world_size": world}

    def finished() -> Done | None:
        found = read_claim(folder, _CONFIG)
        if found is not None:
            there, now = portable(found), portable(record)
            check_same(folder, there, now, kind="a run", free_keys=config.free_keys)
        return read(folder)

    result = finished()
    if result is not None:
        return result
    with locked(folder, wait=False) if rank == 0 else nullcontext():
        wait_for_all()
        # Another process may have finished the run since.
        result = finished()
        if result is None:
            result = train(partial(_claim, folder, record))
        return result


def portable(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a run with its checkpoint named by the way from the run folder to it.

    Runs that start from one another can then be moved together, and named by relative or absolute paths.

    Args:
        record: The config as plain values.

    Example:
        >>> portable({"output": "/runs/tuned", "model": {"checkpoint": "/runs/base"}})["model"]
        {'checkpoint': '../base'}
    """
    output, model = record.get("output"), record.get("model") or {}
    checkpoint = model.get("checkpoint")
    # There is no way between a relative path and an absolute one.
    if not checkpoint or not output or os.path.isabs(checkpoint) != os.path.isabs(output):
        return dict(record)
    return {**record, "model": {**model, "checkpoint": os.path.relpath(checkpoint, output)}}


def _claim(folder: Path, record: dict[str, Any]) -> None:
    """Write a config into its run folder unless it is there, perhaps as an earlier version wrote it."""
    # Logs of this run may lie in the folder already.
    if not (folder / _CONFIG).exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / _CONFIG, yaml.safe_dump(record, sort_keys=False))


def read_fit(folder: Path, kind: type[Found]) -> FitResult[Found] | None:
    """Return the result of a finished run; None when the run in `folder` is not finished."""

    def make(fields: dict[str, Any]) -> FitResult[Found]:
        average = fields["average"] and kind(**fields["average"])
        return FitResult(**{**fields, "evaluation": kind(**fields["evaluation"]), "average": average})

    return read_result(folder, make)


def read_result(folder: Path, make: Callable[[dict[str, Any]], Done]) -> Done | None:
    """Return the result of a finished run; None when the run in `folder` is not finished.

    Args:
        folder: The run folder.
        make: From the fields of the result to the result.

    Raises:
        ValueError: If the file of the result holds something else, or weights of the run are damaged.
    """
    path = folder / _RESULT
    if not path.exists():
        return None
    try:
        for name in ("model", "ema"):
            check_complete(folder / name)
    except DamagedFileError as error:
        raise DamagedFileError(
            f"the run in {str(folder)!r} had finished, and its weights were damaged since: {error}. Remove the folder "
            "to train again, or choose another output"
        ) from error
    try:
        return make({**parse_json(path.read_bytes(), path.name), "folder": str(folder), "reused": True})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{str(path)!r} is no result of a finished run ({type(error).__name__}: {error}); remove it to finish the "
            "run again"
        ) from error


def write_result(folder: str | Path, result: Any) -> None:
    """Mark a run as finished by writing its result."""
    write_atomically(Path(folder) / _RESULT, json.dumps(dataclasses.asdict(result), indent=2) + "\n")
