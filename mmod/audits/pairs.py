"""Audits of image-text models: images and captions have to find each other within a batch.

Axes: B pairs, D dimensions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from mmod.analysis import flops
from mmod.analysis.audit.choices import REFERENCE_ENTROPY
from mmod.audits.config import PairsAuditConfig
from mmod.audits.subject import Again, Subject, unsorted
from mmod.data.readers.pairs import create_eval_pairs
from mmod.training.engine.config import TeacherConfig
from mmod.training.engine.distributed import choose_device
from mmod.training.pairs.evaluate import judge_pairs
from mmod.training.pairs.model import create_models, create_transforms

__all__ = ["PairsSubject"]


class PairsSubject(Subject[PairsAuditConfig]):
    """An open_clip model; see `Subject`."""

    split = "val"
    # No head of such a model answers for a token.
    unasked = frozenset({REFERENCE_ENTROPY})

    def create(self, reference: str | None = None) -> nn.Module:
        """Make the routed model, or the dense one of another run."""
        config = dataclasses.replace(self.config, distill=TeacherConfig(teacher="none"), grad_checkpointing=False)
        if reference is not None:
            config = dataclasses.replace(config, model=config.model.started_from(reference), routing=None)
        model = create_models(config)[0].to(choose_device(config.device)).eval()
        if reference is None:
            _, self._transform, self._tokenizer = create_transforms(model, config.model.name, None)
        return model

    def batches(self, changes: Mapping[str, Any] = MappingProxyType({})) -> Again:
        """Return the pairs that `data.val` names, sorted by nothing, for the model that was made."""
        data = self.data(changes)
        stream = create_eval_pairs(data, self._transform, self._tokenizer)
        return unsorted(stream)

    def judge(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return how well each pair finds itself among those of its batch."""
        return judge_pairs(model, batch)

    def shifted(self, batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """Change the images, not the captions."""
        images, texts = batch
        return change(images), texts

    def flops(self, model: nn.Module) -> dict[str, Any]:
        """Return the FLOPs of a pair."""
        images, texts = next(iter(self.batches())).batch
        device = next(model.parameters()).device
        return flops(model, {"image": images[:1].to(device), "text": texts[:1].to(device)}).to_dict()
