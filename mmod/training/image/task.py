"""The objective of classification: criterion, distillation and auxiliary losses."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from timm.utils import accuracy
from torch import Tensor, nn

from mmod.adapters import image_facts, image_output
from mmod.adapters.images import resized_to_labels
from mmod.model import set_capacity_
from mmod.training.engine.task import Batch, MicroBatch, Task, autocast, mean_kl, with_total
from mmod.training.image.config import ElasticConfig, LossConfig
from mmod.values import IGNORED


def create_criterion(loss: LossConfig, mixed: bool) -> nn.Module:
    """Create timm's criterion, which maps logits (B, C) and targets to a scalar."""
    # Mixed targets are soft already, and smoothed by mixup.
    if loss.kind == "bce":
        smoothing = 0.0 if mixed else loss.smoothing
        return BinaryCrossEntropy(smoothing=smoothing)
    if mixed:
        return SoftTargetCrossEntropy()
    if loss.smoothing:
        return LabelSmoothingCrossEntropy(loss.smoothing)
    return nn.CrossEntropyLoss()


class ClassificationTask(Task):
    """A classifier of images, or of patches, with its objective.

    Args:
        criterion: From logits (B, C) and targets to a scalar.
        feature_weight: Weight of a term that imitates the teacher's final tokens; None for no such term.
        mixup: Mixes images and targets of a batch; None for no mixing.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        >>> task = ClassificationTask(model, nn.CrossEntropyLoss())
        >>> parts = task(torch.zeros(2, 1, 2, 2), torch.tensor([0, 2]))
        >>> sorted(parts)
        ['loss', 'task', 'top1']
    """

    shown = ("loss", "top1")

    def __init__(
        self,
        model: nn.Module,
        criterion: nn.Module,
        *,
        distill_weight: float = 0.5,
        feature_weight: float | None = None,
        mixup: Mixup | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model, distill_weight=distill_weight, **options)
        self.classes = image_facts(self.model).classes
        self.criterion = criterion
        self.feature_weight = feature_weight
        self.final = None
        if self.teacher is not None and feature_weight is not None:
            self.final = _final_tokens(model), _final_tokens(self.teacher)
        self.mixup = mixup

    def passes(self, group: Sequence[Batch], device: torch.device) -> Iterator[MicroBatch]:
        """Yield one pass per batch, with mixed images; see `Task.passes`."""
        for _, targets in group:
            check_targets(targets, self.classes)
        for one_pass in super().passes(group, device):
            if self.mixup is not None:
                images, targets = one_pass.arguments
                # timm mixes in place, and the stream may keep the images.
                one_pass = one_pass._replace(arguments=self.mixup(images.clone(), targets))
            yield one_pass

    def forward(self, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the "loss" of a batch, its terms, and "top1", the accuracy in percent.

        Args:
            images: Images (B, C, H, W).
            targets: Class numbers (B) or, of N patches, (B, N), where `IGNORED` marks patches without a class, or class
                distributions (B, classes).
        """
        labels = targets if targets.is_floating_point() else targets.flatten()
        with autocast(images.device, self.precision):
            logits, parts = self.objective(images, targets, labels)
        logits, labels = labelled(logits.detach(), labels, targets)
        # Of mixed targets the larger share stands for the class.
        hard = labels if labels.ndim == 1 else labels.argmax(1)
        return {**with_total(parts), "top1": accuracy(logits, hard)[0]}

    def objective(self, images: Tensor, targets: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the logits, one row per label, and the terms of the loss."""
        logits = answers(self.model, images, targets)
        parts = {"task": self.criterion(*labelled(logits.float(), labels, targets))}
        parts |= self.distillation_term(logits, partial(answers, images=images, targets=targets))
        if self.final is not None and self.feature_weight is not None:
            student_BND, taught_BND = (take().float() for take in self.final)
            similarity = F.cosine_similarity(student_BND, taught_BND, dim=-1).mean()
            parts["features"] = self.feature_weight * (1 - similarity)
        return logits, parts | self.auxiliary_term()


class ElasticTask(ClassificationTask):
    """The objective at several capacities of a routed model; see `ElasticConfig`."""

    def __init__(self, model: nn.Module, criterion: nn.Module, elastic: ElasticConfig, **options: Any) -> None:
        super().__init__(model, criterion, **options)
        self.elastic = elastic

    def objective(self, images: Tensor, targets: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return logits and terms at the largest capacity; "elastic" sums the divergence of the others from them."""
        smallest, *between, largest = self.elastic.capacities
        set_capacity_(self.model, largest)
        logits, parts = super().objective(images, targets, labels)
        # "Sandwich": the smallest and the largest capacity in each step, and some between.
        others = []
        for capacity in (smallest, *random.sample(between, self.elastic.samples - 2)):
            set_capacity_(self.model, capacity)
            # The largest capacity teaches, and is not taught.
            others.append(mean_kl(answers(self.model, images, targets), logits.detach()))
            others += self.auxiliary_term().values()
        return logits, {**parts, "elastic": torch.stack(others).sum()}


def _final_tokens(model: nn.Module) -> Callable[[], Tensor]:
    """Return a function that takes the final tokens (B, N, D) of a timm model's last pass: the output of its `norm`."""
    tokens: dict[str, Tensor] = {}

    def keep(norm: nn.Module, inputs: object, output: Tensor) -> None:
        tokens["last"] = output

    norm = getattr(model, "norm", None)
    if not isinstance(norm, nn.Module):
        raise ValueError(f"this {type(model).__name__} has no final `norm`, whose tokens distill.features compares")
    norm.register_forward_hook(keep)
    return lambda: tokens.pop("last")


def answers(model: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
    """Return the logits of a model, one row per label: (B, classes), or (B * N, classes) for patches.

    A model that does not pool (`global_pool=''`) classifies every token; prefix tokens are left out. If its grid is not
    that of the targets (B, N), as for images of lower resolution, the logits are interpolated.
    """
    logits = image_output(model, images)
    if logits.ndim == 2:
        return logits
    logits = logits[:, getattr(model, "num_prefix_tokens", 0) :]
    return resized_to_labels(model, logits, images, targets.shape[1]).flatten(0, 1)


def labelled(logits: Tensor, labels: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of logits and labels that have a class; patches may have none.

    Args:
        targets: The targets of the batch; only those of patches, (B, N), are searched, as that waits for the device.
    """
    if targets.ndim != 2 or targets.is_floating_point():
        return logits, labels
    known = labels != IGNORED
    return logits[known], labels[known]


def check_targets(targets: Tensor, classes: int | None) -> None:
    """Check that labels are classes of the model.

    Args:
        targets: Labels of images (B,), or of patches (B, N), where `IGNORED` marks those without a class.
        classes: Number of the model's outputs; None checks nothing.

    Raises:
        ValueError: A label is negative, or not below `classes`.

    Example:
        >>> check_targets(torch.tensor([0, 9]), classes=10)
    """
    of_patches = targets.ndim == 2
    if of_patches:
        targets = targets[targets != IGNORED]
    if classes is None or not len(targets):
        return
    check_range(int(targets.min()), int(targets.max()), classes, of_patches=of_patches)


def check_range(first: int, last: int, classes: int, of_patches: bool) -> None:
    """Raise a ValueError unless labels from `first` to `last` are classes of a model."""
    if first >= 0 and last < classes:
        return
    if first < 0:
        advice = "number classes from 0"
    else:
        advice = f"train it with model.args.num_classes={last + 1} or more"
    if of_patches:
        advice += f"; patches without a class are {IGNORED}"
    raise ValueError(
        f"labels run from {first} to {last} and the model has {classes} classes (0 to {classes - 1}): {advice}"
    )
