"""Tables become shards: every row is a sample or is reported, and a stopped conversion goes on."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import mmod.data.convert.pairs as script
from mmod.data.convert.pairs import PairsConversion, convert_pairs
from mmod.data.corrupt import CorruptDataError, CorruptReport
from mmod.data.readers.shards import CAPTION, ShardSource
from tests.kit.deep_images import DEEP, RAMP, UNSCALED


def save(path: Path, size: tuple[int, int], colour: int = 100, **options: Any) -> None:
    Image.new("RGB", size, (colour, 0, 0)).save(path, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    images = tmp_path / "images"
    images.mkdir()
    for number in range(7):
        save(images / f"{number}.jpg", (40, 30), number)
    save(images / "large.png", (200, 100))
    save(images / "old.bmp", (20, 20))
    Image.new("RGBA", (20, 20), (1, 2, 3, 4)).save(images / "clear.gif")
    (images / "cut.jpg").write_bytes((images / "0.jpg").read_bytes()[:300])
    (images / "text.jpg").write_text("no image")
    return tmp_path


ROWS = [(f"{number}.jpg", f' number {number}, said "{number}"\nover two lines ') for number in range(7)]
DROPS = [
    ("cut.jpg", "a", "image cannot be decoded"),
    ("text.jpg", "a", "image cannot be decoded"),
    ("none.jpg", "a", "image not found"),
    ("", "a", "no image"),
    ("1.jpg", "  ", "no caption"),
]


def write_csv(path: Path, rows: list[tuple[str, ...]]) -> Path:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerow(("image", "caption"))
        writer.writerows(row[:2] for row in rows)
    return path


def config(source: Path, **changes: Any) -> PairsConversion:
    options = {"images": str(source.parent / "images"), "shard_size": 6, "on_corrupt": "skip", **changes}
    return PairsConversion(str(source), str(source.parent / "shards"), **options)


def samples(folder: Path) -> list[dict[str, bytes]]:
    members_of_samples: dict[str, dict[str, bytes]] = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, extension = member.name.partition(".")
                members_of_samples.setdefault(key, {})[extension] = tar.extractfile(member).read()  # type: ignore[union-attr]
    return [{"key": key.encode(), **members} for key, members in members_of_samples.items()]


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_every_row_is_a_sample_or_reported_with_its_reason(folder: Path, suffix: str) -> None:
    rows = [*ROWS[:4], *DROPS, *ROWS[4:], ("large.png", "big"), ("old.bmp", "old"), ("clear.gif", "clear")]
    report = convert_pairs(config(write_csv(folder / f"t.{suffix}", rows), resize=50), progress=False)
    assert (report["items"], report["samples"]) == (15, 10)
    assert report["dropped"] == dict(
        sorted(
            {"image cannot be decoded": 2, "image not found": 1}.items() | {"no image": 1, "no caption": 1}.items(),
            key=lambda item: -item[1],
        )
    )
    packed = samples(folder / "shards")
    assert [json.loads(one["json"])["row"] for one in packed] == [0, 1, 2, 3, *range(9, 15)]
    assert packed[0]["jpg"] == (folder / "images/0.jpg").read_bytes()
    assert packed[0]["txt"].decode() == ROWS[0][1]
    large = next(one for one in packed if one["txt"] == b"big")
    assert Image.open(io.BytesIO(large["jpg"])).size == (100, 50)
    record = json.loads(large["json"])
    assert (record["width"], record["height"], record["original_width"], record["original_height"]) == (
        100,
        50,
        200,
        100,
    )
    assert all("jpg" in one for one in packed[-2:])
    assert json.loads((folder / "shards/sizes.json").read_text()) == report["shards"]
    assert sum(report["shards"].values()) == 10
    with open(folder / "shards/dropped.csv") as file:
        dropped = [(row["name"], row["reason"]) for row in csv.DictReader(file)]
    assert dropped == [(image, reason) for image, _, reason in DROPS]
    assert json.loads((folder / "shards/report.json").read_text()) == report


def test_coco_annotations_give_a_pair_each(folder: Path) -> None:
    images = [{"id": 10 + number, "file_name": f"{number}.jpg"} for number in range(2)]
    annotations = [{"image_id": 10, "caption": "one"}, {"image_id": 11, "caption": "two"}]
    annotations += [{"image_id": 10, "caption": "three"}, {"image_id": 99, "caption": "lost"}]
    (folder / "t.json").write_text(json.dumps({"images": images, "annotations": annotations}))
    report = convert_pairs(config(folder / "t.json"), progress=False)
    assert [one["txt"] for one in samples(folder / "shards")] == [b"one", b"two", b"three"]
    assert report["dropped"] == {"no image": 1}


def test_parquet_with_paths_and_with_images_inside(folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = (folder / "images/3.jpg").read_bytes()
    for name, values in (
        ("paths", ["3.jpg", None]),
        ("bytes", [data, None]),
        ("records", [{"bytes": data, "path": None}, {"bytes": None, "path": None}]),
    ):
        pq.write_table(pa.table({"image": values, "caption": ["three", "none"]}), folder / "t.parquet")
        settings = dataclasses.replace(config(folder / "t.parquet"), output=str(folder / name))
        report = convert_pairs(settings, progress=False)
        assert report["dropped"] == {"no image": 1}
        assert [one["jpg"] for one in samples(folder / name)] == [data]


def test_an_interrupted_conversion_goes_on_and_ends_equal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_csv(folder / "t.csv", [*ROWS, *DROPS, *ROWS])
    uninterrupted = dataclasses.replace(config(source), output=str(folder / "whole"))
    convert_pairs(uninterrupted, progress=False)
    converted: list[int] = []
    real = script._convert

    def dying(number: int, *arguments: Any) -> Any:
        converted.append(number)
        if number == 14:
            raise KeyboardInterrupt
        return real(number, *arguments)

    monkeypatch.setattr(script, "_convert", dying)
    with pytest.raises(KeyboardInterrupt):
        convert_pairs(config(source), progress=False)
    assert not (folder / "shards/00002.tar").exists()
    converted.clear()

    def counting(number: int, *arguments: Any) -> Any:
        converted.append(number)
        return real(number, *arguments)

    monkeypatch.setattr(script, "_convert", counting)
    report = convert_pairs(config(source), progress=False)
    assert min(converted) == 12
    assert report["samples"] == 14
    for path in (folder / "whole").iterdir():
        if path.suffix in (".tar", ".csv"):
            assert path.read_bytes() == (folder / "shards" / path.name).read_bytes()
    converted.clear()
    assert convert_pairs(config(source), progress=False) == report
    assert not converted


def test_rows_that_cannot_be_used_are_left_out_only_where_the_user_says_so(folder: Path) -> None:
    strict = config(write_csv(folder / "t.csv", [*ROWS, *DROPS]), on_corrupt="raise")
    with pytest.raises(
        CorruptDataError,
        match=rf"{len(DROPS)} of .* the first, counted from 0, is item {len(ROWS)}, .*on_corrupt='skip'",
    ):
        convert_pairs(strict, progress=False)
    # Where all fail, the folder is what is wrong.
    (folder / "t").mkdir()
    (folder / "t" / "other.txt").touch()
    elsewhere = dataclasses.replace(strict, images=str(folder / "t"), output=str(folder / "none"))
    with pytest.raises(CorruptDataError, match=r"used: image not found \(\d+\), .*are looked for in '.*/t': name the"):
        convert_pairs(elsewhere, progress=False)
    assert not [*(folder / "shards").glob("[!.]*.tar"), *(folder / "shards").glob("sizes.json")]
    assert len((folder / "shards/dropped.csv").read_text().splitlines()) > len(DROPS)
    with pytest.MonkeyPatch.context() as patch:
        # What was converted stays.
        patch.setattr(script, "_convert", None)
        report = convert_pairs(dataclasses.replace(strict, on_corrupt="skip"), progress=False)
    assert report["samples"] == len(ROWS) == len(samples(folder / "shards"))


def test_nothing_of_the_users_is_overwritten(folder: Path) -> None:
    source = write_csv(folder / "t.csv", ROWS)
    convert_pairs(config(source), progress=False)
    with pytest.raises(FileExistsError, match=r"resize: None there, 9 now"):
        convert_pairs(config(source, resize=9), progress=False)
    with pytest.raises(FileExistsError, match=r"holds files but no conversion\.json"):
        convert_pairs(dataclasses.replace(config(source), output=str(folder / "images")), progress=False)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "image,text\na,b\n", r"no column 'caption' \(caption_column\); it has image, text"),
        ("t.csv", "image,caption\n", "holds no row"),
        ("t.json", "[]", "needs lists `images` and `annotations`"),
        ("t.xlsx", "", r"must end in \.csv"),
    ],
)
def test_wrong_tables(folder: Path, name: str, content: str, message: str) -> None:
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        convert_pairs(config(folder / name), progress=False)
    assert not (folder / "shards").exists()


def test_conversion_of_pairs_leaves_no_deep_image_to_other_readers(tmp_path: Path) -> None:
    for number, data in enumerate([*DEEP.values(), *UNSCALED.values()]):
        (tmp_path / f"{number}.x").write_bytes(data)
    rows = "".join(f"{number}.x,number {number}\n" for number in range(len(DEEP) + len(UNSCALED)))
    (tmp_path / "t.csv").write_text(f"image,caption\n{rows}")
    report = convert_pairs(PairsConversion(f"{tmp_path}/t.csv", f"{tmp_path}/out", on_corrupt="skip"), progress=False)
    assert report["dropped"] == {"image cannot be decoded": len(UNSCALED)}
    source = ShardSource(f"{tmp_path}/out/*.tar", CorruptReport(), target=CAPTION)
    for index in range(len(DEEP)):
        image, caption = source.read(index, "L")
        assert caption == f"number {index}"
        assert np.abs(np.asarray(image).astype(int) - (RAMP >> 8)).max() <= 2


def test_only_images_of_the_folder_are_packed(folder: Path) -> None:
    save(folder / "outside.png", (20, 20))
    (folder / "images" / "link.png").symlink_to(folder / "outside.png")
    rows = [(f"{folder}/images/0.jpg", "a"), ("../images/1.jpg", "a"), ("link.png", "a"), ("../outside.png", "a")]
    source = write_csv(folder / "t.csv", [*rows, (f"{folder}/outside.png", "a")])
    report = convert_pairs(config(source), progress=False)
    assert (report["samples"], report["dropped"]) == (2, {"image outside the folder": 3})
    linked = dataclasses.replace(config(source), output=str(folder / "linked"), follow_links=True)
    assert convert_pairs(linked, progress=False)["dropped"] == {"image outside the folder": 2}


def test_a_quotation_mark_that_is_not_closed_is_a_fault(folder: Path) -> None:
    table = folder / "t.tsv"
    rows = ["image\tcaption", "0.jpg\tfirst", '1.jpg\t"Sunset over the bay', "2.jpg\ta dog", '3.jpg\tthe best" boat']
    table.write_text("\n".join([*rows, "0.jpg\tlast"]) + "\n")
    report = convert_pairs(config(table), progress=False)
    assert report["samples"] == 2
    assert report["dropped"] == {"invalid row": 1}
