"""Where a model is: the folder of a training run, and the file of weights that a path means. Imported without torch."""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from mmod.data.labels import CLASSES, read_classes
from mmod.io.files import SUMS, DamagedFileError, LockedError, is_locked, near_paths, read_json_object, sha256
from mmod.io.tensors import WEIGHTS
from mmod.io.yaml import read_yaml
from mmod.values import one_of

RUN_CONFIG = "config.yaml"
"""The config in a run folder."""
RUN_HEADER = "# The config of a run; its last key is world_size.\n"
"""First line of what a run writes there."""
FINAL_MODEL = "model"
"""Folder of the final model in a run folder."""
LAST_WEIGHTS = "last"
"""Folder of the last weights where the final model is their moving average."""
CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in a run folder."""
RESULT = "result.json"
"""File in a run folder that marks its run as finished."""
LOCAL = "local-dir:"
"""What may stand before the folder of a model, as timm and open_clip name it."""
# Each of these files describes a model, and stands in one folder with its weights.
_DESCRIPTIONS = ("config.json", "mmod.json", "open_clip_config.json")
# Of transformers: what prepares inputs and how a model answers, and which file has which weights.
_FURTHER = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "chat_template.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "pytorch_model.bin.index.json",
)
_CLIP_WEIGHTS = "open_clip_model.safetensors"
# Of the training loop, with a prefix and suffix while it is written; and of transformers' trainer.
_CHECKPOINT = re.compile(r"\.?step-\d{9,}-epoch-\d{5,}(\.partial)?|checkpoint-\d+")
# Where runs are by default, which is no owner.
_RUNS = "runs"
# Weights that come with the package.
_SHIPPED = "mmod:"
_SHIPPED_FOLDER = Path(__file__).parents[1] / "data" / "weights"


def find_run(path: str | Path) -> Path | None:
    """Return the folder of a run for itself, for its `model`, `last` or checkpoints, and for a file in these.

    None for any other path, such as the config in a run folder, or weights below a `config.yaml` of other software.
    """
    path = Path(path)
    if not path.exists():
        return None
    # The deepest is a file in a checkpoint: checkpoints/step-000000002-epoch-00001/ema.safetensors.
    for folder in (path, *list(path.parents)[:3]):
        if not _is_run(folder):
            continue
        below = path.relative_to(folder).parts[:1]
        if not below or below[0] in (FINAL_MODEL, LAST_WEIGHTS, CHECKPOINTS):
            return folder
        # Other files in a run folder, such as a user's own weights, are not the run's.
        return None
    return None


def _is_run(folder: Path) -> bool:
    """Return whether a folder has the config of a run; other software writes files of that name beside weights."""
    path = folder / RUN_CONFIG
    if not path.is_file():
        return False
    if _is_written(path):
        return True
    # A user's own config, in the folder of a run; one beside a model's description is about something else.
    if is_described(folder):
        return False
    try:
        fields = read_yaml(path)
    except (ValueError, OSError):
        # Of what cannot be read, keys at the start of a line are known.
        return {b"kind", b"model"} <= set(re.findall(rb"^(\w+):", path.read_bytes(), re.MULTILINE))
    return isinstance(fields.get("model"), Mapping)


def _is_written(path: Path) -> bool:
    """Return whether a run wrote a file as its config, which may be cut off within its first line."""
    start = path.read_bytes()[: len(RUN_HEADER)]
    return RUN_HEADER.encode().startswith(start)


def read_run_config(run: Path) -> dict[str, Any]:
    """Return the plain fields of a run's config; a DamagedFileError names a file that is cut off or no config.

    A user's own config need not have every key, and is checked where it is used.
    """
    path = run / RUN_CONFIG
    remedy = "restore it, or copy the config file that the run was trained by to its place"
    try:
        fields = read_yaml(path)
    except ValueError as error:
        if not _is_run(run):
            raise
        raise DamagedFileError(f"{error}. It is the config of a run: {remedy}") from error
    if not _is_written(path):
        return fields
    missing = [key for key in ("output", "model", "data", "world_size") if not fields.get(key)]
    if missing:
        raise DamagedFileError(
            f"{str(path)!r} is the config of a run, and lacks {', '.join(missing)}: it was cut off or edited; {remedy}"
        )
    return fields


def told_run(path: str | Path) -> str:
    """Return the end of a message about weights that do not fit: the model of the run that they are of; "" for none."""
    run = find_run(path)
    if run is None:
        return ""
    fields = read_run_config(run)
    named = {key: value for key, value in fields["model"].items() if key in ("name", "args", "config") and value}
    written = yaml.safe_dump(named, default_flow_style=True, sort_keys=False, width=math.inf).strip()
    kind = fields.get("kind", "image")
    return f". They are of {run}, a run of kind {kind!r} with model: {written}; write the same, or name other weights"


def model_folder(path: str | Path) -> Path | None:
    """Return the folder that describes the model a path stands for; None if there is none.

    A run folder stands for its final model, or its newest checkpoint by transformers' trainer, and a file for the model
    in its folder.
    """
    path = Path(path)
    folders = [path if path.is_dir() else path.parent]
    if find_run(path) == path:
        # Checkpoints of transformers' trainer describe their model, and an unfinished run opens by the last.
        folders = [path / FINAL_MODEL, *list_checkpoints(path / CHECKPOINTS)]
    if path.exists():
        return next((folder for folder in folders if is_described(folder)), None)
    return None


def is_described(folder: str | Path) -> bool:
    """Return whether a folder holds the description of a model that a host library or mmod saved."""
    paths = [Path(folder) / name for name in _DESCRIPTIONS]
    present = [path.name for path in paths if path.is_file()]
    if present != [paths[0].name]:
        return bool(present)
    # Other software has a file of this name too. What cannot be read is said where it is opened.
    with suppress(ValueError):
        return not {"model_type", "architecture"}.isdisjoint(read_json_object(paths[0]))
    return True


def check_source(source: str | Path, *, owned: bool = True) -> None:
    """Refuse what is no folder here and no name of the hub, which would be asked for up to a minute.

    Args:
        owned: Names of the hub have an owner. Some old ones have none, such as gpt2, and may be meant where no folder
            here is near.

    Raises:
        FileNotFoundError: With the folders whose names are near.
    """
    path = Path(source)
    if path.exists():
        return
    near = near_paths(path, Path.is_dir)
    is_name = len(path.parts) == 2 and ":" not in str(path) and path.parts[0] not in ("..", "~", path.anchor, _RUNS)
    if len(path.parts) == 1 and not owned:
        is_name = not near
    if not is_name:
        raise FileNotFoundError(f"there is no folder {str(source)!r} here{near}; a model of the hub is OWNER/NAME")
    # A folder here may be named like an owner. Without a network, the hub's answer takes minutes.
    if len(path.parts) == 2 and path.parent.is_dir():
        warnings.warn(f"there is no folder {str(source)!r} here{near}: a model of the hub is meant", stacklevel=2)


def holds_work(folder: str | Path) -> bool:
    """Return whether a run folder holds what its run trained: a result, a final model or a finished checkpoint."""
    folder = Path(folder)
    present = any((folder / name).exists() for name in (RESULT, FINAL_MODEL))
    return present or bool(list_checkpoints(folder / CHECKPOINTS))


def check_holds_work(path: str | Path) -> None:
    """Raise a FileNotFoundError for the folder of a run that was stopped before its first checkpoint.

    One that trains now is a LockedError, see `check_at_rest`.
    """
    if find_run(path) == Path(path) and not holds_work(path):
        check_at_rest(path)
        raise FileNotFoundError(
            f"the run in {str(path)!r} was stopped before its first checkpoint, so it has no weights: start it again, "
            "or name another model"
        )


def check_at_rest(path: str | Path) -> None:
    """Raise a LockedError for the folder of a run that trains now: it stands for its last checkpoint, which changes.

    The final model of a run is written once, and a checkpoint that is named is always the same.
    """
    folder = Path(path)
    if find_run(folder) != folder or (folder / FINAL_MODEL).exists() or not is_locked(folder):
        return
    if not holds_work(folder):
        raise LockedError(f"the run in {str(path)!r} is training, and has no checkpoint yet: wait for it to end")
    raise LockedError(
        f"the run in {str(path)!r} is training, so that its last checkpoint will change: wait for it to end, or copy "
        f"the folder, `cp -r {path} {folder}-copy`, and name the copy"
    )


def run_classes(checkpoint: str | Path | None) -> dict[str, int] | None:
    """Return the numbers of the classes of a run by name; None unless the path is in a run folder that names them."""
    if checkpoint is None:
        return None
    run = find_run(checkpoint)
    if run is None or not (run / CLASSES).is_file():
        return None
    return read_classes(run / CLASSES)


def check_same_classes(numbers: Mapping[str, int] | None, checkpoint: str | Path, what: str) -> None:
    """Raise a ValueError if a run numbers its classes in another way than this model does."""
    others = run_classes(checkpoint)
    if numbers is None or others is None or others == numbers:
        return
    names = sorted({*numbers, *others})
    name = next(name for name in names if numbers.get(name) != others.get(name))
    raise ValueError(
        f"{what} {str(checkpoint)!r} answers with other classes: {name!r} is {others.get(name, 'none')} there and "
        f"{numbers.get(name, 'none')} here"
    )


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the finished checkpoints in a folder, newest first."""
    finished = []
    for path in checkpoint_folders(folder):
        # The loop renames what is whole; in one of the trainer, checksums are written last.
        if path.name.startswith("step-") or (path.name.startswith("checkpoint-") and (path / SUMS).is_file()):
            finished.append(path)
    return sorted(finished, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)], reverse=True)


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, finished or not; other files are ignored."""
    return [path for path in folder.glob("*") if _CHECKPOINT.fullmatch(path.name) and path.is_dir()]


def find_weights(path: str | Path) -> Path:
    """Find the file that holds the weights: the path itself, or one in a run folder or a saved model's folder.

    `mmod:NAME` names weights that come with the package. Those of a sharded checkpoint are a folder of files.
    """
    if str(path).startswith(_SHIPPED):
        name = str(path).removeprefix(_SHIPPED)
        one_of("weights of mmod", name, [file.stem for file in sorted(_SHIPPED_FOLDER.glob("*.safetensors"))])
        return _SHIPPED_FOLDER / f"{name}.safetensors"
    path = Path(path)
    found = _weights_in(path)
    if found is not None:
        return found
    check_holds_work(path)
    inside = ""
    if path.is_dir():
        inside = f": the folder holds no {WEIGHTS}"
    elif not path.exists():
        inside = near_paths(path, lambda other: _weights_in(other) is not None)
    raise FileNotFoundError(f"no checkpoint at {str(path)!r}{inside}")


def _weights_in(path: Path) -> Path | None:
    """Return a file, or that in a run folder or a saved model's folder; None where there is none."""
    if path.is_file():
        return path
    folders = [path, path / "model", *list_checkpoints(path / CHECKPOINTS)[:1]]
    # A finished model before checkpoints, and a file before its shards.
    for folder, name in product(folders, (WEIGHTS, _CLIP_WEIGHTS)):
        candidate = folder / name
        if candidate.is_file():
            return candidate
        if any(shards_of(candidate).glob("shard-*.safetensors")):
            return shards_of(candidate)
    return None


def shards_of(file: Path) -> Path:
    """Return the folder of what would be a file if it were not sharded."""
    return file.with_suffix("")


def weight_sums(checkpoint: str) -> list[str]:
    """Return the checksums of the files that hold weights, and of those in their folder that say what these are of.

    Of weights on a hub, which are not here before they are first used, there are none: their name stands for them.
    """
    # A host's folder may have several files, of which the host chooses.
    files = _model_in(Path(checkpoint))
    if not files:
        # Of a name on a hub there is nothing to find.
        with suppress(FileNotFoundError):
            path = find_weights(checkpoint)
            files = [path] if path.is_file() else _model_in(path)
    return [_sha256(file, file.stat().st_mtime_ns) for file in files]


def check_unchanged(sums: Mapping[str, Sequence[str]]) -> None:
    """Raise a ValueError if a path has other weights than it had.

    Args:
        sums: The `weight_sums` that each path had.
    """
    for path, before in sums.items():
        if weight_sums(path) != before:
            raise ValueError(
                f"{path!r} has other weights than at the start, and figures of both say nothing of each other: restore "
                "them to go on, or start anew in another folder, --output FOLDER"
            )


def told_sums(sums: Iterable[str]) -> str:
    """Return checksums as records and messages have them."""
    return " ".join(checksum[:8] for checksum in sums)


def _model_in(folder: Path) -> list[Path]:
    """Return the files of a model in a folder: weights, configs, and what prepares its inputs; none without weights."""
    weights = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    if not weights:
        return []
    described = [folder / name for name in (*_DESCRIPTIONS, *_FURTHER) if (folder / name).is_file()]
    return sorted([*weights, *described])


@functools.lru_cache
def _sha256(file: Path, changed: int) -> str:
    return sha256(file)
