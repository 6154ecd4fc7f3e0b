"""The objective of text: the next byte, distillation and auxiliary losses."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mmod.methods.route import every_token
from mmod.training.engine.task import Task, autocast, mean_kl, with_total


class TextTask(Task):
    """A causal language model with its objective; see `Task`, and `TrainConfig` for `elastic`."""

    def __init__(self, model: nn.Module, *, elastic: bool = False, **options: Any) -> None:
        super().__init__(model, **options)
        self.elastic = elastic

    def forward(self, tokens: Tensor, following: Tensor) -> dict[str, Tensor]:
        """Return the "loss" of bytes (B, L) and the bytes after them, and its terms, in nats per byte."""
        with autocast(tokens.device, self.precision):
            parts = {}
            logits = None
            if self.elastic:
                with every_token(self.model):
                    logits = logits_of(self.model, tokens)
                parts["elastic"] = mean_kl(logits_of(self.model, tokens), logits.detach())
            else:
                logits = logits_of(self.model, tokens)
            parts |= self.auxiliary_term()
            # The pass over all tokens teaches, and gets the loss of the task.
            parts["task"] = F.cross_entropy(logits.flatten(0, 1).float(), following.flatten())
            parts |= self.distillation_term(logits, partial(logits_of, tokens=tokens))
        return with_total(parts)


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits (B, L, 256) of the byte after each of some bytes (B, L)."""
    return model(input_ids=tokens, use_cache=False).logits
