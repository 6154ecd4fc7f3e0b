"""The candidates of a study, from its config: routed models, shallower dense ones, and baselines without a router."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mmod.adapters import find_stack, image_facts, patch_grid
from mmod.analysis.counting import by_data, pass_flops
from mmod.io.yaml import merged
from mmod.methods import METHODS, read_method
from mmod.planning.budgets import at_budgets
from mmod.planning.candidate import Candidate, without_weights
from mmod.planning.options import FIT
from mmod.studies.config import ChatStudyConfig, TimmStudyConfig, refuse_set_by_study
from mmod.training.engine.config import RunConfig
from mmod.training.image.config import TrainConfig
from mmod.training.kinds import kind_of
from mmod.values import one_of, refuse_unknown

Chosen = tuple[list[Candidate], Mapping[str, str]]
"""The candidates of a study, and why others are left out, by name."""


def image_candidates(
    config: TimmStudyConfig, candidates: Sequence[Candidate], dense: TrainConfig, tuned: TrainConfig
) -> Chosen:
    """Return candidates with shallower dense models and baselines, fitted to the budgets that the study names."""
    candidates = [*candidates]
    epochs = dense.epochs + (tuned.epochs if config.tune else 0)
    if config.isoflop == "scratch":
        candidates += _shallow(candidates, dense, epochs)
    baselines: dict[str, dict[float, Any]] = {}
    for series, budgets in config.baselines.items():
        baselines[series] = {budget: fields for budget, fields in budgets.items() if config.is_run(budget)}
    candidates += create_baselines(baselines, config.controls, epochs=epochs, is_trained=config.tune)
    return _fitted(candidates, dense) if _names_budgets(config) else (candidates, {})


def _names_budgets(config: TimmStudyConfig) -> bool:
    """Return whether budgets are shares of the dense model's FLOPs: series name them, or baselines fit them."""
    fields: list[Mapping[str, object]] = []
    for budgets in config.baselines.values():
        fields += budgets.values()
    is_fitted = any(FIT in baseline.values() for baseline in fields if baseline)
    return is_fitted or any("budgets" in series for series in config.routers.values())


def chat_candidates(
    config: ChatStudyConfig, candidates: Sequence[Candidate], dense: RunConfig, tuned: RunConfig
) -> Chosen:
    """Return candidates with baselines of smaller images."""
    return [*candidates, *create_baselines(config.baselines, config.controls, epochs=0, is_trained=config.tune)], {}


def _fitted(candidates: Sequence[Candidate], dense: TrainConfig) -> Chosen:
    """Return candidates whose numbers are fitted to their shares of the dense FLOPs, and whose names tell these."""
    plain = without_weights(dense)
    model = kind_of(plain).sketch()
    height, width = patch_grid(model, (dense.data.image_size,) * 2)
    patch = (image_facts(model).patch or (1, 1))[0]
    sides = [patch * side for side in range(1, height)]

    def flops_of(candidate: Candidate) -> float | None:
        if candidate.search is not None:
            return None
        kind: Any = kind_of(candidate.configure(plain, plain))
        try:
            routed = kind.sketch().eval()
            image = torch.empty(1, *kind.image_shape, device="meta")
            return None if by_data(routed) else pass_flops(routed, {"image": image})
        # Hosts refuse sizes of images by assertions.
        except (ValueError, AssertionError) as error:
            raise ValueError(f"model {candidate.name!r} of the study: {error}") from error

    return at_budgets(candidates, flops_of, sides, height * width, strict=True)


def _shallow(candidates: Sequence[Candidate], dense: TrainConfig, epochs: int) -> list[Candidate]:
    """Return dense models of fewer blocks, as near in FLOPs to the routed ones as possible, from scratch."""
    plain = without_weights(dense)
    kind = kind_of(plain)
    model = kind.sketch()
    report: Any = kind.report(model)
    depth = len(find_stack(model).blocks)
    costs = {fewer: report.rest.dense + fewer * report.blocks[0].dense for fewer in range(1, depth + 1)}
    depths = set()
    for candidate in candidates:
        routed_kind = kind_of(candidate.configure(plain, plain))
        routed = routed_kind.sketch()
        # The cost of thresholds depends on the data.
        if not by_data(routed):
            routed_report: Any = routed_kind.report(routed)
            depths.add(min(costs, key=lambda fewer: abs(costs[fewer] - routed_report.routed)))
    return [
        Candidate(
            f"shallow-{fewer}",
            series="shallow",
            budget=1.0,
            from_scratch=True,
            changes={"epochs": epochs, "model": {"args": {"depth": fewer}}},
        )
        for fewer in sorted(depths - {depth})
    ]


def create_baselines(
    baselines: Mapping[str, Mapping[float, Mapping[str, Any]]],
    controls: Mapping[str, str | None],
    *,
    epochs: int,
    is_trained: bool,
) -> list[Candidate]:
    """Return the candidates of a study that have no router.

    Args:
        baselines: The fields of each baseline, by series and by the capacity of the routed models that it matches. They
            are `kind: resolution` with `image_size`, `kind: smaller` with `args` and perhaps a `checkpoint`, or one of
            a training config's `methods`. Any baseline may have `image_size` and `changes` of the training config;
            experts may have `routing`.
        controls: Names of series, by the series that is compared with them besides the dense model.
        epochs: Length of a training from scratch.
        is_trained: Whether models that start from the dense one are fine-tuned.
    """
    candidates = []
    for series, budgets in baselines.items():
        for capacity, baseline in budgets.items():
            name = f"{series}-{capacity:g}"
            refuse_set_by_study(f"{name}: changes", baseline.get("changes", {}))
            special = _special(name, dict(baseline), epochs)
            control = controls.get(series)
            candidates.append(
                Candidate(
                    name,
                    series=series,
                    budget=capacity,
                    control=None if control is None else f"{control}-{capacity:g}",
                    image_size=baseline.get("image_size"),
                    is_trained=is_trained or special.get("from_scratch", False),
                    **special,
                )
            )
    return candidates


def _special(name: str, fields: dict[str, Any], epochs: int) -> dict[str, Any]:
    """Return what the kind of a baseline sets of a candidate."""
    size = fields.pop("image_size", None)
    changes = fields.pop("changes", {})
    kind = fields.get("kind")
    one_of(f"baselines.{name}.kind", kind, [*sorted({*METHODS} - {"routing"}), "resolution", "smaller"])
    if kind == "resolution":
        refuse_unknown(f"field of baselines.{name}", fields, ["kind", "image_size"])
        if size is None:
            raise ValueError(f"baselines.{name} needs image_size")
        return {"changes": changes}
    if kind == "smaller":
        refuse_unknown(f"field of baselines.{name}", fields, ["kind", "args", "checkpoint"])
        if fields.get("args") is None:
            raise ValueError(f"baselines.{name} needs args")
        if "checkpoint" in fields:
            model = {key: fields[key] for key in ("args", "checkpoint")}
            return {"changes": merged({"model": model}, changes)}
        smaller = {"epochs": epochs, "model": {"args": fields["args"]}}
        return {"from_scratch": True, "changes": merged(smaller, changes)}
    plain = {key: value for key, value in fields.items() if key != "routing"}
    known = {key: value for key, value in plain.items() if value != FIT}
    if read_method(known).replaces:
        # A model from scratch is not routed: `routing` is refused.
        read_method(fields)
        return {"from_scratch": True, "methods": (plain,), "changes": {"epochs": epochs, **changes}}
    return {"methods": (plain,), "changes": changes, "routing": fields.get("routing")}
