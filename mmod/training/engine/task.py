"""The training objective as a module: a model, its teacher and the passes of an optimiser step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from typing_extensions import Self

from mmod.losses import auxiliary_loss
from mmod.routing import Router

Batch = tuple[Tensor, Tensor]
_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return the context of a forward pass in "fp32", "bf16" or, on CUDA alone, "fp16"."""
    if precision == "fp16" and device.type != "cuda":
        raise ValueError(f"precision 'fp16' needs a CUDA device, got {device}; use 'bf16' or 'fp32'")
    return torch.autocast(device.type, dtype=_PRECISIONS[precision], enabled=precision != "fp32")


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return both tensors of a batch on a device."""
    inputs, targets = batch
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


def mean_kl(logits: Tensor, taught: Tensor) -> Tensor:
    """Return KL(teacher || student), mean over rows of logits (..., C)."""
    student = F.log_softmax(logits.float().flatten(0, -2), dim=-1)
    target = F.log_softmax(taught.float().flatten(0, -2), dim=-1)
    # "batchmean" divides by rows; "mean" would divide by classes as well.
    return F.kl_div(student, target, reduction="batchmean", log_target=True)


def with_total(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the terms of a loss with their sum as "loss"."""
    # In fp32, because a sum in half precision rounds small terms away.
    return {"loss": torch.stack([part.float() for part in parts.values()]).sum(), **parts}


class MicroBatch(NamedTuple):
    """One forward and backward pass of an optimiser step: the arguments of the task's forward, and its weight."""

    arguments: tuple[Any, ...]
    weight: float
    samples: int


class Task(nn.Module):
    """A model with its objective, which the loop trains and distributed training wraps.

    Its forward returns the "loss" of a pass, its terms, and further figures to average over the epoch.

    Args:
        teacher: A frozen model to imitate; None for none.
        auxiliary: Add the auxiliary losses of the routed model.

    Attributes:
        shown: Names of the figures in the progress bar.
    """

    shown: tuple[str, ...] = ("loss",)

    def __init__(
        self,
        model: nn.Module,
        *,
        teacher: nn.Module | None = None,
        distill_weight: float = 1.0,
        auxiliary: bool = False,
        precision: str = "fp32",
    ) -> None:
        super().__init__()
        self.model = model
        self.teacher = teacher
        self.distill_weight = distill_weight
        self.auxiliary = auxiliary
        self.precision = precision

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the model; the teacher stays in eval mode."""
        super().train(mode)
        if self.teacher is not None:
            self.teacher.eval()
        return self

    def passes(self, group: Sequence[Batch], device: torch.device) -> Iterator[MicroBatch]:
        """Yield the passes of an optimiser step, one per batch of the group, which is on the CPU.

        By default a pass takes a batch, and weighs as much as its share of the step's samples.
        """
        samples = sum(len(targets) for _, targets in group)
        for batch in group:
            count = len(batch[1])
            # By samples: a short last batch weighs less, as it does within one large batch.
            yield MicroBatch(to_device(batch, device), count / samples, count)

    def auxiliary_term(self) -> dict[str, Tensor]:
        """Return the auxiliary losses of the model's last pass as a term of the loss; none where they do not count."""
        if not self.auxiliary:
            return {}
        return {"auxiliary": auxiliary_loss(self.model)}

    def distillation_term(self, logits: Tensor, answer: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
        """Return the divergence of logits (..., C) from the teacher's as a term of the loss; none without a teacher.

        Args:
            answer: From a model to its logits for the same inputs.
        """
        if self.teacher is None:
            return {}
        with torch.no_grad():
            taught = answer(self.teacher)
        return {"distillation": self.distill_weight * mean_kl(logits, taught)}

    def after_step(self) -> None:
        """Called after each optimiser step; does nothing by default."""


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all floating-point tensors are finite."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors if tensor.is_floating_point())


def gradient_norm(model: nn.Module) -> Tensor:
    """Return the norm of all gradients, also of those that are split among processes; 0 without any."""
    norm = nn.utils.get_total_norm(value.grad for value in model.parameters() if value.grad is not None)
    if isinstance(norm, DTensor):
        return norm.full_tensor()
    return norm


def find_nonfinite(task: Task, group: Sequence[Batch], device: torch.device) -> str:
    """Repeat the forward passes of a step; name the module whose output was not finite first, and the batch."""
    # With gradients: auxiliary losses are those of passes that train.
    names: list[str] = []

    def note(name: str, module: nn.Module, inputs: object, output: object) -> None:
        # A router's decision marks tokens that always run, or never, with infinity.
        decides = isinstance(module, Router)
        for leaf in tree_leaves(output):
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
                continue
            bad = leaf.isnan() if decides else ~leaf.isfinite()
            if bad.any():
                names.append(f"the output of {name}")
                return

    modules = [(name, module) for name, module in task.model.named_modules() if name]
    handles = [module.register_forward_hook(partial(note, name)) for name, module in modules]
    where = []
    try:
        # All passes in every process, because some tasks gather features between them.
        for number, one_pass in enumerate(task.passes(group, device), 1):
            names.clear()
            if not all_finite([task(*one_pass.arguments)["loss"]]):
                first = next(iter(names), "the loss")
                where.append(f"{first}, batch {number} of {len(group)}")
    finally:
        for handle in handles:
            handle.remove()
    return next(iter(where), "a gradient, or another process")
