"""Streams of Hugging Face's `datasets`: the order is a function of seed and epoch, and resumes at any batch."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from mmod.data.config import DataConfig, PairsConfig, TextConfig
from mmod.data.corrupt import CorruptDataError
from mmod.data.loader import image_stream, pairs_stream, read_corpus, text_stream
from mmod.data.readers import hf_datasets
from mmod.data.stream import BatchStream
from tests.kit.shards import png

FILES, ROWS = 5, 20
OPTIONS = {"image_size": 8, "crop_pct": 1.0, "batch_size": 4, "mean": (0.0,), "std": (1.0,)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five files of twenty samples, whose grey value is their class."""
    path = tmp_path_factory.mktemp("parquet")
    for number in range(FILES):
        values = range(number * ROWS, (number + 1) * ROWS)
        rows = [
            {"image": {"bytes": png(value), "path": None}, "label": value, "text": f"number {value}"}
            for value in values
        ]
        pq.write_table(pa.Table.from_pylist(rows), path / f"train-{number}.parquet")
    return path


def config(folder: Path, **changes: object) -> DataConfig:
    source = f"hf-datasets:parquet:{folder}/{{split}}-*.parquet"
    return DataConfig(**{"source": source, "val_split": "train", **OPTIONS, **changes})


def classes(stream: BatchStream, epoch: int = 0, start: int = 0) -> list[list[int]]:
    batches = []
    for images, labels in stream.batches(epoch, start):
        assert torch.equal((images[:, 0, 0, 0] * 255).round().long(), labels)
        batches.append(labels.tolist())
    return batches


def flat(batches: list[list[int]]) -> list[int]:
    return [label for batch in batches for label in batch]


def test_training_is_a_function_of_seed_and_epoch_and_resumes_at_any_batch(folder: Path) -> None:
    stream = image_stream(config(folder), seed=0)
    first, second = classes(stream), classes(stream, epoch=1)
    assert sorted(flat(first)) == sorted(flat(second)) == list(range(100))
    assert first != second
    assert first != classes(image_stream(config(folder), seed=1))
    assert classes(stream) == first
    again = image_stream(config(folder, workers=2), seed=0)
    assert classes(again, epoch=1, start=7) == second[7:]


def test_processes_read_other_files_and_equally_many_batches(folder: Path) -> None:
    streams = [image_stream(config(folder), 0, rank, 2) for rank in range(2)]
    batches = [classes(stream) for stream in streams]
    assert [len(labels) for labels in batches] == [streams[0].steps_per_epoch] * 2 == [12, 12]
    files = [{value // ROWS for value in flat(labels)} for labels in batches]
    assert not files[0] & files[1]


def test_more_processes_than_files_share_one(folder: Path) -> None:
    one = f"hf-datasets:parquet:{folder}/train-0.parquet"
    streams = [image_stream(config(folder, source=one), 0, rank, 2) for rank in range(2)]
    drawn = [flat(classes(stream)) for stream in streams]
    assert not set(drawn[0]) & set(drawn[1])
    assert len(drawn[0]) == len(drawn[1]) == 8


def test_evaluation_reads_every_sample_once_in_order(folder: Path) -> None:
    streams = [image_stream(config(folder, workers=2), None, rank, 2) for rank in range(2)]
    assert [flat(classes(stream)) for stream in streams] == [list(range(rank, 100, 2)) for rank in range(2)]
    limited = image_stream(config(folder, val_limit=10))
    assert flat(classes(limited)) == flat(classes(limited)) == list(range(10))


def test_a_limit_below_the_number_of_files_leaves_one_sample_to_a_lane(folder: Path) -> None:
    stream = image_stream(config(folder, train_limit=3, batch_size=1, crop_pct=0.9), seed=0)
    assert [len(labels) for _, labels in stream.batches(0)] == [1, 1, 1]


@pytest.mark.parametrize("limit", [None, 110])
def test_an_evaluation_of_fewer_samples_than_are_stated_ends_with_an_error(
    folder: Path, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_datasets, "count_samples", lambda *_: 120)
    with pytest.raises(CorruptDataError, match="holds fewer samples than the 120 that it states"):
        classes(image_stream(config(folder, val_limit=limit)))


def test_corrupt_samples_are_counted_and_files_stop(folder: Path, tmp_path: Path) -> None:
    rows = [{"image": {"bytes": png(value), "path": None}, "label": value} for value in range(8)]
    rows[5] = {"image": {"bytes": b"no image", "path": None}, "label": 5}
    rows[6] = {"image": None, "label": 6}
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train-0.parquet")
    with pytest.raises(CorruptDataError, match=r"hf-datasets:parquet:.* \[5\]: image of 8 bytes cannot be decoded"):
        classes(image_stream(config(tmp_path)))
    stream = image_stream(config(tmp_path, on_corrupt="skip"))
    assert flat(classes(stream)) == [0, 1, 2, 3, 4, 7]
    assert sum(stream.report.counts.values()) == 2
    training = image_stream(config(tmp_path, on_corrupt="skip"), seed=0)
    assert [len(batch) for batch in classes(training)] == [4, 4]
    data = (folder / "train-0.parquet").read_bytes()
    (tmp_path / "train-1.parquet").write_bytes(data[:200] + bytes(2000) + data[2200:])
    with pytest.raises(CorruptDataError, match=r"hf-datasets:parquet:.* cannot be read: \w+: .*"):
        classes(image_stream(config(tmp_path, on_corrupt="skip"), seed=0))


def test_pairs_and_text(folder: Path) -> None:
    source = f"hf-datasets:parquet:{folder}/train-*.parquet"
    pairs = PairsConfig(source, val=source, batch_size=5)

    def tokenizer(captions: list[str]) -> torch.Tensor:
        return torch.tensor([int(caption.split()[1]) for caption in captions])

    def transform(image: Image.Image) -> torch.Tensor:
        return torch.tensor(image.getpixel((0, 0)))

    for seed in (None, 0):
        images, tokens = next(pairs_stream(pairs, transform, tokenizer, seed).batches(0))
        assert torch.equal(images[:, 0], tokens)
    documents = [text for split in ("train", "val", "test") for text in bytes(read_corpus(source, split)).split(b"\0")]
    assert sorted(filter(None, documents)) == sorted(b"number %d" % value for value in range(100))
    assert text_stream(TextConfig(source, length=16, batch_size=4), seed=0).steps_per_epoch > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"columns": ("image", "name")}, "has no column 'name'; it has image, label, text"),
        ({"source": "hf-datasets:parquet"}, "must be hf-datasets:NAME:SPLIT"),
        ({"source": "hf-datasets:parquet:nothing-*.parquet"}, "hf-datasets:parquet:nothing-.* cannot be read: "),
        ({"batch_size": 30}, "100 samples in 5 lanes, fewer than a batch in each: set a smaller data.batch_size"),
    ],
)
def test_wrong_sources_are_named(folder: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        image_stream(config(folder, **changes), seed=0)


def test_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install \"mmod\[datasets\]\""):
        image_stream(config(folder), seed=0)


def write_rows(folder: Path, split: str, column: str, values: list[object], features: object = None) -> str:
    """Write a file of images with these values in a column, and return the pattern of its source."""
    rows = [{"image": {"bytes": png(20 * number), "path": None}, column: value} for number, value in enumerate(values)]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table if features is None else table.cast(features), folder / f"{split}.parquet")
    return f"hf-datasets:parquet:{folder}/{{split}}.parquet"


def labels_of(stream: BatchStream) -> list[int]:
    return [int(label) for _, labels in stream.batches(0) for label in labels]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 3]),
        ([0.0, 1.0, 2.0, 3.0], [0, 1, 2, 3]),
        ([False, True], [0, 1]),
        ([0, -1, 2], [0, 2]),
        ([0, None, 2], [0, 2]),
        ([0.5, 1.0], [1]),
        ([None, "cat", ""], [0]),
    ],
)
def test_each_label_is_a_class_or_a_fault(tmp_path: Path, values: list[object], expected: list[int]) -> None:
    source = write_rows(tmp_path, "val", "label", values)
    options = {"source": source, "val_split": "val", "train_split": "val"}
    stream = image_stream(config(tmp_path, **options, on_corrupt="skip"))
    assert labels_of(stream) == expected
    assert len(stream.report.faults) == len(values) - len(expected)
    if len(values) > len(expected):
        with pytest.raises(CorruptDataError, match=r"the column 'label': .* is no(t the name of a)? class"):
            labels_of(image_stream(config(tmp_path, **options)))


def test_texts_are_numbered_by_the_names_of_the_training_split(tmp_path: Path) -> None:
    source = write_rows(tmp_path, "train", "label", ["10", "9", "dog", "cat", "9"])
    write_rows(tmp_path, "val", "label", ["dog", "10"])
    stream = image_stream(config(tmp_path, source=source, val_split="val"))
    assert labels_of(stream) == [3, 1]
    assert stream.classes is not None
    assert stream.classes.numbers == {"9": 0, "10": 1, "cat": 2, "dog": 3}
    (tmp_path / "names.txt").write_text("dog\n10")
    named = config(tmp_path, source=source, val_split="val", classes=str(tmp_path / "names.txt"))
    assert labels_of(image_stream(named)) == [0, 1]
    write_rows(tmp_path, "val", "label", ["dog", "bird"])
    with pytest.raises(CorruptDataError, match="'bird' is not the name of a class; known are 9, 10, cat, dog"):
        labels_of(image_stream(config(tmp_path, source=source, val_split="val")))


def test_texts_of_a_published_set_need_a_file_of_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    write_rows(tmp_path, "val", "label", ["dog", "cat"])
    files = datasets.load_dataset("parquet", data_files=f"{tmp_path}/val.parquet", split="train", streaming=True)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: files)
    options = {"source": "hf-datasets:user/set:val", "val_split": "val", "train_split": "val"}
    with pytest.raises(ValueError, match=r"column 'label' of .* holds texts such as 'dog'.*data\.classes"):
        image_stream(config(tmp_path, **options))
    (tmp_path / "names.txt").write_text("sea\ncat\ndog")
    assert labels_of(image_stream(config(tmp_path, **options, classes=str(tmp_path / "names.txt")))) == [2, 1]


def test_names_of_a_class_label_are_matched(tmp_path: Path) -> None:
    import datasets

    names = ["cat", "dog", "sea"]
    features = datasets.Features({"image": datasets.Image(decode=False), "label": datasets.ClassLabel(names=names)})
    source = write_rows(tmp_path, "val", "label", [2, 0, -1], features.arrow_schema)
    (tmp_path / "names.txt").write_text("sea\nbird\ndog\ncat")
    options = {"source": source, "val_split": "val", "train_split": "val", "on_corrupt": "skip"}
    plain = image_stream(config(tmp_path, **options))
    assert labels_of(plain) == [2, 0]
    assert plain.classes is not None
    with pytest.raises(ValueError, match="names 3 classes, cat, dog, sea, and the model has 4 outputs"):
        plain.classes.check_ranks(4)
    stream = image_stream(config(tmp_path, **options, classes=str(tmp_path / "names.txt")))
    assert labels_of(stream) == [0, 3]
    assert str(stream.classes) == "3 of 4 classes, matched by name"


def test_class_folders_have_one_reader(tmp_path: Path) -> None:
    for name in ("cat/indoor", "cat/outdoor", "dog/indoor", "dog/outdoor"):
        (tmp_path / "train" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "train" / name / "0.png")
    with pytest.raises(
        ValueError, match=rf"'{tmp_path}' is a folder of class folders, .* read it by data.source: folder"
    ):
        image_stream(config(tmp_path, source=f"hf-datasets:{tmp_path}:train"), seed=0)


def test_columns_of_another_kind_are_named(tmp_path: Path) -> None:
    source = write_rows(tmp_path, "val", "label", [[0], [1, 2]])
    with pytest.raises(ValueError, match=r"the column 'label' of .* holds values such as \[0\], and needs one class"):
        image_stream(config(tmp_path, source=source, val_split="val"))
    for values in ([["a", "b"]], [{"raw": "a"}], [3]):
        source = write_rows(tmp_path, "val", "text", values).replace("{split}", "val")
        with pytest.raises(ValueError, match=r"the column 'text' of .* and needs one caption"):
            pairs_stream(PairsConfig(val=source), torch.tensor, torch.tensor)
    with pytest.raises(ValueError, match=r"the column 'text' of .* holds 3, which is no text"):
        read_corpus(source, "train")


@pytest.mark.parametrize("blank", ["", "  ", None])
def test_a_blank_caption_is_a_fault_as_in_shards(tmp_path: Path, blank: str | None) -> None:
    source = write_rows(tmp_path, "val", "text", ["a", blank, "c"]).replace("{split}", "val")

    def stream(**options: object) -> BatchStream:
        pairs = PairsConfig(train=source, val=source, batch_size=1, **options)
        return pairs_stream(pairs, lambda image: torch.zeros(1), lambda texts: torch.tensor([ord(t) for t in texts]))

    with pytest.raises(CorruptDataError, match="the column 'text': no caption"):
        labels_of(stream())
    # A batch without a readable pair is left out.
    skipping = stream(on_corrupt="skip")
    assert labels_of(skipping) == [ord("a"), ord("c")]
    assert len(skipping.report.faults) == 1
