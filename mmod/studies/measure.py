"""How a run is measured: what it does, what is known of it, and what its final model costs and takes.

It gets a `Run`, with the training config of that run alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from mmod.analysis.table import DENSE, Measured, rows_once
from mmod.analysis.timing import PASSES, Reading, Readings, Times, times_once
from mmod.config import RoutingConfig
from mmod.io.files import locked, make_folder
from mmod.io.jobs import Callback
from mmod.io.store import STORE, Store
from mmod.opening.runs import check_unchanged, weight_sums
from mmod.planning.candidate import PlanOptions
from mmod.planning.plan_search import PlanSearch, named_options
from mmod.planning.search import search_plan
from mmod.studies.runs import UNTUNED, Run
from mmod.training import kinds
from mmod.training.engine.config import RunConfig
from mmod.training.engine.evaluate import Evaluated, RoutedResult
from mmod.training.engine.kind import Kind, calibration, device_of, load, seed_draws
from mmod.training.engine.run_folder import portable

BEFORE = "before"
"""Name of the figure that a model has before it is fine-tuned."""
Measure = Callable[[Run, Callback, "Measurer"], Measured]
"""Does a run whose plan is known, with the store and the models of the measurer that calls it."""
Load = Callable[[Kind], nn.Module]
"""Loads the model that a run starts from, see `mmod.training.engine.kind.load`."""


@dataclass(frozen=True)
class Measurer:
    """Measures runs for `mmod.analysis.table.compare`, with the plan of their seed's dense model if one is searched.

    Other processes get it pickled.

    A model is loaded once for all that is measured of it, such as its accuracy, its costs and its times.
    """

    measure: Measure
    store: Store  # Keeps evaluations without training.
    # By path, as they were when the comparison began, see `starting_weights`.
    weights: Mapping[str, Sequence[str]] = field(default_factory=dict)
    # By folder of the search and budget.
    plans: dict[Path, dict[float, dict[str, object]]] = field(default_factory=dict)
    # By their config. In the end all are timed in turns: they are kept until a model is trained.
    models: dict[str, nn.Module] = field(default_factory=dict)
    # Show a bar over each evaluation.
    progress: bool = False

    def __call__(self, run: Run, callback: Callback) -> Measured | None:
        """Return the rows of a run; None of the one that others start from, which nothing is compared with."""
        check_unchanged(self.weights)
        if run.is_trained:
            # Training needs the memory.
            self.models.clear()
        rows = self.measure(self.ready(run), callback, self)
        if run.name == UNTUNED:
            return None
        return rows

    def __getstate__(self) -> dict[str, object]:
        # Other processes load the models that they need.
        return {**vars(self), "models": {}}

    def load(self, kind: Kind) -> nn.Module:
        """Return the model that a run starts from: the same again for the same config."""
        key = str(kind.config)
        if key not in self.models:
            self.models[key] = load(kind)
        check_unchanged(self.weights)
        return self.models[key]

    def final(self, run: Run) -> nn.Module:
        """Return a run's final model, which draws the same whatever drew before, as in its evaluation."""
        model = self.load(run.final)
        seed_draws(run.seed, 0, 0)
        return model

    def ready(self, run: Run) -> Run:
        """Return a run whose plan is searched, with those of its series, for which the dense model is loaded once."""
        options = run.candidate.search
        if options is None or not run.searches:
            return run
        if run.plans not in self.plans:
            found = search_for(run.start, run.searches, run.plans)
            plans = self.plans.setdefault(run.plans, {})
            for searched, search in zip(run.searches, found):
                plans[searched.budget] = search.plan.to_dict()
        plan = self.plans[run.plans][options.budget]
        part = options.part or run.training.parts[0]
        routing: dict[str, object] = {part: plan}
        # Configs of one part have its routing itself.
        if part == run.training.part:
            routing = plan
        run_config = dataclasses.replace(run.training, routing=routing)
        # What the study recommends is written with its plan.
        candidate = dataclasses.replace(run.candidate, routing=routing)
        return dataclasses.replace(run, candidate=candidate, training=run_config, searches=())


def search_for(kind: Kind, searches: Sequence[PlanOptions], folder: Path) -> list[PlanSearch]:
    """Search plans for the model that a run would start from, which is loaded once, and write them into a folder.

    Args:
        searches: Searches that differ in their budgets alone.
    """
    if kind.config.routing is not None:
        raise ValueError("a plan is searched for a dense model: set `routing: null`")
    if not kind.config.model.has_weights:
        raise ValueError("nothing to search: the config starts from no weights; set model.checkpoint")
    kind.config.check_weights()
    model = load(kind)
    found = []
    for options in searches:
        name = f"{options.cost}-{options.budget:g}"
        if options.rounds:
            name += f"-rounds-{options.rounds}"
        # Processes of one study may search the plans of one series.
        with locked(folder, wait=True):
            make_folder(folder)
            search = search_plan(
                model,
                calibration(kind, model, options.batches, options.batch_size),
                options.budget,
                part=options.part or kind.config.parts[0],
                options=named_options(options),
                router=options.router,
                cost=options.cost,
                divergence=options.divergence,
                rounds=options.rounds,
                # A stopped search continues, and another budget scores nothing again.
                store=folder / STORE,
            )
            path = folder / f"{name}.json"
            if not path.exists() or RoutingConfig.load(path) != search.plan:
                search.plan.save(path)
            for suffix in ("png", "svg"):
                search.plot(folder / f"{name}.{suffix}", overwrite=True)
        found.append(search)
    return found


def identity_of(run_config: RunConfig) -> dict[str, Any]:
    """Return what stands for the model that a run starts from, and for its data: the config, and checksums of weights.

    The folder of the run is left out, and the path of a checkpoint is relative to it: studies can be moved.
    """
    fields = portable(run_config.to_dict())
    del fields["output"]
    # A path may be written anew, with other weights.
    weights = {name: weight_sums(path) for name, path in run_config.model.weights.items()}
    return {"kind": run_config.kind, "config": fields, "weights": weights}


def starting_weights(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return the checksums of weights and teachers of runs, by path; what one of them writes is not there yet."""
    paths: set[str] = set()
    for run in runs:
        paths |= set(run.training.model.weights.values())
        teacher = run.training.teacher()
        # The dense one has the weights that the run starts from.
        if teacher is not None and teacher != "dense":
            paths.add(teacher)
    return {path: weight_sums(path) for path in paths - {run.training.output for run in runs}}


def measure_run(
    run: Run,
    callback: Callback,
    measurer: Measurer,
    *,
    before: str | None = None,
    by_sample: bool = False,
) -> Measured:
    """Do one run: train its model, or evaluate it as it starts.

    Args:
        before: A figure of models that are fine-tuned, evaluated before that too; None evaluates them once.
        by_sample: Keep the outcomes of samples of trained models too, for which runs that are read are evaluated.
    """
    if not run.is_trained:
        return evaluate_once(measurer.store, run.start, measurer.load, progress=measurer.progress)
    figures: dict[str, float] = {}
    outcomes: dict[str, np.ndarray] = {}
    if before is not None and run.is_tuned:
        start = evaluate_once(measurer.store, run.start, progress=measurer.progress)
        figures[BEFORE] = start.figures[before]
        if by_sample and before in start.outcomes:
            outcomes[BEFORE] = start.outcomes[before]
    fitted = fit(run.training, callback, measurer.store)
    rows = rows_of(fitted.result)
    if by_sample:
        # Kept in the store: the record of a finished run has no outcomes of samples.
        known = fitted if fitted.outcomes else None
        final = evaluate_once(measurer.store, run.final, evaluated=known, progress=measurer.progress)
        rows = rows._replace(samples=final.samples)
        outcomes |= final.outcomes
    return rows._replace(figures={**rows.figures, **figures}, outcomes=outcomes)


def fit(run_config: RunConfig, callback: Callback, store: Store) -> Evaluated:
    """Train a run, or read the result of a finished one, and return its evaluation; refuse one without.

    Args:
        store: That of the comparison, whose runs share the check of their evaluation samples.
    """
    fitted = kinds.fit(
        run_config, progress=False, after_step=lambda step: callback(step.done / step.total), store=store
    )
    if fitted.best is None:
        raise ValueError("a comparison needs evaluation data: set data.val")
    return Evaluated(fitted.best, fitted.outcomes)


def evaluate_once(
    store: Store, kind: Kind, load: Load = load, evaluated: Evaluated | None = None, progress: bool = False
) -> Measured:
    """Evaluate a model once, the one that a run starts from or its final one.

    Args:
        kind: Makes the model and its data: `Run.start` or `Run.final`.
        load: Loads it, if it was not evaluated before.
        evaluated: Its evaluation, where the training that ended with it has made it.
    """
    identity = {"work": "rows of samples", **identity_of(kind.config)}

    def measure() -> Measured:
        result, outcomes = evaluated or kind.score(load(kind), progress)
        # They may have been written anew before they were loaded.
        check_unchanged({path: identity["weights"][name] for name, path in kind.config.model.weights.items()})
        samples = max(map(len, outcomes.values()), default=0)
        return rows_of(result)._replace(samples=samples, outcomes=outcomes)

    return rows_once(store, identity, measure)


def rows_of(evaluation: RoutedResult) -> Measured:
    """Return what the table of a comparison keeps of an evaluation."""
    samples = getattr(evaluation, "samples", 0)
    return Measured(evaluation.columns(), evaluation.kept, samples, text=str(evaluation))


def times_of(
    runs: Mapping[str, Run],
    measurer: Measurer,
    readings: Callable[[Kind, nn.Module, int, int], Mapping[str, Reading]],
    sizes: Sequence[int],
    rounds: range,
    callback: Callback = lambda share: None,
) -> tuple[Times[tuple[str, int]], float]:
    """Return the times of the final models of runs, by input and size of batches, in interleaved rounds.

    And how long rounds waited, see `times_once`.

    Args:
        runs: By name; that of the dense model among them.
        readings: The passes that are timed, as `mmod.training.engine.kind.readings`.
        rounds: Their numbers, as of `times_once`.
        callback: That of `times_once`.
    """
    finals = {name: run.final for name, run in runs.items()}
    identity = {"models": {name: identity_of(final.config) for name, final in finals.items()}, "sizes": list(sizes)}

    def all_readings() -> Readings[tuple[str, int]]:
        passes: dict[str, dict[tuple[str, int], Reading]] = {}
        for name, final in finals.items():
            model = measurer.load(final)
            passes[name] = {}
            for size in sizes:
                # As many samples at every size, where that takes few passes.
                passes_of_size = min(max(sizes) // size, PASSES)
                by_input = readings(final, model, size, passes_of_size)
                passes[name] |= {(inputs, size): reading for inputs, reading in by_input.items()}
        return passes

    device = device_of(finals[DENSE])
    return times_once(measurer.store, identity, all_readings, device, rounds=rounds, callback=callback)
