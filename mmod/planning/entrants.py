"""The models that advice compares, and what is measured of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from mmod.adapters import find_library
from mmod.adapters.tokens import said_of
from mmod.analysis.table import (
    DENSE,
    Look,
    Measured,
    Table,
    evaluated,
    gap,
    interval_of,
    rows_once,
)
from mmod.analysis.timing import Times, ratios, times_once
from mmod.io.jobs import Callback
from mmod.io.progress import Stages
from mmod.io.store import Store
from mmod.methods.route import is_routed
from mmod.model import copy_of
from mmod.planning.candidate import ANY_SIZE, CONTROL, Candidate
from mmod.planning.choice import AdviceRow
from mmod.planning.early import BATCH, front_in, milliseconds
from mmod.planning.samples import (
    AGREEMENT,
    CORRECT,
    Costs,
    Images,
    Prompts,
)


class Entrant(NamedTuple):
    """A candidate, the model that it changed, and the samples as that model reads them.

    Attributes:
        attends_twice: Most blocks of the model compute their attention twice, see `Candidate.apply_`.
    """

    candidate: Candidate
    model: nn.Module
    samples: Images | Prompts
    attends_twice: bool = False

    @property
    def chooses(self) -> bool:
        """Whether it chooses the tokens that it keeps, as a user's own do that have routers."""
        return is_routed(self.model) or any(method["kind"] == "prune" for method in self.candidate.methods)


def changed_models(
    model: nn.Module,
    samples: Images | Prompts,
    depth: int,
    candidates: Sequence[Candidate],
    begin: Callable[[str], object] = lambda name: None,
) -> tuple[dict[str, Entrant], dict[str, str]]:
    """Return the model and a changed copy, with the same weights, for every candidate; and why others are refused.

    Args:
        begin: Receives the name of each candidate before it is made.
    """
    entrants = {DENSE: Entrant(Candidate(DENSE), model, samples)}
    refused: dict[str, str] = {}
    for candidate in candidates:
        begin(candidate.name)
        # Weights are shared: dozens of candidates are held at once.
        changed = copy_of(model)
        try:
            attends_twice = candidate.apply_(changed, samples.part, depth)
            as_read = samples.read_by(changed, candidate.image_size)
        except ValueError as refusal:
            refused[candidate.name] = str(refusal)
            continue
        entrants[candidate.name] = Entrant(candidate, changed.eval(), as_read, attends_twice)
    return entrants, refused


def ready_models(
    models: Mapping[str, nn.Module], samples: Images | Prompts, taken: Collection[str]
) -> dict[str, Entrant]:
    """Return models of the user as they are, in evaluation mode; they themselves stay unchanged."""
    entrants = {}
    for name, model in models.items():
        if name in taken:
            raise ValueError(f"models has the name {name!r} of another model: {', '.join(taken)}; choose another")
        ready = copy_of(model).eval()
        try:
            as_read = samples.read_by(ready, None)
        # As hosts refuse images, and devices differ.
        except (RuntimeError, ValueError, AssertionError) as error:
            raise ValueError(f"the model {name!r} does not run as the dense one does: {error}") from error
        # A model without a router chooses no tokens that random ones could stand for.
        is_controlled = CONTROL in models and name != CONTROL and is_routed(ready)
        control = CONTROL if is_controlled else None
        entrants[name] = Entrant(Candidate(name, control=control), ready, as_read)
    return entrants


def evaluate_once(
    store: Store, entrants: Mapping[str, Entrant], look: Look, callback: Callback = lambda share: None
) -> Measured:
    """Evaluate a candidate on some of the samples, once."""
    candidate, model, samples, _ = entrants[look.name]
    start, stop = look.part.start, look.part.stop
    named = {"candidate": look.name, "code": candidate.code(samples.part, False), "image_size": candidate.image_size}
    identity = {**samples.identity, **named, "start": start, "stop": stop}
    return rows_once(store, identity, lambda: samples.evaluate(model, start, stop, callback))


def time_in_turns(
    store: Store,
    entrants: Mapping[str, Entrant],
    stages: Stages,
    passes: Collection[str],
    names: Sequence[str],
    rounds: range,
) -> tuple[Times[str], float]:
    """Return the times of the dense model and of some candidates in rounds, and `Table.waiting`."""
    _, model, samples, _ = entrants[DENSE]
    timed = {name: entrants[name] for name in (DENSE, *names)}
    # Whatever shares a round is part of it: other neighbours slow a pass down differently.
    codes = {}
    readings = {}
    work = 0
    for name, one in timed.items():
        of_model = one.samples.readings(one.model)
        readings[name] = {of: of_model[of] for of in passes}
        work += len(rounds) * sum(reading.samples for reading in readings[name].values())
        if name != DENSE:
            codes[name] = [one.candidate.code(samples.part, False), one.candidate.image_size]
    identity = {**samples.identity, "timed": codes, "batch_size": samples.batch_size}
    device = next(model.parameters()).device
    stages.begin("timing", work, len(rounds))
    return times_once(store, identity, lambda: readings, device, rounds=rounds, callback=stages.update)


def row_of(table: Table, figure: str, candidate: Candidate) -> AdviceRow:
    """Return what is measured of a candidate."""
    times = table.times[BATCH]
    accuracy = None
    # Without answers, the figure is the agreement itself.
    if figure == CORRECT:
        accuracy = gap(table, figure, candidate.name, DENSE)
    return AdviceRow(
        name=candidate.name,
        label=candidate.label,
        speedup=ratios(times[DENSE], times[candidate.name]),
        score=interval_of(table, AGREEMENT, candidate.name),
        accuracy=accuracy,
        images=evaluated(table, candidate.name),
    )


def rows_of(
    table: Table,
    figure: str,
    entrants: Mapping[str, Entrant],
    costs: Mapping[str, Costs],
    part: str,
    is_only: bool,
    decimals: int,
) -> Iterator[AdviceRow]:
    """Yield the rows of the report, the fastest first.

    Args:
        is_only: That of `Candidate.config`.
        decimals: Those of the figure, as the report shows it.
    """
    ms = milliseconds(table, BATCH)
    at_random = [name for name, one in entrants.items() if one.candidate.at_random]
    # Those that are too slow are not on it by the first samples alone.
    few = [name for name in ms if evaluated(table, name) < evaluated(table, DENSE)]
    front = front_in(table, figure, {*at_random, *few}, decimals)
    dense = costs[DENSE].flops
    for name in sorted(table.runs, key=ms.__getitem__):
        if name == DENSE:
            continue
        candidate = entrants[name].candidate
        flops = costs[name].flops
        share = None
        if flops is not None and dense is not None:
            share = flops / dense
        agreement_to_control = None
        if figure == CORRECT:
            agreement_to_control = gap(table, AGREEMENT, name, candidate.control)
        yield dataclasses.replace(
            row_of(table, figure, candidate),
            code=candidate.code(part, is_only, said_of(entrants[DENSE].model)),
            config=_config_of(candidate, entrants[DENSE].model, part, is_only),
            on_front=name in front,
            cache=costs[name].cache,
            series=candidate.series,
            speedups={of: ratios(ms[DENSE], ms[name]) for of, ms in table.times.items() if of != BATCH},
            control=candidate.control,
            to_control=gap(table, figure, name, candidate.control),
            agreement_to_control=agreement_to_control,
            at_random=candidate.at_random,
            chooses=entrants[name].chooses,
            flops=share,
        )


def _config_of(candidate: Candidate, dense: nn.Module, part: str, is_only: bool) -> str:
    """Return the keys of a training config that apply it; empty for a class of model that configs cannot name."""
    if find_library(dense) is None:
        return ""
    config = candidate.config(part, is_only)
    if candidate.resizes and hasattr(dense, "dynamic_img_size"):
        # A model of timm takes images of one size unless its config says otherwise.
        return f"model: {json.dumps({'args': ANY_SIZE})}\n{config}"
    return config
