"""How runs are compared: done at the best learning rate of each where that is searched, then evaluated and timed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from mmod.analysis.table import DENSE, Measured, Table, by_seed, compare
from mmod.analysis.timing import PASSES, Reading, Readings, Times, times_once
from mmod.io.files import sha256
from mmod.io.jobs import Callback, Runner
from mmod.io.store import Store
from mmod.opening.runs import find_weights
from mmod.studies.plan import search_for
from mmod.studies.runs import BASE, Run
from mmod.training.engine.config import RunConfig
from mmod.training.engine.kind import Kind, device_of, load, seed_draws
from mmod.training.engine.run_folder import portable
from mmod.training.kinds import kind_of

Measure = Callable[[Run, Callback, "Measurer"], Measured]
"""Does a run whose plan is known, with the store and the models of the measurer that calls it."""


class Rates(NamedTuple):
    """Factors of the learning rate, of which every trained candidate uses the best, the first of equal ones.

    Attributes:
        factors: Those that are tried; one at which the loss is no longer finite is not chosen.
        figure: The figure that decides; the highest is best.
        measure: Does a trial.
        data: Fields of the config's `data` that trials set differently, such as the split that evaluates them.
        seed: The seed of trials.
    """

    factors: Sequence[float]
    figure: str
    measure: Measure
    data: Mapping[str, object] = {}
    seed: int = 0


def best_rates(runs: Sequence[Run], rates: Rates, store: Store, runner: Runner, folder: Path) -> dict[str, float]:
    """Return the best factor of the learning rate of each trained candidate, by its name.

    Args:
        runs: Those of a comparison, of which the first may train the dense model that trials start from.
        folder: Trials go there, by candidate and factor.

    Raises:
        FloatingPointError: The loss of a candidate is finite at no rate.
    """
    trials = trials_of(runs, rates, folder)
    if len(rates.factors) == 1:
        return dict.fromkeys(trials, rates.factors[0])
    # Trials start from the dense model too, which may not be trained yet.
    jobs = _start_of(runs) + list(itertools.chain.from_iterable(trials.values()))
    table = Table()
    for _ in compare(table, [jobs], functools.partial(_try, Measurer(rates.measure, store), rates.figure), runner):
        pass
    best = {}
    for name, tried in trials.items():
        scores = [by_seed(table, rates.figure, trial.name)[rates.seed] for trial in tried]
        if max(scores) == -float("inf"):
            raise FloatingPointError(f"{name} is trained by none of the rates {list(rates.factors)}: give smaller ones")
        best[name] = rates.factors[scores.index(max(scores))]
    return best


def trials_of(runs: Sequence[Run], rates: Rates, folder: Path) -> dict[str, list[Run]]:
    """Return the trials of each trained candidate by its name, one for each factor; none of a single factor."""
    factors = rates.factors if len(rates.factors) > 1 else ()
    trials = {}
    for run in runs[len(_start_of(runs)) :]:
        if run.seed == 0 and run.is_trained:
            trials[run.name] = [_trial(run, rates, factor, folder) for factor in factors]
    return trials


def _start_of(runs: Sequence[Run]) -> list[Run]:
    """Return the run of the dense model that trials start from, if it is trained."""
    return [run for run in runs[:1] if run.is_trained and run.candidate.from_scratch]


def _trial(run: Run, rates: Rates, factor: float, folder: Path) -> Run:
    name = f"{run.name}-{factor:g}"
    run_config = _with_rate(run.config, factor)
    data = dataclasses.replace(run_config.data, **rates.data)
    run_config = dataclasses.replace(run_config, data=data, output=str(folder / name), seed=rates.seed)
    return dataclasses.replace(run, name=name, seed=rates.seed, config=run_config)


def at_rates(runs: Sequence[Run], factors: Mapping[str, float]) -> list[Run]:
    """Return runs with the learning rates of candidates multiplied by their factors."""
    return [dataclasses.replace(run, config=_with_rate(run.config, factors.get(run.name, 1.0))) for run in runs]


def _try(measurer: Measurer, figure: str, run: Run, callback: Callback) -> Measured | None:
    """Return the rows of a trial, with the worst figure where its loss diverges."""
    try:
        return measurer(run, callback)
    except FloatingPointError:
        # No trial, which has a name of its own: the dense model that all trials start from.
        if run.name == run.candidate.name:
            raise
        return Measured({figure: -float("inf")})


def _with_rate(run_config: Any, rate: float) -> Any:
    """Return a config with its learning rate multiplied."""
    if rate == 1.0:
        return run_config
    return dataclasses.replace(run_config, optim=dataclasses.replace(run_config.optim, lr=rate * run_config.optim.lr))


@dataclass(frozen=True)
class Measurer:
    """Measures runs for `mmod.analysis.table.compare`, with the plan of their seed's dense model if one is searched.

    Other processes get it pickled.

    A model is loaded once for all that is measured of it, such as its accuracy, its costs and its times.
    """

    measure: Measure
    store: Store  # Keeps evaluations without training.
    plans: dict[Path, dict[float, dict[str, Any]]] = field(default_factory=dict)  # By folder of the search and budget.
    models: dict[str, nn.Module] = field(default_factory=dict)  # By their config.
    # In the end all are timed in turns: they are kept until a model is trained. Without times, only the last is.
    keeps_all: bool = False

    def __call__(self, run: Run, callback: Callback) -> Measured | None:
        """Return the rows of a run; None of the one that others start from, which nothing is compared with."""
        if run.is_trained:
            # Training needs the memory.
            self.models.clear()
        rows = self.measure(self.ready(run), callback, self)
        return None if run.name == BASE else rows

    def __getstate__(self) -> dict[str, object]:
        # Other processes load the models that they need.
        return {**vars(self), "models": {}}

    def load(self, run_config: RunConfig) -> nn.Module:
        """Return the model that a run starts from, see `Kind.load`: the same again for the same config."""
        key = str(run_config)
        if key not in self.models:
            if not self.keeps_all:
                self.models.clear()
            self.models[key] = load(kind_of(run_config))
        return self.models[key]

    def final(self, run: Run) -> nn.Module:
        """Return a run's final model, which draws the same whatever drew before, as in its evaluation."""
        model = self.load(run.final_config)
        seed_draws(run.seed, 0, 0)
        return model

    def of_final(self, run: Run, identity: Mapping[str, object], compute: Callable[[nn.Module], object]) -> Any:
        """Return what is computed of a run's final model, once on a machine.

        Args:
            identity: Stands for what is computed, besides the model and its data.
        """
        device = device_of(kind_of(run.final_config))
        whole = {**identity, **identity_of_final(run)}
        return self.store.once(whole, lambda: compute(self.final(run)), timed_on=str(device))

    def ready(self, run: Run) -> Run:
        """Return a run whose plan is searched, with those of its series, for which the dense model is loaded once."""
        options = run.candidate.search
        if options is None or not run.searches:
            return run
        if run.plans not in self.plans:
            found = search_for(run.config, run.searches, run.plans)
            self.plans[run.plans] = {one.budget: search.plan.to_dict() for one, search in zip(run.searches, found)}
        plan = self.plans[run.plans][options.budget]
        part = options.part or run.config.parts[0]
        # Configs of one part have its routing itself.
        routing = plan if part == run.config.part else {part: plan}
        run_config = dataclasses.replace(run.config, routing=routing)
        # What the study recommends is written with its plan.
        candidate = dataclasses.replace(run.candidate, routing=routing)
        return dataclasses.replace(run, candidate=candidate, config=run_config, searches=())


def identity_of(run_config: RunConfig) -> dict[str, Any]:
    """Return what stands for the model that a run starts from, and for its data: the config, and checksums of weights.

    The folder of the run is left out, and the path of a checkpoint is relative to it: studies can be moved.
    """
    fields = portable(run_config.to_dict())
    del fields["output"]
    weights = {}
    for name in ("checkpoint", "image_checkpoint"):
        path = getattr(run_config.model, name, None)
        if path is not None:
            # A path may be written anew, with other weights.
            weights[name] = _checksum(path)
    return {"kind": run_config.kind, "config": fields, "weights": weights}


def identity_of_final(run: Run) -> dict[str, object]:
    """Return what stands for a run's final model, and for its data, see `identity_of`."""
    return identity_of(run.final_config)


def _checksum(checkpoint: str) -> list[str]:
    """Return the checksums of the files that hold weights; of weights on a hub there are none."""
    try:
        path = find_weights(checkpoint)
    except FileNotFoundError:
        # A folder of transformers with several files, or a name on a hub.
        path = Path(checkpoint)
    files = [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("*.bin")])
    return [_sha256(file, file.stat().st_mtime_ns) for file in files]


@functools.lru_cache
def _sha256(file: Path, changed: int) -> str:
    return sha256(file)


def times_of(
    runs: Mapping[str, Run],
    measurer: Measurer,
    readings: Callable[[Kind, nn.Module, int, int], Mapping[str, Reading]],
    sizes: Sequence[int],
    rounds: int,
    *,
    shown: bool,
) -> tuple[Times[tuple[str, int]], float]:
    """Return the times of the final models of runs, by input and size of batches, in interleaved rounds.

    And how long rounds waited, see `times_once`.

    Args:
        runs: By name; that of the dense model among them.
        readings: The passes that are timed, as `mmod.training.engine.kind.readings`.
    """
    kinds = {name: kind_of(run.final_config) for name, run in runs.items()}
    identity = {"models": {name: identity_of(kind.config) for name, kind in kinds.items()}, "sizes": list(sizes)}

    def all_readings() -> Readings[tuple[str, int]]:
        passes: dict[str, dict[tuple[str, int], Reading]] = {}
        for name, kind in kinds.items():
            model = measurer.load(kind.config)
            passes[name] = {}
            for size in sizes:
                # As many samples at every size, where that takes few passes.
                passes_of_size = min(max(sizes) // size, PASSES)
                by_input = readings(kind, model, size, passes_of_size)
                passes[name] |= {(inputs, size): reading for inputs, reading in by_input.items()}
        return passes

    device = device_of(kinds[DENSE])
    return times_once(measurer.store, identity, all_readings, device, rounds=rounds, shown=shown)
