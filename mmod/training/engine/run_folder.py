"""The run folder: its config, whether its run is finished, and the result."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import yaml

from mmod.data.files import Use, data_files
from mmod.data.labels import CLASSES, read_classes
from mmod.io.files import (
    DamagedFileError,
    check_free_of_others,
    locked,
    make_folder,
    parse_json,
    read_json_object,
    write_atomically,
    write_json,
)
from mmod.io.records import FolderTakenError, check_same, check_unused
from mmod.io.sums import check_sums
from mmod.io.tensors import check_complete
from mmod.opening.runs import (
    CHECKPOINTS,
    FINAL_MODEL,
    LAST_WEIGHTS,
    RESULT,
    RUN_CONFIG,
    RUN_HEADER,
    find_run,
    holds_work,
    list_checkpoints,
    read_run_config,
    told_sums,
    weight_sums,
)
from mmod.plain import without_none
from mmod.training.engine.checkpoint import read_newest
from mmod.training.engine.config import RunConfig
from mmod.training.engine.distributed import wait_for_all
from mmod.training.engine.evaluate import RoutedResult

# What stands for the files that a run reads, by use.
_FILES = "files.json"
_USES: tuple[Use, ...] = ("train", "val")
_TEACHER = "teacher"
# What is no longer as it was, and by what it is known.
_READ = {
    "train": ("the training data is", "the names and sizes of its files"),
    "val": ("the evaluation data is", "the names and sizes of its files"),
    _TEACHER: ("the teacher is", "the checksums of its files"),
}
# A resumed run may change them as long as their product is the same.
_BATCH_KEYS = frozenset({"world_size", "accumulate", "data.batch_size"})
Result = TypeVar("Result", bound=RoutedResult | None, covariant=True)
Done = TypeVar("Done")


@dataclass(frozen=True)
class FitResult(Generic[Result]):
    """What a training run returns: its folder, its evaluation, and how it got there.

    Args:
        folder: The run folder. `model/` holds the final model: the moving average of a run that has one, whose last
            weights are in `last/`.
        evaluation: The evaluation of the last weights; None where there is no evaluation data.
        average: The evaluation of their moving average; None without one.
        history: One row per epoch, as in `metrics.csv`; of conversations, the logs of the trainer.
        skipped: Number of unreadable samples by file, for "train" and "val".
        usage: Figures over all starts of the run: `wall_seconds`, `cpu_seconds`, `samples_per_second`, `data_wait` (the
            share of training time spent waiting for data), `peak_rss_mib`, and on a GPU `peak_cuda_mib`.
        reused: The run had finished before, and its result was read from the folder.
        outcomes: What each sample adds to the figures of `best`, such as whether it was right: arrays by column, a row
            per sample. Empty for a result that was read from the folder.
    """

    folder: str
    epochs: float
    steps: int
    evaluation: Result
    average: Result | None
    history: list[dict[str, float]]
    skipped: dict[str, dict[str, int]] = field(default_factory=dict)
    usage: dict[str, float] = field(default_factory=dict)
    reused: bool = False
    outcomes: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False, repr=False)

    @property
    def best(self) -> Result:
        """The evaluation of the final model: that of the moving average if there is one."""
        return self.average or self.evaluation

    def __str__(self) -> str:
        state = "finished earlier," if self.reused else "finished"
        lines = [f"{self.folder}: {state} after epoch {self.epochs:g}, step {self.steps}"]
        results = {"final weights": self.evaluation, "moving average": self.average}
        lines += [f"{name}: {result}" for name, result in results.items() if result is not None]
        if self.evaluation is not None and self.evaluation.baseline:
            lines.append(self.evaluation.baseline)
        for split, counts in self.skipped.items():
            lines += [f"{split} data, unreadable and passed over: {count} in {file}" for file, count in counts.items()]
        return "\n".join(lines)


def _check_continues(config: RunConfig, existing: dict[str, object], record: dict[str, object]) -> None:
    """Raise a ValueError if the run of a folder's record is not that of the config."""
    step_samples = _step_samples(existing)
    free_keys = config.free_keys
    # A step of as many samples may be split otherwise into batches, accumulation and processes.
    if step_samples is not None and step_samples == _step_samples(record):
        free_keys = free_keys | _BATCH_KEYS
    advice = f"choose another folder by --output; `--model.checkpoint {config.output}` starts from its weights"
    check_same(config.output, portable(existing), portable(record), kind="a run", free_keys=free_keys, advice=advice)


def _has_begun(config: RunConfig, record: dict[str, object]) -> bool:
    """Return whether the folder of a config has its run; a ValueError if it has another one.

    One that was stopped before its first checkpoint left nothing, and gives its folder to any config.
    """
    folder = Path(config.output)
    if not (folder / RUN_CONFIG).is_file():
        check_unused(folder, RUN_CONFIG)
        return False
    if find_run(folder) != folder:
        raise FolderTakenError(f"{str(folder)!r} holds a {RUN_CONFIG} that is no run's: choose a new or empty folder")
    if holds_work(folder):
        _check_continues(config, read_run_config(folder), record)
    return True


def told_start(config: RunConfig, world: int) -> str:
    """Say what a run of a config would do with the folder that is there; raises what the run would."""
    folder = Path(config.output)
    if not _has_begun(config, {**config.to_dict(), "world_size": world}):
        return f"{folder}: the run would start anew"
    if is_finished(folder):
        return f"{folder}: the run has finished; its result would be read, and nothing trained"
    _check_result_is_due(config)
    _check_files(config)
    check_free_of_others(folder)
    newest = read_newest(list_checkpoints(folder / CHECKPOINTS), check_sums)
    if newest is None:
        return f"{folder}: the run was stopped before its first checkpoint, and would start anew"
    # Names of both kinds begin with a word and the step.
    _, step, *_ = newest[0].name.split("-")
    return f"{folder}: the run was stopped, and would resume at step {int(step)}"


def run_once(
    config: RunConfig,
    rank: int,
    world: int,
    read: Callable[[Path], Done | None],
    train: Callable[[Callable[[], object]], Done],
    *,
    with_files: bool = True,
) -> Done:
    """Train in a locked folder, unless `read` returns the result of a run in it that has finished.

    Args:
        train: Runs the training; receives a function that writes the config and what it reads into the folder.
        with_files: The files of the config's data are what the run reads: it goes on with the same ones alone.
    """
    folder = Path(config.output)
    record = {**config.to_dict(), "world_size": world}

    def finished() -> Done | None:
        _has_begun(config, record)
        result = read(folder)
        if result is None:
            _check_result_is_due(config)
        elif rank == 0:
            before, now = (_root_of(one) for one in (read_run_config(folder), record))
            if before != now:
                told = f"{folder} finished with data.root={before!r}, of which its result is: {now!r} is not read"
                warnings.warn(told, stacklevel=2)
        return result

    def write_config() -> None:
        if not holds_work(folder):
            make_folder(folder)
            # Of a start that was stopped before its first checkpoint, perhaps with another config.
            for name in (_FILES, CLASSES):
                (folder / name).unlink(missing_ok=True)
            write_atomically(folder / RUN_CONFIG, RUN_HEADER + yaml.safe_dump(record, sort_keys=False))
        if with_files and not (folder / _FILES).exists():
            write_json(folder / _FILES, _files_of(config), indent=1)

    # Without the lock first: a finished run is read from a read-only folder too.
    result = finished()
    if result is not None:
        return result
    lock = locked(folder, wait=False) if rank == 0 else nullcontext()
    with lock:
        wait_for_all()
        # Another process may have finished the run in the meantime.
        result = finished()
        if result is None:
            if with_files:
                _check_files(config)
            result = train(write_config)
        return result


def _root_of(record: Mapping[str, Any]) -> object:
    return (record.get("data") or {}).get("root")


def _step_samples(record: Mapping[str, Any]) -> int | None:
    """Return the samples of an optimiser step over all processes; None if the record does not say."""
    size = (record.get("data") or {}).get("batch_size")
    if size is None:
        return None
    return size * record.get("accumulate", 1) * record.get("world_size", 1)


def portable(record: Mapping[str, Any]) -> dict[str, object]:
    """Return the plain values of a config with its checkpoint's path relative to the run folder.

    Runs that start from one another can then be moved together.

    Example:
        >>> portable({"output": "/runs/tuned", "model": {"checkpoint": "/runs/base"}})["model"]
        {'checkpoint': '../base'}
    """
    output = record.get("output")
    model = record.get("model") or {}
    checkpoint = model.get("checkpoint")
    # A relative path and an absolute one cannot be related.
    if not checkpoint or not output or os.path.isabs(checkpoint) != os.path.isabs(output):
        return dict(record)
    return {**record, "model": {**model, "checkpoint": os.path.relpath(checkpoint, output)}}


def is_finished(folder: str | Path) -> bool:
    """Return whether a folder is that of a run that has finished; other files may be called like its result."""
    return find_run(folder) == Path(folder) and (Path(folder) / RESULT).is_file()


def unfinished(checkpoint: str | Path | None) -> list[str]:
    """Say that a model is the last checkpoint of a run that is not finished, if it is: its figures will change."""
    if checkpoint is None:
        return []
    run = find_run(checkpoint)
    if run is None or run != Path(checkpoint):
        return []
    # The final model of a run is written once, before its result.
    if is_finished(run) or (run / FINAL_MODEL).exists():
        return []
    return [f"The model is the last checkpoint of the run {run}, which is not finished"]


def epochs_and_seconds(folder: str | Path | None) -> tuple[float | None, float | None]:
    """Return the epochs of a finished run and the seconds that each took; None for what is not known."""
    result = _finished_result(folder)
    if result is None:
        return None, None
    seconds = (result.get("usage") or {}).get("wall_seconds")
    epochs = result.get("epochs")
    if not seconds or not epochs:
        return epochs, None
    return epochs, seconds / epochs


def samples_of_epoch(folder: str | Path | None) -> float | None:
    """Return the samples that an epoch of a finished run trains on; None if they are not known."""
    result = _finished_result(folder) or {}
    steps, epochs = result.get("steps"), result.get("epochs")
    if not (steps and epochs):
        return None
    of_step = _step_samples(read_run_config(Path(str(folder))))
    if of_step is None:
        return None
    return of_step * steps / epochs


def _finished_result(folder: str | Path | None) -> dict[str, Any] | None:
    """Return what a finished run wrote; None for other folders."""
    if folder is None or not is_finished(folder):
        return None
    return read_json_object(Path(folder) / RESULT)


def read_fit(folder: Path, result_class: Callable[..., Result]) -> FitResult[Result] | None:
    """Return the result that a finished run wrote into its folder; None if the run is not finished.

    Args:
        folder: The run folder.
        result_class: The dataclass of the run's evaluations.

    Raises:
        DamagedFileError: Weights of the run do not have their checksums any more.
        ValueError: The result cannot be read.
    """
    path = folder / RESULT
    if not path.exists():
        return None
    try:
        for name in (FINAL_MODEL, LAST_WEIGHTS):
            check_complete(folder / name)
    except DamagedFileError as error:
        raise DamagedFileError(
            f"the run in {str(folder)!r} had finished, and its weights were damaged since: {error}. Remove the folder "
            "to train again, or choose another output"
        ) from error
    try:
        fields = {**parse_json(path.read_bytes(), path.name), "folder": str(folder), "reused": True}
        # Null stays None: conversations without questions are not evaluated.
        results = {name: fields[name] and result_class(**fields[name]) for name in ("evaluation", "average")}
        return FitResult(**{**fields, **results})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{str(path)!r} is no result of a finished run ({type(error).__name__}: {error}); restore it, or "
            "remove the folder to train again"
        ) from error


def _check_result_is_due(config: RunConfig) -> None:
    """Raise a FileNotFoundError if a run without a result has its final model: it would be trained once more.

    One that was stopped between the two has checkpoints, from which it goes on, unless its config keeps none.
    """
    folder = Path(config.output)
    if not config.keeps_checkpoints:
        return
    if (folder / FINAL_MODEL).exists() and not any((folder / CHECKPOINTS).glob("*")):
        raise FileNotFoundError(
            f"the run in {str(folder)!r} has its final model, {FINAL_MODEL}/, and neither {RESULT} nor a checkpoint: "
            f"restore {RESULT}, or evaluate the model by `mmod evaluate {folder}`. To train again, remove "
            f"{FINAL_MODEL}/ first, or choose another output"
        )


def read_files(config: RunConfig, use: Use = "val") -> str | None:
    """Return what stands for the files of a run's data, see `data_files`; None for data without files."""
    folders: Sequence[str] = ()
    if use == "val":
        folders = config.evaluated_folders
    return data_files(config.data, use, folders)


def _files_of(config: RunConfig) -> dict[str, str]:
    """Return what stands for the files that a run reads, by their use; what has no files is left out."""
    files: dict[str, str | None] = {use: read_files(config, use) for use in _USES}
    known = without_none(files)
    teacher = config.teacher()
    # The dense one has the weights that the run starts from.
    if teacher is not None and teacher != "dense":
        sums = weight_sums(teacher)
        if sums:
            known[_TEACHER] = told_sums(sums)
    return known


def _check_files(config: RunConfig) -> None:
    """Raise a ValueError if a run that goes on would read other files than it began with, as far as it recorded some.

    Files that are missing are told by what opens them. Every process looks, since nodes may have copies of their own,
    and before the reader, which lists the folders once more: another run's data are refused before a model is made.
    """
    path = Path(config.output) / _FILES
    if not path.exists() or not holds_work(config.output):
        return
    try:
        recorded = read_json_object(path)
    except ValueError as error:
        raise ValueError(f"{error}: remove it to go on without comparing the files of the data") from error
    for use, files in _files_of(config).items():
        before = recorded.get(use, files)
        if files != before:
            what, known_by = _READ[use]
            raise ValueError(
                f"{what} no longer that with which the run in {config.output!r} began, by {known_by}: {before} then, "
                f"{files} now. Restore them, remove {str(path)!r} to go on with "
                f"mended files, or choose another folder by --output; `--model.checkpoint {config.output}` starts from "
                "its weights"
            )


def record_classes(folder: Path, numbers: Mapping[str, int]) -> None:
    """Write the number of each class by its name into a run folder, unless an earlier start of the run has."""
    if not (folder / CLASSES).exists():
        write_json(folder / CLASSES, numbers, indent=1)


def check_recorded(folder: Path, numbers: Mapping[str, int]) -> None:
    """Raise a ValueError if a run folder records other classes than those of the training data."""
    path = folder / CLASSES
    if path.exists() and holds_work(folder) and read_classes(path) != dict(numbers):
        before = set(read_classes(path))
        now = set(numbers)
        gone = ", ".join(sorted(before - now)) or "none"
        new = ", ".join(sorted(now - before)) or "none"
        raise ValueError(
            f"{str(path)!r} records other classes than the training data has now (gone: {gone}; new: {new}): restore "
            "the data, or choose another output"
        )


def write_result(folder: str | Path, result: FitResult[RoutedResult | None]) -> None:
    """Write the result of a run, which marks it as finished."""
    fields = dataclasses.asdict(result)
    del fields["outcomes"]
    write_json(Path(folder) / RESULT, fields)
