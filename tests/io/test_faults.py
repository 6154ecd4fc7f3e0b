"""A full disk, a read-only folder and one that is gone: one error with the path, and the last good state is kept."""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmod.analysis.style import new_figure, save_figure
from mmod.io.files import UnwrittenError, open_shard, write_atomically
from mmod.io.store import Store
from mmod.training.engine.checkpoint import Checkpoint, save_checkpoint
from tests.kit.disk import contents, small_disk

State = Callable[[int], object]
"""Writes a state of so many numbers."""


def checkpoints(folder: Path, part: str) -> State:
    """Write checkpoints, of which one part grows."""
    steps = iter(range(100))

    def write(size: int) -> None:
        parts: dict[str, Any] = {name: {"x": torch.ones(2)} for name in ("weights", "average", "training")}
        save_checkpoint(folder, 0, next(steps), Checkpoint(**{**parts, part: {"x": torch.ones(size)}}))

    return write


def results(folder: Path) -> State:
    store = Store(folder / "store.jsonl")
    return lambda size: store.put({"size": size}, {"values": [0.5] * size})


def counts(folder: Path) -> State:
    store = Store(folder / "store.jsonl")
    store.put({"seed": 0}, {"values": [0.5]})
    return lambda size: store.once({"size": size}, lambda: {"values": [0.5] * size})


def report(folder: Path) -> State:
    return lambda size: write_atomically(folder / "result.json", "[1]" * size)


def shard(folder: Path) -> State:
    def write(size: int) -> None:
        with open_shard(folder / "0.tar") as writer:
            writer.write({"__key__": "0", "txt": bytes(8 * size)})

    return write


def picture(folder: Path) -> State:
    def write(size: int) -> None:
        figure = new_figure(4, 4)
        figure.subplots().imshow(np.random.default_rng(size).random((size // 100 + 1, 100)))
        save_figure(figure, folder / "plot.png", dpi=20 if size < 100 else 300)

    return write


# Runs of images, pairs and text write checkpoints; those of chat are in tests/training/chat. All else adds to a store.
STATES = {
    **{f"run, {part}": partial(checkpoints, part=part) for part in ("weights", "average", "training")},
    "results": results,
    "results that are looked for first": counts,
    "result": report,
    "conversion": shard,
    "figure": picture,
}


@contextmanager
def full(folder: Path) -> Iterator[None]:
    with small_disk(20_000):
        yield


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Refuse files that are opened for writing, and folders, as the system does to users who may not write."""
    real_open, real_mkdir = io.open, os.mkdir

    def refuse(path: Any) -> OSError:
        return OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    def opened(path: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if isinstance(path, (str, Path)) and folder in Path(path).parents and set(mode) & set("wax+"):
            raise refuse(path)
        return real_open(path, mode, *arguments, **options)

    def mkdir(path: Any, *arguments: Any, **options: Any) -> None:
        if folder in Path(path).parents:
            raise refuse(path)
        real_mkdir(path, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "open", opened)
        patch.setattr(io, "open", opened)
        patch.setattr(os, "mkdir", mkdir)
        yield


@contextmanager
def gone(folder: Path) -> Iterator[None]:
    kept = folder.with_name("elsewhere")
    folder.rename(kept)
    yield
    assert not folder.exists()
    kept.rename(folder)


FAULTS = {"full": full, "read-only": read_only, "gone": gone}
REASONS = {"full": "MB are free", "read-only": "Read-only file system", "gone": "No such file or directory"}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", STATES)
def test_what_cannot_be_written_is_named_and_leaves_the_last_good_state(tmp_path: Path, name: str, fault: str) -> None:
    folder = tmp_path / "work" / "run"
    folder.mkdir(parents=True)
    write = STATES[name](folder)
    write(3)
    before = contents(folder)
    assert before
    # The parent, as a mount that vanished takes all of it.
    place = folder.parent if fault == "gone" else folder
    with FAULTS[fault](place), pytest.raises(UnwrittenError, match=f"'{folder}/.*' could not be .*{REASONS[fault]}"):
        write(100_000)
    after = contents(folder)
    assert after == before
    shutil.rmtree(folder.parent)
