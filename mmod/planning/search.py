"""Search for a plan without training, by the divergence that options cause in the model's output."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmod.adapters import BlockStack, find_part, find_parts, own_name
from mmod.analysis.modes import in_mode
from mmod.config import RoutingConfig, Score, spelled
from mmod.io.progress import progress_bar
from mmod.io.store import Store, fingerprint
from mmod.methods.route import Route, is_routed
from mmod.model import apply_, unroute_
from mmod.planning.divergence import (
    Divergence,
    check_batches,
    check_rows,
    divergence_of,
    image_token,
    outputs,
    real_tokens,
)
from mmod.planning.plan_search import (
    COSTS,
    BlockCosts,
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


def search_plan(
    model: nn.Module,
    batches: Iterable[Any],
    budget: float,
    *,
    part: str | None = None,
    options: Sequence[Option] | None = None,
    router: str | Score | Mapping[str, Any] = "stride",
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
        store: File that keeps the scores of every batch, from which an interrupted search resumes, see
            `mmod.io.store.Store`. Searches of any models and batches may share it. Times are measured again.

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
    check_value("budget", budget, float, "(0, inf)" if cost == "milliseconds" else "(0, 1)")
    check_value("rounds", rounds, int, "[0, inf)")
    check_batches(batches)
    if rounds and iter(batches) is batches:
        raise ValueError(f"rounds={rounds} read the batches again: pass a list, not an iterator")
    part, stack = dense_part(model, part)
    if cost in ("cache", "image_flops") and not stack.language:
        raise ValueError(f"cost={cost!r} is for language models only; {stack.names[0]} belongs to another model")
    score = RoutingConfig(router=router).router
    chosen = default_options(stack, score) if options is None else tuple(options)
    _check_options(chosen, stack, score)
    compared = Divergence(model, part, divergence_of(divergence, model))
    scoring = _Scoring(compared, stack.names, chosen, score, Store(store))
    with in_mode(False, model), torch.no_grad():
        configs = [option.config(range(scoring.first, len(stack.blocks)), score) for option in chosen]
        # Fail on an option that a block does not support before the first trial.
        for config in configs:
            unroute_(apply_(model, Route({part: config})))
        counted: list[tuple[BlockCosts, float]] = []

        def count() -> None:
            costs = block_costs(model, part, stack, configs, cost, scoring.lengths, scoring.example)
            if cost == "milliseconds":
                costs = costs.timed(*stopwatch(model, part, scoring.example)(configs))
            share = budget / costs.total if cost == "milliseconds" else budget
            costs.check(share)
            counted.append((costs, share))

        scores, _ = scoring.run(batches, (None,) * len(stack.blocks), count)
        if stack.language and cost != "milliseconds":
            # Prompts of later batches may be longer.
            count()
        costs, share = counted[-1]
        plan = best_plan(scores, costs, chosen, share, score)
        search = PlanSearch(stack.names, chosen, scores, costs, share, cost, scoring.rows, score, plan)
        search = _refine(search, scoring, batches, rounds)
        return in_time(search, stopwatch(model, part, scoring.example)) if cost == "milliseconds" else search


class _Scoring:
    """Scores every option in every block, alone or combined with a base plan."""

    def __init__(
        self,
        divergence: Divergence,
        names: Sequence[str],
        options: Sequence[Option],
        router: Score,
        store: Store,
    ) -> None:
        self.divergence = divergence
        self.options = options
        self.router = router
        self.first = first_block(router)
        self.depth = len(names)
        self.samples = self.tokens = self.images = self.rows = 0
        self.example: Any = None
        # The dense outputs of a batch stand for the model and the batch.
        self.identity: dict[str, Any] = {
            "work": "search",
            "blocks": list(names),
            "options": [list(option) for option in options],
            "part": divergence.part,
            "router": str(spelled(router)),
            "divergence": divergence.compare.__name__,
        }
        self.store = store

    @property
    def lengths(self) -> tuple[int, int]:
        """Mean text and image tokens of a prompt so far, rounded; zeros for models of images."""
        images = round(self.images / max(self.samples, 1))
        return round(self.tokens / max(self.samples, 1)) - images, images

    def _count_tokens(self, batch: Any) -> None:
        """Count the prompts of a batch, and their tokens."""
        if not isinstance(batch, Mapping) or "input_ids" not in batch:
            return
        self.samples += len(batch["input_ids"])
        self.tokens += int(real_tokens(batch).sum())
        token = image_token(self.divergence.model)
        if token is not None:
            self.images += int((batch["input_ids"] == token).sum())

    def run(
        self, batches: Iterable[Any], base: Choices, begin: Callable[[], object] = lambda: None
    ) -> tuple[tuple[tuple[float, ...], ...], float]:
        """Return the scores of the options by block, and the divergence of the base plan.

        A score is the divergence with the option in its block minus that with the block dense, others as in the plan.
        """
        dense = (None,) * self.depth
        blocks = range(self.first, self.depth)
        trials: list[Choices] = []
        for block in blocks:
            # The base plan without one of its blocks is the reference of that block's scores.
            trials += [_changed(base, block, option) for option in (None, *self.options)]
        distinct = [trial for trial in dict.fromkeys([*trials, base]) if trial != dense]
        configs = [plan_of(trial, self.router) for trial in distinct]
        plain_base = [option and list(option) for option in base]
        total = len(batches) * len(distinct) if isinstance(batches, Sized) else None
        totals = [0.0] * len(distinct)
        rows = 0
        with progress_bar(desc="search plan", total=total, leave=False) as bar:
            for place, batch in enumerate(batches):
                self.example = batch if self.example is None else self.example
                if base == dense:
                    # Further rounds read the same batches again.
                    self._count_tokens(batch)
                dense_RF = outputs(self.divergence.model, batch, self.divergence.part)
                identity = {**self.identity, "base": plain_base, "outputs": fingerprint(dense_RF)}
                if place == 0:
                    # Costs are counted for the first batch, and refuse a budget before anything is scored.
                    begin()
                divergences = self.store.get(identity)
                if divergences is None:
                    divergences = []
                    for config in configs:
                        divergences.append(self.divergence.added(config, batch, dense_RF))
                        bar.update()
                    self.store.put(identity, divergences)
                else:
                    bar.update(len(distinct))
                totals = [total + divergence for total, divergence in zip(totals, divergences, strict=True)]
                rows += len(dense_RF)
        check_rows(rows)
        self.rows = rows
        means: dict[Choices, float] = {dense: 0.0}
        means |= {trial: total / rows for trial, total in zip(distinct, totals)}
        # Blocks before the first one that can be routed must stay dense.
        scores: list[tuple[float, ...]] = [(math.inf,) * len(self.options)] * self.first
        for block in blocks:
            reference = means[_changed(base, block, None)]
            scores.append(tuple(means[_changed(base, block, option)] - reference for option in self.options))
        return tuple(scores), means[base]


def _changed(choices: Choices, block: int, option: Option | None) -> Choices:
    """Return the choices with another option in one block."""
    return (*choices[:block], option, *choices[block + 1 :])


def first_block(router: Score) -> int:
    """Return the index of the first block that can be routed: importance is read in the dense block before it."""
    return int(RoutingConfig(router=router).reads_importance(training=False))


def _refine(search: PlanSearch, scoring: _Scoring, batches: Iterable[Any], rounds: int) -> PlanSearch:
    """Score the options on top of the current plan and plan again; return the round with the lowest divergence."""
    tried: list[PlanSearch] = []
    for _ in range(rounds):
        scores, divergence = scoring.run(batches, choices_of(search.plan))
        tried.append(dataclasses.replace(search, divergence=divergence))
        plan = best_plan(scores, search.costs, search.options, search.budget, search.router)
        if plan in [earlier.plan for earlier in tried]:
            break
        search = dataclasses.replace(search, scores=scores, plan=plan)
    else:
        if rounds:
            tried.append(dataclasses.replace(search, divergence=scoring.divergence.mean(batches, search.plan)))
    return min(tried, key=lambda result: result.divergence or 0.0, default=search)


def plan_divergence(
    model: nn.Module,
    batches: Iterable[Any],
    config: RoutingConfig,
    part: str | None = None,
    divergence: str | None = None,
) -> float:
    """Return the mean divergence of a routed model's outputs from the dense model's.

    Args:
        model: The dense model; unchanged afterwards.
        batches: As for `search_plan`.
        config: The plan or config to route with.
        part: The part to route.
        divergence: As for `search_plan`.
    """
    check_batches(batches)
    part, _ = dense_part(model, part)
    with in_mode(False, model), torch.no_grad():
        return Divergence(model, part, divergence_of(divergence, model)).mean(batches, config)


def default_options(stack: BlockStack, router: Score) -> tuple[Option, ...]:
    """Return the options that the blocks of a part support, see `search_plan`."""
    call = stack.call_of(stack.blocks[-1], None)
    if stack.reads_images:
        # Only image tokens may all be skipped.
        capacities: tuple[float, ...] = (0.0, 0.25) if first_block(router) else (0.0,)
    else:
        # Capacity 0 needs tokens that always run, such as a class token.
        capacities = (0.0 if stack.prefix and not stack.language else 0.25, 0.5)
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
    if part == "vision" and own_name("image", find_parts(model)) != part:
        raise ValueError("the FLOPs of a vision tower alone are not counted: search a plan for the part 'language'")
    return part, stack


def _check_options(options: Sequence[Option], stack: BlockStack, router: Score) -> None:
    if not options:
        raise ValueError(f"no options to choose from for {stack.names[0]}")
    check_value("options", options, tuple[Option, ...])
    if router.learns:
        raise ValueError(
            f"router {router.name!r} is learned, but the search trains nothing: use one without parameters"
        )
