"""The controls of candidates: the same routing with random scores, which tells whether it matters what is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from mmod.methods.resolve import resolve_routing
from mmod.planning.candidate import CONTROL, Candidate


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
            f"Without a control, as the images or a search decide how much is kept: {', '.join(alone)}. Whether it "
            "matters which tokens these keep is not tested, unless `controls` names a control"
        )
    return told
