"""A study: its config becomes a comparison, and ends here; its runs are done, and what they cost and lose is written.

`run_study` makes a `StudyKind` of the `Comparison` and the `Evaluation`. All that is called from there on knows these,
and gets no `StudyConfig`. The dense model's training config, and that of fine-tuning it, are made of the study's, each
step over the one before:

1. the file or run that `dense` names, and the keys beside its `base`;
2. the study's `changes`;
3. of fine-tuning, `finetune` and the weights of the dense model, in place of its `checkpoint`, `pretrained` and `head`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmod.analysis.style import save_picture
from mmod.analysis.table import DENSE, Table, compare
from mmod.io.files import make_folder
from mmod.io.jobs import Runner
from mmod.io.progress import Bar
from mmod.io.store import STORE, Store
from mmod.io.yaml import BASE_KEY, merged, read_yaml
from mmod.opening.runs import RUN_CONFIG
from mmod.plain import from_plain
from mmod.planning.candidate import FIT, Candidate
from mmod.studies.candidates import baseline, fitted, shallow, told_of_controls, with_controls
from mmod.studies.config import RUN_FIELDS, StudyConfig, TimmStudyConfig, naming_dense
from mmod.studies.kind import StudyKind, study_kind
from mmod.studies.measure import Measurer, identity_of_final, times_of
from mmod.studies.question import question_of
from mmod.studies.rates import at_rates, best_rates, trials_of
from mmod.studies.report import StudyResult, write_study
from mmod.studies.runs import BASE, Comparison, Run
from mmod.training.engine.config import RunConfig
from mmod.training.engine.run_folder import epochs_and_seconds, is_finished, steps_of_epoch, unfinished
from mmod.training.kinds import config_class
from mmod.values import check_value


def run_study(config: StudyConfig, *, progress: bool = True) -> StudyResult:
    """Train or load the dense model and the candidates made from it, evaluate, time, and draw.

    Table and pictures are written as soon as there is a model to compare with the dense one, and again with every
    further model of the first seed and every further seed. Latency joins them at the end, when nothing else runs.
    """
    dense, tuned = training_configs(config)
    if not config.train_dense:
        # Before candidates are fitted to budgets, which counts dozens of models.
        with naming_dense():
            dense.check_weights()
    runner = Runner(config.processes, progress)
    # Counting dozens of models may take a minute, in which nothing else is said.
    runner.say("making the models that are compared, and counting their FLOPs")
    comparison = _comparison_from(config, dense, tuned)
    runs = comparison.checked_runs()
    check_following(config)
    study = study_kind(config.kind)(comparison, config.evaluation)
    # From here on, nothing reads the config.
    return _compared(study, runs, runner, dataclasses.asdict(config))


def comparison_of(config: StudyConfig) -> Comparison:
    """Return what a study compares: the dense model, its series, and models without a router."""
    return _comparison_from(config, *training_configs(config))


def _comparison_from(config: StudyConfig, dense: RunConfig, tuned: RunConfig) -> Comparison:
    """Return what a study compares, by the training configs of the dense model and of fine-tuning it."""
    candidates = [Candidate(DENSE, series=DENSE, budget=1.0, is_trained=config.tune is True), *config.routed()]
    # As long as a fine-tuned model has been trained in all.
    epochs = (dense.epochs or 0) + ((tuned.epochs or 0) if config.tune else 0)
    candidates += baselines_of(config, epochs)
    left_out: Mapping[str, str] = {}
    if isinstance(config, TimmStudyConfig) and _names_budgets(config):
        candidates, left_out = fitted(candidates, dense)
    if isinstance(config, TimmStudyConfig) and config.isoflop == "scratch":
        # Last, as routed models are counted with their fitted numbers; in the table, baselines stand below.
        routed = [candidate for candidate in candidates if candidate.series not in config.baselines]
        baselines = [candidate for candidate in candidates if candidate.series in config.baselines]
        candidates = [*routed, *shallow(routed, dense, epochs), *baselines]
    candidates = with_controls(candidates, config.routers, config.controls, is_of_parts=not dense.part)
    names = Counter([BASE, *(candidate.name for candidate in candidates)])
    if max(names.values()) > 1:
        raise ValueError(f"several models of the study have the name {names.most_common(1)[0][0]!r}")
    comparison = Comparison(
        candidates=candidates,
        dense=dense,
        # Untuned models are evaluated on the data and in the precision of the dense one.
        train=tuned if config.tune else None,
        seeds=config.seeds,
        train_dense=config.train_dense,
        bases=config.bases,
        notes=[
            *([] if config.train_dense else unfinished(dense.model.checkpoint)),
            *(f"Left out: {name}: {reason}" for name, reason in left_out.items()),
            *told_of_controls(candidates, {*config.routers} - {*config.controls}),
            *_numbers(config, candidates),
        ],
        keys=("changes", "finetune"),
    )
    if config.seeds > 1 and not comparison.trains:
        raise ValueError(
            f"seeds={config.seeds} repeats training, and this study trains nothing: leave seeds out, as intervals are "
            "over samples, or set tune to true"
        )
    return comparison


def training_configs(config: StudyConfig) -> tuple[RunConfig, RunConfig]:
    """Read the training configs of the dense model and of fine-tuning it; a ValueError if they do not fit the study."""
    if config.tune and not config.finetune:
        # A silent default would repeat the dense model's whole schedule for each model.
        raise ValueError(
            "finetune is empty: say how long models are fine-tuned, such as `finetune: {epochs: 1}` (of conversations "
            "`{trainer: {max_steps: 100}}`), or set tune to false"
        )
    kind_config = config_class(config.trains)
    fields = config.fields_of_dense(_read_dense(config.dense, config.trains))
    dense = from_plain(kind_config, fields, "dense")
    start = fields
    if config.train_dense:
        # Fine-tuning starts from the trained dense model, whatever the dense config starts from. Its folder differs by
        # seed: `Comparison.runs` puts it in place of this one.
        start = {**fields, "model": dataclasses.asdict(dense.started_from(config.output).model)}
    try:
        tuned = from_plain(kind_config, merged(start, config.finetune), "finetune")
    except ValueError as error:
        # Read for the dense model, which has no routers to train and no teacher but one that is named.
        if config.finetune.keys().isdisjoint(("trained", "distill")):
            raise
        raise ValueError(
            f"finetune is about the dense model too: {error}; what needs routers or methods goes into `changes` of "
            "each series"
        ) from error
    for run in (dense, tuned):
        kinds = [method.get("kind") for method in run.methods if not method.get("training_only")]
        if run.routing is not None:
            kinds.append("routing")
        if kinds:
            raise ValueError(
                f"the dense model of a study has no methods and no routing, got {', '.join(map(str, kinds))}: "
                "leave them out of `dense` and its changes, and name them in `routers` or `baselines`"
            )
    if not config.train_dense and config.tune is not True and not config.starts_trained(dense):
        raise ValueError(
            "nothing to compare with: the dense config starts from no weights, and the study does not train it; "
            "set dense.model.checkpoint, name a run in `dense`, or set train_dense to true"
        )
    config.check_runs(dense, tuned)
    return dense, tuned


def _read_dense(named: str | Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Read a config, with the keys that differ from it where it is a `base`.

    That of a run, by its folder or file, is changed to start from the run's final model.
    """
    changes = {BASE_KEY: named} if isinstance(named, str) else dict(named)
    path = changes.pop(BASE_KEY, None)
    if path is None:
        return changes
    check_value(f"dense.{BASE_KEY}", path, str)
    file = Path(path, RUN_CONFIG) if Path(path, RUN_CONFIG).is_file() else Path(path)
    fields = read_yaml(str(file))
    kinds = (kind,)
    check_value(f"{path!r} is a config of another kind: kind", fields.get("kind", kind), str, kinds)
    # What a run records besides its config.
    if fields.pop("world_size", None) is not None:
        fields = config_class(kind).from_dict(fields).finished(str(file.parent)).to_dict()
    return merged(fields, changes)


def _numbers(config: StudyConfig, candidates: Sequence[Candidate]) -> list[str]:
    """Say what the numbers in names of routed models and their baselines are: a sentence or none."""
    if isinstance(config, TimmStudyConfig) and _names_budgets(config):
        return ["Numbers in names are shares of the dense model's FLOPs"]
    numbered = {one.series for one in candidates if one.budget is not None and one.name != one.series}
    routed = [fields for series, fields in config.routers.items() if series in numbered]
    if not routed or any("budgets" in fields for fields in routed):
        return []
    text = "Numbers in names are capacities: shares of the tokens that routed blocks keep, and not of FLOPs"
    if any("search" in fields for fields in routed):
        text += "; of searches, their budgets"
    is_matched = numbered & {*config.baselines_by_series}
    return [f"{text}; of baselines, those of the routed models that they are matched to" if is_matched else text]


def baselines_of(config: StudyConfig, epochs: int) -> Iterator[Candidate]:
    """Yield every baseline, a model without a router; some kinds of study have them.

    Args:
        epochs: Length of a training from scratch.
    """
    for series, budgets in config.baselines_by_series.items():
        for budget, fields in budgets.items():
            if config.is_run(budget):
                settings = {name: value for name, value in fields.items() if name not in RUN_FIELDS}
                yield baseline(config.candidate(series, budget, fields), settings, epochs)


def _names_budgets(config: TimmStudyConfig) -> bool:
    """Return whether budgets are shares of the dense model's FLOPs: series name them, or baselines fit them."""
    fields: list[Mapping[str, object]] = []
    for budgets in config.baselines.values():
        fields += budgets.values()
    is_fitted = any(FIT in baseline.values() for baseline in fields if baseline)
    return is_fitted or any("budgets" in series for series in config.routers.values())


def check_following(config: StudyConfig) -> None:
    """Raise for what is wrong in the study that follows, as far as that is known before this one has run."""
    following = config.following()
    if following is None:
        return
    # Dense models in `bases` are trained where they are missing; others of this study are not there yet.
    named = {key: value for key, value in (config.then or {}).items() if key not in ("output", "bases")}
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


def _compared(study: StudyKind, runs: Sequence[Run], runner: Runner, settings: Mapping[str, object]) -> StudyResult:
    """Do the runs of a study, and write what is known after each.

    Args:
        settings: The study's config, for its record.
    """
    comparison = study.comparison
    # Controls without a series are compared with, and are no rows of the table.
    names = [candidate.name for candidate in comparison.candidates if candidate.series]
    # A folder that cannot be written, or has the table of another study, is no news for the end of a run.
    store = Store(make_folder(comparison.folder) / STORE)
    question = question_of(study.evaluation.identity, runs)
    question.check(comparison.folder)
    facts = study.describe()
    rates = study.rates()
    rates_folder = comparison.folder / "rates"
    trials = {} if rates is None else trials_of(runs, rates, rates_folder)
    ahead = training_ahead([*runs, *itertools.chain.from_iterable(trials.values())])
    controls = len(comparison.candidates) - len(names)
    noun = "control" if controls == 1 else "controls"
    told = f" and {controls} {noun}" if controls else ""
    runner.say(". ".join([f"{len(names)} models{told}{ahead}", *comparison.notes]))
    measurer = Measurer(study.measure, store, keeps_all=True)
    table = Table(weigh=study.weigh)
    if rates is not None:
        table.rates = best_rates(runs, rates, measurer.store, runner, rates_folder)
        runs = at_rates(runs, table.rates)
    # The runs of the first seed, whose models are counted, drawn and timed.
    done: dict[str, Run] = {}

    def write() -> StudyResult:
        ordered = {name: done[name] for name in names if name in done}
        result = write_study(study, table, ordered, facts, settings, runner.facts)
        question.keep(comparison.folder, table.runs)
        return result

    is_announced = False
    # Each run comes back once `study.measure` has done it, and its rows are in the table.
    for run in compare(table, [runs], measurer, runner):
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
    sizes = list(study.evaluation.size_suffixes)
    table.times, table.waiting = times_of(
        done, measurer, study.readings, sizes, study.evaluation.rounds, shown=runner.progress
    )
    return write()


def training_ahead(runs: Sequence[Run]) -> str:
    """Say how many models are left to train, and for how long, which may take hours; empty where none is."""
    left = [run for run in runs if run.is_trained and not is_finished(run.training.output)]
    if not left:
        return ""
    text = f", {len(left)} {'run' if len(left) == 1 else 'runs'} to train"
    epochs = sum(run.training.epochs or 0 for run in left)
    if not epochs:
        return text
    text += f", of {epochs:g} {'epoch' if epochs == 1 else 'epochs'} in all"
    # Runs that start from a finished one have its data, and about its model.
    checkpoint = left[0].training.model.checkpoint
    _, seconds = epochs_and_seconds(checkpoint)
    if seconds is None:
        return text
    # Some may have begun, and some may run at once.
    steps = steps_of_epoch(checkpoint)
    work = sum((run.training.epochs or 0) * _share_of_epoch(run, steps) for run in left)
    return (
        f"{text}: about {Bar.format_interval(seconds * work)} by the dense model's run, and besides that models are "
        "loaded, evaluated before training, and timed"
    )


def _share_of_epoch(run: Run, steps: float | None) -> float:
    """Return the share of an epoch of so many steps that `epoch_steps` of a run leaves."""
    own = getattr(run.training, "epoch_steps", None)
    return 1.0 if own is None or steps is None else min(1.0, own / steps)


def _counted(study: StudyKind, run: Run, measurer: Measurer, table: Table) -> dict[str, float]:
    """Return the costs of a run's final model, which are counted once."""
    # The first costs of conversations were those of the language model alone.
    identity = {"work": "costs", "version": 2, "batch": study.evaluation.batch}
    rows = table.runs[run.name][run.seed]
    costs: dict[str, float] = measurer.of_final(run, identity, lambda model: study.count(run, model, rows))
    return costs


def _draw_once(study: StudyKind, run: Run, measurer: Measurer) -> None:
    """Draw what a model keeps, unless that is what its pictures in the study's folder show."""
    maps = study.evaluation.maps
    if not maps:
        return
    name = {"work": "pictures", "name": run.name}
    shown = json.dumps({"maps": maps, **identity_of_final(run)}, sort_keys=True)
    drawn = measurer.store.get(name) or {"shown": "", "titles": []}
    folder = study.comparison.folder
    # A user may have deleted some.
    is_whole = all((folder / f"{title}.svg").exists() for title in drawn["titles"])
    if drawn["shown"] == shown and is_whole:
        return
    pictures = study.draw(run, measurer.final(run))
    for title, figure in pictures.items():
        save_picture(folder, title, figure)
    measurer.store.put(name, {"shown": shown, "titles": list(pictures)})
