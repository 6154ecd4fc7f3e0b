"""Answer priors: the share of questions that is answered right without looking at an image."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from mmod.data.synthetic.questions import QuestionsConfig, SyntheticChat, compose_chats


def prior_of(train: Iterable[tuple[str, str, str]], test: Iterable[tuple[str, str, str]]) -> dict[str, float]:
    """Return how often a question's most frequent answer in training is right, by kind.

    A question that training does not hold is answered by the most frequent answer of its kind.

    Args:
        train: Kind, question and answer of each training turn.
        test: The same of each test turn.

    Returns:
        Share of right answers of each kind, in [0, 1].

    Example:
        >>> prior_of([("a", "q", "yes"), ("a", "q", "no"), ("a", "q", "yes")], [("a", "q", "no"), ("a", "q", "yes")])
        {'a': 0.5}
    """
    by_question: dict[str, Counter[str]] = defaultdict(Counter)
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    for kind, question, answer in train:
        by_question[question][answer] += 1
        by_kind[kind][answer] += 1
    right, asked = Counter[str](), Counter[str]()
    for kind, question, answer in test:
        known = by_question.get(question) or by_kind[kind]
        right[kind] += bool(known) and known.most_common(1)[0][0] == answer
        asked[kind] += 1
    return {kind: right[kind] / count for kind, count in asked.items()}


def measure_prior(config: QuestionsConfig) -> dict[str, float]:
    """Return the answer priors of the embedded questions.

    Args:
        config: Parameters of a build.

    Returns:
        Share of the test questions of each kind that the most frequent answer in training gets right, in [0, 1].

    Example:
        >>> from mmod.data.synthetic.questions import DIFFICULTIES
        >>> measure_prior(DIFFICULTIES["tiny"])["count"] < 0.9
        True
    """
    train, test = (_turns(compose_chats(config, split)) for split in ("train", "test"))
    return prior_of(train, test)


def _turns(chats: Iterable[SyntheticChat]) -> Iterable[tuple[str, str, str]]:
    return ((turn.kind, turn.question, turn.answer) for chat in chats for turn in chat.turns)
