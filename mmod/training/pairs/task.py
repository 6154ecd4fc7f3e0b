"""The objective of image-text pairs: contrastive loss, distillation and auxiliary losses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmod.training.engine.task import Batch, MicroBatch, Task, autocast, to_device

TensorDict = dict[str, Tensor]
_SCALARS = ("logit_scale", "logit_bias")


class PairsTask(Task):
    """An open_clip model with its objective.

    The batches of an optimiser step share their negatives. The features of all are computed first, without gradients.
    Then each batch is passed again and compared with the features of the others. This gives the gradients of one large
    batch, in the memory of a small one, for a second forward pass.

    Args:
        model: The open_clip model, created with `output_dict=True`.
        criterion: A loss of open_clip, computed in fp32.
        distiller: open_clip's distillation loss, needed with a teacher.
    """

    def __init__(
        self, model: nn.Module, criterion: nn.Module, *, distiller: nn.Module | None = None, **options: Any
    ) -> None:
        super().__init__(model, **options)
        self.criterion = criterion
        self.distiller = distiller

    def passes(self, group: Sequence[Batch], device: torch.device) -> Iterator[MicroBatch]:
        """Yield one pass per batch, with the features of the others; see `Task.passes`."""
        moved = [to_device(batch, device) for batch in group]
        if len(moved) == 1:
            # One batch a step needs no features of others.
            yield MicroBatch((*moved[0], [], 0), 1.0, len(moved[0][0]))
            return
        # Both passes of a batch draw the same (dropout, random routing).
        seed = torch.initial_seed()
        cached: list[TensorDict] = []
        for index, (images, texts) in enumerate(moved):
            torch.manual_seed(seed + index)
            with torch.no_grad(), autocast(device, self.precision):
                features = self._encode(images, texts)
            # Scalars are left out: they are parameters, and not features of a batch.
            cached.append({name: value for name, value in features.items() if value.ndim})
        for index, (images, texts) in enumerate(moved):
            torch.manual_seed(seed + index)
            yield MicroBatch((images, texts, cached, index), 1.0, len(images))

    def after_step(self) -> None:
        """Keep the logit scale at 100 at most, as CLIP and open_clip do."""
        scale: Any = self.model.logit_scale
        scale.data.clamp_(0, math.log(100))

    def forward(self, images: Tensor, texts: Tensor, cached: list[TensorDict], index: int) -> dict[str, Tensor]:
        """Return the "loss" of a whole step, its terms, and "scale"; gradients reach one batch of it alone.

        Args:
            images: Those of that batch (B, C, H, W).
            texts: Its tokens (B, L).
            cached: Features of all batches of the step, without gradients; empty for a single batch.
            index: Place of that batch among them.
        """
        known = cached[index] if cached else {}
        with autocast(images.device, self.precision):
            features = self._encode(images, texts, known)
            parts = self.auxiliary_term()
        scalars: TensorDict = {name: features.pop(name) for name in _SCALARS if name in features}
        # Every pass computes the loss of the step, so each contributes a share of the gradients of scale and bias.
        part = 1 / max(1, len(cached))
        for name, value in scalars.items():
            fixed = value.detach()
            scalars[name] = fixed + part * (value - fixed)
        # At least this batch, because nothing is cached for a single one.
        step_images = sum(len(batch["image_features"]) for batch in cached)
        share = len(images) / max(len(images), step_images)
        joined = _join(features, cached, index)
        parts |= self._losses(joined, scalars)
        weights = {"distillation": self.distill_weight, "auxiliary": share}
        terms = [weights.get(name, 1.0) * term.float() for name, term in parts.items()]
        loss = torch.stack(terms).sum()
        return {"loss": loss, **parts, "scale": scalars["logit_scale"].detach()}

    def _encode(self, images: Tensor, texts: Tensor, known: TensorDict | None = None) -> TensorDict:
        """Return the features of model and teacher; the teacher's come from `known` if it has them."""
        features: TensorDict = dict(self.model(images, texts))
        if self.teacher is None:
            return features
        names = ("image_features", "text_features")
        with torch.no_grad():
            if known:
                taught = {f"dist_{name}": known[f"dist_{name}"] for name in names}
            else:
                output = self.teacher(images, texts)
                taught = {f"dist_{name}": output[name] for name in names}
            scale: Any = self.teacher.logit_scale
        return {**features, **taught, "dist_logit_scale": scale.detach().exp().reshape(())}

    def _losses(self, features: TensorDict, scalars: TensorDict) -> TensorDict:
        taught = {name: features.pop(name) for name in list(features) if name.startswith("dist_")}
        # CoCa returns several losses by name, the others one tensor.
        losses = self.criterion(**features, **scalars, output_dict=True)
        if isinstance(losses, Tensor):
            losses = {"contrastive_loss": losses}
        parts = {name.removesuffix("_loss"): value for name, value in losses.items()}
        if taught:
            assert self.distiller is not None
            pairs = {name: features[name] for name in ("image_features", "text_features")}
            distilled = self.distiller(**pairs, logit_scale=scalars["logit_scale"], **taught, output_dict=True)
            parts["distillation"] = distilled["distill_loss"]
        return parts


def _join(features: TensorDict, cached: list[TensorDict], index: int) -> TensorDict:
    """Return the features of the step in fp32: those of batch `index`, with gradients, among the cached others."""
    joined = {}
    for name, value in features.items():
        if value.ndim and cached:
            rows = [batch[name] for batch in cached]
            rows[index] = value
            value = torch.cat(rows)
        if value.is_floating_point():
            value = value.float()
        joined[name] = value
    return joined
