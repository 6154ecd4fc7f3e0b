"""Unpack the archives of ImageNet-1k (ILSVRC 2012) into folders of classes, as `source: folder` reads them.

    mmod data imagenet downloads data/imagenet
    mmod data imagenet downloads data/imagenet --splits '[val]' --labels synsets.txt

SOURCE is the folder of ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz. A split
appears in OUTPUT when all of it is unpacked; the same command resumes an interrupted one. Members that are no whole
images are counted in report.json and listed in dropped.csv.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, NamedTuple

from mmod.data.convert.packing import DROPPED, REPORT, SETTINGS, run_conversion
from mmod.data.corrupt import CorruptDataError, UnusableError
from mmod.data.readers.images import MAX_BYTES, open_image
from mmod.io.claim import check_same, claim_folder
from mmod.io.files import check_regular, locked, read_json_object, read_text, write_atomically
from mmod.io.progress import progress_bar
from mmod.values import Checked, check_distinct

ARCHIVES = {"train": "ILSVRC2012_img_train.tar", "val": "ILSVRC2012_img_val.tar"}
"""Official name of each split's archive."""
DEVKIT = "ILSVRC2012_devkit_t12.tar.gz"
_TRUTH = "data/ILSVRC2012_validation_ground_truth.txt"
_META = "data/meta.mat"
_SYNSET = re.compile(r"n\d{8}")
_VAL_IMAGE = re.compile(r"ILSVRC2012_val_(\d{8})\.JPEG")
_TRAIN_IMAGE = re.compile(r"n\d{8}_\d+\.JPEG")
# Validation images between two records of progress.
_PART = 1000


@dataclass(frozen=True)
class ImageNetConversion(Checked):
    """Settings of the conversion.

    Args:
        source: Folder of the archives, under their official names.
        output: Folder of the class folders, in `train` and `val`.
        splits: Splits to unpack.
        labels: Classes of the validation images: the devkit's archive, or a text file with one synset a line, in the
            order of the images' numbers. By default the devkit in `source`.
        check: Decode every image to its last byte.
        threads: Threads that decode.
    """

    source: str
    output: str
    splits: tuple[Literal["train", "val"], ...] = ("train", "val")
    labels: str | None = None
    check: bool = True
    threads: Annotated[int, "[1, inf)"] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_distinct(self, "splits")

    def archive(self, split: str) -> Path:
        """Return the path of a split's archive."""
        return Path(self.source) / ARCHIVES[split]


class Member(NamedTuple):
    """An image in an archive: its class, its file name, and its bytes; `fault` says why it is none."""

    synset: str
    name: str
    data: bytes
    fault: UnusableError | None = None


class Part(NamedTuple):
    """What is unpacked between two records of progress: a class, or a run of validation images."""

    name: str
    size: int
    members: Iterator[Member]


def convert_imagenet(config: ImageNetConversion, progress: bool = True) -> dict[str, Any]:
    """Unpack the splits and return the report; an interrupted conversion resumes.

    Raises:
        FileNotFoundError: An archive, or what says the validation images' classes, does not exist.
        FileExistsError: The output holds other files, or a conversion of other archives or with other settings.
        ValueError: Labels that are no synsets, or too few for the images.
        CorruptDataError: An archive ends before its end; what is complete stays, and another download resumes.
    """
    for split in config.splits:
        check_regular(config.archive(split))
    labels = read_labels(config) if "val" in config.splits else []
    output = Path(config.output)
    with locked(output, wait=False):
        claim_folder(output, {"set": "imagenet", "check": config.check}, file=SETTINGS, kind="a conversion")
        for split in config.splits:
            with _reading(config.archive(split)) as archive:
                members = archive.getmembers()
                if split == "train":
                    _unpack(split, _train_parts(archive, members), len(members), "class", config, progress)
                else:
                    _keep_labels(output, labels)
                    parts = _val_parts(archive, members, labels)
                    _unpack(split, parts, -(-len(members) // _PART), "part", config, progress)
        return _write_report(output)


def read_labels(config: ImageNetConversion) -> list[str]:
    """Return the synset of every validation image, in the order of their numbers."""
    path = Path(config.source) / DEVKIT if config.labels is None else Path(config.labels)
    if not path.exists():
        raise FileNotFoundError(
            f"{str(path)!r} does not exist; it says the classes of the validation images: download the devkit, or pass "
            "--labels FILE, one synset a line in the order of the images"
        )
    check_regular(path)
    if path.suffix == ".txt":
        labels = read_text(path).split()
    else:
        labels = _devkit_labels(path)
    wrong = next((label for label in labels if not _SYNSET.fullmatch(label)), None)
    if wrong is not None or not labels:
        raise ValueError(f"{str(path)!r} must hold a synset such as n01440764 for each image, got {wrong!r}")
    return labels


def _devkit_labels(path: Path) -> list[str]:
    """Return the synsets of the devkit: numbers of classes in a text file, and their synsets in a MATLAB file."""
    from scipy.io import loadmat

    with _reading(path) as archive:
        names = {name: member for member, name in product(archive, (_TRUTH, _META)) if member.name.endswith(name)}
        if len(names) < 2:
            raise ValueError(f"{str(path)!r} is no devkit of ILSVRC 2012: it lacks {_TRUTH} or {_META}")
        truth = archive.extractfile(names[_TRUTH]).read().split()  # type: ignore[union-attr]
        meta = archive.extractfile(names[_META]).read()  # type: ignore[union-attr]
    synsets = loadmat(io.BytesIO(meta), squeeze_me=True)["synsets"]
    by_number = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in synsets}
    unknown = next((number for number in truth if int(number) not in by_number), None)
    if unknown is not None:
        raise ValueError(f"{str(path)!r}: its ground truth names class {int(unknown)}, which {_META} lacks")
    return [by_number[int(number)] for number in truth]


@contextmanager
def _reading(path: Path) -> Iterator[tarfile.TarFile]:
    """Open an archive; a CorruptDataError where it cannot be read to its end."""
    try:
        with tarfile.open(path) as archive:
            yield archive
    except (tarfile.TarError, EOFError) as error:
        raise CorruptDataError(
            f"{str(path)!r} cannot be read to its end: {error}. Download it again; the same command resumes"
        ) from error


def _train_parts(archive: tarfile.TarFile, members: Sequence[tarfile.TarInfo]) -> Iterator[Part]:
    """Yield the classes of the training archive, an archive of one archive for each class."""
    for member in members:
        synset, _, suffix = PurePosixPath(member.name).name.partition(".")
        if suffix != "tar" or not _SYNSET.fullmatch(synset) or not member.isfile():
            raise ValueError(f"{member.name!r} is no archive of a class, such as n01440764.tar")
        yield Part(synset, member.size, _class_members(archive, member, synset))


def _class_members(archive: tarfile.TarFile, member: tarfile.TarInfo, synset: str) -> Iterator[Member]:
    try:
        with tarfile.open(fileobj=archive.extractfile(member)) as images:
            for image in images:
                yield _member(images, image, synset, bool(_TRAIN_IMAGE.fullmatch(PurePosixPath(image.name).name)))
    except (tarfile.TarError, EOFError) as error:
        yield Member(synset, f"{synset}.tar", b"", UnusableError("class archive damaged", str(error)))


def _val_parts(archive: tarfile.TarFile, members: Sequence[tarfile.TarInfo], labels: Sequence[str]) -> Iterator[Part]:
    """Yield the images of the validation archive, which has no folders, in runs."""
    for start in range(0, len(members), _PART):
        run = members[start : start + _PART]
        images = (_val_member(archive, image, labels) for image in run)
        yield Part(f"{start // _PART:05d}", sum(image.size for image in run), images)


def _val_member(archive: tarfile.TarFile, image: tarfile.TarInfo, labels: Sequence[str]) -> Member:
    match = _VAL_IMAGE.fullmatch(PurePosixPath(image.name).name)
    if match is None:
        return _member(archive, image, "", False)
    number = int(match[1])
    if not 1 <= number <= len(labels):
        raise ValueError(f"{image.name!r} has no label: there are {len(labels)}, one for each image is needed")
    return _member(archive, image, labels[number - 1], True)


def _member(archive: tarfile.TarFile, image: tarfile.TarInfo, synset: str, is_named: bool) -> Member:
    """Return an image of an archive; one of another name, type or size has a fault and no data."""
    name = PurePosixPath(image.name).name
    if not is_named or not image.isfile():
        return Member(synset, name, b"", UnusableError("not an image of the set", image.name))
    if image.size > MAX_BYTES:
        return Member(synset, name, b"", UnusableError("image too large", f"{image.size} bytes"))
    data = archive.extractfile(image).read()  # type: ignore[union-attr]
    if len(data) < image.size:
        return Member(synset, name, b"", UnusableError("archive ends inside the image", image.name))
    return Member(synset, name, data)


def _unpack(
    split: str, parts: Iterator[Part], total: int, unit: str, config: ImageNetConversion, progress: bool
) -> None:
    """Unpack the parts of a split that are missing, and show the split when it is complete."""
    output = Path(config.output)
    done = _records(output, split)
    hidden = output / f".{split}.partial"
    done.mkdir(parents=True, exist_ok=True)
    target = output / split if (output / split).exists() else hidden
    with (
        ThreadPoolExecutor(config.threads) as pool,
        progress_bar(desc=f"unpack {split}", total=total, unit=unit, shown=progress) as bar,
    ):
        for part in parts:
            record = done / f"{part.name}.json"
            if record.exists():
                check_same(record, {"bytes": read_json_object(record)["bytes"]}, {"bytes": part.size}, kind="a part")
            else:
                images, dropped = _write_part(part, target, config, pool)
                # The record says that the images are on the disk; one flush for all is far faster than one for each.
                os.sync()
                content = {"bytes": part.size, "images": images, "dropped": dropped}
                write_atomically(record, json.dumps(content) + "\n")
            bar.update()
    if target == hidden:
        os.replace(hidden, output / split)


def _write_part(
    part: Part, folder: Path, config: ImageNetConversion, pool: ThreadPoolExecutor
) -> tuple[dict[str, int], list[list[str]]]:
    """Write the images of a part into the folders of their classes; return counts by class, and the dropped members."""
    images: Counter[str] = Counter()
    dropped: list[list[str]] = []

    def check(member: Member) -> UnusableError | None:
        if member.fault is not None or not config.check:
            return member.fault
        try:
            open_image(member.data)
        except ValueError as error:
            return UnusableError("image cannot be decoded", str(error))
        return None

    # In windows, because `pool.map` would read all members into memory.
    while window := list(islice(part.members, 16 * config.threads)):
        for member, fault in zip(window, pool.map(check, window)):
            if fault is not None:
                dropped.append([member.name, fault.reason, fault.details])
                continue
            path = folder / member.synset / member.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(member.data)
            images[member.synset] += 1
    return dict(images), dropped


def _keep_labels(output: Path, labels: Sequence[str]) -> None:
    """Record the labels, or refuse others than those that a split was begun with."""
    record = {"labels": hashlib.sha256("\n".join(labels).encode()).hexdigest()}
    path = _records(output, "val").with_suffix(".json")
    if path.exists():
        check_same(path, read_json_object(path), record, kind="a split")
    else:
        write_atomically(path, json.dumps(record) + "\n")


def _records(output: Path, split: str) -> Path:
    folder = output / ".conversion"
    folder.mkdir(exist_ok=True)
    return folder / split


def _write_report(output: Path) -> dict[str, Any]:
    """Write `report.json` with the counts of each split, and `dropped.csv` with every member that is no image."""
    report: dict[str, Any] = {}
    rows: list[list[str]] = []
    for split in ARCHIVES:
        records = [read_json_object(path) for path in sorted(_records(output, split).glob("*.json"))]
        if not records:
            continue
        images: Counter[str] = Counter()
        dropped = []
        for record in records:
            images.update(record["images"])
            dropped += [[split, *row] for row in record["dropped"]]
        reasons = dict(Counter(reason for _, _, reason, _ in dropped).most_common())
        report[split] = {"classes": len(images), "images": images.total(), "dropped": reasons}
        rows += dropped
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("split", "name", "reason", "details"), *rows])
    write_atomically(output / DROPPED, text.getvalue())
    write_atomically(output / REPORT, json.dumps(report, indent=2) + "\n")
    return report


def main(arguments: Sequence[str], prog: str | None = None) -> None:
    """Convert as a command line says."""
    run_conversion(ImageNetConversion, convert_imagenet, __doc__, arguments, prog)
