"""Search for a plan without training: what each choice does to the model's own output, and the best set of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmod.adapters import BlockStack, find_part, find_parts
from mmod.analysis.modes import in_mode
from mmod.config import Plan, RoutingConfig, Score
from mmod.model import is_routed, route_, unroute_
from mmod.planning.costs import COSTS, Chooser, Costs, Option, block_costs
from mmod.planning.divergence import divergence_of
from mmod.planning.found import PlanSearch, best_plan
from mmod.planning.scoring import Choices, Scoring
from mmod.planning.stopwatch import in_time, stopwatch
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
    progress_file: str | Path | None = None,
) -> PlanSearch:
    """Search which tokens miss which operator in which block, so that the model says what it says at a lower cost.

    Every option is tried in every block alone, on every batch: its score is the mean divergence between the model's own
    output and the one with that choice. Scores are taken to add up, and the set of choices with the least sum under the
    budget is the plan. Nothing is trained. The dense output of one batch is held at a time.

    Divergences do not quite add up: each of `rounds` scores every choice again where the other blocks are as in the
    plan so far, and chooses again. Of the plans of all rounds the one is taken that as a whole diverges least.

    Args:
        model: A dense model of a supported library; in evaluation mode while it is searched, and unchanged afterwards.
        batches: Calibration batches: the model's arguments by name, or its only argument. `labels` beside a language
            model's arguments say which tokens its answers are: only what it says of them counts then.
        budget: Share of the dense model's cost that the plan may have, in (0, 1), or milliseconds, see `cost`.
        part: The part that is planned, where the model has several: "language" of a vision-language model, "image" or
            "text" of a CLIP model.
        options: What may be done to a block; None tries all that the blocks can do: capacity 0, and 0.5 in image
            models, where those without a class token take 0.25 in the place of 0, or 0.25 in language models whose
            router reads importance; 0.25 and 0.5 in language models of text alone, whose tokens cannot all be skipped.
        router: Which tokens a capacity above 0 keeps: a score that does not learn. One that reads importance, such as
            "attention", does so in the dense block before, so that nothing is done to the first block; reading is not
            counted.
        cost: What the budget is of: "flops", in language models those of the prefill without vision tower;
            "image_flops", those that image tokens add to the prefill of the text alone, however long that is; "cache",
            the tokens in a language model's cache; or "milliseconds", measured here, of one pass over the first batch,
            in language models the prefill with vision tower. The plan that is chosen is measured too, and corrected:
            its time is within a tenth of the budget, or less where no plan lies between.
        divergence: "kl" between logits or "cosine" between features; None chooses by the model.
        rounds: How often choices are scored again beside those of the plan so far, each as dear as the first scoring.
        progress_file: Keeps the scores after every batch; the same search, started again, goes on from there. Time is
            measured again.

    Returns:
        The scores, costs and plan; `print` shows them.

    Raises:
        ValueError: A model that is routed or has several parts and none is named, an option that its blocks cannot do,
            a budget that no plan reaches, no batches, rounds over batches that can be read only once, or a progress
            file of another search.

    Source: the additive score and its few calibration samples are those of DOP, arXiv 2507.02909, which prunes
        operators of token groups.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("test_vit").eval()
        >>> found = search_plan(model, [torch.randn(2, 3, 160, 160)], budget=0.7)
        >>> found.share(found.plan) <= 0.7
        True
    """
    one_of("cost", cost, COSTS)
    check_value("budget", budget, float, "(0, inf)" if cost == "milliseconds" else "(0, 1)")
    check_value("rounds", rounds, int, "[0, inf)")
    if rounds and iter(batches) is batches:
        raise ValueError(f"rounds={rounds} read batches again: pass a list or alike, not an iterator")
    part, stack = _part(model, part)
    if cost in ("cache", "image_flops") and not stack.language:
        raise ValueError(f"cost={cost!r} is for language models: {stack.names[0]} is no layer of one")
    chooser = Chooser(router)
    chosen = default_options(stack, chooser, "vision" in find_parts(model)) if options is None else tuple(options)
    _check_options(chosen, stack, chooser)
    scoring = Scoring(model, part, stack.names, chosen, chooser, divergence_of(divergence, model), progress_file)
    with in_mode(False, model), torch.no_grad():
        every = [option.config(range(chooser.first, len(stack.blocks)), chooser) for option in chosen]
        # An option that a block cannot do is refused before anything is tried.
        for config in every:
            unroute_(route_(model, **{part: config}))
        counted: list[tuple[Costs, float]] = []

        def count() -> None:
            costs = block_costs(model, stack, part, chosen, chooser, cost, scoring.lengths, scoring.example)
            if cost == "milliseconds":
                total, shares = stopwatch(model, part, scoring.example)(every)
                costs = costs.timed(total, [total * share for share in shares])
            share = budget / costs.total if cost == "milliseconds" else budget
            costs.check(share)
            counted.append((costs, share))

        scores, _ = scoring.run(batches, {}, count)
        if stack.language and cost != "milliseconds":
            # Prompts of later batches may be longer.
            count()
        costs, share = counted[-1]
        plan = best_plan(scores, costs, chosen, share, chooser)
        found = PlanSearch(stack.names, chosen, scores, costs, share, cost, scoring.rows, chooser, plan)
        found = _refine(found, scoring, batches, rounds)
        return in_time(found, stopwatch(model, part, scoring.example)) if cost == "milliseconds" else found


def _refine(found: PlanSearch, scoring: Scoring, batches: Iterable[Any], rounds: int) -> PlanSearch:
    """Score choices again beside those of the plan, and choose again; return the plan of the round that is best."""
    tried: list[PlanSearch] = []
    for _ in range(rounds):
        base: Choices = {block: Option(kept, operator, context) for block, kept, operator, context in found.plan.rows}
        scores, whole = scoring.run(batches, base)
        tried.append(dataclasses.replace(found, divergence=whole))
        plan = best_plan(scores, found.costs, found.options, found.budget, found.chooser)
        if plan in [one.plan for one in tried]:
            break
        found = dataclasses.replace(found, scores=scores, plan=plan)
    else:
        if rounds:
            tried.append(dataclasses.replace(found, divergence=scoring.whole(batches, found.config)))
    return min(tried, key=lambda one: one.divergence or 0.0, default=found)


def plan_divergence(
    model: nn.Module, batches: Iterable[Any], config: Plan | RoutingConfig, part: str | None = None,
    divergence: str | None = None,
) -> float:  # fmt: skip
    """Return how far a dense model is from itself when it is routed: the mean divergence of its rows of output.

    Args:
        model: The dense model; unchanged afterwards.
        batches: Batches, as for `search_plan`.
        config: How to route it.
        part: The part that is routed.
        divergence: As for `search_plan`.
    """
    part, stack = _part(model, part)
    scoring = Scoring(model, part, stack.names, (), Chooser(), divergence_of(divergence, model), None)
    with in_mode(False, model), torch.no_grad():
        return scoring.whole(batches, config)


def default_options(stack: BlockStack, chooser: Chooser, has_images: bool) -> tuple[Option, ...]:
    """Return what the blocks of a part can do, see `search_plan`.

    Args:
        stack: The blocks.
        chooser: Chooses tokens.
        has_images: A language model reads images, which alone may be skipped altogether.
    """
    call = stack.call_of(stack.blocks[-1], None)
    in_language = ((0.0, 0.25) if chooser.first else (0.0,)) if has_images else (0.25, 0.5)
    capacities = in_language if stack.language else (0.0 if stack.prefix else 0.25, 0.5)
    ways = [("block", "kept"), ("block", "all"), ("attention", "all" if "all" in call.contexts else "kept")]
    ways = [way for way in [*ways, ("mlp", "kept")] if way[0] in ("block", *call.operators) and way[1] in call.contexts]
    return tuple(Option(capacity, *way) for way in ways for capacity in capacities)


def _part(model: nn.Module, part: str | None) -> tuple[str, BlockStack]:
    if is_routed(model):
        raise ValueError(f"this {type(model).__name__} is routed already: call mmod.unroute_ first")
    part, stack = find_part(model, part)
    if part == "vision":
        raise ValueError("the FLOPs of a vision tower alone are not counted: search a plan for the part 'language'")
    return part, stack


def _check_options(options: Sequence[Option], stack: BlockStack, chooser: Chooser) -> None:
    if not options:
        raise ValueError(f"no options to choose from for {stack.names[0]}")
    check_value("options", options, tuple[Option, ...])
    score = chooser.config.router
    if score.learns:
        raise ValueError(f"router {score.name!r} learns, which nothing does here")
