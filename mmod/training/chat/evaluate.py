"""How many questions a vision-language model answers, by their kind, and how many tokens it kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmod import trace
from mmod.analysis.modes import in_mode
from mmod.data.readers.chat import ChatCollator
from mmod.data.readers.conversations import ChatDataset, ChatSample
from mmod.io.progress import progress_bar
from mmod.methods import methods_of
from mmod.routing import TokenGroups
from mmod.training.engine.distributed import sum_over_processes
from mmod.training.engine.evaluate import RoutedResult

__all__ = ["EvalResult", "evaluate"]

# Kinds that need no image count for themselves alone.
_BLIND = "text"


@dataclass(frozen=True)
class EvalResult(RoutedResult):
    """The outcome of asking questions.

    Args:
        right: Share of questions answered exactly, in percent, by kind.
        asked: Number of questions by kind.
        kept: Name of each routed block to the share it kept of the tokens that could be skipped, in this process; empty
            when dense.
    """

    right: dict[str, float]
    asked: dict[str, int]
    kept: dict[str, float] = field(default_factory=dict)

    @property
    def accuracy(self) -> float:
        """Mean over the kinds of questions that need an image, in percent."""
        return mean_over_kinds(self.right)

    def columns(self) -> dict[str, float]:
        """Return the figures as columns of a table."""
        kinds = {f"right/{kind}": share for kind, share in self.right.items()}
        return {"right": self.accuracy, **kinds, **self.kept_columns()}

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {share:.2f} % of {self.asked[kind]}" for kind, share in self.right.items())
        return f"answers right {self.accuracy:.2f} %: {kinds}; kept {self.mean_kept:.3f}"


def mean_over_kinds(figures: Mapping[str, float]) -> float:
    """Return the mean of figures over the kinds of questions that need an image, or over all if none does.

    Args:
        figures: Kind to figure.

    Example:
        >>> mean_over_kinds({"count": 90.0, "read": 70.0, "text": 100.0})
        80.0
    """
    return mean([value for kind, value in figures.items() if kind != _BLIND] or figures.values())


@torch.no_grad()
def evaluate(
    model: Any,
    collator: ChatCollator,
    conversations: ChatDataset,
    *,
    batch_size: int = 32,
    max_new_tokens: int = 16,
    rank: int = 0,
    world: int = 1,
    progress: bool = False,
) -> EvalResult:
    """Let a model generate the last answer of each conversation, greedily, and compare it with the one given.

    Answers are compared without regard to case and spacing. With several processes each asks its own part of the
    questions and all get the result of the whole.

    Args:
        model: The model; its mode is restored at the end.
        collator: Encodes the prompts.
        conversations: The conversations.
        batch_size: Questions answered at once.
        max_new_tokens: Longest answer, in tokens.
        rank: Number of this process.
        world: Number of processes.
        progress: Show a bar.

    Returns:
        Shares by kind.

    Raises:
        ValueError: If there are fewer conversations than processes.
    """
    if len(conversations) < world:
        raise ValueError(f"{len(conversations)} conversations for {world} processes")
    kinds = sorted({(row["kinds"] or ["all"])[-1] for row in map(conversations.record, range(len(conversations)))})
    right, asked = Counter[str](), Counter[str]()
    with in_mode(False, model), _watched(model) as counts:
        for talks in _batches(conversations, batch_size, rank, world, progress):
            answers = generate(model, collator, collator.prompts(talks), max_new_tokens)
            for talk, answer in zip(talks, answers):
                asked[talk.question_type] += 1
                right[talk.question_type] += _plain(answer) == _plain(talk.answer)
        kept = {
            name: own / free if free else 1.0
            for name, (own, free) in ((name, sums.tolist()) for name, sums in counts.items())
        }
    sums = torch.tensor([[right[kind], asked[kind]] for kind in kinds], dtype=torch.float64)
    sums = sum_over_processes(sums.to(model.device)).cpu()
    shares = {kind: 100 * float(good / count) for kind, (good, count) in zip(kinds, sums)}
    return EvalResult(shares, {kind: int(count) for kind, (_, count) in zip(kinds, sums)}, kept)


def generate(
    model: Any, collator: ChatCollator, prompts: Mapping[str, Tensor], max_new_tokens: int, exactly: bool = False
) -> list[str]:
    """Generate answers greedily.

    Args:
        model: The model, in evaluation mode.
        collator: What encoded the prompts.
        prompts: The encoded prompts.
        max_new_tokens: Longest answer, in tokens.
        exactly: Go on to the longest answer whatever is said.

    Returns:
        The answers as text.
    """
    tokenizer = collator.processor.tokenizer
    inputs = {name: value.to(model.device) for name, value in prompts.items()}
    ids_BN: Tensor = model.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        min_new_tokens=max_new_tokens if exactly else None,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        # An image token without an image would be an error in the next step.
        suppress_tokens=[collator.processor.image_token_id],
    )
    answers: list[str] = tokenizer.batch_decode(ids_BN[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


@contextmanager
def _watched(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Count in each forward pass which tokens are kept, and which may be skipped, by name of the block that decides."""
    counts: dict[str, Tensor] = {}
    if not methods_of(model):
        yield counts
        return

    def count(*_: Any) -> None:
        for name, routing in decisions.take().items():
            keep_BN, tokens = routing.keep_BN, routing.evidence.tokens
            free_BN = tokens.free_BN if isinstance(tokens, TokenGroups) else torch.ones_like(keep_BN)
            kept_and_free = torch.stack([(keep_BN & free_BN).sum(), free_BN.sum()])
            counts[name] = counts.get(name, 0) + kept_and_free

    with trace(model) as decisions:
        handle = model.register_forward_hook(count)
        try:
            yield counts
        finally:
            handle.remove()


def _batches(
    conversations: ChatDataset, batch_size: int, rank: int, world: int, progress: bool
) -> Iterator[list[ChatSample]]:
    """Yield this process's conversations, those of about equal length together."""
    order = np.lexsort((conversations.letters, conversations.images))[rank::world]
    for start in progress_bar(range(0, len(order), batch_size), desc="answer", shown=progress, leave=False):
        yield [conversations[int(index)] for index in order[start : start + batch_size]]


def _plain(answer: str) -> str:
    return " ".join(answer.lower().split())
