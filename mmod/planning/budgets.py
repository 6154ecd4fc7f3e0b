"""Budgets of candidates: shares of the dense model's FLOPs, to which capacities, tokens or sizes are fitted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from mmod.analysis.table import DENSE
from mmod.planning.candidate import FIT, Candidate

# A candidate further off is not called by its budget.
_TOLERANCE = 0.03
# Of models whose budgets no number meets, those that differ less in cost are one.
_ALIKE = 0.01
# What is fitted in whole steps: sides of images, and tokens.
_WHOLE = ("image_size", "size", "r")
# A fitted share of tokens has three decimals.
_STEPS = 1000
# Shares that are equal in these are those of models of one cost.
_DECIMALS = 4
Share = Callable[[Candidate], float | None]
"""From a candidate to its share of the dense model's FLOPs; None where that depends on the data."""

Flops = Callable[[Candidate], float | None]
"""From a candidate to its FLOPs; None where these depend on the data."""


def at_budgets(
    candidates: Sequence[Candidate],
    flops_of: Flops,
    sides: Sequence[object],
    patches: int,
    *,
    strict: bool,
) -> tuple[list[Candidate], dict[str, str]]:
    """Return candidates that are fitted to their budgets and named by their shares: see `fitted`, `named_by_share`.

    Args:
        flops_of: Asked once for each model.
        strict: Raise for a series that cannot be fitted, instead of leaving it out.

    Returns:
        The candidates, and why series and budgets are left out, by name.
    """
    known: dict[str, float | None] = {}

    def counted(candidate: Candidate) -> float | None:
        # The same model comes by several names and budgets, and a count takes a pass.
        model = repr(dataclasses.replace(candidate, name="", series="", budget=None, control=None))
        if model not in known:
            known[model] = flops_of(candidate)
        return known[model]

    whole = counted(Candidate(DENSE))

    def share_of(candidate: Candidate) -> float | None:
        own = counted(candidate)
        return None if own is None or whole is None else own / whole

    chosen: list[Candidate] = []
    stepped = set()
    # Those with a fitted number, by what they have besides it.
    alike: dict[str, list[Candidate]] = {}
    left_out: dict[str, str] = {}
    for candidate in candidates:
        try:
            one = fitted(candidate, share_of, sides, patches)
            field = _fitted_field(candidate)
            if field in _WHOLE:
                stepped.add(candidate.name)
            if field is not None:
                others = alike.setdefault(repr(dataclasses.replace(candidate, name="", budget=None, control=None)), [])
                one = _nearest_of(one, others, share_of)
                others.append(one)
            chosen.append(one)
        except ValueError as refusal:
            if strict:
                raise
            # The same for all budgets, mostly.
            left_out[candidate.series] = str(refusal)
    named, equal = named_by_share(chosen, share_of, stepped)
    return named, left_out | equal


def fitted(candidate: Candidate, share_of: Share, sides: Sequence[object], patches: int) -> Candidate:
    """Return a candidate with the number that brings its FLOPs nearest to its budget in place of "fit".

    Args:
        sides: Sizes of smaller images that the model can take, the smallest first: sides in pixels, or pairs of them.
        patches: Number of patches of an image.

    Returns:
        The candidate with the least number where none makes it as cheap.

    Raises:
        ValueError: Its cost depends on the data.
    """
    name = _fitted_field(candidate)
    if name is None:
        return candidate
    # The cheapest first.
    values: Sequence[object]
    if name in ("image_size", "size"):
        values = sides
    elif name == "r":
        # Half of the tokens can join the others at most.
        values = range(patches // 2, 0, -1)
    else:
        values = [number / _STEPS for number in range(1, _STEPS + 1)]
    if not values:
        raise ValueError(f"{candidate.name}: images have one patch, so there are no smaller ones")
    share = partial(_share, candidate, share_of)
    budget = candidate.budget or 1.0
    return _with(candidate, values[_nearest(values, share, budget)])


def _nearest_of(candidate: Candidate, others: Sequence[Candidate], share_of: Share) -> Candidate:
    """Return a fitted candidate; where it misses its budget, as the model of an earlier one that costs as much.

    Below the least that a series can cost, each budget would have another number of nearly that cost.

    Args:
        others: The earlier ones, which differ from it in their names, budgets and fitted numbers alone.
    """
    share = share_of(candidate)
    if share is None or candidate.budget is None or abs(share / candidate.budget - 1) <= _TOLERANCE:
        return candidate
    for other in others:
        cost = share_of(other)
        if cost is not None and abs(cost / share - 1) < _ALIKE:
            return dataclasses.replace(other, name=candidate.name, budget=candidate.budget, control=candidate.control)
    return candidate


def _nearest(values: Sequence[object], share: Callable[[object], float], budget: float) -> int:
    """Return the index of the value, of ascending shares, whose share is nearest to a budget.

    By false position, since each share takes a count and FLOPs are nearly a line: what is known to be too cheap, and
    too expensive, closes in on the budget. By halves where that does not halve what is between them: of few tokens,
    many shares are one number, and a line would go along each step of the staircase.
    """
    # Behind the largest number stands the dense model.
    high = len(values)
    known = {high: 1.0}
    low = -1
    index = min(round(budget * high), high - 1)
    refusal: ValueError | None = None
    while low < index < high:
        before = high - low
        try:
            known[index] = share(values[index])
        except ValueError as error:
            # Too few tokens for the model: what it takes lies above.
            refusal = error
            low = index
            index = (low + high) // 2
            continue
        # Near enough: each further value takes another count.
        if abs(known[index] / budget - 1) < _TOLERANCE / 6:
            return index
        if known[index] < budget:
            low = index
        else:
            high = index
        middle = (low + high) // 2
        # At most by half, until something is too cheap.
        least = low + 1 if low >= 0 else max(0, high // 2)
        is_slow = low >= 0 and 2 * (high - low) > before
        index = middle if is_slow else min(max(_guess(known, budget, middle), least), high - 1)
    del known[len(values)]
    if not known and refusal is not None:
        raise refusal
    return min(known, key=lambda index: abs(known[index] - budget))


def _guess(known: Mapping[int, float], budget: float, middle: int) -> int:
    """Return where a line meets the budget through the two known shares nearest to it; `middle` where it falls."""
    near, other = sorted(known, key=lambda index: abs(known[index] - budget))[:2]
    rise = (known[other] - known[near]) / (other - near)
    return near + round((budget - known[near]) / rise) if rise > 0 else middle


def _share(candidate: Candidate, share_of: Share, value: object) -> float:
    share = share_of(_with(candidate, value))
    if share is None:
        raise ValueError(f"{candidate.name}: its FLOPs depend on the data, so no number is fitted to them: give one")
    return share


def _fitted_field(candidate: Candidate) -> str | None:
    """Return the name of the field that is to be fitted; a ValueError for several."""
    fields: list[tuple[str, object]] = [("image_size", candidate.image_size)]
    for part in (candidate.routing or {}, *candidate.methods):
        fields += part.items()
    names = [name for name, value in fields if value == FIT]
    if len(names) > 1:
        raise ValueError(f"{candidate.name} can have one value {FIT!r}, got {', '.join(names)}")
    return names[0] if names else None


def _with(candidate: Candidate, value: Any) -> Candidate:
    """Return a candidate with a value in place of "fit"."""

    def filled(fields: Mapping[str, object]) -> dict[str, object]:
        return {name: value if field == FIT else field for name, field in fields.items()}

    return dataclasses.replace(
        candidate,
        image_size=value if candidate.image_size == FIT else candidate.image_size,
        routing=candidate.routing and filled(candidate.routing),
        methods=tuple(map(filled, candidate.methods)),
    )


def named_by_share(
    candidates: Sequence[Candidate], share_of: Share, stepped: Collection[str] = ()
) -> tuple[list[Candidate], dict[str, str]]:
    """Return candidates named by their share of the dense FLOPs where that is more than 3 % off the budget in the name.

    Of several that are the same model, such as one size of images for two budgets, one stays. Names that candidates
    keep come first.

    Args:
        stepped: Names of those whose number is a whole one, which are always named by their share: a few sizes serve
            many budgets, and each has one name in all comparisons of a model.

    Returns:
        The candidates, and why others are left out, by the name that they would have.
    """
    # By the names that they come with.
    named: dict[str, Candidate] = {}
    shares: dict[str, float] = {}
    equals: dict[str, str] = {}
    left_out: dict[str, str] = {}

    def equal_of(candidate: Candidate) -> str | None:
        return next((one.name for one in named.values() if _are_equal(candidate, one)), None)

    def renamed(candidate: Candidate, share: float) -> Candidate:
        return _renamed(candidate, share, {one.name for one in named.values()})

    # Those that are named by their shares, the nearest to their budgets first.
    near: list[Candidate] = []
    far: list[Candidate] = []
    for candidate in candidates:
        budget = candidate.budget
        share = None
        if budget is not None and candidate.name == f"{candidate.series}-{budget:g}":
            share = share_of(candidate)
        if budget is None or share is None:
            named[candidate.name] = candidate
            continue
        shares[candidate.name] = share
        if abs(share / budget - 1) > _TOLERANCE:
            far.append(candidate)
        elif candidate.name in stepped:
            near.append(candidate)
        else:
            named[candidate.name] = candidate
    for candidate in (*near, *far):
        equal = equal_of(candidate)
        if equal is not None:
            equals[candidate.name] = equal
            # Of one name they are one row, which no reader misses.
            if candidate.name != equal:
                left_out[candidate.name] = f"the nearest model to this budget is {equal}, which is there already"
            continue
        one = renamed(candidate, shares[candidate.name])
        if candidate in near:
            # It stays matched to the routed models of its budget.
            one = dataclasses.replace(one, budget=candidate.budget)
        named[candidate.name] = one
    # What a model that is left out was the control of is compared with the same model.
    names = equals | {name: one.name for name, one in named.items()}
    in_order = [named[candidate.name] for candidate in candidates if candidate.name in named]
    return [dataclasses.replace(one, control=names.get(one.control or "", one.control)) for one in in_order], left_out


def _renamed(candidate: Candidate, share: float, taken: Collection[str]) -> Candidate:
    """Return a candidate that is named by its share, with as many decimals as tell it from names that are taken."""
    decimals = 2
    # As a budget is written, without a zero at the end: one model has one name.
    name = f"{candidate.series}-{round(share, decimals):g}"
    while name in taken:
        # Models of one cost that are not equal would have one name with any number of decimals.
        if decimals == _DECIMALS:
            return candidate
        decimals += 1
        name = f"{candidate.series}-{share:.{decimals}f}"
    return dataclasses.replace(candidate, name=name, budget=round(share, decimals))


def _are_equal(one: Candidate, other: Candidate) -> bool:
    return one == dataclasses.replace(other, name=one.name, budget=one.budget, control=one.control)
