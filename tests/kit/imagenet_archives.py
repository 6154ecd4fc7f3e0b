"""ImageNet's archives in small: training images of three classes, validation images without classes, the devkit."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy.io import savemat
from torchvision.datasets.imagenet import ARCHIVE_META

DEVKIT = ARCHIVE_META["devkit"][0]
SYNSETS = ("n00000007", "n00000003", "n00000005")
# Numbers of classes of the validation images, from 1.
TRUTH = (2, 1, 3, 3, 2, 1, 2)


def jpeg(value: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (20, 16), (value, 255 - value, 9)).save(file, format="JPEG")
    return file.getvalue()


def tar_of(members: dict[str, bytes], mode: str = "w") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode=mode) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


TRAIN = {
    synset: {f"{synset}_{number}.JPEG": jpeg(50 * place + number) for number in range(4 + place)}
    for place, synset in enumerate(SYNSETS)
}
VAL = {f"ILSVRC2012_val_{number:08d}.JPEG": jpeg(200 + number) for number in range(1, len(TRUTH) + 1)}


def devkit() -> bytes:
    synsets = np.array(
        [(number, synset, f"word {number}", "", 0) for number, synset in enumerate((*SYNSETS, "n00000009"), 1)],
        dtype=[("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("gloss", "O"), ("num_children", "O")],
    )
    meta = io.BytesIO()
    savemat(meta, {"synsets": synsets})
    folder = "ILSVRC2012_devkit_t12/data"
    truth = "\n".join(map(str, TRUTH)).encode()
    members = {f"{folder}/meta.mat": meta.getvalue(), f"{folder}/ILSVRC2012_validation_ground_truth.txt": truth}
    return tar_of(members, "w:gz")


def archive(split: str) -> str:
    """Return the official name of a split's archive."""
    return ARCHIVE_META[split][0]


def write_archives(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write the archives, whose checksums torchvision then takes for the official ones."""
    folder.mkdir(exist_ok=True)
    classes = {f"{synset}.tar": tar_of(images) for synset, images in TRAIN.items()}
    for name, content in (("train", tar_of(classes)), ("val", tar_of(VAL)), ("devkit", devkit())):
        (folder / archive(name)).write_bytes(content)
        monkeypatch.setitem(ARCHIVE_META, name, (archive(name), hashlib.md5(content).hexdigest()))
    return folder
