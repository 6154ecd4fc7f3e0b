"""Accuracy and kept shares of an image classifier."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.data.labels import Classes
from mmod.data.loader import BatchStream
from mmod.training.engine.distributed import gathered, sum_over_processes
from mmod.training.engine.evaluate import KeptShares, RoutedResult, evaluation_batches
from mmod.training.engine.task import autocast
from mmod.training.image.task import answers, check_targets, labelled
from mmod.values import check_value


@dataclass(frozen=True)
class EvalResult(RoutedResult):
    """The result of an evaluation.

    Args:
        top1: Accuracy on labels, of images or of patches, in percent.
        top5: Share of labels among the first five guesses, in percent.
        loss: Mean cross entropy.
        kept: Mean kept share of tokens, in [0, 1], by routed block.
        objects: Accuracy on patches of any class but 0, the background, in percent; None for labels of images.
        mean_iou: Mean intersection over union of the classes, in percent; None for labels of images.
        capacities: Accuracies by capacity; None for a model that was not trained for several.
        classes: How the classes of the data were matched to those of the model; None where both are the same.
    """

    top1: float
    top5: float
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
        return {name: figure for name, figure in figures.items() if figure is not None}

    def __str__(self) -> str:
        patches = "".join(f"{name} {figure:.2f} %, " for name, figure in [*self.accuracies().items()][2:])
        return (
            f"top-1 {self.top1:.2f} %, top-5 {self.top5:.2f} %, {patches}loss {self.loss:.4f}, "
            f"kept {self.mean_kept:.3f} ({self.samples} images{f'; {self.classes}' if self.classes else ''})"
        )


def evaluate(
    model: nn.Module,
    stream: BatchStream,
    device: torch.device | str = "cpu",
    precision: str = "fp32",
    *,
    progress: bool = False,
) -> EvalResult:
    """Measure accuracy, loss and kept shares over one pass of a stream.

    With several processes, each evaluates its share of the data and all return the result of all data. The model's
    mode is restored at the end.

    Raises:
        TypeError: The model returns integers or complex numbers.
        ValueError: The stream is empty, a label is not a class of the model, the data names another number of classes
            than the model has outputs, the loss is not finite, or grids do not match; see `answers`.

    Example:
        >>> import tempfile, timm
        >>> from mmod.data.config import DataConfig
        >>> from mmod.data.loader import image_stream
        >>> stream = image_stream(DataConfig("digits:tiny", root=tempfile.mkdtemp()))
        >>> model = timm.create_model("test_vit", img_size=32, in_chans=1, num_classes=10)
        >>> evaluate(model, stream).samples
        64
    """
    device = torch.device(device)
    kept = KeptShares(model, device)
    # Streams of a caller may name no classes.
    classes: Classes | None = getattr(stream, "classes", None)
    # First guesses, first five guesses, loss, labels, images.
    sums = torch.zeros(5, dtype=torch.float64, device=device)
    # Patches by class and first guess; empty for labels of images.
    confusion = torch.zeros(0, dtype=torch.float64, device=device)
    with evaluation_batches(model, stream, device, progress=progress) as batches:
        for (_, labels), (images, targets) in batches:
            with autocast(device, precision), kept.watch():
                logits = answers(model, images, targets)
            if not logits.is_floating_point():
                raise TypeError(f"this {type(model).__name__} must return floating-point logits, got {logits.dtype}")
            if classes is not None:
                classes.check_outputs(logits.shape[-1])
            check_targets(labels, logits.shape[-1])
            logits, known = labelled(logits.float(), targets.flatten(), targets)
            sums += _batch_sums(logits, known, len(images))
            if targets.ndim == 2:
                confusion = _count(logits, known) + (confusion if len(confusion) else 0)
    first, five, loss, labels, samples = sum_over_processes(sums).tolist()
    if samples == 0:
        report = getattr(stream, "report", None)
        raise ValueError(f"the evaluation stream holds no images that can be read{f'; {report}' if report else ''}")
    # One check for all batches, because a check waits for the device; any non-finite logit makes the loss non-finite.
    check_value("the mean loss of an evaluation", loss / labels, float)
    # A process may have no batch, and then does not know the shape.
    parts = [part.to(device) for part in gathered(confusion.cpu()) if len(part)]
    objects, mean_iou = _patch_figures(torch.stack(parts).sum(0)) if parts else (None, None)
    return EvalResult(
        top1=100 * first / labels,
        top5=100 * five / labels,
        loss=loss / labels,
        samples=int(samples),
        kept=kept.means(),
        objects=objects,
        mean_iou=mean_iou,
        classes=None if classes is None or classes.is_plain else str(classes),
    )


def _batch_sums(logits: Tensor, targets: Tensor, images: int) -> Tensor:
    """Return the sums of one batch in the order of `evaluate`."""
    guesses = logits.topk(min(5, logits.shape[1]), dim=1).indices == targets[:, None]
    loss = F.cross_entropy(logits, targets, reduction="sum")
    counts = loss.new_tensor([len(targets), images], dtype=torch.float64)
    return torch.stack([guesses[:, 0].sum().double(), guesses.sum().double(), loss.double(), *counts])


def _count(logits: Tensor, targets: Tensor) -> Tensor:
    """Count patches by class and first guess, (classes, classes)."""
    classes = logits.shape[-1]
    pairs = targets * classes + logits.argmax(1)
    return torch.bincount(pairs, minlength=classes**2).reshape(classes, classes).double()


def _patch_figures(confusion: Tensor) -> tuple[float, float]:
    """Return `objects` and `mean_iou` of counts by class and first guess."""
    right = confusion.diagonal()
    labelled = confusion.sum(1)
    guessed = confusion.sum(0)
    union = labelled + guessed - right
    objects = right[1:].sum() / labelled[1:].sum()
    mean_iou = (right[union > 0] / union[union > 0]).mean()
    return 100 * float(objects), 100 * float(mean_iou)
