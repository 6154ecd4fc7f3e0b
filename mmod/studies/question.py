"""The question that the table in a study's folder answers: a table may grow, and never takes another one's place.

It is made of the runs, and not of the study's config.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from mmod.io.files import locked, write_json
from mmod.io.records import QUESTION, FolderTakenError, answered_by, differences
from mmod.opening.runs import told_sums, weight_sums
from mmod.plain import from_plain, without
from mmod.studies.measure import identity_of
from mmod.studies.runs import Run
from mmod.training.engine.config import TRAINING
from mmod.training.engine.run_folder import read_files

_TRAINED = "is_trained"
_DATA = "data"
# Of these files, each says that its folder has the table of a study.
_TABLES = ("tradeoff.json", "isoflop.json")


@dataclasses.dataclass(frozen=True)
class Question:
    """What a study asks: its models by name, with how many seeds, and how they are evaluated.

    More seeds and more models are the same study, which goes on. Another dense model, other data or another training
    make another one, and so does a model that has the name of another.
    """

    evaluation: Mapping[str, object]
    seeds: int
    models: Mapping[str, Mapping[str, object]]
    # Keys of runs that change no figure, such as the device.
    free_keys: Collection[str] = ()

    def begin(self, folder: Path) -> None:
        """Check a folder, and record what its first result will answer: a stopped start may leave one and no table."""
        # Several programs may begin at once.
        with locked(folder / QUESTION, wait=True):
            self.check(folder)
            answered = _answered_by(folder)
            # What others have recorded of their models stays.
            if answered is None or not answered.models:
                self.keep(folder, ())

    def check(self, folder: Path) -> None:
        """Raise a FolderTakenError if a folder has the table of another study, more models or seeds, or other data.

        And if, before it has a table, models in it were trained from other weights.
        """
        answered = _answered_by(folder)
        # A start that was stopped before its first result leaves the question and its lock alone.
        results = [path for path in folder.glob("[!.]*") if path.name != QUESTION]
        if answered is not None and results:
            self._check_data(folder, answered)
        table = next((folder / name for name in _TABLES if (folder / name).exists()), None)
        if table is None:
            self._check_weights(folder, answered)
            return
        advice = "which this one would replace: name another folder, --output FOLDER, or remove the table"
        if answered is None:
            raise FolderTakenError(
                f"{str(table)!r} is the table of a study, {advice}. Whether it is this study's is not known: "
                f"{QUESTION} is not beside it"
            )
        changes = self._changes_from(answered)
        if changes:
            raise FolderTakenError(f"{str(table)!r} is the table of another study, {advice}. Differing: {changes}")

    def _check_data(self, folder: Path, answered: Question) -> None:
        """Raise a FolderTakenError if the results in a folder, with a table or without, are of other files of data."""
        changes = differences({_DATA: answered.evaluation.get(_DATA)}, {_DATA: self.evaluation.get(_DATA)})
        if changes:
            raise FolderTakenError(
                f"{str(folder)!r} was begun with other evaluation data: restore its files, or name another folder, "
                f"--output FOLDER. Differing: {changes}"
            )

    def _check_weights(self, folder: Path, answered: Question | None) -> None:
        """Raise a FolderTakenError if models in a folder were trained from other weights: they would be read again."""
        if answered is None:
            return
        for name, model in answered.models.items():
            if not model[_TRAINED] or name not in self.models:
                continue
            before = {"weights": model.get("weights")}
            changes = differences(before, {"weights": self.models[name].get("weights")})
            if changes:
                raise FolderTakenError(
                    f"{str(folder)!r} has the model {name!r}, which was trained from other weights: restore these, or "
                    f"name another folder, --output FOLDER. Differing: {changes}"
                )

    def _changes_from(self, answered: Question) -> str:
        """Return what keeps a study from going on with an answered one; empty where nothing does."""
        changes = differences(answered.evaluation, self.evaluation)
        if changes:
            return changes
        for name in [name for name in self.models if name in answered.models]:
            changes = _changes_of_model(answered.models[name], self.models[name], self.free_keys)
            # Of the same change in all models, the first tells.
            if changes:
                return f"model {name!r}: {changes}"
        missing = [name for name in answered.models if name not in self.models]
        if missing:
            return f"models {', '.join(missing)}: measured there, left out now"
        if self.seeds < answered.seeds:
            return f"seeds: {answered.seeds} there, {self.seeds} now"
        return ""

    def keep(self, folder: Path, names: Collection[str]) -> None:
        """Record in a folder what the results of some models answer, and those of these models recorded before.

        A study that goes on has not come to all of them yet, and another program may be ahead of it.
        """
        answered = _answered_by(folder)
        before = {} if answered is None else answered.models
        models = {}
        for name, model in self.models.items():
            if name in names or (name in before and not _changes_of_model(before[name], model, self.free_keys)):
                models[name] = model
        write_json(folder / QUESTION, {"evaluation": self.evaluation, "seeds": self.seeds, "models": models})


def _answered_by(folder: Path) -> Question | None:
    """Return the question that the results in a folder answer; None if it is not known."""
    answered = answered_by(folder)
    if answered is None:
        return None
    try:
        return from_plain(Question, answered)
    except (TypeError, ValueError) as error:
        raise FolderTakenError(
            f"{str(folder / QUESTION)!r} is no question of a study: name another folder, --output FOLDER"
        ) from error


def _changes_of_model(before: Mapping[str, object], now: Mapping[str, object], free_keys: Collection[str]) -> str:
    """Return the differences of two models that change figures: of how a model is trained, only where it is."""
    trained = differences({_TRAINED: before[_TRAINED]}, {_TRAINED: now[_TRAINED]})
    if trained:
        return trained
    if not now[_TRAINED]:
        before = without(before, TRAINING)
        now = without(now, TRAINING)
    return differences(before, now, free_keys)


def question_of(evaluation: Mapping[str, object], runs: Sequence[Run]) -> Question:
    """Return what a study asks by its runs, and by how these are evaluated."""
    first = [run for run in runs if run.seed == 0]
    files = read_files(first[0].training)
    if files is not None:
        evaluation = {**evaluation, _DATA: files}
    written = {run.training.output for run in first}
    free_keys = {*first[0].training.free_keys}
    if not any(run.is_trained for run in first):
        # Without training it only takes memory.
        free_keys.add("data.batch_size")
    return Question(
        evaluation,
        1 + max(run.seed for run in runs),
        {run.name: _model_of(run, written) for run in first},
        free_keys,
    )


def _model_of(run: Run, written: Collection[str]) -> dict[str, object]:
    """Return what a model is made of, the same before and after the runs that it starts from."""
    identity = identity_of(run.training)
    model = identity["config"]
    model[_TRAINED] = run.is_trained
    model["searches"] = [dataclasses.asdict(search) for search in run.searches]
    weights = list(itertools.chain.from_iterable(identity["weights"].values()))
    # What an earlier run of the study writes is not there yet, and follows from its config.
    if weights and run.training.model.checkpoint not in written:
        # The weights tell the model, wherever they or the study were moved to.
        model["model"] = {**model["model"], "checkpoint": None}
        model["weights"] = told_sums(weights)
    teacher = run.training.teacher()
    # The dense one is the model itself.
    if run.is_trained and teacher is not None and teacher not in ("dense", *written):
        model["teacher"] = told_sums(weight_sums(teacher))
    return dict(model)
