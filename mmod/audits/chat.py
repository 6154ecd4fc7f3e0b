"""Audits of vision-language models: conversations with images, judged by their answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mmod import is_routed
from mmod.analysis.audit.choices import REFERENCE_ENTROPY
from mmod.analysis.audit.judges import judge_answers
from mmod.audits.config import ChatAuditConfig
from mmod.audits.subject import Again, Sorted, Subject
from mmod.data.readers.chat import IGNORED, ChatCollator
from mmod.data.readers.conversations import open_conversations
from mmod.model import routing_configs
from mmod.training.chat.config import ModelConfig
from mmod.training.chat.model import create_model, create_processor
from mmod.training.chat.recipe import MODEL
from mmod.training.engine.distributed import choose_device

__all__ = ["ChatSubject"]

_IMAGES = "pixel_values"
_KIND = "kind of question"


class ChatSubject(Subject[ChatAuditConfig]):
    """A vision-language model of transformers; see `Subject`."""

    split = "val"
    # Not all conversations have equally many tokens, and no loss asked the head what follows an image token.
    unasked = frozenset({"shuffled", REFERENCE_ENTROPY})

    def create(self, reference: str | None = None) -> nn.Module:
        """Make the routed model, or the dense one of another run."""
        config = dataclasses.replace(self.config, lora=None, frozen=[])
        if reference is not None:
            model = ModelConfig(checkpoint=f"{reference}/{MODEL}", args=config.model.args)
            config = dataclasses.replace(config, model=model, routing=None)
        made: nn.Module = create_model(config)[0].to(choose_device()).eval()
        if reference is None:
            self._is_language_routed = is_routed(made) and "language" in routing_configs(made)
        return made

    def batches(self, changes: Mapping[str, Any] = MappingProxyType({})) -> Again:
        """Return the conversations with images, those of about equal length together, by the kind of question."""
        data, size = self.data(changes), self.config.eval_batch_size
        if data.val is None:
            raise ValueError("an audit needs conversations to ask: set data.val")
        talks = open_conversations(data.val, data)
        order = np.lexsort((talks.letters, talks.images))
        order = order[np.asarray(talks.images)[order] > 0]
        wanted = self.config.questions
        if wanted is not None and wanted < len(order):
            chosen = np.random.default_rng(self.config.seed).choice(len(order), wanted, replace=False)
            order = order[np.sort(chosen)]
        processor = create_processor(self.config.model)
        collate = ChatCollator(processor, data.max_length, protected=data.protected)

        def make() -> Iterator[Sorted]:
            for start in range(0, len(order), size):
                asked = [talks[int(index)] for index in order[start : start + size]]
                batch, kinds = collate(asked), [talk.kind for talk in asked]
                roles = _roles(batch, processor) if self._is_language_routed else {}
                yield Sorted(batch, {_KIND: kinds}, roles and {**roles, _KIND: _for_each_token(kinds, batch)})

        return Again(make, -(-len(order) // size))

    def judge(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the loss of each conversation's answers, and whether all of them are right."""
        return judge_answers(model, batch)

    def shifted(self, batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """Change the images where each conversation of the batch has one."""
        if _IMAGES not in batch or batch[_IMAGES].ndim != 4 or len(batch[_IMAGES]) != len(batch["labels"]):
            raise ValueError("audit.shifts need conversations of one image each, of one size")
        return {**batch, _IMAGES: change(batch[_IMAGES])}


def _roles(batch: Mapping[str, Tensor], processor: Any) -> dict[str, NDArray[np.str_]]:
    """Return what each token of a batch is."""
    tokens = batch["input_ids"]
    is_special = torch.isin(tokens, torch.tensor(processor.tokenizer.all_special_ids))
    names = np.where(batch["labels"] != IGNORED, "answer", np.where(is_special, "special token", "question"))
    return {"role": np.where(tokens == processor.image_token_id, "image", names)}


def _for_each_token(names: Sequence[str], batch: Mapping[str, Tensor]) -> NDArray[np.str_]:
    return np.repeat(np.asarray(names)[:, None], batch["input_ids"].shape[1], axis=1)
