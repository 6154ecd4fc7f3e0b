"""Labels of patches by a linear classifier of a tower's features, for every way to make the tower cheaper.

Axes: B images, C classes, D channels, H and W rows and columns of patches, N patches.
"""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from mmod.io.store import Store
from scripts.pages_and_screens.browser import CLASSES, labels_of
from scripts.pages_and_screens.drawn import Canvas
from scripts.pages_and_screens.rows import DENSE, MEAN, PATCH, STD, Row
from scripts.photo_attempts import Forward, patches_of

# Names of results: predictions by the classifier of dense features, and by that of features of as many pixels.
HEAD = "confusion"
OWN_HEAD = "confusion by a head of its own"
# A patch of which less is labelled is blank.
_SHOWN = 0.15


class Example(NamedTuple):
    """An image (1, 3, height, width) as the tower gets it, and the classes of its patches (H, W)."""

    image: Tensor
    label_HW: Tensor


@dataclass(frozen=True)
class Examples:
    """The examples of a set: those that the classifier is fitted on, and those it is tested on."""

    name: str
    train: Sequence[Example]
    test: Sequence[Example]


def example(picture: Image.Image, label_RC: np.ndarray) -> Example:
    """Return an example; a patch shows what most of its labelled pixels do, if these are 15 % of it."""
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255
    grid = label_RC.reshape(label_RC.shape[0] // PATCH, PATCH, -1, PATCH)
    count_HWC = np.stack([(grid == number).mean(axis=(1, 3)) for number in range(len(CLASSES))], axis=-1)
    shown_HW = np.where(count_HWC[..., 0] > 1 - _SHOWN, 0, count_HWC[..., 1:].argmax(-1) + 1)
    return Example(((pixels - MEAN) / STD).unsqueeze(0), torch.from_numpy(shown_HW))


def from_canvas(canvas: Canvas) -> Example:
    """Return a drawn picture as an example."""
    return example(canvas.picture, canvas.label_HW)


class Windows(Sequence[Example]):
    """Windows of photographs, read as they are asked for."""

    def __init__(self, files: Sequence[Path], width: int, height: int) -> None:
        self.files = files
        self.width = width
        self.height = height

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: Any) -> Any:
        file = self.files[number]
        draw = random.Random(number)
        with Image.open(file) as picture, Image.open(labels_of(file)) as labels:
            # A half begin where the photograph does.
            top = draw.choice([0, draw.randint(0, picture.height - self.height)])
            left = draw.choice([0, draw.randint(0, picture.width - self.width)])
            box = (left, top, left + self.width, top + self.height)
            return example(picture.convert("RGB").crop(box), np.array(labels.crop(box)))


class Head(NamedTuple):
    """A linear classifier: its classes, and weights (D, C) and biases (C) of these."""

    classes: Tensor
    weight: Tensor
    bias: Tensor

    def __call__(self, feature_ND: Tensor) -> Tensor:
        """Return the classes of patches (N)."""
        return self.classes[(feature_ND @ self.weight + self.bias).argmax(1)]


def fitted(feature_ND: Tensor, label_N: Tensor) -> Head:
    """Return a logistic regression on standardised features."""
    mean_D = feature_ND.mean(0)
    scale_D = feature_ND.std(0).clamp_min(1e-6)
    solver = LogisticRegression(C=0.01, max_iter=200)
    solver.fit(((feature_ND - mean_D) / scale_D).numpy(), label_N.numpy())
    weight = torch.from_numpy(solver.coef_.T).float() / scale_D.unsqueeze(1)
    bias = torch.from_numpy(solver.intercept_).float() - mean_D @ weight
    return Head(torch.from_numpy(solver.classes_), weight, bias)


def features(forward: Forward, row: Row, image: Tensor) -> Tensor:
    """Return the features (N, D) of the patches of one image, of fewer pixels by interpolation."""
    height = image.shape[2] // PATCH
    width = image.shape[3] // PATCH
    if row.pixels == 1:
        return forward(image)[0]
    rows = round(height * row.pixels)
    columns = round(width * row.pixels)
    small = F.interpolate(image, (rows * PATCH, columns * PATCH), mode="bicubic", antialias=True)
    grid = forward(small).transpose(1, 2).unflatten(2, (rows, columns))
    return F.interpolate(grid, (height, width), mode="bilinear")[0].flatten(1).T


def head_of(store: Store, examples: Examples, pixels: float, model: Any) -> Head:
    """Return the classifier that is fitted on dense features of images with a share of their pixels."""

    def fit() -> Head:
        row = Row(patches_of, pixels)
        forward = row.make(model)
        taken = [(features(forward, row, image), label_HW.flatten()) for image, label_HW in examples.train]
        # Every second patch suffices for the fit.
        feature_ND = torch.cat([feature[::2] for feature, _ in taken])
        return fitted(feature_ND, torch.cat([label[::2] for _, label in taken]))

    return Head(*store.once({"head of": examples.name, "pixels": pixels}, lambda: list(fit())))


def confusion(label_N: Tensor, predicted_N: Tensor) -> Tensor:
    """Return the number of patches by class and predicted class (C, C)."""
    classes = len(CLASSES)
    return torch.bincount(label_N * classes + predicted_N, minlength=classes**2).view(classes, classes)


def identity(name: str, row: str, number: int) -> dict[str, Any]:
    """Return what names the result of a row for a tested picture of a set."""
    return {"set": name, "row": row, "picture": number}


def evaluate(store: Store, examples: Examples, rows: Mapping[str, Row], model: Any) -> None:
    """Put into the store what each row predicts for each tested picture, and its time, rows in turns.

    A dense pass is timed beside them, so that rows can be added later.
    """
    heads = {row.pixels: head_of(store, examples, row.pixels, model) for row in rows.values()}
    forwards = {name: row.make(model) for name, row in rows.items()}
    for number, (image, label_HW) in enumerate(examples.test):
        missing = [name for name in rows if identity(examples.name, name, number) not in store]
        if not missing:
            continue
        dense = timed(forwards[DENSE], rows[DENSE], image)
        for name in missing:
            row = rows[name]
            seconds, feature_ND = dense if name == DENSE else timed(forwards[name], row, image)
            label_N = label_HW.flatten()
            value = {"seconds": seconds, "dense_seconds": dense[0], "kept": kept_share(row, image)}
            value[HEAD] = confusion(label_N, heads[1.0](feature_ND))
            if row.pixels < 1:
                value[OWN_HEAD] = confusion(label_N, heads[row.pixels](feature_ND))
            store.put(identity(examples.name, name, number), value)


def time_rows(store: Store, name: str, images: Sequence[Tensor], rows: Mapping[str, Row], model: Any) -> None:
    """Put into the store the CPU time of each row, in turns: for each image, or for the first if all cost the same."""
    forwards = {row: rows[row].make(model) for row in rows}
    for number, image in enumerate(images):
        for row, forward in forwards.items():
            if identity(name, row, number) in store or (number and rows[row].kept is None):
                continue
            seconds, _ = timed(forward, rows[row], image)
            store.put(identity(name, row, number), {"seconds": seconds, "kept": kept_share(rows[row], image)})


def kept_share(row: Row, image: Tensor) -> float | None:
    """Return the share of an image's patches that all blocks compute; None if that is not one number."""
    return None if row.kept is None else row.kept(image)


def timed(forward: Forward, row: Row, image: Tensor) -> tuple[float, Tensor]:
    """Return the CPU time of the process for an image in seconds, and the features."""
    start = time.process_time()
    feature_ND = features(forward, row, image)
    return time.process_time() - start, feature_ND
