"""Few combinations of parameters instead of all: each value of each axis meets each value of every other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any


def cover(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return combinations, in the order of their product, in which each pair of values of two axes occurs."""
    values = [list(axis) for axis in axes]
    every = list(itertools.product(*map(range, map(len, values))))
    missing = {pair for places in every for pair in _pairs(places)}
    chosen = set()
    while missing:
        best = max(every, key=lambda places: len(_pairs(places) & missing))
        chosen.add(best)
        missing -= _pairs(best)
    return [tuple(axis[place] for axis, place in zip(values, places)) for places in every if places in chosen]


def in_turn(values: Iterable[Any], others: Iterable[Any], times: int = 1) -> list[tuple[Any, Any]]:
    """Return each of the values with so many of the others, which take turns; they must be no more than the values."""
    first, second = list(values), list(others)
    assert len(second) <= len(first)
    return [(one, second[(place + step) % len(second)]) for place, one in enumerate(first) for step in range(times)]


def _pairs(places: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    return {(a, places[a], b, places[b]) for a, b in itertools.combinations(range(len(places)), 2)}
