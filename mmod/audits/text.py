"""Audits of causal language models of bytes.

Axes: B windows, N bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmod.analysis.audit.generation import Generation, judge_generation
from mmod.audits.config import TextAuditConfig
from mmod.audits.subject import Again, Sorted, Subject
from mmod.data.readers.text import create_eval_text
from mmod.training.engine.config import TeacherConfig
from mmod.training.engine.distributed import choose_device
from mmod.training.text.config import BYTES
from mmod.training.text.evaluate import judge_text
from mmod.training.text.model import create_models

__all__ = ["TextSubject"]


def _role(byte: bytes) -> str:
    """Return what a byte is in a text."""
    if byte.isspace():
        return "end of line" if byte in b"\r\n" else "space"
    if byte.isalnum() or byte == b"_":
        return "digit" if byte.isdigit() else "letter"
    return "punctuation" if byte.isascii() and byte >= b" " else "other"


_ROLES = np.array([_role(bytes([value])) for value in range(BYTES)])


class TextSubject(Subject[TextAuditConfig]):
    """A language model of bytes, which decides as in generation where it was trained for that; see `Subject`."""

    def create(self, reference: str | None = None) -> nn.Module:
        """Make the routed model, or the dense one of another run."""
        plain: dict[str, Any] = {"distill": TeacherConfig(teacher="none"), "grad_checkpointing": False}
        config = dataclasses.replace(self.config, elastic=False, **plain)
        if reference is not None:
            config = dataclasses.replace(config, model=config.model.started_from(reference), routing=None)
        return create_models(config)[0].to(choose_device(config.device)).eval()

    def batches(self, changes: Mapping[str, Any] = MappingProxyType({})) -> Again:
        """Return the windows of the evaluation split, sorted by nothing, with what each byte is."""
        data = self.data(changes)
        stream = create_eval_text(data)

        def make() -> Iterator[Sorted]:
            for tokens, following in stream.batches(0):
                yield Sorted((tokens, following), kinds={"role": _ROLES[tokens.numpy()]})

        return Again(make, stream.steps_per_epoch)

    def judge(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the loss of each window, and the share of its bytes that are foretold."""
        return judge_text(model, batch)

    def generation(self, model: nn.Module) -> Generation | None:
        """Return how the model decides in texts that are longer than the windows of its training."""
        config = self.config
        if not config.generation:
            return None
        length = config.data.length + config.generation
        stream = create_eval_text(dataclasses.replace(config.data, length=length, val_limit=config.texts))
        tokens_BN = torch.cat([tokens for tokens, _ in stream.batches(0)]).to(next(model.parameters()).device)
        return judge_generation(model, tokens_BN, config.data.length, config.seed)

    def shifted(self, batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """Refuse: shifts change images."""
        raise ValueError("audit.shifts change images, and text has none: leave them out")
