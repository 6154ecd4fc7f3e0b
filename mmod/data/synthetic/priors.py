"""Answer priors: the accuracy that is possible without the image."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from mmod.data.synthetic.questions import QuestionsConfig, SyntheticChat, compose_chats


def prior_of(train: Iterable[tuple[str, str, str]], test: Iterable[tuple[str, str, str]]) -> dict[str, float]:
    """Return the accuracy, by question type, of the most frequent training answer to a question.

    For a question without a training example, the most frequent answer of its type is used.

    Args:
        train: Type, question and answer of each training turn.
        test: Type, question and answer of each test turn.

    Example:
        >>> prior_of([("a", "q", "yes"), ("a", "q", "no"), ("a", "q", "yes")], [("a", "q", "no"), ("a", "q", "yes")])
        {'a': 0.5}
    """
    by_question: dict[str, Counter[str]] = defaultdict(Counter)
    by_type: dict[str, Counter[str]] = defaultdict(Counter)
    for question_type, question, answer in train:
        by_question[question][answer] += 1
        by_type[question_type][answer] += 1
    right, asked = Counter[str](), Counter[str]()
    for question_type, question, answer in test:
        known = by_question.get(question) or by_type[question_type]
        right[question_type] += bool(known) and known.most_common(1)[0][0] == answer
        asked[question_type] += 1
    return {question_type: right[question_type] / count for question_type, count in asked.items()}


def measure_prior(config: QuestionsConfig) -> dict[str, float]:
    """Return the prior accuracy on the test split of the embedded questions by question type, in [0, 1]."""
    train, test = (_turns(compose_chats(config, split)) for split in ("train", "test"))
    return prior_of(train, test)


def _turns(chats: Iterable[SyntheticChat]) -> Iterable[tuple[str, str, str]]:
    return ((turn.question_type, turn.question, turn.answer) for chat in chats for turn in chat.turns)
