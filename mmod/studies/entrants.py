"""The entrants of a study: models whose training configs are made from the dense model's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmod.io.yaml import merged
from mmod.methods import METHODS, read_method
from mmod.planning.options import PlanOptions
from mmod.studies.config import refuse_set_by_study
from mmod.values import one_of, refuse_unknown

DENSE = "dense"
"""Name of the entrant that all others are compared with."""


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A model of a study, made from the dense one by its training config; without changes it is the dense one.

    Args:
        control: Name of the entrant that it is compared with besides the dense one.
        share: Its training time as a share of the dense model's.
        epochs: Train it from scratch for so many epochs; None fine-tunes the dense model.
        image_size: Side of its images in pixels, where it differs; position embeddings are resampled.
        search: How its routing is searched in the dense model of every seed; None where it is known.
        args: Arguments of a model from scratch that differ.
        changes: Fields of its training config that differ, nested as there.
    """

    name: str = DENSE
    series: str = DENSE
    capacity: float | None = 1.0
    control: str | None = None
    share: float = 1.0
    is_trained: bool = True
    epochs: int | None = None
    image_size: int | None = None
    routing: Any = None
    search: PlanOptions | None = None
    methods: list[dict[str, Any]] = field(default_factory=list)
    args: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        refuse_set_by_study(f"{self.name}: changes", self.changes)

    @property
    def is_tuned(self) -> bool:
        """Whether it starts from the trained dense model."""
        return self.epochs is None

    @property
    def is_routed(self) -> bool:
        """Whether its blocks choose what they run on."""
        return self.routing is not None or self.search is not None or (bool(self.methods) and not self.is_tuned)

    def configure(self, dense: Any, tuned: Any) -> Any:
        """Return the config of its run; the study sets the folder."""
        methods = {"methods": self.methods} if self.methods else {}
        if self.epochs is not None:
            model = type(dense.model)(dense.model.name, {**dense.model.args, **self.args})
            config = dataclasses.replace(dense, model=model, epochs=self.epochs, **methods)
        elif self.is_routed or methods:
            config = dataclasses.replace(tuned, routing=self.routing, **methods)
        else:
            config = tuned
        if self.changes:
            config = type(config).from_dict(merged(config.to_dict(), self.changes))
        return config if self.image_size is None else config.at_size(self.image_size)


def create_rivals(
    rivals: Mapping[str, Mapping[float, Mapping[str, Any]]],
    controls: Mapping[str, str | None],
    *,
    epochs: int,
    is_trained: bool,
) -> list[Entrant]:
    """Return the entrants of a study that have no router.

    Args:
        rivals: Series to capacity of the routed models that a rival is matched to, to its fields: `kind: resolution`
            with `image_size`, `kind: smaller` with `args` and perhaps a `checkpoint`, or one of a training config's
            `methods`; any may have `image_size` and `changes` of the training config. Experts take its `routing` too.
        controls: Name of a series to the one that it is compared with besides the dense model.
    """
    entrants = []
    for series, budgets in rivals.items():
        for capacity, rival in budgets.items():
            control = controls.get(series)
            name, special = f"{series}-{capacity:g}", _special(f"{series}-{capacity:g}", dict(rival), epochs)
            entrants.append(
                Entrant(
                    name=name, series=series, capacity=capacity, image_size=rival.get("image_size"),
                    control=None if control is None else f"{control}-{capacity:g}",
                    is_trained=is_trained or "epochs" in special, **special,
                )
            )  # fmt: skip
    return entrants


def _special(name: str, fields: dict[str, Any], epochs: int) -> dict[str, Any]:
    """Return what the kind of a rival sets of an entrant."""
    size, changes = fields.pop("image_size", None), fields.pop("changes", {})
    kind = fields.get("kind")
    one_of(f"rivals.{name}.kind", kind, [*sorted({*METHODS} - {"routing"}), "resolution", "smaller"])
    if kind == "resolution":
        refuse_unknown(f"field of rivals.{name}", fields, ["kind", "image_size"])
        if size is None:
            raise ValueError(f"rivals.{name} needs image_size")
        return {"changes": changes}
    if kind == "smaller":
        refuse_unknown(f"field of rivals.{name}", fields, ["kind", "args", "checkpoint"])
        if fields.get("args") is None:
            raise ValueError(f"rivals.{name} needs args")
        if "checkpoint" in fields:
            return {"changes": merged({"model": {key: fields[key] for key in ("args", "checkpoint")}}, changes)}
        return {"args": fields["args"], "epochs": epochs, "changes": changes}
    plain = {key: value for key, value in fields.items() if key != "routing"}
    if read_method(plain).replaces:
        # A model from scratch is not routed: `routing` is refused.
        read_method(fields)
        return {"methods": [plain], "changes": changes, "epochs": epochs}
    return {"methods": [plain], "changes": changes, "routing": fields.get("routing")}
