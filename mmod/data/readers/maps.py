"""Images with label maps, for dense prediction."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from mmod.data.corrupt import Fault
from mmod.data.readers.images import IMAGE_EXTENSIONS, UnreadableSampleError, decode_image, open_image, read_image
from mmod.data.readers.shards import patch_classes


class MapSource:
    """The images of `ROOT/images/SPLIT`, each with a map of the same name and size in `ROOT/labels/SPLIT`.

    Both are cropped to the central square and scaled to `side`. A map is a PNG file whose values or palette indices are
    classes; a patch of `patch` pixels gets its most frequent one.
    """

    def __init__(self, root: str | Path, split: str, side: int, patch: int) -> None:
        self.side, self.patch = side, patch
        images, labels = (Path(root) / folder / split for folder in ("images", "labels"))
        for folder in (images, labels):
            if not folder.is_dir():
                raise ValueError(
                    f"label maps need the folder {folder}, which does not exist: name its root by data.root, or by "
                    "images in a study"
                )
        known = {f".{extension}" for extension in IMAGE_EXTENSIONS}
        paths = sorted(path for path in images.iterdir() if path.suffix.lower() in known)
        if not paths:
            raise ValueError(f"{images} holds no image")
        self._paths = [(path, labels / f"{path.stem}.png") for path in paths]
        missing = [path.name for _, path in self._paths if not path.is_file()]
        if missing:
            raise ValueError(f"{labels} lacks {len(missing)} of {len(paths)} label maps, the first {missing[0]}")

    def __len__(self) -> int:
        return len(self._paths)

    def labels(self) -> list[int]:
        """Return -1 for each sample, which has many classes."""
        return [-1] * len(self)

    def read(self, index: int, mode: str) -> tuple[Image.Image, list[int]]:
        """Read one sample; see `ImageSource.read`."""
        path, map_path = self._paths[index]
        try:
            image, labels = decode_image(read_image(str(path)), mode), open_image(read_image(str(map_path)))
            if labels.size != image.size or labels.mode not in ("L", "P"):
                raise ValueError(
                    f"the label map {map_path.name} has {labels.width}x{labels.height} pixels and mode {labels.mode}; "
                    f"it must have {image.width}x{image.height} pixels, as its image, and mode L or P"
                )
        except ValueError as error:
            raise UnreadableSampleError(Fault(str(path.parent), path.name, str(error))) from error
        square = self._square(labels, Image.Resampling.NEAREST)
        return self._square(image, Image.Resampling.BICUBIC), patch_classes(np.asarray(square), self.patch)

    def _square(self, image: Image.Image, resampling: Image.Resampling) -> Image.Image:
        short = min(image.size)
        left, top = (image.width - short) // 2, (image.height - short) // 2
        return image.resize((self.side, self.side), resampling, (left, top, left + short, top + short))
