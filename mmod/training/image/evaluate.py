"""Accuracy and kept shares of an image classifier."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.data.labels import Classes
from mmod.data.loader import BatchStream
from mmod.plain import without_none
from mmod.training.engine.evaluate import (
    BatchStore,
    Columns,
    RoutedResult,
    decisions_of,
    kept_means,
    kept_rows,
    read_rows,
)
from mmod.training.engine.task import autocast
from mmod.training.image.task import answers, check_range
from mmod.values import IGNORED, check_value

_GUESSES = 5
CONFUSION = "confusion"
"""Outcome of an image of patches: their number by class (rows) and predicted class (columns)."""


@dataclass(frozen=True)
class EvalResult(RoutedResult):
    """What an evaluation returns: accuracy, loss, and the shares of tokens that blocks kept.

    Args:
        top1: Accuracy on labels, of images or of patches, in percent.
        top5: Share of labels among the first five guesses, in percent; None for a model of five classes or fewer.
        loss: Mean cross entropy.
        kept: Mean kept share of tokens, in [0, 1], by routed block.
        objects: Accuracy on patches of any class but 0, the background, in percent; None without such patches.
        mean_iou: Mean intersection over union of the classes, in percent; None for labels of images.
        capacities: Accuracies by capacity; None for a model that was not trained for several.
        classes: How the classes of the data were matched to those of the model; None where both are the same.
    """

    top1: float
    top5: float | None
    loss: float
    samples: int
    kept: dict[str, float]
    objects: float | None = None
    mean_iou: float | None = None
    capacities: dict[str, dict[str, float]] | None = None
    classes: str | None = None

    def columns(self) -> dict[str, float]:
        """Return the figures by name, those at another capacity as `NAME@CAPACITY`."""
        columns = super().columns()
        for capacity, figures in (self.capacities or {}).items():
            columns |= {f"{name}@{capacity}": value for name, value in figures.items()}
        return columns

    def accuracies(self) -> dict[str, float]:
        """Return the figures in percent."""
        figures = {name: getattr(self, name) for name in ("top1", "top5", "objects", "mean_iou")}
        return without_none(figures)

    def __str__(self) -> str:
        titles = {"top1": "top-1", "top5": "top-5"}
        figures = [f"{titles.get(name, name)} {figure:.2f} %" for name, figure in self.accuracies().items()]
        figures.append(f"loss {self.loss:.4f}")
        images = f"{self.samples} images"
        if self.classes:
            images += f"; {self.classes}"
        return f"{', '.join(figures)}{self.told_kept} ({images})"


def evaluate(
    model: nn.Module,
    stream: BatchStream,
    precision: str = "fp32",
    *,
    progress: bool = False,
) -> EvalResult:
    """Measure accuracy, loss and kept shares over one pass of a stream.

    With several processes, each evaluates its share of the data and all return the result of all data. The model's
    mode is restored at the end.

    Raises:
        ValueError: The stream is empty, a label is not a class of the model, the data names another number of classes
            than the model has outputs, the loss is not finite, or the grid of a model that classifies patches does not
            match that of the labels.

    Example:
        >>> import tempfile, timm
        >>> from mmod.data.config import DataConfig
        >>> from mmod.data.loader import image_stream
        >>> stream = image_stream(DataConfig("digits:tiny", root=tempfile.mkdtemp()))
        >>> model = timm.create_model("test_vit", img_size=32, in_chans=1, num_classes=10)
        >>> evaluate(model, stream).samples
        64
    """
    return evaluate_set(model, stream, precision, progress=progress)[0]


def evaluate_set(
    model: nn.Module,
    stream: BatchStream,
    precision: str = "fp32",
    *,
    progress: bool = False,
    store: BatchStore | None = None,
) -> tuple[EvalResult, dict[str, np.ndarray]]:
    """Return the result of `evaluate`, and the outcomes that it follows from; see `image_outcomes`."""
    read = partial(evaluate_batch, precision=precision)
    rows = read_rows(read, model, stream, progress=progress, store=store)
    # Streams of a caller may name no classes.
    return score(rows, getattr(stream, "classes", None)), image_outcomes(rows)


def evaluate_batch(model: nn.Module, batch: tuple[Tensor, Tensor], precision: str = "fp32") -> Columns:
    """Return the rows of a batch: "loss" and "outcome", means over an image's labels, "five" and "labels".

    "five" is the share of labels among the first five guesses and "labels" their number. "first" and "last" are the
    lowest and the highest label, which `check_labels` compares with "outputs", the number of classes. Patches also have
    "guess" and "target", class numbers (B, N).

    Args:
        batch: Images (B, C, H, W) and class numbers (B,), or of patches (B, N), where `IGNORED` marks those without.
    """
    images, targets = batch
    with autocast(images.device, precision), decisions_of(model) as decisions:
        logits = answers(model, images, targets)
    classes = logits.shape[-1]
    target_BN = targets if targets.ndim == 2 else targets[:, None]
    # One row of logits per label, for patches and for images alike.
    logits_BNC = logits.float().unflatten(0, target_BN.shape)
    has_label_BN = target_BN != IGNORED
    count_B = has_label_BN.sum(1)
    # An image without labels has weight 0.
    labels_B = count_B.clamp(min=1)
    # Labels are checked later, since reading one here would wait for the device in every batch.
    is_class_BN = (target_BN >= 0) & (target_BN < classes)
    safe_BN = target_BN.where(is_class_BN, IGNORED)
    loss_BN = F.cross_entropy(logits_BNC.movedim(-1, 1), safe_BN, ignore_index=IGNORED, reduction="none")
    guess_BNK = logits_BNC.topk(min(_GUESSES, classes), dim=-1).indices
    right_BNK = guess_BNK == target_BN[..., None]
    rows = {
        "loss": loss_BN.double().sum(1) / labels_B,
        "outcome": right_BNK[..., 0].double().sum(1) / labels_B,
        "five": right_BNK.any(-1).double().sum(1) / labels_B,
        "labels": count_B,
        "first": target_BN.where(has_label_BN, 0).amin(1),
        "last": target_BN.where(has_label_BN, 0).amax(1),
        "outputs": torch.full_like(count_B, classes),
        **kept_rows(decisions),
    }
    if targets.ndim == 2:
        rows |= {"guess": guess_BNK[..., 0].short(), "target": targets.short()}
    return rows


def check_labels(rows: Columns) -> None:
    """Raise a ValueError if a label is not a class of the model, which the rows of `evaluate_batch` tell."""
    first = int(rows["first"].min())
    last = int(rows["last"].max())
    outputs = int(rows["outputs"][0])
    check_range(first, last, outputs, of_patches="guess" in rows)


def score(rows: Columns, classes: Classes | None = None) -> EvalResult:
    """Return the result of the rows of all images.

    Args:
        classes: The classes of the data; None where they are not known.
    """
    check_labels(rows)
    if classes is not None:
        classes.check_ranks(int(rows["outputs"][0]))
    # Weighed by labels: an image with few labelled patches counts for less.
    labels_N = rows["labels"].double()
    total = labels_N.sum()
    means = {name: float((rows[name] * labels_N).sum() / total) for name in ("loss", "outcome", "five")}
    # One check for all images: any logit that is not finite makes the loss so.
    check_value("the mean loss of an evaluation", means["loss"], float)
    objects = mean_iou = None
    if "guess" in rows:
        objects, mean_iou = _patch_figures(rows)
    top5 = None
    # Five guesses of five classes or fewer are always right.
    if int(rows["outputs"][0]) > _GUESSES:
        top5 = 100 * means["five"]
    described = None
    if classes is not None and not classes.is_plain:
        described = str(classes)
    return EvalResult(
        top1=100 * means["outcome"],
        top5=top5,
        loss=means["loss"],
        samples=len(labels_N),
        kept=kept_means(rows),
        objects=objects,
        mean_iou=mean_iou,
        classes=described,
    )


def image_outcomes(rows: Columns) -> dict[str, np.ndarray]:
    """Return what is right of each image: "top1" (N,), or of patches their confusion (N, classes, classes)."""
    if "guess" not in rows:
        return {"top1": rows["outcome"].float().numpy()}
    classes = _classes(rows)
    pairs = zip(rows["target"], rows["guess"])
    counts_NCC = torch.stack([_confusion(target_P, guess_P, classes) for target_P, guess_P in pairs])
    # In 16 bits where these hold them, because a study keeps a matrix for each of its images.
    dtype = torch.int32
    if int(counts_NCC.max()) <= torch.iinfo(torch.int16).max:
        dtype = torch.int16
    return {CONFUSION: counts_NCC.to(dtype).numpy()}


def iou_of(count_SCC: np.ndarray) -> np.ndarray:
    """Return the intersection over union of each class (S, C), from numbers of patches as in `CONFUSION`.

    Returns:
        A share for each class; NaN for one that is neither there nor predicted.
    """
    right_SC = np.diagonal(count_SCC, axis1=1, axis2=2)
    union_SC = count_SCC.sum(1) + count_SCC.sum(2) - right_SC
    return np.divide(right_SC, union_SC, out=np.full(union_SC.shape, np.nan), where=union_SC > 0)


def _patch_figures(rows: Columns) -> tuple[float | None, float]:
    """Return `objects` and `mean_iou` of patches."""
    count_CC = _confusion(rows["target"], rows["guess"], _classes(rows)).double()
    iou_C = torch.from_numpy(iou_of(count_CC[None].numpy())[0])
    # Class 0 is the background, which may be all there is.
    patches = float(count_CC[1:].sum())
    objects = None
    if patches:
        objects = 100 * float(count_CC.diagonal()[1:].sum() / patches)
    return objects, 100 * float(iou_C[~iou_C.isnan()].mean())


def _classes(rows: Columns) -> int:
    highest_BN = torch.maximum(rows["target"].long(), rows["guess"].long())
    return int(highest_BN.max()) + 1


def _confusion(target_P: Tensor, guess_P: Tensor, classes: int) -> Tensor:
    """Return the number of labelled patches by class and predicted class (C, C)."""
    known_P = target_P != IGNORED
    # One histogram over pairs of class and guess: row and column in one number.
    cell_P = target_P[known_P].long() * classes + guess_P[known_P].long()
    return torch.bincount(cell_P, minlength=classes**2).reshape(classes, classes)
