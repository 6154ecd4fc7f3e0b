"""Budgets: the number that brings a candidate to a share of the dense FLOPs, and names that tell the share."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mmod.planning import Candidate
from mmod.planning.budgets import at_budgets, fitted, named_by_share


@given(
    st.sampled_from(["capacity", "r", "image_size"]),
    st.floats(0.2, 0.95),
    st.floats(0.0, 0.5),
    st.floats(0.5, 2.0),
    st.integers(1, 600),
)
# A line goes along the steps of this one, and took 63 counts.
@example("capacity", 0.85, 0.45, 1.0, 5)
def test_the_nearest_value_is_found_in_few_counts(
    field: str, budget: float, least: float, power: float, steps: int
) -> None:
    counted = []

    def share_of(candidate: Candidate) -> float:
        if field == "capacity":
            # As a few tokens are: a staircase.
            part = -(-candidate.routing["capacity"] * steps // 1) / steps
        elif field == "r":
            part = 1 - candidate.methods[0]["r"] / 51
        else:
            part = candidate.image_size / 128
        counted.append(part)
        return float(least + (1 - least) * part**power)

    routing = {"router": "norm", "capacity": "fit"} if field == "capacity" else None
    methods = ({"kind": "merge", "r": "fit"},) if field == "r" else ()
    size = "fit" if field == "image_size" else None
    candidate = Candidate("a", routing=routing, methods=methods, image_size=size, series="a", budget=budget)
    values = {"capacity": [place / steps for place in range(1, steps + 1)]}
    values |= {"r": [1 - r / 51 for r in range(1, 51)], "image_size": [side / 128 for side in range(8, 128, 8)]}
    shares = [least + (1 - least) * value**power for value in values[field]]
    best = min(abs(share - budget) for share in shares)
    found = fitted(candidate, share_of, range(8, 128, 8), 100)
    assert abs(share_of(found) - budget) <= max(best, 0.005 * budget) + 1e-9
    assert len(counted) <= 15
    (renamed,), _ = named_by_share([Candidate("a-0.5", series="a", budget=0.5)], lambda _: share_of(found))
    assert (renamed.name == "a-0.5") == (abs(share_of(found) - 0.5) <= 0.015)


def test_of_equal_models_of_several_budgets_one_stays_with_its_share() -> None:
    smaller = [
        Candidate(f"small-{share:g}", image_size=80, series="small", budget=share) for share in (0.9, 0.71, 0.64)
    ]
    other = Candidate("a-0.5", image_size=64, series="a", budget=0.5, control="small-0.64")
    shares = {80: 0.683, 64: 0.5}
    named, left_out = named_by_share([*smaller, other], lambda candidate: shares[candidate.image_size])
    assert [(one.name, one.image_size, one.control) for one in named] == [
        ("small-0.68", 80, None),
        ("a-0.5", 64, "small-0.68"),
    ]
    assert left_out == {
        f"small-{budget}": "the nearest model to this budget is small-0.68, which is there already"
        for budget in (0.71, 0.64)
    }
    # One whose name tells the truth is not renamed for one whose name does not.
    named, _ = named_by_share(smaller, lambda _: 0.71)
    assert [one.name for one in named] == ["small-0.71"]
    # What a model that is left out was the control of has the one that stays.
    named, _ = named_by_share([*smaller, other], lambda candidate: 0.72 if candidate.image_size == 80 else 0.5)
    assert [(one.name, one.control) for one in named] == [("small-0.71", None), ("a-0.5", "small-0.71")]


@pytest.mark.parametrize(
    ("shares", "names"),
    [
        ((0.5714, 0.5662), ["small-0.57", "small-0.566"]),
        ((0.5703, 0.57), ["small-0.57", "small-0.570"]),
        # Of one cost and not equal: one keeps the name of its budget.
        ((0.57, 0.57, 0.57, 0.57), ["small-0.57", "small-0.570", "small-0.5700", "small-0.3"]),
        # Another model has the name.
        ((0.501, 0.4), ["small-0.5", "small-0.4"]),
    ],
)
def test_models_of_shares_that_round_alike_have_names_of_their_own(shares: tuple[float, ...], names: list[str]) -> None:
    budgets = (0.9, 0.7, 0.4, 0.3)
    smaller = [
        Candidate(f"small-{budget:g}", image_size=8 * place, series="small", budget=budget)
        for place, budget in enumerate(budgets[: len(shares)], 1)
    ]
    named, left_out = named_by_share(smaller, lambda candidate: shares[candidate.image_size // 8 - 1])
    assert [one.name for one in named] == names
    assert not left_out


@pytest.mark.parametrize("field", ["image_size", "size", "r"])
def test_what_has_few_sizes_has_one_name_whatever_budgets_it_comes_by(field: str) -> None:
    def flops_of(candidate: Candidate) -> float:
        if candidate.methods:
            (method,) = candidate.methods
            return 1 - method["r"] / 17 if field == "r" else (method["size"] / 128) ** 2
        return 1.0 if candidate.image_size is None else (candidate.image_size / 128) ** 2

    def names_of(*budgets: float) -> list[tuple[str, object]]:
        options: dict[str, object] = {"methods": ({"kind": "a", field: "fit"},)}
        if field == "image_size":
            options = {"image_size": "fit"}
        series = [Candidate(f"a-{budget:g}", series="a", budget=budget, **options) for budget in budgets]
        named, _ = at_budgets(series, flops_of, range(16, 128, 16), 16, strict=True)
        return [(one.name, one.image_size or one.methods[0][field]) for one in named]

    models = {
        name: number for budgets in ((0.57,), (0.76, 0.56), (0.75, 0.55, 0.4)) for name, number in names_of(*budgets)
    }
    assert len(models) == len({*models.values()})
    for name, number in models.items():
        share = 1 - number / 17 if field == "r" else (number / 128) ** 2
        assert name == f"a-{round(share, 2):g}"


def test_what_is_named_by_a_share_near_its_budget_stays_matched_to_the_routed_models_of_that() -> None:
    smaller = [Candidate(f"a-{budget:g}", series="a", budget=budget, image_size=1) for budget in (0.7, 0.5)]
    named, _ = named_by_share(smaller[:1], lambda _: 0.69, ["a-0.7"])
    assert [(one.name, one.budget) for one in named] == [("a-0.69", 0.7)]
    # Further off, it is of no budget but its own.
    named, _ = named_by_share(smaller[1:], lambda _: 0.61, ["a-0.5"])
    assert [(one.name, one.budget) for one in named] == [("a-0.61", 0.61)]


def test_a_fitted_size_takes_no_name_of_an_explicit_one_and_says_why_it_is_left_out() -> None:
    flops = {None: 1000.0, 112: 500.0, 56: 250.0}

    def named(*sizes: tuple[float, object]) -> tuple[list[tuple[str, object]], dict[str, str]]:
        candidates = [Candidate(f"a-{budget:g}", image_size=size, series="a", budget=budget) for budget, size in sizes]
        chosen, left_out = at_budgets(
            candidates, lambda candidate: flops[candidate.image_size], [56, 112], 4, strict=False
        )
        return [(one.name, one.image_size) for one in chosen], left_out

    reason = "the nearest model to this budget is a-0.5, which is there already"
    expected = ([("a-0.5", 112)], {"a-0.51": reason})
    assert named((0.51, "fit"), (0.5, 112)) == named((0.5, 112), (0.51, "fit")) == expected
    fitted_sizes = [("a-0.5", 112), ("a-0.25", 56)]
    assert named((0.5, "fit"), (0.51, "fit"), (0.25, "fit")) == (fitted_sizes, {"a-0.51": reason})


def test_budgets_below_the_least_cost_of_a_series_have_one_model() -> None:
    def flops_of(candidate: Candidate) -> float:
        # No capacity costs less than 0.38 of the dense model, and near it they cost nearly the same.
        return 1.0 if candidate.routing is None else max(0.38 + candidate.routing["capacity"] / 1000, 0.38)

    routing = {"router": "norm", "capacity": "fit"}
    wanted = [Candidate(f"a-{budget:g}", routing=routing, series="a", budget=budget) for budget in (0.11, 0.09, 0.07)]
    named, left_out = at_budgets(wanted, flops_of, [], 64, strict=False)
    assert [one.name for one in named] == ["a-0.38"]
    assert left_out == {
        f"a-{budget:g}": "the nearest model to this budget is a-0.38, which is there already" for budget in (0.09, 0.07)
    }
    # Another training, or other blocks, are other models, however near their cost.
    wanted[1] = dataclasses.replace(wanted[1], changes={"epochs": 20})
    wanted[2] = dataclasses.replace(wanted[2], routing={**routing, "blocks": "late"})
    named, left_out = at_budgets(wanted, flops_of, [], 64, strict=False)
    assert not left_out
    assert [(one.changes, one.routing.get("blocks")) for one in named] == [
        ({}, None),
        ({"epochs": 20}, None),
        ({}, "late"),
    ]


def test_what_cannot_be_fitted_is_refused() -> None:
    candidate = Candidate("a", routing={"router": "norm", "capacity": "fit", "gate": "fit"}, series="a", budget=0.5)
    with pytest.raises(ValueError, match="one value 'fit', got capacity, gate"):
        fitted(candidate, lambda _: 0.5, [8], 4)
    threshold = Candidate("b", routing={"router": "linear", "capacity": "fit"}, series="b", budget=0.5)
    with pytest.raises(ValueError, match="FLOPs depend on the data"):
        fitted(threshold, lambda _: None, [8], 4)
    with pytest.raises(ValueError, match="images have one patch"):
        fitted(Candidate("c", image_size="fit", series="c", budget=0.5), lambda _: 0.5, [], 1)
