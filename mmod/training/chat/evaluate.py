"""Answers of a vision-language model by kind of question, and kept shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from statistics import mean
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

from mmod.analysis.modes import in_mode
from mmod.analysis.tracing import trace
from mmod.data.readers.chat import ChatCollator
from mmod.data.readers.conversations import ChatDataset, ChatSample
from mmod.data.records import plain_answer
from mmod.io.processes import gathered, process_count, process_rank
from mmod.io.progress import progress_bar
from mmod.methods import methods_of
from mmod.training.chat.config import TrainConfig
from mmod.training.engine.distributed import sum_over_processes
from mmod.training.engine.evaluate import BatchStore, RoutedResult
from mmod.values import IGNORED

# Kind of question that needs no image; it does not count in the mean.
_BLIND = "text"
RIGHT = "right"
"""Column of the mean accuracy."""


@dataclass(frozen=True)
class EvalResult(RoutedResult):
    """The result of an evaluation on questions.

    Args:
        right: Exact-match accuracy in percent, by kind of question.
        questions: Number of questions by kind.
        kept: Kept share of the tokens that may be skipped, in this process, by routed block; empty for a dense model.
        prior: Accuracy in percent, by kind of question, of always giving the most frequent training answer to it; empty
            if it was not measured. No part of equality, as it is about the data.
    """

    right: dict[str, float]
    questions: dict[str, int]
    kept: dict[str, float] = field(default_factory=dict)
    prior: dict[str, float] = field(default_factory=dict, compare=False)

    @property
    def accuracy(self) -> float:
        """Mean over the kinds of questions that need an image, in percent."""
        return mean_over_kinds(self.right)

    def columns(self) -> dict[str, float]:
        """Return right answers in percent, overall and by kind of question, and the kept share of tokens."""
        return {
            RIGHT: self.accuracy,
            **{f"right/{kind}": share for kind, share in self.right.items()},
        } | super().columns()

    def __str__(self) -> str:
        kept = ""
        if self.kept:
            kept = f"{self.told_kept} of the tokens that may be skipped"
        if len(self.right) == 1:
            return f"answers right {self.accuracy:.2f} % of {sum(self.questions.values())}{kept}"
        parts = [f"{kind} {share:.2f} % of {self.questions[kind]}" for kind, share in self.right.items()]
        return f"answers right {self.accuracy:.2f} %: {', '.join(parts)}{kept}"

    @property
    def baseline(self) -> str:
        """The language-only prior."""
        if not self.prior:
            return ""
        kinds = ""
        if len(self.prior) > 1:
            kinds = ": " + ", ".join(f"{kind} {share:.2f} %" for kind, share in self.prior.items())
        return (
            f"language-only prior {mean_over_kinds(self.prior):.2f} %{kinds} (right answers without looking at an "
            "image: always the most frequent training answer to the question. A model that sees does better)"
        )


def mean_over_kinds(figures: Mapping[str, float]) -> float:
    """Return the mean of figures by kind over the kinds that need an image, or over all if none does.

    Example:
        >>> mean_over_kinds({"count": 90.0, "read": 70.0, "text": 100.0})
        80.0
    """
    # A set without images has text questions alone.
    return mean([value for kind, value in figures.items() if kind != _BLIND] or figures.values())


class Answer(NamedTuple):
    """A question, the answer that is expected, and the one that a model gave."""

    key: str
    kind: str
    question: str
    expected: str
    given: str

    @property
    def is_right(self) -> bool:
        """Whether both answers are equal but for case and spacing."""
        return plain_answer(self.given) == plain_answer(self.expected)


@torch.no_grad()
def ask(
    config: TrainConfig,
    model: nn.Module,
    collator: ChatCollator,
    conversations: ChatDataset,
    *,
    progress: bool = False,
    store: BatchStore | None = None,
) -> tuple[list[Answer], dict[str, float]]:
    """Generate the last answer of every conversation greedily; return the answers, and `EvalResult.kept`.

    With several processes, each answers its share of the questions and all return all answers. The model's mode is
    restored at the end.

    Args:
        store: See `mmod.training.engine.kind.Kind.score`.

    Raises:
        ValueError: There are fewer conversations than processes, none can be read, or logits are not finite.
    """
    check_enough(conversations, process_count())
    answers: list[Answer] = []
    sums: dict[str, np.ndarray] = {}
    with in_mode(False, model):
        for chats in _batches(conversations, config.eval_batch_size, progress):
            prompts = collator.prompts(chats)
            generated = partial(_generated, model, collator, prompts, config.max_new_tokens)
            if store is None:
                given = generated()
            else:
                given = store.once(prompts, generated)
            for chat, text in zip(chats, given["texts"]):
                answers.append(Answer(chat.key, chat.question_type, chat.messages[-2].text, chat.answer, text))
            for name, counts in given["counts"].items():
                sums[name] = sums.get(name, 0) + np.array(counts)
    kept = {}
    for name, (ran, free) in sums.items():
        # Nothing could be skipped where no token was free.
        kept[name] = float(ran / free) if free else 1.0
    everyone = list(chain.from_iterable(gathered(answers)))
    if not everyone:
        raise ValueError(f"no conversation of the evaluation can be read; {conversations.report}")
    return everyone, kept


def score(answers: Sequence[Answer], kept: Mapping[str, float]) -> EvalResult:
    """Return the result of the answers to all questions; see `ask`."""
    questions = Counter(answer.kind for answer in answers)
    right = Counter(answer.kind for answer in answers if answer.is_right)
    # In one order, whatever the questions' order: results are compared as they are written.
    kinds = sorted(questions)
    shares = {kind: 100 * right[kind] / questions[kind] for kind in kinds}
    return EvalResult(shares, {kind: questions[kind] for kind in kinds}, dict(kept))


def answer_outcomes(answers: Sequence[Answer]) -> dict[str, np.ndarray]:
    """Return whether each answer is right (N,), and the number of its kind of question, -1 where that does not count.

    The mean over the kinds of `right_answers` is `EvalResult.accuracy`.
    """
    kinds = sorted({answer.kind for answer in answers})
    counted = [kind for kind in kinds if kind != _BLIND] or kinds
    number = {kind: index for index, kind in enumerate(counted)}
    return {
        "answer": np.array([answer.is_right for answer in answers], np.float32),
        "kind": np.array([number.get(answer.kind, -1) for answer in answers], np.int16),
    }


def right_answers(outcomes: Mapping[str, np.ndarray], weight_SN: np.ndarray) -> np.ndarray:
    """Return the accuracy in percent for each draw (S,): the mean over the kinds of questions.

    Args:
        outcomes: Whether each answer is right, and its kind of question, from `answer_outcomes`.
        weight_SN: How often each draw of a bootstrap has each answer.

    Example:
        >>> answers = {"answer": np.array([1.0, 0.0, 1.0]), "kind": np.array([0, 0, 1])}
        >>> right_answers(answers, np.array([[1, 1, 1], [2, 0, 1]])).tolist()
        [75.0, 100.0]
    """
    shares = []
    for kind in range(int(outcomes["kind"].max()) + 1):
        is_kind_N = outcomes["kind"] == kind
        count_S = weight_SN @ is_kind_N
        right_S = weight_SN @ (is_kind_N * outcomes["answer"])
        # A draw may hold no question of a kind.
        share_S = np.full(len(weight_SN), np.nan)
        np.divide(right_S, count_S, out=share_S, where=count_S > 0)
        shares.append(share_S)
    return 100 * np.nanmean(shares, axis=0)


def check_enough(conversations: ChatDataset, processes: int) -> None:
    """Raise a ValueError if a process would have no conversation to answer."""
    if len(conversations) < processes:
        raise ValueError(f"{len(conversations)} conversations for {processes} processes: use more, or fewer processes")


def generate(
    model: Any, collator: ChatCollator, prompts: Mapping[str, Tensor], max_new_tokens: int, exactly: bool = False
) -> list[str]:
    """Generate answers greedily."""
    tokenizer = collator.processor.tokenizer
    inputs = {name: value.to(model.device) for name, value in prompts.items()}
    # Many language models have no token for padding, which the ends of short answers need.
    padding = tokenizer.pad_token_id
    if padding is None:
        padding = tokenizer.eos_token_id
    ids_BN: Tensor = model.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        min_new_tokens=max_new_tokens if exactly else None,
        do_sample=False,
        pad_token_id=padding,
        # An image token without an image would fail in the next step.
        suppress_tokens=[collator.processor.image_token_id],
    )
    return tokenizer.batch_decode(ids_BN[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


class _Generated(TypedDict):
    """The answers to a batch, and the counts of kept and skippable tokens by module that decides."""

    texts: list[str]
    counts: dict[str, list[int]]


def _generated(
    model: nn.Module, collator: ChatCollator, prompts: Mapping[str, Tensor], max_new_tokens: int
) -> _Generated:
    """Answer a batch of prompts; see `_watched`."""
    with _watched(model) as counts:
        texts = generate(model, collator, prompts, max_new_tokens)
    return {"texts": texts, "counts": {name: count.tolist() for name, count in counts.items()}}


@contextmanager
def _watched(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Context that counts kept and skippable tokens by module that decides, and checks the logits of every pass."""
    counts: dict[str, Tensor] = {}
    bad: list[Tensor] = []

    def check(module: nn.Module, inputs: object, output: object) -> None:
        # The last position predicts; the others may be padding.
        logits = getattr(output, "logits", None)
        if logits is not None:
            bad.append((~logits[:, -1].isfinite()).sum())

    def count(*_: object) -> None:
        for name, routing in decisions.take().items():
            counted_BN = routing.counted_BN
            kept_of_counted = torch.stack([(routing.keep_BN & counted_BN).sum(), counted_BN.sum()])
            counts[name] = counts.get(name, 0) + kept_of_counted

    with ExitStack() as stack:
        stack.callback(model.register_forward_hook(check).remove)
        if methods_of(model):
            decisions = stack.enter_context(trace(model))
            stack.callback(model.register_forward_hook(count).remove)
        yield counts
    # One check of all passes, because a check waits for the device.
    if bad and int(torch.stack(bad).sum()):
        broken = sum(map(bool, bad))
        raise ValueError(
            f"the logits of an evaluation must be finite, got NaN or infinite ones in {broken} of {len(bad)} forward "
            "passes"
        )


def _batches(conversations: ChatDataset, batch_size: int, progress: bool) -> Iterator[list[ChatSample]]:
    """Yield the conversations of this process in batches of similar length."""
    # Every n-th of the sorted conversations: each process gets short and long ones.
    order = np.lexsort((conversations.letters, conversations.images))[process_rank() :: process_count()]
    for start in progress_bar(range(0, len(order), batch_size), desc="answer", shown=progress, leave=False):
        chats = conversations.read(order[start : start + batch_size])
        if chats:
            yield chats


@torch.no_grad()
def answer_loss(model: Any, collator: ChatCollator, conversations: ChatDataset, batch_size: int) -> float:
    """Return the mean loss of a token of the answers in all conversations, by all processes together.

    The model's mode is restored at the end.
    """
    total = torch.zeros(2, dtype=torch.float64)
    with in_mode(False, model):
        for chats in _batches(conversations, batch_size, progress=False):
            batch = {name: value.to(model.device) for name, value in collator(chats).items()}
            # The first token of a sequence is predicted by none.
            count = int((batch["labels"][:, 1:] != IGNORED).sum())
            loss = float(model(**batch).loss)
            total += torch.tensor([loss * count, count], dtype=torch.float64)
    loss, count = sum_over_processes(total.to(model.device)).tolist()
    return float(loss / count)
