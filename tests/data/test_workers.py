"""What goes wrong in a loader's worker process is raised as it is in the training process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from mmod.data.config import DataConfig, PairsConfig, TextConfig
from mmod.data.corrupt import CorruptDataError, UnusableError, original_errors
from mmod.data.loader import image_stream, pairs_stream, text_stream
from mmod.data.stream import BatchStream
from tests.kit.pair_files import png, tokenizer, write_pairs


def refuse(_: Any) -> Any:
    raise ValueError("0.png: of no use\nin two lines")


def broken_images(folder: Path, workers: int) -> BatchStream:
    path = folder / "val" / "a" / "0.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(0))
    stream = image_stream(DataConfig("folder", str(folder), channels=3, workers=workers))
    stream.reader.transform = refuse  # type: ignore[attr-defined]
    return stream


def broken_pairs(folder: Path, workers: int) -> BatchStream:
    shard = write_pairs(folder / "a.tar", range(3))
    return pairs_stream(PairsConfig(val=str(shard), workers=workers), refuse, tokenizer)


def broken_text(folder: Path, workers: int) -> BatchStream:
    for number in range(80):
        (folder / f"{number}.txt").write_text("words " * 9 + str(number))
    stream = text_stream(TextConfig(f"{folder}/*.txt", length=8, workers=workers))
    stream.reader.read = lambda *_: refuse(0)  # type: ignore[method-assign]
    return stream


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("create", [broken_images, broken_pairs, broken_text])
def test_every_stream_raises_the_error_itself(
    tmp_path: Path, create: Callable[[Path, int], BatchStream], workers: int
) -> None:
    with pytest.raises(ValueError, match=r"\A0\.png: of no use\nin two lines\Z") as caught:
        next(create(tmp_path, workers).batches(0))
    assert type(caught.value) is ValueError


FAILURES: list[tuple[Callable[[], Any], type[Exception]]] = [
    (lambda: b"\xff".decode(), UnicodeError),
    (lambda: json.loads("{"), ValueError),
    (lambda: Path("/nowhere/0.png").read_bytes(), FileNotFoundError),
    (lambda: throw(UnusableError("image not found", "0.png")), ValueError),
    (lambda: throw(CorruptDataError("a.tar [7]: bad: worse")), CorruptDataError),
    (lambda: throw(RuntimeError("plain")), RuntimeError),
    (lambda: throw(AssertionError()), AssertionError),
]


def test_errors_of_every_kind_keep_their_message() -> None:
    # A worker goes on after an error.
    batches = iter(DataLoader(range(len(FAILURES)), num_workers=1, collate_fn=lambda places: FAILURES[places[0]][0]()))  # type: ignore[arg-type]
    for fail, kind in FAILURES:
        with pytest.raises(kind) as there:
            fail()
        with pytest.raises(kind) as here, original_errors():
            next(batches)
        assert type(here.value) is kind
        assert str(here.value) == str(there.value)


def test_what_no_worker_raised_stays_as_it_is() -> None:
    for error in (ValueError("Caught cold"), KeyError(3), StopIteration()):
        with pytest.raises(type(error)) as caught, original_errors():
            raise error
        assert caught.value is error


def throw(error: Exception) -> None:
    raise error
