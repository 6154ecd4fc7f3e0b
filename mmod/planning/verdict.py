"""What is said of a choice: the sentences and the table of what is named, and what makes a comparison say nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from mmod.analysis.statistics import Estimate
from mmod.io.tables import MarkdownTable
from mmod.planning.choice import USE, Recommendation, points

# Titles of the columns: a difference to dense has its interval in brackets, and a speed its quartiles.
_HEADER = ("for", "recipe", "times as fast", "to dense [95 %]")


class Verdict(NamedTuple):
    """What to do, and the table of what is named; `print` shows both as Markdown.

    Attributes:
        sentences: What to do in each pass; one where nothing is advised.
        table: What is named for each pass, at each speed, and what is undecided: faster than what is to be used. By
            speed-up in each pass, the fastest last. It has no rows where nothing is advised.
        named: Names of these models, each once, those of the sentences first.
    """

    sentences: Sequence[str]
    table: MarkdownTable
    named: Sequence[str]

    @property
    def parts(self) -> list[str | MarkdownTable]:
        """The sentences, and the table if it has rows."""
        if len(self.table.rows) == 1:
            # The header alone.
            return list(self.sentences)
        return [*self.sentences, self.table]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.parts))


def verdict_of(recommendations: Sequence[Recommendation]) -> Verdict:
    """Return the verdict of the recommendations for each pass, the most important first."""
    rows: list[Sequence[str]] = []
    named: dict[str, None] = {}
    for one in recommendations:
        named |= dict.fromkeys(model.name for model, _ in one.roles)
        # From the slowest on, as the speeds at which one is named.
        for model, role in sorted(one.roles, key=lambda entry: entry[0].speedup.median):
            outcome = one.outcome(model)
            mark = one.mark(model)
            if mark:
                outcome += f" {mark}"
            if mark == USE and one.is_unsteady:
                outcome += ", if confirmed"
            # Why it is not what the sentence names, though its median is.
            if one.speed is None and not model.is_clearly_faster:
                outcome += "; not clearly faster"
            rows.append((role, model.name, f"{model.speedup:[.2f}", points(model.loss), outcome))
        if one.speed is None and one.unreached:
            rows.append((f"{one.where}, {one.unreached[0]:g} times", "none as fast", "", "", ""))
    first, *others = recommendations
    sentences = [first.sentence]
    # That nothing is advised holds in every pass.
    if not first.invalid:
        sentences += [one.sentence + _slower(first, one) for one in others]
    # The same in every pass.
    sentences += filter(None, [first.too_few])
    table = MarkdownTable([(*_HEADER, f"within {first.limit}?"), *rows])
    return Verdict(sentences, table, list(named))


def _slower(first: Recommendation, other: Recommendation) -> str:
    """Say where a model that is used in one pass is no faster than the dense one in another; empty where it is."""
    if first.used is None:
        return ""
    told = ""
    for model in other.models:
        if model.name != first.used.name or model.speedup.shown.median >= 1:
            continue
        how = "about as fast as the dense model"
        # By its quartiles, as what is clearly faster is.
        if model.speedup.shown.high < 1:
            how = "slower than the dense model"
        told += f" {model.label} is {how} there: {model.speedup:[.2f} times."
    return told


def beside_controls(
    differences: Mapping[str, Estimate | None],
    tolerance: float,
    agreements: Mapping[str, Estimate | None] = MappingProxyType({}),
) -> str:
    """Say which models are better or worse than their controls, such as random tokens; empty where none is tested.

    Controls may be no rows of a table, so that the difference stands behind each name.

    Args:
        differences: Difference of each model to its control in points, by name; None for those without.
        tolerance: Share that may be lost: models whose whole interval is within it are as good as their controls.
        agreements: That of the agreement with the dense model, where something else is compared.
    """
    groups: dict[str, list[str]] = {"better": [], "worse": [], "alike": [], "open": []}
    for name, value in differences.items():
        if value is None or not value.has_width:
            continue
        agreement = agreements.get(name)
        # A name of several words, such as 'as FastV', would be read as a part of the sentence.
        shown = repr(name) if " " in name else name
        told = f"{shown} ({value:+.1f})"
        if value.is_clear:
            group = "better" if value.low > 0 else "worse"
        elif agreement is not None and agreement.is_clear:
            group = "open"
            better = "better" if agreement.low > 0 else "worse"
            told = f"{shown} ({value:+.1f}; {better} by agreement)"
        else:
            # An interval with zero in it is no proof of equality: all of it has to be small.
            is_small = max(-value.low, value.high) <= 100 * tolerance
            group = "alike" if is_small else "open"
        groups[group].append(told)
    named = {group: "; ".join(names) for group, names in groups.items() if names}
    sentences = {
        "better": "Clearly better than their controls, such as random tokens, in points: {}.",
        "worse": "Clearly worse than their controls, such as random tokens, in points: {}.",
        "alike": f"As good as their controls, within {100 * tolerance:g} points: {{}}. It hardly matters here which "
        "tokens these keep.",
        "open": "Too few samples to say whether these differ from their controls, in points: {}.",
    }
    return " ".join(sentences[group].format(names) for group, names in named.items())


def say_guessing(correct: float, classes: int | None, samples: int) -> str:
    """Say that a dense model is hardly better than chance, or never right; empty where it is better.

    Args:
        correct: Share of right answers.
        classes: Number of classes that the model chooses from; None for answers in words.

    Example:
        >>> bool(say_guessing(0.27, classes=5, samples=100)), bool(say_guessing(0.29, classes=5, samples=100))
        (True, False)
        >>> bool(say_guessing(0.27, classes=5, samples=900)), bool(say_guessing(0.29, classes=5, samples=900))
        (True, False)
        >>> bool(say_guessing(0.0, classes=None, samples=100)), bool(say_guessing(0.01, classes=None, samples=100))
        (True, False)
    """
    if classes is None and samples and not correct:
        return (
            "the dense model has no answer right, so that differences to it say nothing. It needs more training, or "
            "the answers or the prompts are not of the form that it was trained with."
        )
    if classes is None or classes < 2 or not samples:
        return ""
    chance = 1 / classes
    # Two standard deviations of guesses that are right by chance.
    guessed = chance + 2 * math.sqrt(chance * (1 - chance) / samples)
    # Of many samples the least is more than chance: what gains little on it has learned other classes, or an order.
    little = chance + min(chance, (1 - chance) / 10)
    # Of a handful of samples chance may get all right, and nothing is known.
    if correct > max(guessed, little) or guessed >= 1:
        return ""
    percent = f"{100 * chance:.3g} %"
    return (
        f"the dense model is hardly better than chance ({percent}), so that differences to it say nothing. It needs "
        "more training, or these are not its weights, its classes in their order, or its preprocessing."
    )
