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


def in_turn(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return as many combinations as the longest axis has values; the others begin again at their end."""
    values = [list(axis) for axis in axes]
    return [tuple(axis[row % len(axis)] for axis in values) for row in range(max(map(len, values)))]


def _pairs(places: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
    return {(a, places[a], b, places[b]) for a, b in itertools.combinations(range(len(places)), 2)}
