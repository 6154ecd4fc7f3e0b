"""The objective of classification: criterion, distillation and auxiliary losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.utils import accuracy
from torch import Tensor, nn

from mmod import auxiliary_loss
from mmod.planning.divergence import resized
from mmod.training.engine.task import Batch, Pass, Task, autocast

__all__ = ["ClassificationTask", "answers", "check_targets"]


class ClassificationTask(Task):
    """A model with its criterion and, where there is one, its teacher and auxiliary objectives.

    Where labels are those of patches, each patch counts as an image does otherwise.

    Args:
        model: The model to train; see `answers`.
        criterion: Logits (B, C) and targets to a scalar.
        teacher: A frozen model whose logits are imitated, or None.
        distill_weight: Weight of that term.
        temperature: Divisor of both logits in that term.
        feature_weight: Weight of a term in which the teacher's final tokens are imitated; None for no such term.
        auxiliary: Whether the routed model's auxiliary objectives are added.
        precision: "fp32", "bf16" or "fp16".
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
        teacher: nn.Module | None = None,
        distill_weight: float = 0.5,
        temperature: float = 1.0,
        feature_weight: float | None = None,
        auxiliary: bool = False,
        precision: str = "fp32",
        mixup: Mixup | None = None,
    ) -> None:
        super().__init__(
            model, teacher=teacher, distill_weight=distill_weight, auxiliary=auxiliary, precision=precision
        )
        self.criterion = criterion
        self.temperature = temperature
        self.feature_weight = feature_weight
        self.final = None if teacher is None or feature_weight is None else (_Final(model), _Final(teacher))
        self.mixup = mixup

    def passes(self, group: Sequence[Batch], device: torch.device) -> Iterator[Pass]:
        """Yield one pass for each batch, weighed by its share of the step's images; see `Task.passes`."""
        total = sum(len(targets) for _, targets in group)
        for images, targets in group:
            check_targets(targets, getattr(self.model, "num_classes", None))
            count = len(targets)
            images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
            if self.mixup is not None:
                # timm mixes in place, and the images may be a view of what the stream keeps.
                images, targets = self.mixup(images.clone(), targets)
            yield Pass((images, targets), count / total, count)

    def forward(self, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Compute the loss of a batch.

        Args:
            images: (B, C, H, W).
            targets: Class numbers, (B) or (B, N) of N patches each, or class distributions (B, classes), as the
                criterion takes them.

        Returns:
            "loss" to differentiate; its parts "task", "distillation", "features" and "auxiliary" as far as they
            exist; and "top1", the share of right first guesses in percent.
        """
        labels = targets if targets.is_floating_point() else targets.flatten()
        with autocast(images.device, self.precision):
            logits, parts = self.objective(images, targets, labels)
        loss = torch.stack([part.float() for part in parts.values()]).sum()
        hard = labels if labels.ndim == 1 else labels.argmax(1)
        return {"loss": loss, **parts, "top1": accuracy(logits.detach(), hard)[0]}

    def objective(self, images: Tensor, targets: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a model's logits, one row a label, and the parts of the loss.

        Args:
            images: (B, C, H, W).
            targets: What the stream gives with them.
            labels: The same, one row a label.
        """
        logits = answers(self.model, images, targets)
        parts = {"task": self.criterion(logits.float(), labels)}
        if self.teacher is not None:
            with torch.no_grad():
                taught = answers(self.teacher, images, targets)
            parts["distillation"] = self.distill_weight * self.divergence(logits, taught)
        if self.final is not None and self.feature_weight is not None:
            parts["features"] = self.feature_weight * _distance(*(final.take() for final in self.final))
        if self.auxiliary:
            parts["auxiliary"] = auxiliary_loss(self.model)
        return logits, parts

    def divergence(self, logits: Tensor, taught: Tensor) -> Tensor:
        """Return KL(teacher || student) per label; the squared temperature keeps its gradient's scale.

        Args:
            logits: Those of the student, one row a label.
            taught: Those of the teacher.
        """
        target = F.log_softmax(taught.float() / self.temperature, dim=-1)
        student = F.log_softmax(logits.float() / self.temperature, dim=-1)
        return self.temperature**2 * F.kl_div(student, target, reduction="batchmean", log_target=True)


class _Final:
    """The final tokens of a model, as its last pass left them.

    Args:
        model: A timm model; its `norm` is what tokens pass last, an identity where pooled ones are normalised.

    Raises:
        ValueError: If it has no such module.
    """

    def __init__(self, model: nn.Module) -> None:
        norm = getattr(model, "norm", None)
        if not isinstance(norm, nn.Module):
            raise ValueError(f"this {type(model).__name__} has no final `norm`, whose tokens distill.features compares")
        self._tokens: Tensor | None = None
        norm.register_forward_hook(self._keep)

    def _keep(self, norm: nn.Module, inputs: object, output: Tensor) -> None:
        self._tokens = output

    def take(self) -> Tensor:
        """Return them, (B, N, D), once."""
        tokens, self._tokens = self._tokens, None
        assert tokens is not None
        return tokens


def _distance(own_BND: Tensor, taught_BND: Tensor) -> Tensor:
    """Return the mean over tokens of one minus the cosine."""
    if own_BND.shape != taught_BND.shape:
        raise ValueError(
            f"distill.features compares final tokens one by one: the model's are {tuple(own_BND.shape)}, the teacher's "
            f"{tuple(taught_BND.shape)}"
        )
    return 1 - F.cosine_similarity(own_BND.float(), taught_BND.float(), dim=-1).mean()


def answers(model: nn.Module, images: Tensor, targets: Tensor) -> Tensor:
    """Return what a model says of each label.

    Args:
        model: A timm model, or one called alike. One that does not pool (`global_pool=''`) answers every token, of
            which the prefix tokens are left out here.
        images: (B, C, H, W).
        targets: Class numbers (B), or (B, N) of a square grid of patches. From a grid of its own, as of images of lower
            resolution, a model's logits are interpolated to that of the labels.

    Returns:
        Logits, one row a label: (B, classes) of images or (B * N, classes) of patches.

    Raises:
        ValueError: If grids differ and one is not square.
    """
    logits: Tensor = model(images)
    if logits.ndim == 2:
        return logits
    logits = logits[:, getattr(model, "num_prefix_tokens", 0) :]
    return resized(logits, targets.shape[1]).flatten(0, 1)


def check_targets(targets: Tensor, classes: int | None) -> None:
    """Raise a ValueError when a label is not a class of the model.

    Args:
        targets: Class numbers (B) or (B, N), on the CPU.
        classes: Number of classes; None where it is not known.
    """
    if classes is not None and len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < classes:
        raise ValueError(
            f"labels run from {int(targets.min())} to {int(targets.max())} and the model has {classes} "
            f"classes (0 to {classes - 1}); set model.args.num_classes to the data's number of classes"
        )
