"""Candidates that are fitted to FLOPs once for all tests of a process, few of each series; equal models share them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mmod.adapters import image_output
from mmod.planning import budgets, search, trials, untrained
from mmod.planning.candidate import Candidate
from mmod.planning.plan_search import BlockCosts
from mmod.studies import candidates, runs
from mmod.studies.runs import Comparison
from mmod.training.engine.config import LoopConfig, RunConfig
from mmod.training.engine.start import sketch

_BUDGET = 0.7
_KNOWN: dict[str, tuple[list[Any], dict[str, str]]] = {}
_COSTS: dict[str, BlockCosts] = {}
_FLOPS: dict[str, int | None] = {}
_SKETCHES: dict[str, nn.Module] = {}
_COUNT = candidates._flops_of


def fit_roughly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let candidates have the first guess of their fit, and its name: tests ask which there are, not at what cost."""
    monkeypatch.setattr(budgets, "_TOLERANCE", 3.0)
    monkeypatch.setattr(budgets, "_WHOLE", ())


def fit_once(monkeypatch: pytest.MonkeyPatch, whole: tuple[str, ...] = ("smaller-image",)) -> None:
    """Let `advise` fit the candidates of equal models once, and roughly: one of each series, and all of some."""
    fit_roughly(monkeypatch)

    def few(tried: list[Candidate], *arguments: Any, strict: bool) -> tuple[list[Candidate], dict[str, str]]:
        # Those of a wanted speed have budgets of their own.
        if any(candidate.budget == _BUDGET for candidate in tried):
            tried = [one for one in tried if one.budget == _BUDGET or one.series in whole]
        return budgets.at_budgets(tried, *arguments, strict=strict)

    monkeypatch.setattr(untrained, "at_budgets", few)

    def fitted(
        model: nn.Module, part: str, depth: int, image: Tensor, patch: Any, faster: float | None
    ) -> tuple[list[Any], dict[str, str]]:
        series = [one.name for one in untrained.image_series()]
        key = f"{model} {getattr(model, 'dynamic_img_size', None)} {part} {tuple(image.shape)} {faster} {series}"
        if key not in _KNOWN:
            _KNOWN[key] = untrained.image_candidates(model, part, depth, image, patch, faster)
        fitting, refused = _KNOWN[key]
        return list(fitting), dict(refused)

    monkeypatch.setattr(trials, "image_candidates", fitted)


def sketch_once(kind: Any) -> nn.Module:
    """Make the model of a run on the meta device, once for equal ones: its weights are not read."""
    config = kind.config
    named = {**vars(config.model), "checkpoint": None}
    asked = repr((config.kind, named, config.image_shape, config.routing, config.methods))
    if asked not in _SKETCHES:
        _SKETCHES[asked] = sketch(kind)
    return _SKETCHES[asked]


def fit_by_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let studies take each candidate to cost what its budget says: no pass is counted, and one model of a series made.

    What depends on the data has no cost, as ever.
    """

    def fitted(
        studied: list[Candidate], flops_of: budgets.Flops, *sizes: Any, strict: bool
    ) -> tuple[list[Candidate], dict[str, str]]:
        known: dict[str, float | None] = {}

        def cost_of(candidate: Candidate) -> float | None:
            if candidate.series not in known:
                known[candidate.series] = flops_of(candidate)
            return None if known[candidate.series] is None else candidate.budget or 1.0

        return budgets.at_budgets(studied, cost_of, *sizes, strict=strict)

    monkeypatch.setattr(candidates, "at_budgets", fitted)
    monkeypatch.setattr(candidates, "sketch", sketch_once)
    monkeypatch.setattr(candidates, "pass_flops", lambda *_: 1)
    # No such count is kept for other tests.
    monkeypatch.setattr(candidates, "_flops_of", _COUNT)


def make_models(comparison: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one model of each series, once for equal ones: budgets change its numbers alone.

    Runs and weights that the models start from need not be there.
    """
    few = {candidate.series or candidate.name: candidate for candidate in comparison.candidates}
    with monkeypatch.context() as patched:
        for config in (RunConfig, LoopConfig):
            patched.setattr(config, "check_weights", lambda _: None)
        patched.setattr(runs, "sketch", sketch_once)
        dataclasses.replace(comparison, candidates=[*few.values()]).checked_runs()


def count_candidates_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let studies count the FLOPs of candidates that are one model once: configs that follow another share most."""
    count = candidates._flops_of

    def counted(candidate: Candidate, dense: RunConfig) -> int | None:
        model = dataclasses.replace(candidate, name="", series="", budget=None, control=None, is_trained=False)
        data: Any = dense.data
        key = repr((model, dense.kind, dense.model, data.image_size, data.channels))
        if key not in _FLOPS:
            _FLOPS[key] = count(candidate, dense)
        return _FLOPS[key]

    monkeypatch.setattr(candidates, "_flops_of", counted)


def open_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `mmod advise` run the model on the first samples alone: what it compares, other tests show."""

    def read_once(model: nn.Module, batches: Iterable[Any], **_: Any) -> str:
        batch = next(iter(batches))
        model.eval()
        with torch.no_grad():
            if isinstance(batch, Mapping):
                model(**batch)
            else:
                # With or without labels.
                image_output(model, batch if isinstance(batch, torch.Tensor) else batch[0])
        return "advice"

    monkeypatch.setattr(trials, "advise", read_once)


def few_series(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let advice try some series of candidates alone: for tests that ask for nothing of the others."""
    known = untrained.image_series
    monkeypatch.setattr(untrained, "image_series", lambda: [one for one in known() if one.series in names])


def count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let searches among the same options count the FLOPs of equal models once: counting takes longest."""
    count = search.block_costs

    def counted(model: nn.Module, *arguments: Any) -> BlockCosts:
        part, stack, configs, cost, lengths, example = arguments
        shapes = [tuple(value.shape) for value in (*tree_leaves(example), *model.state_dict().values())]
        key = f"{model} {part} {stack.names} {stack.prefix} {configs} {cost} {lengths} {shapes}"
        if key not in _COSTS:
            _COSTS[key] = count(model, *arguments)
        return _COSTS[key]

    monkeypatch.setattr(search, "block_costs", counted)
