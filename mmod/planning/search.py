"""Search for a plan without training, by the divergence that options cause in the model's output."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from mmod.adapters import BlockStack, by_first_batch, find_part, find_parts
from mmod.analysis.modes import in_mode
from mmod.analysis.table import Look, Measured, Table, evaluated, fill, rows_once
from mmod.config import RoutingConfig, Score
from mmod.io.jobs import Callback, Runner
from mmod.io.store import Store, fingerprint
from mmod.methods.route import Route, is_routed
from mmod.model import change_, unroute_
from mmod.planning.divergence import (
    check_batch,
    check_batches,
    check_rows,
    divergence_of,
    image_token,
    outputs,
    real_tokens,
    routed,
)
from mmod.planning.plan_search import (
    COSTS,
    Choices,
    Option,
    PlanSearch,
    best_plan,
    block_costs,
    choices_of,
    in_time,
    plan_of,
    stopwatch,
)
from mmod.values import check_value, one_of

# Name of the plan whose blocks are changed one by one; the dense model in the first round.
_BASE = "plan"
# The outcome of a batch: the divergences of its rows together.
_SUM = "sum of divergences"
# A batch, its dense outputs, and what stands for them in a store.
_DenseBatch = tuple[object, Tensor, str]


@by_first_batch
def search_plan(
    model: nn.Module,
    batches: Iterable[object],
    budget: float,
    *,
    part: str | None = None,
    options: Sequence[Option] | None = None,
    router: str | Score | Mapping[str, object] = "stride",
    cost: str = "flops",
    divergence: str | None = None,
    rounds: int = 0,
    store: str | Path | None = None,
) -> PlanSearch:
    """Search for the plan with the lowest divergence from the dense model's output under a budget.

    Every option is tried in every block alone, on every batch. Its score is the mean divergence of the model's output
    from the dense output. The plan is the set of options with the lowest sum of scores under the budget. Nothing is
    trained. Memory holds the dense output of one batch at a time.

    Divergences do not add up exactly. Each of `rounds` scores every option again with the other blocks as in the
    current plan, and plans again. The plan with the lowest measured divergence of all rounds wins.

    Args:
        model: A dense model of a supported library; unchanged afterwards.
        batches: Calibration batches: the model's keyword arguments, or its only argument. With `labels`, only the
            logits that predict the labelled tokens of a language model count.
        budget: Share of the dense model's cost in (0, 1), or milliseconds, see `cost`.
        part: The part to plan, for models with several: "language" of a vision-language model, "image" or "text" of a
            CLIP model.
        options: Ways to route a block; None tries all that the blocks support, at these capacities:

            - image models: 0 and 0.5, or 0.25 and 0.5 without a class token;
            - language models that read images: 0, and 0.25 if the router reads importance;
            - other language models: 0.25 and 0.5.
        router: The score by which a capacity above 0 selects tokens; it must have no parameters. A score that reads
            importance, such as "attention", reads it in the dense block before, so the first block stays dense. The
            cost of reading is not counted.
        cost: Unit of the budget:

            - "flops": FLOPs; of a language model, those of the prefill without the vision tower;
            - "image_flops": FLOPs that image tokens add to the prefill of the text;
            - "cache": tokens in the KV cache;
            - "milliseconds": time of a forward pass over the first batch, measured here; of a language model, the
              prefill with the vision tower. The plan is timed and corrected until it is within 5 % of the budget, or
              below if no plan is closer.
        divergence: "kl" of logits or "cosine" of features; None selects by the model.
        rounds: Number of further scoring rounds, as expensive as the first.
        store: File that keeps the scores of every batch, from which an interrupted search resumes. Searches of any
            models and batches may share it. Times are measured again.

    Raises:
        ValueError: The model is routed, or has several parts and none is named. A block does not support an option, or
            the budget is out of reach. There are no batches, `rounds` would read an iterator twice, or the store is
            damaged.

    Source: the additive score and its few calibration samples are those of DOP, arXiv 2507.02909, which prunes
        operators of token groups.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("test_vit").eval()
        >>> search = search_plan(model, [torch.randn(2, 3, 160, 160)], budget=0.7)
        >>> search.share(search.plan) <= 0.7
        True
    """
    one_of("cost", cost, COSTS)
    limit = "(0, inf)" if cost == "milliseconds" else "(0, 1)"
    check_value("budget", budget, float, limit)
    check_value("rounds", rounds, int, "[0, inf)")
    check_batches(batches)
    if rounds and iter(batches) is batches:
        raise ValueError(f"rounds={rounds} read the batches again: pass a list, not an iterator")
    part, stack = dense_part(model, part)
    if cost in ("cache", "image_flops") and not stack.language:
        raise ValueError(f"cost={cost!r} is for language models only; {stack.names[0]} belongs to another model")
    score = RoutingConfig(router=router).router
    chosen = _options_of(stack, score, options)
    measure = partial(divergences, model, part, divergence_of(divergence, model), Store(store))
    with in_mode(False, model), torch.no_grad():
        configs = _everywhere(stack, score, chosen)
        # Fail on an option that a block does not support before the first trial.
        for config in configs:
            unroute_(change_(model, Route({part: config})))
        reading = iter(batches)
        example = next(reading, None)
        if example is None:
            check_rows(0)
        lengths = _Lengths(image_token(model))
        first = lengths.noted(example)
        # Counted for the first batch, which refuses a budget before anything is scored.
        counted = lengths.means
        costs = block_costs(model, part, stack, configs, cost, counted, example)
        if cost == "milliseconds":
            costs = costs.timed(*stopwatch(model, part, example)(configs))
            budget = budget / costs.total
        costs.check(budget, cost == "milliseconds")
        read = chain([first], map(lengths.noted, reading))
        scores, table = _scores(measure, read, (None,) * len(stack.blocks), chosen, score)
        # Prompts of later batches may be longer.
        if stack.language and cost != "milliseconds" and lengths.means != counted:
            costs = block_costs(model, part, stack, configs, cost, lengths.means, example)
        plan = best_plan(scores, costs, chosen, budget, score)
        rows = evaluated(table, next(iter(table.runs)))
        search = PlanSearch(stack.names, chosen, scores, costs, budget, cost, rows, score, plan)
        search = _refine(search, measure, batches, rounds)
        if cost == "milliseconds":
            return in_time(search, stopwatch(model, part, example))
        return search


@dataclasses.dataclass
class _Lengths:
    """How long the prompts of the batches so far are on average; zeros for models of images."""

    image_token: int | None
    samples: int = 0
    tokens: int = 0
    images: int = 0

    @property
    def means(self) -> tuple[int, int]:
        """Mean text and image tokens of a prompt, rounded."""
        images = round(self.images / max(self.samples, 1))
        return round(self.tokens / max(self.samples, 1)) - images, images

    def noted(self, batch: object) -> object:
        """Return a batch whose prompts count."""
        check_batch(batch)
        if isinstance(batch, Mapping) and "input_ids" in batch:
            self.samples += len(batch["input_ids"])
            self.tokens += int(real_tokens(batch).sum())
            if self.image_token is not None:
                self.images += int((batch["input_ids"] == self.image_token).sum())
        return batch


Measure = Callable[[Iterable[object], Mapping[str, RoutingConfig]], Table]
"""Compares plans by name on batches, see `divergences`."""


def divergences(
    model: nn.Module,
    part: str,
    diverge: Callable[[Tensor, Tensor], Tensor],
    store: Store,
    batches: Iterable[object],
    plans: Mapping[str, RoutingConfig],
    *,
    shown: bool = True,
) -> Table:
    """Compare plans with the dense model, batch by batch; a batch that a store knows is not measured again.

    Memory holds the dense output of one batch. The table's samples are rows of outputs.

    Args:
        diverge: From the outputs of the dense and of the routed model to a divergence of each row.
        shown: Show a bar over the plans for each batch.
    """
    runner = Runner(progress=shown)
    table = Table()

    def rounds() -> Iterator[Sequence[Look[_DenseBatch]]]:
        for number, batch in enumerate(batches, 1):
            runner.title = f"search plan, batch {number}"
            dense_RF = outputs(model, batch, part)
            dense = (batch, dense_RF, fingerprint(dense_RF))
            yield [Look(name=name, seed=0, part=dense) for name in plans]

    def measure(look: Look[_DenseBatch], callback: Callback) -> Measured:
        plan = plans[look.name]
        batch, dense_RF, known = look.part

        def added() -> Measured:
            with routed(model, part, plan):
                changed_RF = outputs(model, batch, part)
            total = float(diverge(dense_RF, changed_RF).double().sum())
            return Measured({}, samples=len(dense_RF), outcomes={_SUM: np.array([total])})

        identity = {
            "work": "divergence of a plan",
            "plan": plan.to_dict(),
            "part": part,
            "divergence": diverge.__name__,
            # The dense outputs of a batch stand for the model and the batch.
            "outputs": known,
        }
        return rows_once(store, identity, added)

    fill(table, rounds(), measure, runner)
    check_rows(max((evaluated(table, name) for name in plans), default=0))
    return table


def _mean(table: Table, name: str) -> float:
    """Return the mean divergence of a plan over all rows; that of the dense model, which is not measured, is 0."""
    if name not in table.runs:
        return 0.0
    rows = table.runs[name][0]
    return float(rows.outcomes[_SUM].sum()) / rows.samples


def _scores(
    measure: Measure, batches: Iterable[object], base: Choices, options: Sequence[Option], router: Score
) -> tuple[tuple[tuple[float, ...], ...], Table]:
    """Return the scores of the options by block, and the table that they follow from, with the base plan.

    A score is the divergence with the option in its block minus that with the block dense, others as in the plan.
    """
    first = first_block(router)
    blocks = range(first, len(base))
    names: dict[Choices, str] = {base: _BASE}
    for block in blocks:
        # The base plan without one of its blocks is the reference of that block's scores.
        for option in (None, *options):
            names.setdefault(_changed(base, block, option), f"block {block}: {option or 'dense'}")
    plans = {name: plan_of(choices, router) for choices, name in names.items() if any(choices)}
    table = measure(batches, plans)
    divergence = {choices: _mean(table, name) for choices, name in names.items()}
    # Blocks before the first one that can be routed must stay dense.
    scores: list[tuple[float, ...]] = [(math.inf,) * len(options)] * first
    for block in blocks:
        reference = divergence[_changed(base, block, None)]
        scores.append(tuple(divergence[_changed(base, block, option)] - reference for option in options))
    return tuple(scores), table


def _changed(choices: Choices, block: int, option: Option | None) -> Choices:
    """Return the choices with another option in one block."""
    return (*choices[:block], option, *choices[block + 1 :])


def _refine(search: PlanSearch, measure: Measure, batches: Iterable[object], rounds: int) -> PlanSearch:
    """Score the options on top of the current plan and plan again; return the round with the lowest divergence."""
    tried: list[PlanSearch] = []
    for _ in range(rounds):
        scores, table = _scores(measure, batches, choices_of(search.plan), search.options, search.router)
        tried.append(dataclasses.replace(search, divergence=_mean(table, _BASE)))
        plan = best_plan(scores, search.costs, search.options, search.budget, search.router)
        # Scored again, it would give the same scores.
        if plan in [earlier.plan for earlier in tried]:
            break
        search = dataclasses.replace(search, scores=scores, plan=plan)
    else:
        if rounds:
            divergence = _mean(measure(batches, {_BASE: search.plan}), _BASE)
            tried.append(dataclasses.replace(search, divergence=divergence))
    return min(tried, key=lambda result: result.divergence or 0.0, default=search)


def first_block(router: Score) -> int:
    """Return the index of the first block that can be routed: importance is read in the dense block before it."""
    return int(RoutingConfig(router=router).reads_importance(training=False))


def plan_divergence(
    model: nn.Module,
    batches: Iterable[object],
    config: RoutingConfig,
    part: str | None = None,
    divergence: str | None = None,
) -> float:
    """Return how far a routed model's outputs are from the dense model's: their mean divergence.

    Args:
        model: The dense model; unchanged afterwards.
        batches: As for `search_plan`.
        config: The plan or config to route with.
        part: The part to route.
        divergence: As for `search_plan`.
    """
    check_batches(batches)
    part, _ = dense_part(model, part)
    diverge = divergence_of(divergence, model)
    with in_mode(False, model), torch.no_grad():
        return _mean(divergences(model, part, diverge, Store(), batches, {_BASE: config}, shown=False), _BASE)


def default_options(stack: BlockStack, router: Score) -> tuple[Option, ...]:
    """Return the options that the blocks of a part support, see `search_plan`."""
    call = stack.call_of(stack.blocks[-1], None)
    if stack.reads_images:
        # Only image tokens may all be skipped.
        capacities: tuple[float, ...] = (0.0,)
        if first_block(router):
            capacities = (0.0, 0.25)
    else:
        # Capacity 0 needs tokens that always run, such as a class token.
        has_class_token = stack.prefix and not stack.language
        capacities = (0.0, 0.5) if has_class_token else (0.25, 0.5)
    attention_context = "all" if "all" in call.contexts else "kept"
    pairs = [("block", "kept"), ("block", "all"), ("attention", attention_context), ("mlp", "kept")]
    options: list[Option] = []
    for operator, context in pairs:
        if operator in ("block", *call.operators) and context in call.contexts:
            options += [Option(capacity, operator, context) for capacity in capacities]
    return tuple(options)


def dense_part(model: nn.Module, part: str | None) -> tuple[str, BlockStack]:
    """Return a part of a dense model, its name and its blocks; a ValueError for a routed model."""
    if is_routed(model):
        raise ValueError(f"this {type(model).__name__} is routed already: call mmod.unroute_ first")
    part, stack = find_part(model, part)
    if part == "image" and "language" in find_parts(model):
        raise ValueError("the FLOPs of a vision tower alone are not counted: search a plan for the part 'language'")
    return part, stack


def check_reachable(
    model: nn.Module,
    image: Tensor,
    budget: float,
    part: str,
    options: Sequence[Option] | None,
    router: str | Score | Mapping[str, object],
) -> None:
    """Raise a ValueError if no plan of an image model has a share of its FLOPs, as `search_plan` would; see there.

    Args:
        model: One on the meta device is enough.
        image: An image (1, C, H, W), of which the size counts.
    """
    part, stack = dense_part(model, part)
    score = RoutingConfig(router=router).router
    configs = _everywhere(stack, score, _options_of(stack, score, options))
    block_costs(model, part, stack, configs, "flops", (0, 0), image).check(budget)


def _everywhere(stack: BlockStack, router: Score, options: Sequence[Option]) -> list[RoutingConfig]:
    """Return the config of each option in all blocks that can be routed."""
    return [option.config(range(first_block(router), len(stack.blocks)), router) for option in options]


def _options_of(stack: BlockStack, router: Score, named: Sequence[Option] | None) -> tuple[Option, ...]:
    """Return the options that a search names, or else those that the blocks support, once they are checked."""
    if named is None:
        named = default_options(stack, router)
    options = tuple(named)
    if not options:
        raise ValueError(f"no options to choose from for {stack.names[0]}")
    check_value("options", options, tuple[Option, ...])
    if router.learns:
        raise ValueError(
            f"router {router.name!r} is learned, but the search trains nothing: use one without parameters"
        )
    return options
