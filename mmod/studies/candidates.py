"""What a study compares: its config becomes a `Comparison` here.

Only what the config says of models and their runs goes into it. How models are scored, timed, drawn and told of is read
from `Study.config` by what does that.

A run gets its training config in these steps, each over the one before:

1. the file or run that `dense` names, and the keys beside its `base` (`_read_dense`);
2. the study's `changes`, and what its kind sets (`StudyConfig.fields_of_dense`): that is the dense model's config, in
   which its kind sets how its model wants images prepared;
3. of fine-tuning, `finetune` and the weights of the dense model, in place of its `checkpoint`, `pretrained` and `head`
   (`training_configs`); a model from scratch has no weights instead;
4. the candidate's `routing` or `methods`, then its `changes`, and its `image_size` as the keys that have it in its kind
   of training, such as `data.image_size` and `model.args.img_size` (`run_config_of` in `runs.py`);
5. the run's own folder and seed, and where the dense model is trained, its run of this seed as the weights of step 3
   (`Comparison.runs`);
6. just before it starts, the plan that a search has found (`Measurer.ready`) and the best rate (`rates.py`).

In all of them null sets a key to null. Between files, where one names another as its `base`, it removes the key.

Candidates are made one after the other: the dense model, the routed ones of the config, and baselines; then numbers are
fitted to budgets, and shallow models and controls are added.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from mmod.adapters import find_stack, image_facts, patch_grid
from mmod.analysis import flops
from mmod.analysis.counting import by_data, pass_flops
from mmod.analysis.table import DENSE
from mmod.data.config import PREPARATION
from mmod.io.yaml import BASE_KEY, merged, read_yaml
from mmod.methods import METHODS, read_method
from mmod.methods.resolve import resolve_routing
from mmod.opening.runs import RUN_CONFIG, find_run, model_folder, read_run_config
from mmod.plain import from_plain, without
from mmod.planning.budgets import at_budgets
from mmod.planning.candidate import CONTROL, FIT, Candidate
from mmod.studies.config import StudyConfig
from mmod.studies.runs import UNTUNED, Comparison, run_config_of
from mmod.training.engine.config import RunConfig
from mmod.training.engine.run_folder import unfinished
from mmod.training.engine.start import sketch
from mmod.training.kinds import config_class, kind_of
from mmod.values import check_value, one_of, refuse_unknown


def comparison_of(config: StudyConfig) -> Comparison:
    """Return what a study compares: the dense model, its series, and models without a router."""
    return comparison_from(config, *training_configs(config))


def comparison_from(config: StudyConfig, dense: RunConfig, tuned: RunConfig) -> Comparison:
    """Return what a study compares, by the training configs of the dense model and of fine-tuning it."""
    candidates = [Candidate(DENSE, series=DENSE, budget=1.0, is_trained=config.tune is True), *config.routed()]
    candidates += baselines_of(config)
    trains = config.train_dense or config.trains_shallow or any(one.is_trained for one in candidates)
    if config.seeds > 1 and not trains:
        raise ValueError(
            f"seeds={config.seeds} repeats training, and this study trains nothing: leave seeds out, as intervals are "
            "over samples, or set tune to true"
        )
    left_out: Mapping[str, str] = {}
    if config.budgets_are_shares:
        candidates, left_out = fitted(candidates, dense)
    if config.trains_shallow:
        # Last, as routed models are counted with their fitted numbers; in the table, baselines stand below.
        routed = [candidate for candidate in candidates if candidate.series not in config.baselines_by_series]
        baselines = [candidate for candidate in candidates if candidate.series in config.baselines_by_series]
        candidates = [*routed, *shallow(routed, dense), *baselines]
    # Untuned models are evaluated on the data and in the precision of the dense one.
    train = None
    # From scratch, as long as a fine-tuned model has been trained in all, unless a candidate says its own.
    epochs = dense.epochs or 0
    if config.tune:
        train = tuned
        epochs += tuned.epochs or 0
    for number, one in enumerate(candidates):
        if one.from_scratch:
            candidates[number] = dataclasses.replace(one, changes=merged({"epochs": epochs}, one.changes))
    candidates = with_controls(candidates, config.routers, config.controls, is_of_parts=not dense.part)
    names = Counter([UNTUNED, *(candidate.name for candidate in candidates)])
    name, count = names.most_common(1)[0]
    if count > 1:
        raise ValueError(f"several models of the study have the name {name!r}")
    notes = []
    if not config.train_dense:
        notes += unfinished(dense.model.checkpoint)
    notes += [f"Left out: {name}: {reason}" for name, reason in left_out.items()]
    notes += told_of_controls(candidates, {*config.routers} - {*config.controls})
    notes += _numbers(config, candidates)
    return Comparison(
        candidates=candidates,
        dense=dense,
        train=train,
        seeds=config.seeds,
        train_dense=bool(config.train_dense),
        bases=config.bases,
        notes=notes,
        keys=("changes", "finetune"),
    )


def training_configs(config: StudyConfig) -> tuple[RunConfig, RunConfig]:
    """Read the training configs of the dense model and of fine-tuning it; a ValueError if they do not fit the study."""
    kind_config = config_class(config.run_kind)
    fields = config.fields_of_dense(_read_dense(config.dense, config.run_kind))
    # All models made from it see images as it wants them.
    dense = kind_of(from_plain(kind_config, fields, "dense")).config
    start = dense.as_written()
    if config.train_dense:
        # Fine-tuning starts from the trained dense model, whatever the dense config starts from.
        start["model"] = as_trained(dense).as_written()["model"]
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
    config.check_runs(dense, tuned)
    return dense, tuned


def as_trained(dense: RunConfig) -> RunConfig:
    """Return the dense model's config as if its run had ended, as what fine-tunes it needs weights.

    They are in the folder of all runs here. `Comparison.runs` names the dense model's run of each seed instead.
    """
    return dense.started_from(dense.output)


def _read_dense(named: str | Mapping[str, object], kind: str) -> dict[str, object]:
    """Read a config, with the keys that differ from it where it is a `base`.

    That of a run, by its folder or file, is changed to start from the run's final model.
    """
    changes: dict[str, object] = {BASE_KEY: named} if isinstance(named, str) else dict(named)
    path = changes.pop(BASE_KEY, None)
    if path is None:
        return changes
    check_value(f"dense.{BASE_KEY}", path, str)
    folder = Path(str(path))
    if (folder / RUN_CONFIG).is_file():
        fields = read_run_config(folder)
    else:
        fields = read_yaml(str(path))
        folder = folder.parent
    kinds = (kind,)
    check_value(f"{path!r} is a config of another kind: kind", fields.get("kind", kind), str, kinds)
    # What a run records besides its config.
    if fields.pop("world_size", None) is not None:
        recorded = config_class(kind).from_dict(fields)
        fields = recorded.finished(str(folder)).to_dict()
    return merged(fields, changes)


def baselines_of(config: StudyConfig) -> list[Candidate]:
    """Return every baseline, a model without a router; some kinds of study have them."""
    return [baseline(plain, settings) for plain, settings in config.unrouted()]


def baseline(plain: Candidate, settings: Mapping[str, Any]) -> Candidate:
    """Return a candidate with what the kind of a baseline sets."""
    kind = settings.get("kind")
    one_of(f"baselines.{plain.name}.kind", kind, [*sorted({*METHODS} - {"routing"}), "resolution", "smaller"])
    if kind == "resolution":
        refuse_unknown(f"field of baselines.{plain.name}", settings, ["kind", "image_size"])
        if plain.image_size is None:
            raise ValueError(f"baselines.{plain.name} needs image_size")
        return plain
    if kind == "smaller":
        refuse_unknown(f"field of baselines.{plain.name}", settings, ["kind", "args", "checkpoint"])
        run = None
        if settings.get("checkpoint"):
            run = find_run(settings["checkpoint"])
        if settings.get("args") is None and run is None:
            raise ValueError(f"baselines.{plain.name} needs args, or the folder of a run as its checkpoint")
        if settings.get("checkpoint") is not None:
            known = {} if run is None else read_run_config(run)["model"]
            shape = {key: known[key] for key in ("name", "args") if key in known}
            # In place of the dense model's weights, wherever these come from.
            model = {**merged(shape, settings), "pretrained": False, "head": None}
            del model["kind"]
            changes: dict[str, object] = {"model": model}
            if run is not None or model_folder(settings["checkpoint"]):
                # It says itself how its images are prepared.
                changes["data"] = dict.fromkeys(PREPARATION)
            return dataclasses.replace(plain, changes=merged(changes, plain.changes))
        return _from_scratch(plain, {"model": {"args": settings["args"]}})
    method = without(settings, ("routing",))
    fixed = {key: value for key, value in method.items() if value != FIT}
    if read_method(fixed).replaces:
        # A model from scratch is not routed: `routing` is refused.
        read_method(settings)
        return dataclasses.replace(_from_scratch(plain, {}), methods=(method,))
    return dataclasses.replace(plain, methods=(method,), routing=settings.get("routing"))


def _from_scratch(plain: Candidate, changes: Mapping[str, object]) -> Candidate:
    """Return a candidate that is trained from random weights."""
    return dataclasses.replace(plain, from_scratch=True, is_trained=True, changes=merged(changes, plain.changes))


def shallow(candidates: Sequence[Candidate], dense: RunConfig) -> list[Candidate]:
    """Return dense models of fewer blocks, as near in FLOPs to the routed ones as possible, from scratch."""
    model = sketch(kind_of(dense.started_from(None)))
    assert dense.image_shape is not None
    report = flops(model, dense.image_shape)
    depth = len(find_stack(model).blocks)
    block = report.blocks[0].dense
    costs = {fewer: report.rest.dense + fewer * block for fewer in range(1, depth + 1)}
    depths = set()
    for candidate in candidates:
        routed = _flops_of(candidate, dense)
        if routed is not None:
            depths.add(min(costs, key=lambda fewer: abs(costs[fewer] - routed)))
    added = []
    for fewer in sorted(depths - {depth}):
        candidate = Candidate(f"shallow-{fewer}-blocks", series="shallow")
        added.append(_from_scratch(candidate, {"model": {"args": {"depth": fewer}}}))
    return added


def _flops_of(candidate: Candidate, dense: RunConfig) -> int | None:
    """Return the FLOPs of an image before any weights are there; None where they depend on the data or on a search."""
    if candidate.search is not None:
        return None
    # Teachers and frozen weights are refused of a model without weights.
    start = dense.started_from(None) if candidate.from_scratch else as_trained(dense)
    run_config = run_config_of(candidate, start)
    try:
        counted = sketch(kind_of(run_config))
        if run_config.image_shape is None or by_data(counted):
            return None
        image = torch.empty(1, *run_config.image_shape, device="meta")
        return pass_flops(counted, {"image": image})
    # Hosts refuse sizes of images by assertions.
    except (ValueError, AssertionError) as error:
        raise ValueError(f"model {candidate.name!r} of the study: {error}") from error


def fitted(candidates: Sequence[Candidate], dense: RunConfig) -> tuple[list[Candidate], Mapping[str, str]]:
    """Return candidates whose numbers are fitted to their shares of the dense FLOPs, and whose names tell these.

    Returns:
        The candidates, and why others are left out, by name.
    """
    model = sketch(kind_of(dense))
    assert dense.image_shape is not None
    height, width = patch_grid(model, dense.image_shape[1:])
    patch = (image_facts(model).patch or (1, 1))[0]
    sides = [patch * side for side in range(1, height)]
    return at_budgets(candidates, partial(_flops_of, dense=dense), sides, height * width, strict=True)


def with_controls(
    candidates: Sequence[Candidate],
    routed: Collection[str],
    named: Mapping[str, str | Literal[False]],
    is_of_parts: bool,
) -> list[Candidate]:
    """Return candidates with their controls: their own routing with random scores, where the study names no others.

    Models whose routing is equal but for the score share a control. Where none of the series is the same, it joins the
    candidates without a series, and is no row of the table.

    Args:
        routed: The series that have a router.
        named: The control of a series, where the study names it; False for none.
        is_of_parts: Routings are those of parts by name.
    """
    names = {candidate.name for candidate in candidates}
    controls = [(candidate.name, _model_of(candidate, is_of_parts)) for candidate in candidates if candidate.at_random]
    controlled: list[Candidate] = []
    added: list[Candidate] = []
    for candidate in candidates:
        needs_none = candidate.control in names or named.get(candidate.series) is False
        drawn = None
        if candidate.series in routed and not candidate.at_random and not needs_none:
            drawn = _at_random(candidate, is_of_parts)
        if drawn is None:
            controlled.append(candidate)
            continue
        model = _model_of(drawn, is_of_parts)
        same = next((name for name, other in controls if other == model), None)
        if same is None:
            controls.append((drawn.name, model))
            added.append(drawn)
        controlled.append(dataclasses.replace(candidate, control=same or drawn.name))
    return [*controlled, *added]


def _at_random(candidate: Candidate, is_of_parts: bool) -> Candidate | None:
    """Return a candidate's control; None where its plan is still to be searched, or the data say how much it keeps."""
    if candidate.routing is None:
        return None
    parts = _by_part(candidate.routing, is_of_parts)
    drawn = {}
    for part, fields in parts.items():
        known = resolve_routing(fields)
        if known.select != "topk":
            return None
        drawn[part] = {**fields, "router": CONTROL}
        if known.router.learns:
            # What only a score that learns can have.
            language = {"predictor": False, "inference_threshold": None, "gate_on": "update"}
            drawn[part] |= {
                "gate": "identity",
                "losses": {},
                "language": {**(fields.get("language") or {}), **language},
            }
        if known.skipped == "scale":
            drawn[part]["skipped"] = "pass"
    routing = drawn if is_of_parts else drawn[""]
    return dataclasses.replace(candidate, name=f"{CONTROL}-{candidate.name}", series="", control=None, routing=routing)


def _model_of(candidate: Candidate, is_of_parts: bool) -> Candidate:
    """Return what is equal for candidates that are the same model, however they are named and written."""
    routing = candidate.routing
    if routing is not None:
        parts = _by_part(routing, is_of_parts)
        routing = {part: resolve_routing(fields) for part, fields in parts.items()}
    return dataclasses.replace(candidate, name="", series="", budget=None, control=None, routing=routing)


def _by_part(routing: Mapping[str, object], is_of_parts: bool) -> Mapping[str, Any]:
    """Return the routings of parts by name; that of the only one by an empty name."""
    if is_of_parts:
        return routing
    return {"": routing}


def told_of_controls(candidates: Sequence[Candidate], expected: Collection[str]) -> list[str]:
    """Say what controls are that are no rows, and which models have none although the study does not leave it out.

    Args:
        expected: The series with a router for which the study names no control.
    """
    added = [candidate.name for candidate in candidates if not candidate.series]
    told = []
    if added:
        told.append(
            f"Controls without a row in the table keep as many tokens by the same routing at random: {', '.join(added)}"
        )
    alone = [
        candidate.name
        for candidate in candidates
        if candidate.series in expected and not candidate.at_random and candidate.control is None
    ]
    if alone:
        told.append(
            f"Without a control: {', '.join(alone)}. The images or a search decide how much these keep, so that no "
            "random choice of as many tokens is known; `controls` may name one"
        )
    return told


def _numbers(config: StudyConfig, candidates: Sequence[Candidate]) -> list[str]:
    """Say what the numbers in names of routed models and their baselines are: a sentence or none."""
    if config.budgets_are_shares:
        return ["Numbers in names are shares of the dense model's FLOPs"]
    numbered = {one.series for one in candidates if one.budget is not None and one.name != one.series}
    routed = [fields for series, fields in config.routers.items() if series in numbered]
    if not routed or any("budgets" in fields for fields in routed):
        return []
    text = "Numbers in names are capacities: shares of the tokens that routed blocks keep, and not of FLOPs"
    if any("search" in fields for fields in routed):
        text += "; of searches, their budgets"
    if numbered & {*config.baselines_by_series}:
        text += "; of baselines, those of the routed models that they are matched to"
    return [text]
