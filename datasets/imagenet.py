"""Unpack the archives of ImageNet-1k (ILSVRC 2012) into folders of classes, as `data.source: folder` reads them.

    python datasets/imagenet.py downloads data/imagenet
    python datasets/imagenet.py downloads data/imagenet --splits val

SOURCE is the folder of ILSVRC2012_img_train.tar, ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz, from
image-net.org after registration. torchvision compares their checksums with the official ones and unpacks them. A split
appears in OUTPUT when all of it is unpacked, and is left alone from then on; the same command unpacks what is missing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torchvision.datasets.imagenet import (
    ARCHIVE_META,
    load_meta_file,
    parse_devkit_archive,
    parse_train_archive,
    parse_val_archive,
)

from mmod.io.files import locked, replacing

SPLITS = ("train", "val")


def val_classes(source: Path) -> list[str]:
    """Return the synset of each validation image, from the devkit."""
    devkit, _ = ARCHIVE_META["devkit"]
    # torchvision writes a file beside the archive, and downloads may be read-only.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, devkit).symlink_to(source / devkit)
        parse_devkit_archive(folder)
        return load_meta_file(folder)[1]


def unpack(source: Path, output: Path, splits: Sequence[str] = SPLITS) -> None:
    """Unpack the splits that are missing in the output.

    Raises:
        FileNotFoundError: An archive does not exist.
        RuntimeError: An archive is not the official one, or damaged.
    """
    missing = [split for split in splits if not (output / split).exists()]
    needed = [ARCHIVE_META[name][0] for name in (*missing, *(["devkit"] if "val" in missing else []))]
    for name in needed:
        if not (source / name).is_file():
            raise FileNotFoundError(f"{str(source / name)!r} does not exist: download it from image-net.org")
    output.mkdir(parents=True, exist_ok=True)
    with locked(output, wait=False):
        for split in missing:
            with replacing(output / split, durable=False) as folder:
                # An absolute path, which torchvision does not take as one inside `source`.
                target = str(folder.absolute())
                if split == "train":
                    parse_train_archive(source, folder=target)
                else:
                    parse_val_archive(source, wnids=val_classes(source), folder=target)
                # One flush of all images is far faster than one of each.
                os.sync()
    for split in splits:
        classes = [folder for folder in (output / split).iterdir() if folder.is_dir()]
        images = sum(len(list(folder.iterdir())) for folder in classes)
        state = "unpacked" if split in missing else "there already"
        print(f"{output / split}: {state}, {len(classes)} classes, {images} images")


def main() -> None:
    """Unpack as the command line says; print what there is, or a one-line error."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("source", type=Path, help="folder of the archives")
    parser.add_argument("output", type=Path, help="folder of the splits")
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=SPLITS, help="splits to unpack")
    options = parser.parse_args()
    try:
        unpack(options.source.absolute(), options.output, options.splits)
    except (OSError, RuntimeError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
