"""Differences between models that share their seeds: means, 95 % intervals, and which models they tell apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from statistics import stdev

from mmod.analysis.statistics import BySeed, Estimate, difference

__all__ = ["as_fast", "compare", "quoted", "spread", "unbeaten", "verdict"]


def compare(figures: Mapping[str, BySeed], partners: Mapping[str, str | None]) -> dict[str, Estimate | None]:
    """Return each model's difference to its partner.

    Args:
        figures: Figures by seed of each model.
        partners: Name of the model that each is compared with; itself, None or a missing one gives None.
    """
    found: dict[str, Estimate | None] = {}
    for name, own in figures.items():
        partner = partners.get(name)
        other = {} if partner is None or partner == name else figures.get(partner, {})
        found[name] = difference(own, other) if set(own) & set(other) else None
    return found


def verdict(figures: Mapping[str, BySeed]) -> str:
    """Say in one sentence which models the seeds do not tell apart.

    Args:
        figures: Figures by seed of each model.

    Example:
        >>> print(verdict({"dense": {0: 95.0, 1: 95.2}, "a": {0: 94.9, 1: 95.2}, "b": {0: 70.0, 1: 70.1}}))
        Paired over 2 seeds, 95 % intervals do not tell apart: dense and a.
    """
    seeds = max((len(own) for own in figures.values()), default=0)
    if seeds < 2:
        return "One seed: which model is better is not said."
    groups = _close_groups(figures)
    told = "do not tell apart: " + "; ".join(map(_listed, groups)) if groups else "tell all models apart"
    return f"Paired over {seeds} seeds, 95 % intervals {told}."


def as_fast(ms: Mapping[str, float], name: str) -> list[str]:
    """Return the models that take no more time than one of them, apart from itself.

    Args:
        ms: Measured time of each model. A fiftieth more counts as equal, which is what measurements repeat to.
        name: The model.

    Example:
        >>> as_fast({"dense": 3.0, "a": 2.0, "b": 2.02, "c": 1.0}, "a")
        ['b', 'c']
    """
    return [other for other, own in ms.items() if other != name and own <= 1.02 * ms[name]]


def unbeaten(ms: Mapping[str, float], is_better: Callable[[str, str], bool]) -> list[str]:
    """Return the models that none as fast is clearly better than.

    Args:
        ms: Measured time of each model.
        is_better: Whether a model is clearly better than another.

    Example:
        >>> unbeaten({"dense": 3.0, "a": 2.0, "b": 2.0}, lambda one, other: (one, other) == ("a", "b"))
        ['dense', 'a']
    """
    return [name for name in ms if not any(is_better(other, name) for other in as_fast(ms, name))]


def quoted(name: str) -> str:
    """Return a name as it stands in a list: in quotes where it has a comma.

    Example:
        >>> quoted("dense"), quoted("attention, merged")
        ('dense', "'attention, merged'")
    """
    return f"'{name}'" if "," in name else name


def spread(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation over seeds; None for a single one."""
    return stdev(values) if len(values) > 1 else None


def _close_groups(figures: Mapping[str, BySeed]) -> list[list[str]]:
    """Return groups of models no two of which are told apart, so that each pair that is not stands in one of them."""
    near = {name: {other for other in figures if not _is_clear(figures[name], figures[other])} for name in figures}
    groups: list[list[str]] = []
    for one, two in combinations(figures, 2):
        if two in near[one] and not any({one, two} <= set(group) for group in groups):
            group = [one, two]
            for name in figures:
                if name not in group and near[name].issuperset(group):
                    group.append(name)
            groups.append([name for name in figures if name in group])
    return groups


def _listed(names: Sequence[str]) -> str:
    shown = [quoted(name) for name in names]
    return f"{', '.join(shown[:-1])} and {shown[-1]}"


def _is_clear(own: BySeed, other: BySeed) -> bool:
    return bool(set(own) & set(other)) and difference(own, other).is_clear
