"""Evaluations: functions that return a model's loss and accuracy of each image or sample of a batch.

Axes: B images or samples, N patches or tokens, C channels."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.adapters import image_output
from mmod.values import IGNORED

_PASS_FUNCTION = "pass `evaluate`, which returns the loss and the accuracy of each image of such a batch"
# Entries of a batch that the forward pass does not take.
_NO_INPUTS = ("labels", "protected_mask")
Name = TypeVar("Name", bound=Hashable)

Evaluate = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
"""Runs a model on a batch, once, and returns the loss and the accuracy in [0, 1] of each image or sample, (B,) each."""


def evaluate_classes(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return cross-entropy and accuracy of every image of a batch.

    Args:
        batch: Images (B, C, height, width) and classes (B,), or classes of patches (B, N), over which means are taken;
            -100 marks patches without a class, which are left out.
    """
    device = next(model.parameters()).device
    is_pair = isinstance(batch, (tuple, list)) and len(batch) == 2
    if not is_pair or not all(isinstance(value, Tensor) for value in batch):
        raise ValueError(
            f"a batch must be two tensors, images and their classes, got {type(batch).__name__}: {_PASS_FUNCTION}"
        )
    images, targets = (value.to(device) for value in batch)
    logits = image_output(model, images).float()
    if targets.ndim == 2 and logits.ndim == 3:
        # Prefix tokens come first and have no class.
        logits = logits[:, -targets.shape[1] :]
    if targets.is_floating_point() or logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"the model returns logits {tuple(logits.shape)}, the classes are {targets.dtype} {tuple(targets.shape)}: "
            f"{_PASS_FUNCTION}"
        )
    has_class = torch.ones_like(targets, dtype=torch.bool)
    if targets.ndim == 2:
        has_class = targets != IGNORED
    classes = logits.shape[-1]
    outside = targets[has_class & ((targets < 0) | (targets >= classes))]
    if len(outside):
        raise ValueError(f"classes must be in [0, {classes}), as the model has {classes}, got {int(outside[0])}")
    loss = F.cross_entropy(logits.movedim(-1, 1), targets, ignore_index=IGNORED, reduction="none")
    right = (logits.argmax(-1) == targets).float()
    if targets.ndim == 1:
        return loss, right
    count_B = has_class.sum(1)
    check_classes(count_B)
    return loss.sum(1) / count_B, right.sum(1) / count_B


def check_classes(count_B: Tensor) -> None:
    """Raise a ValueError for an image of whose patches none has a class; given how many have one."""
    if not count_B.all():
        raise ValueError(f"each image needs a patch with a class: all patches of an image are {IGNORED}")


def evaluate_answers(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the mean loss of every sample's answers, and 1 if the most likely tokens are all right, else 0.

    Args:
        model: A causal language or vision-language model of transformers.
        batch: Its inputs, and `labels` (B, N), -100 outside answers, as training collators return them.
    """
    device = next(model.parameters()).device
    inputs = {name: value.to(device) for name, value in batch.items() if name not in _NO_INPUTS}
    # Logits of a token predict the next one.
    label_BN = batch["labels"].to(device)[:, 1:]
    answer_BN = label_BN != IGNORED
    if not answer_BN.any(dim=1).all():
        raise ValueError("each sample needs an answer: all labels of a sample are -100")
    logits = model(**inputs).logits[:, :-1].float()
    loss_BN = F.cross_entropy(logits.movedim(-1, 1), label_BN, ignore_index=IGNORED, reduction="none")
    # Tokens without a label count as right, so that `all` asks for the answer alone.
    right_BN = (logits.argmax(-1) == label_BN) | ~answer_BN
    return loss_BN.sum(1) / answer_BN.sum(1), right_BN.all(dim=1).float()


def joined(parts: Sequence[Mapping[Name, Tensor]]) -> dict[Name, Tensor]:
    """Return the columns of several batches as those of one."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
