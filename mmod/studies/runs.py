"""Runs: each candidate's training or evaluation with every seed, its training config, and what is refused before any.

A `Comparison` has all that a study's config says of them. The steps by which a run gets its training config are in
`candidates.py`, from the study's config on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from mmod.analysis.table import DENSE
from mmod.io.jobs import Job
from mmod.io.yaml import merged
from mmod.plain import with_keys_in
from mmod.planning.candidate import Candidate, PlanOptions
from mmod.planning.plan_search import named_options
from mmod.planning.search import check_reachable
from mmod.training.engine.config import RunConfig
from mmod.training.engine.kind import Kind
from mmod.training.engine.start import sketch
from mmod.training.kinds import kind_of

UNTUNED = "base"
"""Name of the dense model's run, and of its folder, where "dense" is the one that is fine-tuned like the others."""
# Epochs that take about as long as evaluating once.
_EVALUATION = 0.05
Config = TypeVar("Config", bound=RunConfig)


@dataclass(frozen=True, kw_only=True)
class Run(Job):
    """The training or evaluation of a candidate with one seed."""

    candidate: Candidate
    training: RunConfig  # What it starts from, and what it is evaluated on.
    is_trained: bool = True
    # Whether it is trained by the config of fine-tuning; the dense model's own run, and models from scratch, are not.
    is_tuned: bool = False
    # The searches of its series, one for each budget, if the candidate's own plan is still to be found; their folder.
    searches: tuple[PlanOptions, ...] = ()
    plans: Path = Path()

    def __str__(self) -> str:
        if self.is_trained:
            return super().__str__()
        # Of a model that is evaluated as it is, no seed draws anything.
        return self.name

    @property
    def start(self) -> Kind:
        """The kind that makes the model which the run starts from, and evaluates it."""
        return kind_of(self.training)

    @property
    def final(self) -> Kind:
        """The kind that makes the run's final model, which is that of its start where nothing is trained."""
        if not self.is_trained:
            return self.start
        return kind_of(self.training.finished(self.training.output))


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is compared with the dense model that it is made from, and how often.

    Args:
        candidates: One named "dense" without changes is the model that speed-ups refer to.
        dense: Config of the dense model's run: it names model and data, and the folder of all runs.
        train: Config of the fine-tuning of the dense model; None trains no candidate but those from scratch.
        seeds: Every run is repeated with so many seeds, unless nothing is trained.
        train_dense: Train the dense model first; otherwise it is loaded as its config says.
        bases: Folder of another comparison with the same dense models, which are taken from there.
        notes: What is not compared, and why: a sentence each.
        keys: Where the user sets the keys of every run, and those of fine-tuning alone, for messages: a dotted key.
    """

    candidates: Sequence[Candidate]
    dense: RunConfig
    train: RunConfig | None = None
    seeds: int = 1
    train_dense: bool = False
    bases: str | None = None
    notes: Sequence[str] = ()
    keys: tuple[str, str] = ("", "")

    def runs(self) -> list[Run]:
        """Return the runs in the order they must be done."""
        runs = []
        seeds = self.seeds if self.trains else 1
        for seed in range(seeds):
            runs += self._runs_of(seed)
        return runs

    @property
    def trains(self) -> bool:
        """Whether a model is trained, which seeds repeat."""
        return self.train_dense or any(map(self.is_trained, self.candidates))

    def checked_runs(self) -> list[Run]:
        """Return the runs; one that would be refused, perhaps after hours of the runs before it, is refused now.

        That is one whose checkpoint is not there, or whose methods or schedule do not fit.
        """
        runs = self.runs()
        written = {run.training.output for run in runs}
        for run in runs:
            # What an earlier run will write cannot be there.
            if run.training.model.checkpoint not in written:
                run.training.check_weights()
        for run in runs:
            started = run.training
            if started.model.checkpoint in written:
                started = started.sketched_by(self.dense)
            shared, tuned = self.keys
            keys = tuned if run.is_tuned else shared
            try:
                if run.is_trained:
                    started.check_schedule()
                # Fine-tuning has the model and the data of all runs.
                keys = shared
                is_changed = started.routing or started.methods or run.candidate.changes or run.candidate.image_size
                if run.seed == 0 and (is_changed or run.searches):
                    model = sketch(kind_of(started))
                    # What prompts cost follows from the data.
                    if started.image_shape is not None:
                        image = torch.empty(1, *started.image_shape, device="meta")
                        _check_searches(model, image, started.parts[0], run.searches)
            # Hosts refuse sizes by assertions.
            except (ValueError, AssertionError) as error:
                told = with_keys_in(keys, run.training, str(error))
                raise ValueError(f"model {run.name!r} of the study: {told}") from error
        return runs

    def _runs_of(self, seed: int) -> list[Run]:
        """Return the runs of a seed.

        | the dense model is | run of the dense config | the others start from |
        | :----------------- | :---------------------- | :-------------------- |
        | trained, then tuned like the others | `UNTUNED` | `UNTUNED` |
        | trained | "dense" | "dense" |
        | loaded, then tuned like the others | none | the weights that `train` names |
        | loaded | "dense", which is evaluated alone | the weights that `train` names |
        """
        dense = self.dense_run(seed)
        if dense is None:
            return [self._run_from(candidate, seed, None) for candidate in self.candidates]
        others = [candidate for candidate in self.candidates if candidate.name != dense.name]
        # A model that is evaluated alone leaves no folder to start from.
        start = dense if dense.is_trained else None
        return [dense, *(self._run_from(candidate, seed, start) for candidate in others)]

    @property
    def folder(self) -> Path:
        """The folder of all runs."""
        return Path(self.dense.output)

    @property
    def tunes_dense(self) -> bool:
        """Whether the dense model is fine-tuned like the others."""
        return any(one.name == DENSE and self.is_trained(one) for one in self.candidates)

    def dense_run(self, seed: int) -> Run | None:
        """Return the run of the dense model as its own config makes it; None where there is none."""
        dense = next((one for one in self.candidates if one.name == DENSE), None)
        if dense is None or self.is_trained(dense):
            if not self.train_dense:
                return None
            dense = Candidate(UNTUNED)
        folder = self.folder_of(dense.name, seed)
        if self.bases:
            # In a comparison that tunes its dense model, the one that all start from has this name.
            folder = Path(self.bases, f"seed{seed}", UNTUNED)
        run_config = dataclasses.replace(self.dense, output=str(folder), seed=seed)
        return _run(dense, run_config, self.train_dense)

    def _run_from(self, candidate: Candidate, seed: int, dense: Run | None) -> Run:
        """Return the run of a candidate, which starts from that of the dense model, if this is trained before."""
        if candidate.from_scratch:
            start = self.dense.started_from(None)
            dense = None
        else:
            start = self.train or self.dense
        if dense is not None:
            start = start.started_from(dense.training.output)
        folder = self.folder_of(candidate.name, seed)
        run_config = run_config_of(candidate, dataclasses.replace(start, seed=seed))
        is_trained = self.is_trained(candidate)
        is_tuned = is_trained and not candidate.from_scratch
        run = _run(candidate, dataclasses.replace(run_config, output=str(folder)), is_trained, is_tuned)
        if dense is not None:
            run = dataclasses.replace(run, starts_from=(dense.name, seed))
        if candidate.search is None:
            return run
        series = [other.search for other in self.candidates if other.series == candidate.series]
        plans = self.folder_of(f"{candidate.series}.plans", seed)
        return dataclasses.replace(run, searches=tuple(filter(None, series)), plans=plans)

    def folder_of(self, name: str, seed: int) -> Path:
        """Return the folder of a run."""
        return self.folder / f"seed{seed}" / name

    def is_trained(self, candidate: Candidate) -> bool:
        """Return whether a candidate is trained."""
        return candidate.from_scratch or (candidate.is_trained and self.train is not None)


def run_config_of(candidate: Candidate, start: Config) -> Config:
    """Return the training config of a candidate.

    Args:
        start: That of the model that it changes: of fine-tuning the dense one, or of training it from random weights.
    """
    run_config = start
    fields: dict[str, object] = {}
    if candidate.routing is not None:
        fields["routing"] = candidate.routing
    if candidate.methods:
        fields["methods"] = [dict(method) for method in candidate.methods]
    if fields or candidate.changes:
        # As written, and read once: changes may set the depth, by which a preset chooses its blocks.
        run_config = type(run_config).from_dict(merged({**run_config.as_written(), **fields}, candidate.changes))
    if candidate.image_size is None:
        return run_config
    # A size that is still to be fitted is refused there, as any text is.
    return run_config.at_size(cast(int, candidate.image_size))


def _run(candidate: Candidate, run_config: RunConfig, is_trained: bool, is_tuned: bool = False) -> Run:
    # In any unit that the runs of a comparison share.
    work = _EVALUATION
    if is_trained:
        work = float(run_config.epochs or 1)
    return Run(
        name=candidate.name,
        seed=run_config.seed,
        # A model of its own may want images in another way.
        training=kind_of(run_config).config,
        work=work,
        candidate=candidate,
        is_trained=is_trained,
        is_tuned=is_tuned,
    )


def _check_searches(model: nn.Module, image: Tensor, part: str, searches: Sequence[PlanOptions]) -> None:
    """Raise a ValueError for a budget of FLOPs that no plan of a part reaches, unless its search names another part."""
    for options in searches:
        # Times follow from the weights.
        if options.cost == "flops":
            searched = options.part or part
            check_reachable(model, image, options.budget, searched, named_options(options), options.router)
