"""A study: its comparison is checked, its runs are done, and what they cost and lose is written.

`run_study` makes a `Study` of the config, its kind, and the `Comparison` that the config becomes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from mmod.analysis.style import save_picture
from mmod.analysis.table import DENSE, Table, compare
from mmod.analysis.timing import further_rounds
from mmod.data.files import files_of
from mmod.io.files import locked, make_folder
from mmod.io.jobs import Runner
from mmod.io.progress import Bar, Stages
from mmod.io.records import QUESTION
from mmod.io.store import STORE, Store
from mmod.methods.route import is_routed
from mmod.names import plural
from mmod.plain import without
from mmod.studies.candidates import comparison_from, comparison_of, training_configs
from mmod.studies.config import StudyConfig, naming_dense
from mmod.studies.kind import Facts, Study, study_kind
from mmod.studies.kind_configs import TimmStudyConfig
from mmod.studies.measure import Measurer, identity_of, starting_weights, times_of
from mmod.studies.question import question_of
from mmod.studies.rates import Rates, at_rates, best_rates, trials_of
from mmod.studies.report import StudyResult, listed, write_study
from mmod.studies.runs import UNTUNED, Comparison, Run
from mmod.training.engine.config import LoopConfig
from mmod.training.engine.kind import device_of
from mmod.training.engine.run_folder import epochs_and_seconds, is_finished, samples_of_epoch


def run_study(config: StudyConfig, *, command: str = "", progress: bool = True) -> StudyResult:
    """Train or load the dense model and the candidates made from it, evaluate, time, and draw.

    Table and pictures are written as soon as there is a model to compare with the dense one, and again with every
    further model of the first seed and every further seed. Latency joins them at the end, when nothing else runs.

    Args:
        command: The command that asks for it, as it was typed, for the report.
    """
    dense, tuned = training_configs(config)
    # All that needs no candidates comes before they are fitted to budgets, which counts dozens of models.
    if not config.train_dense:
        with naming_dense():
            dense.check_weights()
    # A study that goes on may have trained its models.
    if config.tune and not Path(config.output).exists():
        files_of(tuned.data, "train")
    kind = study_kind(config.kind)
    # Images that cannot be read leave the folder free.
    facts = kind.describe(dense, tuned if config.tune else dense)
    runner = Runner(config.processes, progress)
    # Counting dozens of models may take a minute, in which nothing else is said.
    runner.say("making the models that are compared, and counting their FLOPs")
    comparison = comparison_from(config, dense, tuned)
    runs = comparison.checked_runs()
    check_following(config)
    return _compared(Study(kind, comparison, config), runs, facts, runner, command)


def check_following(config: StudyConfig) -> None:
    """Raise for what is wrong in the study that follows, as far as that is known before this one has run."""
    following = config.following()
    if following is None:
        return
    # Dense models in `bases` are trained where they are missing; others of this study are not there yet.
    named = without(config.then or {}, ("output", "bases"))
    folder = Path(config.output).absolute()
    if not any(Path(text).absolute().is_relative_to(folder) for text in _texts_in(named)):
        comparison_of(following).checked_runs()


def _texts_in(value: object) -> Iterator[str]:
    """Yield the texts in nested values, which may be paths."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts_in(item)


def _compared(study: Study, runs: Sequence[Run], facts: Facts, runner: Runner, command: str) -> StudyResult:
    """Do the runs of a study, and write what is known after each."""
    comparison = study.comparison
    # Controls without a series are compared with, and are no rows of the table.
    names = [candidate.name for candidate in comparison.candidates if candidate.series]
    # A folder that cannot be written, or has the table of another study, is no news for the end of a run.
    store = Store(make_folder(comparison.folder) / STORE)
    question = question_of(study.config.evaluation, runs)
    question.begin(comparison.folder)
    rates = _rates_of(study)
    models = compared_models(comparison, runs)
    trials: list[Run] = []
    if rates is not None:
        trials += itertools.chain.from_iterable(trials_of(runs, rates).values())
    if trials:
        models += " besides runs that try learning rates"
    ahead = training_ahead([*runs, *trials])
    runner.say(". ".join([f"{models}{ahead}", *comparison.notes]))
    # Bars of several processes would be drawn over each other.
    shown = runner.progress and runner.processes == 1
    measurer = Measurer(study.measure, store, starting_weights(runs), progress=shown)
    table = Table(weigh=study.kind.weigh)
    if rates is not None:
        table.rates = best_rates(runs, rates, measurer.store, runner)
        runs = at_rates(runs, table.rates)
    # The runs of the first seed, whose models are counted, drawn and timed.
    done: dict[str, Run] = {}

    def write() -> StudyResult:
        ordered = {name: done[name] for name in names if name in done}
        return write_study(study, table, ordered, facts, command, runner.facts)

    is_announced = False
    # Each run comes back once its rows are in the table.
    for run in compare(table, [runs], measurer, runner):
        # Other programs may do runs of the study too.
        with locked(comparison.folder / QUESTION, wait=True):
            question.keep(comparison.folder, table.runs)
            if run.seed == 0 and run.name in names:
                done[run.name] = measurer.ready(run)
                table.costs[run.name] = _counted(study, done[run.name], measurer, table)
                _draw_once(study, done[run.name], measurer)
            # Where nothing is trained, the next model is there before a picture is drawn.
            is_first = run.seed == 0 and (len(done) == 2 or run.is_trained)
            is_seed_done = all(run.seed in table.runs.get(one.name, {}) for one in comparison.candidates)
            if len(done) > 1 and DENSE in done and (is_first or is_seed_done):
                write()
                if not is_announced:
                    runner.say(f"table and picture, from now on: {comparison.folder}/tradeoff.{{md,png}}")
                is_announced = True
    sizes = list(study.config.size_suffixes)
    rounds = study.config.latency_rounds
    # Timed alone, and once.
    with locked(comparison.folder / QUESTION, wait=True), Stages(runner.title, runner.progress) as stages:
        stages.begin("timing", work=1.0, rounds=rounds)
        time = partial(times_of, measurer=measurer, readings=study.kind.readings, sizes=sizes, callback=stages.update)
        table.times, table.waiting = time(done, rounds=range(rounds))
        result = write()
        recommended = [name for name in result.recommended if name != DENSE]
        named = [name for name in recommended if table.caution or table.scatters(name)]
        if not named:
            return result
        stages.expect(1.0)
        numbers = further_rounds(rounds)
        stages.begin("timing what is named", work=1.0, rounds=len(numbers))
        further, _ = time({name: done[name] for name in (DENSE, *named)}, rounds=numbers)
        table.add_rounds(further)
        return write()


def _rates_of(study: Study) -> Rates | None:
    """Return the learning rates that are tried first, on a split of their own; None trains as configs say."""
    config = study.config
    if not isinstance(config, TimmStudyConfig) or config.rates is None:
        return None
    # Of a trial the trained model alone counts.
    trial = study._replace(config=dataclasses.replace(config, before=False))
    folder = study.comparison.folder / "rates"
    return Rates(config.rates, config.score, trial.measure, folder, {"val_split": config.rate_split})


def compared_models(comparison: Comparison, runs: Sequence[Run]) -> str:
    """Say which models a study trains or evaluates, and how often, so that their runs can be counted."""
    rows = sum(1 for candidate in comparison.candidates if candidate.series)
    controls = len(comparison.candidates) - rows
    told = [f"{rows} models"]
    if controls:
        told.append(f"{controls} {plural('control', controls)}")
    # The dense model that all start from is no row where it is then tuned as they are.
    if any(run.name == UNTUNED for run in runs):
        told.append("the dense model before fine-tuning")
    text = listed(told)
    seeds = len({run.seed for run in runs})
    if seeds > 1:
        text += f", each with {seeds} seeds"
    return text


def training_ahead(runs: Sequence[Run]) -> str:
    """Say how many models are left to train, and for how long, which may take hours; empty where none is."""
    left = [run for run in runs if run.is_trained and not is_finished(run.training.output)]
    if not left:
        return ""
    text = f", {len(left)} {plural('run', len(left))} to train"
    epochs = sum(run.training.epochs or 0 for run in left)
    if not epochs:
        return text
    text += f", of {epochs:g} {plural('epoch', epochs)} in all"
    # Runs that start from a finished one have its data, and about its model.
    checkpoint = left[0].training.model.checkpoint
    _, seconds = epochs_and_seconds(checkpoint)
    if seconds is None:
        return text
    # Some may have begun, and some may run at once.
    samples = samples_of_epoch(checkpoint)
    work = sum((run.training.epochs or 0) * _share_of_epoch(run, samples) for run in left)
    time = Bar.format_interval(seconds * work)
    return (
        f"{text}: about {time} by the dense model's run, and besides that models are loaded, evaluated before "
        "training, and timed"
    )


def _share_of_epoch(run: Run, samples: float | None) -> float:
    """Return the share of an epoch of so many samples that `epoch_steps` and `data.train_limit` of a run leave."""
    training = run.training
    limits = [getattr(training.data, "train_limit", None)]
    if isinstance(training, LoopConfig) and training.epoch_steps is not None:
        limits.append(training.epoch_steps * training.step_samples(1))
    shares = [limit / samples for limit in limits if limit is not None and samples is not None]
    return min([1.0, *shares])


def _counted(study: Study, run: Run, measurer: Measurer, table: Table) -> dict[str, float]:
    """Return the costs of a run's final model, which are counted once on a machine."""
    identity = {"work": "costs", "batch": study.config.latency_batch, **identity_of(run.final.config)}
    rows = table.runs[run.name][run.seed]
    return measurer.store.once(
        identity, lambda: study.kind.count(study, run, measurer.final(run), rows), timed_on=str(device_of(run.final))
    )


def _draw_once(study: Study, run: Run, measurer: Measurer) -> None:
    """Draw what a model keeps, unless that is what its pictures in the study's folder show."""
    draw = study.kind.draw
    if draw is None or not study.config.maps:
        return
    name = {"work": "pictures", "name": run.name}
    shown = json.dumps({"maps": study.config.maps, **identity_of(run.final.config)}, sort_keys=True)
    drawn = measurer.store.get(name) or {"shown": "", "titles": []}
    folder = study.comparison.folder
    # A user may have deleted some.
    is_whole = all((folder / f"{title}.svg").exists() for title in drawn["titles"])
    if drawn["shown"] == shown and is_whole:
        return
    model = measurer.final(run)
    figure = draw(study, run, model) if is_routed(model) else None
    titles = []
    if figure is not None:
        titles = [f"maps-{run.name}"]
        save_picture(folder, titles[0], figure)
    measurer.store.put(name, {"shown": shown, "titles": titles})
