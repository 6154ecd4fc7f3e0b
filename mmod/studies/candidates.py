"""Candidates beside the routed models of a study: baselines, numbers fitted to budgets, and controls.

They are made of other candidates and of the dense model's training config; the study's config is not read here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch

from mmod.adapters import find_stack, image_facts, patch_grid
from mmod.analysis import flops
from mmod.analysis.counting import by_data, pass_flops
from mmod.io.yaml import merged, read_yaml
from mmod.methods import METHODS, read_method
from mmod.methods.resolve import resolve_routing
from mmod.opening.runs import RUN_CONFIG, find_run
from mmod.planning.budgets import at_budgets
from mmod.planning.candidate import CONTROL, FIT, Candidate
from mmod.studies.runs import run_config_of
from mmod.training.engine.config import RunConfig
from mmod.training.engine.start import sketch
from mmod.training.kinds import kind_of
from mmod.values import one_of, refuse_unknown


def baseline(plain: Candidate, settings: Mapping[str, Any], epochs: int) -> Candidate:
    """Return a candidate with what the kind of a baseline sets.

    Args:
        epochs: Length of a training from scratch.
    """
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
            known = {} if run is None else read_yaml(str(run / RUN_CONFIG))["model"]
            shape = {key: known[key] for key in ("name", "args") if key in known}
            # In place of the dense model's weights, wherever these come from.
            model = {**merged(shape, settings), "pretrained": False, "head": None}
            del model["kind"]
            return dataclasses.replace(plain, changes=merged({"model": model}, plain.changes))
        return _from_scratch(plain, epochs, {"model": {"args": settings["args"]}})
    method = {key: value for key, value in settings.items() if key != "routing"}
    if read_method({key: value for key, value in method.items() if value != FIT}).replaces:
        # A model from scratch is not routed: `routing` is refused.
        read_method(settings)
        return dataclasses.replace(_from_scratch(plain, epochs, {}), methods=(method,))
    return dataclasses.replace(plain, methods=(method,), routing=settings.get("routing"))


def _from_scratch(plain: Candidate, epochs: int, changes: Mapping[str, object]) -> Candidate:
    """Return a candidate that is trained from random weights for some epochs, unless it says its own."""
    return dataclasses.replace(
        plain, from_scratch=True, is_trained=True, changes=merged({"epochs": epochs, **changes}, plain.changes)
    )


def shallow(candidates: Sequence[Candidate], dense: RunConfig, epochs: int) -> list[Candidate]:
    """Return dense models of fewer blocks, as near in FLOPs to the routed ones as possible, from scratch."""
    model = sketch(kind_of(dense.started_from(None)))
    assert dense.image_shape is not None
    report = flops(model, dense.image_shape)
    depth = len(find_stack(model).blocks)
    costs = {fewer: report.rest.dense + fewer * report.blocks[0].dense for fewer in range(1, depth + 1)}
    depths = set()
    for candidate in candidates:
        routed = _flops_of(candidate, dense)
        if routed is not None:
            depths.add(min(costs, key=lambda fewer: abs(costs[fewer] - routed)))
    added = []
    for fewer in sorted(depths - {depth}):
        candidate = Candidate(f"shallow-{fewer}-blocks", series="shallow")
        added.append(_from_scratch(candidate, epochs, {"model": {"args": {"depth": fewer}}}))
    return added


def _flops_of(candidate: Candidate, dense: RunConfig) -> int | None:
    """Return the FLOPs of an image before any weights are there; None where they depend on the data or on a search."""
    if candidate.search is not None:
        return None
    # Teachers and frozen weights are refused of a model from scratch, which a fine-tuned one is not: the dense model's
    # folder stands for the weights to come.
    run_config: Any = run_config_of(candidate, dense.started_from(None if candidate.from_scratch else dense.output))
    try:
        counted = sketch(kind_of(run_config))
        image = torch.empty(1, *run_config.image_shape, device="meta")
        return None if by_data(counted) else pass_flops(counted, {"image": image})
    # Hosts refuse sizes of images by assertions.
    except (ValueError, AssertionError) as error:
        raise ValueError(f"model {candidate.name!r} of the study: {error}") from error


def fitted(candidates: Sequence[Candidate], dense: RunConfig) -> tuple[list[Candidate], Mapping[str, str]]:
    """Return candidates whose numbers are fitted to their shares of the dense FLOPs, and whose names tell these.

    Returns:
        The candidates, and why others are left out, by name.
    """
    model = sketch(kind_of(dense.started_from(None)))
    height, width = patch_grid(model, (dense.data.image_size,) * 2)
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
        is_settled = candidate.control in names or named.get(candidate.series) is False
        drawn = None
        if candidate.series in routed and not candidate.at_random and not is_settled:
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
    parts = candidate.routing if is_of_parts else {"": candidate.routing}
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
        parts = routing if is_of_parts else {"": routing}
        routing = {part: resolve_routing(fields) for part, fields in parts.items()}
    return dataclasses.replace(candidate, name="", series="", budget=None, control=None, routing=routing)


def told_of_controls(candidates: Sequence[Candidate], expected: Collection[str]) -> list[str]:
    """Say what controls are that are no rows, and which models have none although the study does not leave it out.

    Args:
        expected: The series with a router for which the study names no control.
    """
    added = [candidate.name for candidate in candidates if not candidate.series]
    told = []
    if added:
        told.append(
            f"Controls, which are no rows of the table, keep as many tokens by the same routing at random: "
            f"{', '.join(added)}"
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
