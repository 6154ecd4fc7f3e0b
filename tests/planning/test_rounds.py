"""Searches under a budget of measured time, and rounds that score choices again beside those of the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import mmod
from mmod.io.store import Store
from mmod.planning import search
from mmod.planning.plan_search import (
    BlockCosts,
    Choices,
    PlanSearch,
    best_plan,
    choices_of,
    in_time,
    plan_of,
    stopwatch,
)
from tests.kit.fitted import count_once
from tests.kit.vlm_zoo import make_joint, prompt
from tests.kit.zoo import make_images, make_model

NAME = "vit_tiny_patch16_224"
FEW = (mmod.Option(0.5), mmod.Option(0.25, "mlp"))
STRIDE = mmod.score("stride")
DEPTH = 12


@pytest.fixture(autouse=True)
def counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count_once(monkeypatch)


def pretend(overhead: float, exponent: float) -> Callable[[Sequence[mmod.RoutingConfig]], tuple[float, list[float]]]:
    """Return a stopwatch of assumed times that do not add up over blocks and have an overhead for each."""

    def share(config: mmod.RoutingConfig) -> float:
        plan = config.resolved(DEPTH)
        saved = sum((1 - capacity) * (1.0 if operator == "block" else 0.6) for _, capacity, operator, _ in plan.rows)
        return 1 - 0.9 * (saved / DEPTH) ** exponent + overhead * len(plan.blocks)

    return lambda configs: (20.0, [share(config) for config in configs])


def search_in_time(
    overhead: float, exponent: float, budget: float, scores: list[tuple[float, float]]
) -> tuple[PlanSearch, dict[Choices, float]]:
    """Return the search under a budget of assumed times, and the share of every plan that it measured."""
    clock, measured = pretend(overhead, exponent), dict[Choices, float]()

    def measure(configs: Sequence[mmod.RoutingConfig]) -> tuple[float, list[float]]:
        total, shares = clock(configs)
        measured.update(zip([choices_of(config) for config in configs], shares))
        return total, shares

    flops = BlockCosts(((0.5, 0.55),) * DEPTH, (1.0,) * DEPTH, DEPTH * 1.1)
    total, shares = clock([option.config(range(DEPTH), STRIDE) for option in FEW])
    costs = flops.timed(total, shares)
    # What every option takes in all blocks is what was measured.
    assert [sum(column) for column in zip(*costs.options)] == pytest.approx([total * share for share in shares])
    names, plan = tuple(map(str, range(DEPTH))), best_plan(scores, costs, FEW, budget, STRIDE)
    search = PlanSearch(names, FEW, tuple(scores), costs, budget, "milliseconds", 1, STRIDE, plan)
    return in_time(search, measure), measured


@given(
    overhead=st.floats(0, 0.01),
    exponent=st.floats(0.8, 1.3),
    budget=st.floats(0.75, 0.95),
    scores=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=DEPTH, max_size=DEPTH),
)
def test_the_best_measured_plan_within_the_budget_of_time_wins(
    overhead: float, exponent: float, budget: float, scores: list[tuple[float, float]]
) -> None:
    outcome, measured = search_in_time(overhead, exponent, budget, scores)
    fitting = [plan_of(choices, STRIDE) for choices, share in measured.items() if share <= budget * 1.05]
    assert outcome.plan in fitting
    assert outcome.score(outcome.plan) == min(map(outcome.score, fitting))
    assert outcome.time == pytest.approx(20 * measured[choices_of(outcome.plan)])
    assert f"{outcome.time:.4g} of the dense model's 20 milliseconds" in str(outcome)
    assert str(outcome.plan) in outcome._repr_markdown_()


@pytest.mark.parametrize("exponent", [0.8, 1.0, 1.3])
@pytest.mark.parametrize("budget", [0.75, 0.85, 0.95])
def test_a_plan_uses_its_budget_of_time(exponent: float, budget: float) -> None:
    scores = [(1.0 + block / DEPTH, 0.5 + block / DEPTH) for block in range(DEPTH)]
    outcome, _ = search_in_time(0.005, exponent, budget, scores)
    assert outcome.time == pytest.approx(budget * 20, rel=0.1)


def test_budgets_of_time_that_cannot_be_kept_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = make_model(NAME), [make_images(NAME, 2)]

    def slow_when_measured(configs: Sequence[mmod.RoutingConfig]) -> tuple[float, list[float]]:
        return 20.0, [0.5, 0.5] if len(configs) > 1 else [1.2]

    monkeypatch.setattr(search, "stopwatch", lambda *_: slow_when_measured)
    for budget, message in (
        (14.0, "a budget of 14 ms is out of reach: the fastest plan took 24 ms"),
        (9.0, r"must lie in \[1\d(\.\d+)?, 20\) milliseconds, the range of these options, got 9"),
        (21.0, r"20\) milliseconds, the range of these options, got 21"),
    ):
        with pytest.raises(ValueError, match=message):
            mmod.search_plan(model, images, budget, options=FEW, cost="milliseconds")
    assert not mmod.is_routed(model)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (make_model(NAME), "image", make_images(NAME, 1)),
        lambda: (make_joint("llava"), "language", prompt("llava", (1, 2))),
    ],
)
def test_a_measurement_leaves_the_model_dense(make: Callable[[], tuple[nn.Module, str, Any]]) -> None:
    model, part, batch = make()
    configs = [mmod.RoutingConfig(router="stride", capacity=0.5, blocks=(1,))]
    with torch.no_grad():
        total, shares = stopwatch(model, part, batch)(configs)
    assert total > 0
    assert len(shares) == 1
    assert not mmod.is_routed(model)


def test_rounds_score_choices_beside_those_of_the_plan() -> None:
    model, batches = make_joint("llava"), [prompt("llava", (1, 2), seed=seed) for seed in (1, 2)]
    options = (mmod.Option(0.0, "block", "all"), mmod.Option(0.0, "mlp"))
    first = mmod.search_plan(model, batches, 0.7, part="language", options=options)
    actual = mmod.search_plan(model, batches, 0.7, part="language", options=options, rounds=2)

    def score_of_plan(plan: mmod.RoutingConfig) -> float:
        return mmod.plan_divergence(model, batches, plan, part="language")

    assert actual.divergence == pytest.approx(score_of_plan(actual.plan))
    assert actual.divergence <= score_of_plan(first.plan) + 1e-9
    assert actual.share(actual.plan) <= 0.7
    # What one round scores: the whole divergence with a choice, less that with the block dense.
    base = choices_of(first.plan)
    measure = partial(search.divergences, model, "language", search.divergence_of(None, model), Store())
    with torch.no_grad():
        scores, table = search._scores(measure, batches, base, options, STRIDE)
    assert search._mean(table, search._BASE) == pytest.approx(score_of_plan(first.plan))
    for block, item in ((0, 0), (3, 1), (first.plan.blocks[0], 1)):
        with_option, without = (
            tuple(choice if place == block else option for place, option in enumerate(base))
            for choice in (options[item], None)
        )
        dense = score_of_plan(plan_of(without, STRIDE)) if any(without) else 0.0
        changed = score_of_plan(plan_of(with_option, STRIDE))
        assert scores[block][item] == pytest.approx(changed - dense, abs=1e-6)


def test_an_interrupted_round_goes_on(tmp_path: Path) -> None:
    model, images, path = make_model(NAME), make_images(NAME, 4), tmp_path / "store.jsonl"
    batches = [images[:2], images[2:]]
    uninterrupted = mmod.search_plan(model, batches, 0.8, options=FEW, rounds=2)

    class Stopping(list[Tensor]):
        passes = 0

        def __iter__(self) -> Iterator[Tensor]:
            self.passes += 1
            for place, batch in enumerate(list.__iter__(self)):
                if self.passes == 2 and place == 1:
                    raise KeyboardInterrupt
                yield batch

    with pytest.raises(KeyboardInterrupt):
        mmod.search_plan(model, Stopping(batches), 0.8, options=FEW, rounds=2, store=path)
    results = path.read_bytes().count(b"divergence of a plan")
    assert results > len(FEW) * len(uninterrupted.names) * len(batches)
    assert mmod.search_plan(model, batches, 0.8, options=FEW, rounds=2, store=path) == uninterrupted
    # The dense model's scores serve a search without rounds too.
    assert mmod.search_plan(model, batches, 0.8, options=FEW, store=path).divergence is None
