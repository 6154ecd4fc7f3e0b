"""The objective of image-text pairs: contrastive loss, distillation and auxiliary losses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmod import auxiliary_loss
from mmod.training.engine.task import Batch, Pass, Task, autocast

__all__ = ["PairsTask"]

Features = dict[str, Tensor]
_SCALARS = ("logit_scale", "logit_bias")


class PairsTask(Task):
    """An open_clip model with its criterion and, where there is one, its teacher and auxiliary objectives.

    Several batches of one optimiser step are one batch as far as negatives go: features of all are computed first,
    without gradients, then each batch is passed again and compared with the others' features. That takes a second
    forward pass and no more memory than one batch, and gives the gradients of the one large batch.

    Args:
        model: The open_clip model, made with `output_dict=True`.
        criterion: A loss of open_clip.
        distiller: open_clip's distillation loss; needed with a teacher, whose similarities are imitated.
        options: Those of `Task`; losses are computed in fp32 at any precision.
    """

    def __init__(
        self, model: nn.Module, criterion: nn.Module, *, distiller: nn.Module | None = None, **options: Any
    ) -> None:
        super().__init__(model, **options)
        self.criterion = criterion
        self.distiller = distiller

    def passes(self, group: Sequence[Batch], device: torch.device) -> Iterator[Pass]:
        """Yield one pass for each batch, which knows the features of the others; see `Task.passes`."""
        moved = [tuple(part.to(device, non_blocking=True) for part in batch) for batch in group]
        if len(moved) == 1:
            yield Pass((*moved[0], [], 0), 1.0, len(moved[0][0]))
            return
        # Each batch draws the same in both of its passes (dropout, random routing).
        seed = torch.initial_seed()
        cached: list[Features] = []
        for index, (images, texts) in enumerate(moved):
            torch.manual_seed(seed + index)
            with torch.no_grad(), autocast(device, self.precision):
                features = self._encode(images, texts)
            cached.append({name: value for name, value in features.items() if value.ndim})
        for index, (images, texts) in enumerate(moved):
            torch.manual_seed(seed + index)
            yield Pass((images, texts, cached, index), 1.0, len(images))

    def after_step(self) -> None:
        """Keep the logit scale at 100 at most, as CLIP and open_clip do."""
        self.model.get_parameter("logit_scale").data.clamp_(0, math.log(100))

    def forward(self, images: Tensor, texts: Tensor, cached: list[Features], index: int) -> dict[str, Tensor]:
        """Compute the loss of a step with the gradients of one of its batches.

        Args:
            images: (B, C, H, W).
            texts: Tokens (B, L).
            cached: Features of all batches of the step, without gradients; empty when it has one batch.
            index: Which of them this batch is.

        Returns:
            "loss" to differentiate; its parts "contrastive", "caption", "distillation" and "auxiliary" as far as they
            exist; and "scale", the factor of the similarities.
        """
        with autocast(images.device, self.precision):
            features = self._encode(images, texts, cached[index] if cached else {})
            parts = {"auxiliary": auxiliary_loss(self.model)} if self.auxiliary else {}
        scalars: Features = {name: features.pop(name) for name in _SCALARS if name in features}
        # Every pass sees the whole step's loss, so each gives scale and bias its share of their gradients.
        scalars = {name: _scale_gradient(value, 1 / max(1, len(cached))) for name, value in scalars.items()}
        share = len(images) / max(len(images), sum(len(batch["image_features"]) for batch in cached))
        joined = _join(features, cached, index)
        parts |= self._losses(joined, scalars)
        weights = {"distillation": self.distill_weight, "auxiliary": share}
        loss = torch.stack([weights.get(name, 1.0) * part.float() for name, part in parts.items()]).sum()
        return {"loss": loss, **parts, "scale": scalars["logit_scale"].detach()}

    def _encode(self, images: Tensor, texts: Tensor, known: Features | None = None) -> Features:
        """Return what the losses take of a batch, the teacher's features from `known` when they are there."""
        found: Features = dict(self.model(images, texts))
        if self.teacher is None:
            return found
        with torch.no_grad():
            own = known if known else _of_teacher(self.teacher(images, texts))
            scale = self.teacher.get_parameter("logit_scale").exp().reshape(())
        names = ("dist_image_features", "dist_text_features")
        return {**found, **{name: own[name] for name in names}, "dist_logit_scale": scale}

    def _losses(self, features: Features, scalars: Features) -> Features:
        taught = {name: features.pop(name) for name in list(features) if name.startswith("dist_")}
        found = self.criterion(**features, **scalars, output_dict=True)
        if isinstance(found, Tensor):
            found = {"contrastive_loss": found}
        parts = {name.removesuffix("_loss"): value for name, value in found.items()}
        if taught:
            assert self.distiller is not None
            pairs = {name: features[name] for name in ("image_features", "text_features")}
            both = self.distiller(**pairs, logit_scale=scalars["logit_scale"], **taught, output_dict=True)
            parts["distillation"] = both["distill_loss"]
        return parts


def _of_teacher(output: dict[str, Any]) -> Features:
    return {f"dist_{name}": output[name] for name in ("image_features", "text_features")}


def _join(features: Features, cached: list[Features], index: int) -> Features:
    """Put this batch's features, which have gradients, among those of the step's other batches, in fp32."""
    joined = {}
    for name, own in features.items():
        whole = own
        if own.ndim and cached:
            whole = torch.cat([own if place == index else batch[name] for place, batch in enumerate(cached)])
        joined[name] = whole.float() if whole.is_floating_point() else whole
    return joined


def _scale_gradient(value: Tensor, factor: float) -> Tensor:
    """Return the value with its gradient weighed by a factor."""
    return value.detach() + factor * (value - value.detach())
