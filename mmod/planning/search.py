"""Search for a plan without training: what each choice does to the model's own output, and the best set of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmod.adapters import BlockStack, find_stacks
from mmod.config import Plan, RoutingConfig, Score
from mmod.io.files import check_regular, parse_json, write_atomically
from mmod.model import is_routed, route_, unroute_
from mmod.planning.costs import COSTS, Costs, Option, PromptLengths, block_costs
from mmod.planning.divergence import divergence_of, outputs
from mmod.planning.found import PlanSearch
from mmod.values import one_of


def search_plan(
    model: nn.Module,
    batches: Iterable[Any],
    budget: float,
    *,
    part: str | None = None,
    options: Sequence[Option] | None = None,
    router: str | Score = "stride",
    cost: str = "flops",
    divergence: str | None = None,
    progress_file: str | Path | None = None,
) -> PlanSearch:
    """Search which tokens miss which operator in which block, so that the model says what it says at a lower cost.

    Every option is tried in every block alone, on every batch: its score is the mean divergence between the model's own
    output and the one with that choice. Scores are taken to add up, and the set of choices with the least sum under the
    budget is the plan. Nothing is trained. The dense output of one batch is held at a time.

    Args:
        model: A dense model of a supported library; in evaluation mode while it is searched, and unchanged afterwards.
        batches: Calibration batches: the model's arguments by name, or its only argument. `labels` beside a language
            model's arguments say which tokens its answers are: only what it says of them counts then.
        budget: Share of the dense model's cost that the plan may have, in (0, 1).
        part: The part that is planned, where the model has several: "language" of a vision-language model, "image" or
            "text" of a CLIP model.
        options: What may be done to a block; None tries all that the blocks can do: capacity 0, and 0.5 in image
            models, where those without a class token take 0.25 in the place of 0.
        router: Which tokens a capacity above 0 keeps: a score that neither learns nor reads importance.
        cost: What the budget is of: "flops", in language models those of the prefill without vision tower, or "cache",
            the tokens in a language model's cache.
        divergence: "kl" between logits or "cosine" between features; None chooses by the model.
        progress_file: Keeps the scores after every batch; the same search, started again, goes on from there.

    Returns:
        The scores, costs and plan; `print` shows them.

    Raises:
        ValueError: A model that is routed or has several parts and none is named, an option that its blocks cannot do,
            a budget that no plan reaches, no batches, or a progress file of another search.

    Source: the additive score and its few calibration samples are those of DOP, arXiv 2507.02909, which prunes
        operators of token groups.

    Example:
        >>> import timm, torch
        >>> model = timm.create_model("test_vit").eval()
        >>> found = search_plan(model, [torch.randn(2, 3, 160, 160)], budget=0.7)
        >>> found.share(found.plan) <= 0.7
        True
    """
    if not 0 < budget < 1:
        raise ValueError(f"budget must be in (0, 1), got {budget!r}")
    one_of("cost", cost, COSTS)
    part, stack = _part(model, part)
    if cost == "cache" and not stack.language:
        raise ValueError(f"cost='cache' is for language models: {stack.names[0]} is no layer of one")
    chosen = default_options(stack) if options is None else tuple(options)
    _check_options(chosen, stack, router)
    scoring = _Scoring(model, part, stack, chosen, router, divergence)
    with _evaluating(model):
        # An option that a block cannot do is refused before anything is tried.
        for option in chosen:
            unroute_(route_(model, **{part: option.config(range(len(stack.blocks)), router)}))

        def count() -> Costs:
            found = block_costs(model, stack, part, chosen, router, cost, scoring.lengths, scoring.example)
            found.check(budget)
            return found

        scores = scoring.run(batches, progress_file, count)
        # Prompts of later batches may be longer.
        costs = count() if stack.language else scoring.costs
    assert costs is not None
    return PlanSearch(stack.names, chosen, scores, costs, budget, cost, scoring.rows, router)


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
    part, _ = _part(model, part)
    compare, token = divergence_of(divergence, model), _image_token(model)
    total, rows = 0.0, 0
    with _evaluating(model):
        for batch in batches:
            own_RF = outputs(model, batch, part, token)
            with _routed(model, part, config):
                total += float(compare(own_RF, outputs(model, batch, part, token)).double().sum())
            rows += len(own_RF)
    return total / rows


def default_options(stack: BlockStack) -> tuple[Option, ...]:
    """Return what the blocks of a part can do, see `search_plan`.

    Args:
        stack: The blocks.
    """
    call = stack.call_of(stack.blocks[-1], None)
    capacities = (0.0,) if stack.language else (0.0 if stack.prefix else 0.25, 0.5)
    ways = [("block", "kept"), ("block", "all"), ("attention", "all" if "all" in call.contexts else "kept")]
    ways = [way for way in [*ways, ("mlp", "kept")] if way[0] in ("block", *call.operators) and way[1] in call.contexts]
    return tuple(Option(capacity, *way) for way in ways for capacity in capacities)


class _Scoring:
    """Tries every option in every block, batch by batch."""

    def __init__(
        self, model: nn.Module, part: str, stack: BlockStack, options: Sequence[Option], router: str | Score,
        divergence: str | None,
    ) -> None:  # fmt: skip
        self.model, self.part, self.options, self.router = model, part, options, router
        self.choices = [(block, option) for block in range(len(stack.blocks)) for option in options]
        self.compare: Callable[[Tensor, Tensor], Tensor] = divergence_of(divergence, model)
        self.token = _image_token(model)
        self.lengths = PromptLengths(self.token)
        self.totals = [0.0] * len(self.choices)
        self.rows, self.done = 0, 0
        self.example: Any = None
        self.costs: Costs | None = None
        self.identity: dict[str, Any] = {
            "blocks": list(stack.names), "options": [list(option) for option in options], "part": part,
            "router": str(router), "divergence": self.compare.__name__,
        }  # fmt: skip

    def run(
        self, batches: Iterable[Any], progress_file: str | Path | None, count: Callable[[], Costs]
    ) -> tuple[tuple[float, ...], ...]:
        """Return the score of each option in each block; refuse a budget that is out of reach before any is tried."""
        from tqdm import tqdm

        finished = self.done
        total = len(batches) * len(self.choices) if isinstance(batches, Sized) else None
        with tqdm(desc="search plan", total=total, leave=False, disable=None) as bar:
            for place, batch in enumerate(batches):
                self.example = batch if self.example is None else self.example
                if isinstance(batch, Mapping) and "input_ids" in batch:
                    self.lengths.add(batch)
                own_RF = outputs(self.model, batch, self.part, self.token)
                if not place:
                    self.identity["first"] = f"{float(own_RF.double().abs().mean()):.6e}"
                    finished = self._read(progress_file)
                    self.costs = count()
                if place >= finished:
                    self._try_all(batch, own_RF, bar.update)
                    self._write(progress_file, place + 1)
                else:
                    bar.update(len(self.choices))
        if not self.rows:
            raise ValueError("no calibration samples: batches is empty, or holds nothing to compare")
        width = len(self.options)
        means = [total / self.rows for total in self.totals]
        return tuple(tuple(means[at : at + width]) for at in range(0, len(means), width))

    def _try_all(self, batch: Any, own_RF: Tensor, tick: Callable[[], Any]) -> None:
        for place, (block, option) in enumerate(self.choices):
            with _routed(self.model, self.part, option.config([block], self.router)):
                changed_RF = outputs(self.model, batch, self.part, self.token)
            self.totals[place] += float(self.compare(own_RF, changed_RF).double().sum())
            tick()
        self.rows += len(own_RF)

    def _read(self, path: str | Path | None) -> int:
        """Return how many batches were finished before, and take over their scores."""
        if path is None or not Path(path).exists():
            return 0
        check_regular(path)
        saved = parse_json(Path(path).read_bytes(), repr(str(path)))
        if not isinstance(saved, dict) or saved.get("search") != self.identity:
            raise ValueError(f"{str(path)!r} belongs to another search: of other blocks, options, weights or batches")
        self.totals, self.rows = [float(total) for total in saved["totals"]], int(saved["rows"])
        return int(saved["batches"])

    def _write(self, path: str | Path | None, finished: int) -> None:
        if path is not None:
            state = {"search": self.identity, "batches": finished, "rows": self.rows, "totals": self.totals}
            write_atomically(path, json.dumps(state))


def _part(model: nn.Module, part: str | None) -> tuple[str, BlockStack]:
    if is_routed(model):
        raise ValueError(f"this {type(model).__name__} is routed already: call mmod.unroute_ first")
    stacks = find_stacks(model)
    if part is None and len(stacks) > 1:
        raise ValueError(f"this {type(model).__name__} has several parts, {', '.join(stacks)}: name one")
    part = next(iter(stacks)) if part is None else part
    if part not in stacks:
        raise ValueError(f"this {type(model).__name__} has no part {part!r}; it has {', '.join(stacks)}")
    if part == "vision":
        raise ValueError("the FLOPs of a vision tower alone are not counted: search a plan for the part 'language'")
    return part, stacks[part]


def _check_options(options: Sequence[Option], stack: BlockStack, router: str | Score) -> None:
    if not options:
        raise ValueError(f"no options to choose from for {stack.names[0]}")
    score = RoutingConfig(router=router).router
    if score.learns or score.reads_importance:
        raise ValueError(f"router {score.name!r} learns or reads importance, which a block that is tried alone has not")


def _image_token(model: nn.Module) -> int | None:
    config: Any = getattr(model, "config", None)
    token = getattr(config, "image_token_id", None)
    return None if token is None else int(token)


@contextmanager
def _routed(model: nn.Module, part: str, config: Plan | RoutingConfig) -> Iterator[None]:
    route_(model, **{part: config})
    try:
        yield
    finally:
        unroute_(model)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode
