"""Fine-tuning of vision-language models on image conversations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from mmod.adapters.transformers.cache_base import cache_of
from mmod.analysis import Prompt, flops
from mmod.analysis.counting import needed_shares
from mmod.analysis.evaluations import evaluate_answers
from mmod.analysis.flop_count import vision_flops
from mmod.data.readers.chat import ChatCollator
from mmod.data.readers.conversations import ChatDataset, ChatSample
from mmod.data.readers.lengths import open_checked
from mmod.training.chat.config import TrainConfig
from mmod.training.chat.evaluate import EvalResult, answer_outcomes, ask, score
from mmod.training.chat.processor import create_processor
from mmod.training.chat.start import create_dense
from mmod.training.engine.evaluate import BatchStore, Columns, Evaluated, decisions_of, kept_rows
from mmod.training.engine.kind import COUNTED, ModelInput, device_of


@dataclass(frozen=True)
class ChatKind:
    """Image conversations with vision-language models of transformers, in its Trainer; see `Kind`."""

    config: TrainConfig
    result = EvalResult

    def prepare(self, weights: bool = True) -> nn.Module:
        """Create the model before methods are applied; see `mmod.training.chat.start.create_dense`."""
        processor = create_processor(self.config) if weights else None
        return create_dense(self.config, processor, on_meta=not weights)

    def evaluate(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Columns:
        """Return "loss" and "outcome", whether all tokens of the answers are the most likely, of every conversation."""
        with decisions_of(model) as decisions:
            loss_B, outcome_B = evaluate_answers(model, batch)
        return {"loss": loss_B, "outcome": outcome_B, **kept_rows(decisions)}

    def score(self, model: nn.Module, progress: bool = False, store: BatchStore | None = None) -> Evaluated:
        """Generate answers to the evaluation questions; see `Kind.score`."""
        answers, kept = ask(self.config, model, self.collator, self.questions, progress=progress, store=store)
        return Evaluated(score(answers, kept), answer_outcomes(answers))

    def inputs(self, model: nn.Module, size: int, batches: int = 1, training: bool = False) -> dict[str, ModelInput]:
        """Return one batch of prompts with one image, or whole training conversations; see `Kind.inputs`."""
        parts: Iterable[object]
        if training:
            parts = self._spread(batches * size, size)
            samples = size
        else:
            prompts = self.prompts(size)[0]
            parts = [prompts]
            samples = len(prompts["input_ids"])
        return {"prompt": ModelInput(parts, samples, partial(fill_cache, model), partial(self._flops, model))}

    def _flops(self, model: nn.Module, kept: Mapping[str, float]) -> float:
        """Count the FLOPs of the prefill of a prompt with one image, the mean of a few; see `prompt_flops`."""
        return prompt_flops(model, *self.prompts(COUNTED), kept).routed

    def _spread(self, count: int, size: int) -> DataLoader[ChatSample]:
        """Return encoded training conversations in batches, evenly over the data, the first among them."""
        collator = self.collator
        device = device_of(self)
        chats = open_checked(self.config.data.train, self.config.data, collator)
        count = min(len(chats), count)
        chosen = [number * len(chats) // count for number in range(count)]

        def encoded(batch: list[ChatSample]) -> dict[str, Tensor]:
            chats.report.add(chain.from_iterable(chat.faults for chat in batch))
            return {name: value.to(device) for name, value in collator(batch).items()}

        # An explicit generator: the loader would otherwise draw from the global one.
        return DataLoader(Subset(chats, chosen), size, collate_fn=encoded, generator=torch.Generator())  # type: ignore[arg-type]

    @property
    def collator(self) -> ChatCollator:
        """The encoder of conversations for this model."""
        return ChatCollator(create_processor(self.config), self.config.data.max_length)

    @property
    def questions(self) -> ChatDataset:
        """The conversations of the evaluation; a ValueError without any."""
        if self.config.data.val is None:
            raise ValueError("there is nothing to ask: set data.val")
        return open_checked(self.config.data.val, self.config.data, self.collator, prompts=True)

    def chats(self, count: int) -> list[ChatSample]:
        """Return up to `count` evaluation conversations with one image, whose prompts have similar lengths."""
        questions = self.questions
        indices = [index for index in range(len(questions)) if questions.images[index] == 1][:count]
        chats = questions.read(indices)
        if not chats:
            raise ValueError("no evaluation question has one image that can be read, so there is nothing to time")
        return chats

    def prompts(self, count: int) -> tuple[dict[str, Tensor], int, int]:
        """Return the encoded prompts of `chats`, and the mean numbers of text and image tokens per prompt."""
        collator = self.collator
        prompts = collator.prompts(self.chats(count))
        rows = len(prompts["input_ids"])
        image = int((prompts["input_ids"] == collator.processor.image_token_id).sum()) // rows
        return prompts, int(prompts["attention_mask"].sum()) // rows - image, image


class MeanFlops(NamedTuple):
    """FLOPs of a prompt of mean length, dense and with the model's methods, and the vision tower's among them."""

    dense: float
    routed: float
    dense_vision: float
    vision: float


def prompt_flops(
    model: nn.Module, prompts: Mapping[str, Tensor], text: int, image: int, kept: Mapping[str, float]
) -> MeanFlops:
    """Count the FLOPs of the prefill of a prompt of mean length, vision tower and projector included.

    Args:
        prompts: Encoded prompts, whose images are counted.
        text: Mean number of text tokens.
        image: Mean number of image tokens.
        kept: Kept shares by module.
    """
    shares = needed_shares(model, kept)
    language = flops(model, Prompt(text, image), shares)
    vision = vision_flops(model, prompts, shares)
    rows = len(prompts["input_ids"])
    return MeanFlops(
        dense=language.dense + vision.dense / rows,
        routed=language.routed + vision.routed / rows,
        dense_vision=vision.dense / rows,
        vision=vision.routed / rows,
    )


def fill_cache(model: Any, prompts: Mapping[str, Tensor]) -> Any:
    """Return the key-value cache of encoded prompts."""
    inputs = {name: value.to(model.device) for name, value in prompts.items()}
    return cache_of(model(**inputs, use_cache=True, logits_to_keep=1))
