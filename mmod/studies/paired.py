"""Differences between models that share their seeds: means, 95 % intervals, and which of them are significant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from statistics import stdev

from mmod.analysis.statistics import BySeed, Estimate, difference


def compare(figures: Mapping[str, BySeed], partners: Mapping[str, str | None]) -> dict[str, Estimate | None]:
    """Return the difference of every model's figures by seed to those of its partner, None for itself or none."""
    gaps: dict[str, Estimate | None] = {}
    for name, values in figures.items():
        partner = partners.get(name)
        other = {} if partner is None or partner == name else figures.get(partner, {})
        gaps[name] = difference(values, other) if set(values) & set(other) else None
    return gaps


def verdict(figures: Mapping[str, BySeed]) -> str:
    """Say in one sentence between which models there is no significant difference.

    Example:
        >>> print(verdict({"dense": {0: 95.0, 1: 95.2}, "a": {0: 94.9, 1: 95.2}, "b": {0: 70.0, 1: 70.1}}))
        Paired over 2 seeds (95 % intervals), no significant difference between dense and a.
    """
    seeds = max((len(values) for values in figures.values()), default=0)
    if seeds < 2:
        return "One seed: differences are not tested. Add --seeds 5 for confidence intervals."
    groups = "; ".join(map(_listed, _close_groups(figures)))
    differing = f"no significant difference between {groups}" if groups else "all differences are significant"
    return f"Paired over {seeds} seeds (95 % intervals), {differing}."


def as_fast(ms: Mapping[str, float], name: str) -> list[str]:
    """Return the other models that take no more time than one of them.

    Example:
        >>> as_fast({"dense": 3.0, "a": 2.0, "b": 2.02, "c": 1.0}, "a")
        ['b', 'c']
    """
    # Measurements repeat to within 2 %.
    return [other for other, time in ms.items() if other != name and time <= 1.02 * ms[name]]


def unbeaten(ms: Mapping[str, float], is_better: Callable[[str, str], bool]) -> list[str]:
    """Return the models than which none that is as fast is clearly better.

    Example:
        >>> unbeaten({"dense": 3.0, "a": 2.0, "b": 2.0}, lambda one, other: (one, other) == ("a", "b"))
        ['dense', 'a']
    """
    return [name for name in ms if not any(is_better(other, name) for other in as_fast(ms, name))]


def quoted(name: str) -> str:
    """Return a name for a list of names: in quotes where it has a comma.

    Example:
        >>> quoted("dense"), quoted("attention, merged")
        ('dense', "'attention, merged'")
    """
    return f"'{name}'" if "," in name else name


def spread(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation over seeds; None for a single one."""
    return stdev(values) if len(values) > 1 else None


def _close_groups(figures: Mapping[str, BySeed]) -> list[list[str]]:
    """Return groups of models without a significant difference, such that every such pair stands in one of them."""
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


def _is_clear(one: BySeed, other: BySeed) -> bool:
    return bool(set(one) & set(other)) and difference(one, other).is_clear
