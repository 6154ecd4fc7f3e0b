"""What a batch is worth: the task's loss, distillation and auxiliary objectives as one module."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod import auxiliary_loss

__all__ = ["ClassificationTask", "autocast"]

_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return the context in which a forward pass runs at `precision`.

    Args:
        device: Where the model is.
        precision: "fp32", "bf16" or "fp16".

    Raises:
        ValueError: If the precision is unknown, or is "fp16" on another device than CUDA.
    """
    if precision not in _PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(_PRECISIONS)}, got {precision!r}")
    if precision == "fp16" and device.type != "cuda":
        raise ValueError(f"precision 'fp16' needs a CUDA device, got {device}; use 'bf16' or 'fp32'")
    return torch.autocast(device.type, dtype=_PRECISIONS[precision], enabled=precision != "fp32")


class ClassificationTask(nn.Module):
    """A model with its criterion and, where there is one, its teacher and auxiliary objectives.

    It is one module so that all terms of the loss are made inside one forward pass, which is what
    distributed training wraps.

    Args:
        model: The model to train.
        criterion: Logits (B, C) and targets to a scalar.
        teacher: A frozen model whose logits are imitated, or None.
        distill_weight: Weight of that term.
        temperature: Divisor of both logits in that term.
        auxiliary: Whether the routed model's auxiliary objectives are added.
        precision: "fp32", "bf16" or "fp16".

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        >>> task = ClassificationTask(model, nn.CrossEntropyLoss())
        >>> parts = task(torch.zeros(2, 1, 2, 2), torch.tensor([0, 2]))
        >>> sorted(parts)
        ['logits', 'loss', 'task']
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: nn.Module,
        *,
        teacher: nn.Module | None = None,
        distill_weight: float = 0.5,
        temperature: float = 1.0,
        auxiliary: bool = False,
        precision: str = "fp32",
    ) -> None:
        super().__init__()
        self.model = model
        self.criterion = criterion
        self.teacher = teacher
        self.distill_weight = distill_weight
        self.temperature = temperature
        self.auxiliary = auxiliary
        self.precision = precision

    def train(self, mode: bool = True) -> ClassificationTask:
        """Set the mode of the model; the teacher stays in eval mode."""
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    def forward(self, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Compute the loss of a batch.

        Args:
            images: (B, C, H, W).
            targets: Class numbers (B) or class distributions (B, classes), as the criterion takes them.

        Returns:
            "loss" to differentiate; its parts "task", "distillation" and "auxiliary" as far as they
            exist; and the "logits" (B, classes).
        """
        with autocast(images.device, self.precision):
            logits = self.model(images)
            parts = {"task": self.criterion(logits.float(), targets)}
            if self.teacher is not None:
                parts["distillation"] = self.distill_weight * self._divergence(logits, images)
            if self.auxiliary:
                parts["auxiliary"] = auxiliary_loss(self.model)
        loss = torch.stack([part.float() for part in parts.values()]).sum()
        return {"loss": loss, **parts, "logits": logits}

    def _divergence(self, logits: Tensor, images: Tensor) -> Tensor:
        """Return KL(teacher || student) per image; the squared temperature keeps its gradient's scale."""
        assert self.teacher is not None
        with torch.no_grad():
            target = F.log_softmax(self.teacher(images).float() / self.temperature, dim=-1)
        student = F.log_softmax(logits.float() / self.temperature, dim=-1)
        return self.temperature**2 * F.kl_div(student, target, reduction="batchmean", log_target=True)
