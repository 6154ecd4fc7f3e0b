"""Images, pairs and documents streamed by Hugging Face's `datasets`, without a copy on disk."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from PIL import Image

from mmod.data.corrupt import CorruptDataError
from mmod.data.labels import (
    Classes,
    ModelClasses,
    class_number,
    match_classes,
    rank_names,
    read_caption,
    renumbered_class,
)
from mmod.data.readers.images import MAX_BYTES, Target, decode_image
from mmod.io.files import BYTE_ORDER_MARK
from mmod.lazy import name_missing_extra
from mmod.values import brief

PREFIX = "hf-datasets:"
_BUILDERS = ("parquet", "arrow", "json", "csv", "text", "webdataset")
# Samples that each lane shuffles at once, and lanes of each process.
_BUFFER = 1000
_LANES = 8
_READ = 64


def is_streamed(source: object) -> TypeGuard[str]:
    """Return whether a source is `hf-datasets:NAME[@SUBSET]:SPLIT` or `hf-datasets:BUILDER:FILES`."""
    return isinstance(source, str) and source.startswith(PREFIX)


def open_dataset(source: str, needed: tuple[str, ...], **options: object) -> Any:
    """Open a streamed dataset; raise a ValueError if it lacks a column, and a CorruptDataError if it cannot be read."""
    with name_missing_extra():
        from datasets import load_dataset

    name, _, argument = source.removeprefix(PREFIX).partition(":")
    if not name or not argument:
        raise ValueError(
            f"source {source!r} must be {PREFIX}NAME:SPLIT, {PREFIX}NAME@SUBSET:SPLIT, or {PREFIX}BUILDER:FILES with "
            f"one of {', '.join(_BUILDERS)}"
        )
    with _named_errors(source):
        if name in _BUILDERS:
            dataset = load_dataset(name, data_files=argument, split="train", streaming=True, **options)
        else:
            path, _, subset = name.partition("@")
            dataset = load_dataset(path, subset or None, split=argument, streaming=True, **options)
        known = list(dataset.features or ())
        # Formats that state no columns show them in the first sample.
        if not known:
            known = list(next(iter(dataset.take(1)), ()))
    missing = [column for column in needed if column not in known]
    if missing:
        raise ValueError(f"source {source!r} has no column {missing[0]!r}; it has {', '.join(known) or 'no sample'}")
    return dataset


@contextmanager
def _named_errors(source: str) -> Iterator[None]:
    """Name the source in the errors of `datasets`, pyarrow and the drivers of file systems, which are of many types."""
    try:
        yield
    except Exception as error:
        raise CorruptDataError(f"{source} cannot be read: {type(error).__name__}: {error}") from error


def read_column(source: str, column: str) -> Iterator[object]:
    """Yield the values of one column of a streamed dataset, in one pass over its files."""
    options = {}
    if source.startswith(f"{PREFIX}parquet:"):
        # Of Parquet one column can be read alone.
        options = {"columns": [column]}
    dataset = open_dataset(source, (column,), **options).select_columns([column])
    with _named_errors(source):
        for batch in dataset.iter(_BUFFER):
            yield from batch[column]


def count_samples(dataset: Any, source: str, column: str) -> int:
    """Return the number of samples that the dataset states, or count one column."""
    # A count that the dataset states costs nothing; without it all rows are read once.
    splits = dataset.info.splits or {}
    if dataset.split in splits and splits[dataset.split].num_examples:
        return int(splits[dataset.split].num_examples)
    return sum(1 for _ in read_column(source, column))


def _number_classes(
    dataset: Any, source: str, column: str, training: str, model: ModelClasses | None
) -> tuple[Classes | None, dict[Any, int]]:
    """Return the classes of a column if they have names, and the number of each label with a name.

    Raises:
        ValueError: Labels are texts whose set is not known, or neither numbers nor texts; or names of folders.
    """
    names = getattr((dataset.features or {}).get(column), "names", None)
    reader = source.removeprefix(PREFIX).partition(":")[0]
    if names:
        if dataset.info.builder_name == "imagefolder" and Path(reader).is_dir():
            raise ValueError(
                f"{reader!r} is a folder of class folders, and `datasets` takes the innermost folders for classes: "
                "read it by data.source: folder"
            )
        raw = {name: number for number, name in enumerate(names)}
        classes = match_classes(Classes(raw, len(raw)), names, model, source)
        return classes, {number: classes.numbers[name] for name, number in raw.items()}
    label = _first_value(dataset, source, column)
    if not isinstance(label, str):
        if isinstance(label, (list, tuple, dict)):
            raise _wrong_column(label, source, column, "one class for each image")
        return None, {}
    if model is not None and model.required:
        return Classes(model.numbers, given=True, is_plain=False), dict(model.numbers)
    # Only files are read whole for the sake of their names: a set of the hub may be of any size.
    if reader not in _BUILDERS:
        raise ValueError(
            f"the column {column!r} of {source!r} holds texts such as {brief(label)}, whose numbers need all: "
            "list the classes in a file, data.classes"
        )
    own = Classes(rank_names(_texts(training, column)), None)
    classes = match_classes(own, own.numbers.keys(), model, source)
    return classes, dict(classes.numbers)


@functools.lru_cache(maxsize=8)
def _texts(source: str, column: str) -> frozenset[str]:
    """Return the distinct texts of a column that are not empty."""
    return frozenset(text for text in read_column(source, column) if text and isinstance(text, str))


def _first_value(dataset: Any, source: str, column: str) -> object:
    """Return the first value of a column that is not missing, among some rows."""
    with _named_errors(source):
        rows = dataset.select_columns([column]).take(_READ)
        return next((row[column] for row in rows if row[column] not in (None, "")), None)


def _wrong_column(value: object, source: str, column: str, wanted: str) -> ValueError:
    return ValueError(
        f"the column {column!r} of {source!r} holds values such as {brief(value)}, and needs {wanted}: name another "
        "column by data.columns"
    )


class StreamedSource:
    """Samples of a streamed dataset, by an index that is cheap to read in ascending order.

    In training the files are dealt out to lanes. Each lane shuffles its files and its samples by seed and epoch. Index
    `epoch * N + lane * (N // lanes) + position` is a sample of a lane; a lane that is shorter begins again. A batch is
    read from one lane, so that a process or worker reads its lanes alone, and skips to a position without decoding
    images. Without a seed, index is the position in the dataset.

    Args:
        columns: Names of the columns of images and of classes or captions.
        seed: Of the order of training samples; None keeps that of the dataset.
        training: The source whose names number the classes, where labels are texts; None for captions.
        model: The classes of the model that reads the images, if they are known by name.
    """

    def __init__(
        self,
        source: str,
        columns: tuple[str, str],
        limit: int | None = None,
        seed: int | None = None,
        world: int = 1,
        training: str | None = None,
        model: ModelClasses | None = None,
    ) -> None:
        dataset = open_dataset(source, columns)
        self.classes: Classes | None = None
        if training is None:
            caption = _first_value(dataset, source, columns[1])
            if caption is not None and not isinstance(caption, str):
                raise _wrong_column(caption, source, columns[1], "one caption for each image")
            self._parse: Callable[[object], Target] = read_caption
        else:
            self.classes, numbers = _number_classes(dataset, source, columns[1], training, model)
            self._parse = partial(_read_label, numbers=numbers)
        from datasets import Image as ImageFeature

        # Files of other writers state no type, and hold the encoded bytes.
        self._dataset = dataset.select_columns(list(columns)).cast_column(columns[0], ImageFeature(decode=False))
        self._source = source
        self._columns = columns
        self._seed = seed
        self._stated = count_samples(dataset, source, columns[1])
        self._count = self._stated
        if limit is not None:
            self._count = min(self._stated, limit)
        # No more than samples, of which a limit may leave few: a lane without any could not be read.
        lanes = min(dataset.num_shards, _LANES * world, self._count)
        # A multiple of the processes, where there are as many files, so that no two read the same one.
        if lanes >= world:
            lanes -= lanes % world
        self.lanes = 0 if seed is None else lanes
        self._open: dict[tuple[int, int], tuple[int, Iterator[tuple[object, object]]]] = {}

    def __len__(self) -> int:
        return self._count

    def read(self, index: int, mode: str) -> tuple[Image.Image, Target]:
        """Read one sample; see `ImageSource.read`."""
        image, target = self._raw(*self._position(index))
        try:
            target = self._parse(target)
        except ValueError as error:
            raise ValueError(f"the column {self._columns[1]!r}: {error}") from error
        if image is None:
            raise ValueError(f"the column {self._columns[0]!r} holds no image")
        data = image["bytes"]
        if data is None:
            data = _read_file(image["path"])
        return decode_image(data, mode), target

    def place(self, index: int) -> tuple[str, str]:
        """Return where a sample is; see `ImageSource.place`."""
        epoch, lane, position = self._position(index)
        if not self.lanes:
            return self._source, str(position)
        return self._source, f"lane {lane} of epoch {epoch}, {position}"

    def _position(self, index: int) -> tuple[int, int, int]:
        """Return epoch, lane and position in the lane of an index."""
        epoch, position = divmod(index, self._count)
        lane = 0
        if self.lanes:
            # Each lane has equally many samples.
            lane, position = divmod(position, self._count // self.lanes)
            # The samples left over by equal lanes are asked for where one replaces an unreadable sample.
            lane %= self.lanes
        return epoch, lane, position

    # Open iterators hold files and threads, which no worker process can take over.
    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_open": {}}

    def _raw(self, epoch: int, lane: int, position: int) -> tuple[Any, object]:
        """Return a sample without decoding it; a lane that is further already is opened again."""
        following, samples = self._open.get((epoch, lane), (position + 1, iter(())))
        # Asked for a sample before its position: iterators only move forward.
        if following > position:
            # Iterators of other epochs are closed with it.
            self._open = {key: state for key, state in self._open.items() if key[0] == epoch}
            following = 0
            samples = self._samples(epoch, lane)
        sample = next(islice(samples, position - following, None))
        self._open[epoch, lane] = position + 1, samples
        return sample

    def _samples(self, epoch: int, lane: int) -> Iterator[tuple[object, object]]:
        dataset = self._dataset
        if self.lanes:
            # The lanes of a process are other files in each epoch.
            rng = np.random.default_rng([self._seed or 0, epoch])
            # A permutation by epoch decides which part of the files a lane reads.
            number = int(rng.permutation(self.lanes)[lane])
            dataset = dataset.shard(self.lanes, number)
            # One file at a time: to mix several, `datasets` reads them in threads and waits five seconds for their end.
            dataset = dataset.shuffle(
                seed=int(rng.integers(1 << 31)) + number, buffer_size=_BUFFER, max_buffer_input_shards=1
            )
        with _named_errors(self._source):
            # A lane that is shorter than its share begins again.
            while True:
                is_empty = True
                # Not `iter(dataset)`, which would deal the files out to the workers of the loader once more.
                for batch in dataset.iter(_READ):
                    is_empty = False
                    yield from zip(*(batch[column] for column in self._columns))
                if is_empty:
                    raise ValueError(f"file {lane} holds no sample")
                if not self.lanes:
                    # An evaluation that began again would count its first samples twice.
                    raise ValueError(f"it holds fewer samples than the {self._stated} that it states")


def _read_label(value: object, numbers: Mapping[Any, int]) -> int:
    """Return the class of a label; `numbers` are those of all labels with a name, empty if labels are numbers."""
    if not numbers or isinstance(value, str):
        return class_number(value, numbers or None)
    return renumbered_class(value, numbers)


def _read_file(path: str) -> bytes:
    import fsspec

    with fsspec.open(path, "rb") as file:
        data: bytes = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"{path} has more than {MAX_BYTES} bytes")
    return data


def documents(source: str, column: str) -> Iterator[bytes]:
    """Yield the texts of a streamed dataset in UTF-8."""
    for text in read_column(source, column):
        if text is not None and not isinstance(text, str):
            raise ValueError(f"the column {column!r} of {source!r} holds {brief(text)}, which is no text")
        if text:
            yield text.removeprefix(BYTE_ORDER_MARK).encode()
