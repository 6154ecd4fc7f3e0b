"""The entrants of a study: rules that make a training config from the dense model's."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mmod.io.yaml import merged
from mmod.methods import METHODS, read_method
from mmod.studies.config import PlanOptions, refuse_set_by_study
from mmod.values import one_of, refuse_unknown

DENSE = "dense"
"""Name of the entrant that all others are compared with."""


@dataclass(frozen=True, kw_only=True)
class Entrant(ABC):
    """A model of a study, made from the dense one by its training config.

    Args:
        control: Name of the entrant that it is compared with besides the dense one.
        share: Its training time as a share of the dense model's.
        image_size: Side of its images in pixels, where it differs; position embeddings are resampled.
        search: How its routing is searched in the dense model of every seed; None where it is known.
        changes: Fields of its training config that differ, nested as there.
    """

    name: str
    series: str
    capacity: float | None = 1.0
    control: str | None = None
    share: float = 1.0
    is_trained: bool = True
    image_size: int | None = None
    search: PlanOptions | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    is_tuned: ClassVar[bool] = True  # It starts from the trained dense model.

    def __post_init__(self) -> None:
        refuse_set_by_study(f"{self.name}: changes", self.changes)

    @property
    def is_routed(self) -> bool:
        """Whether some of its blocks are routed."""
        return False

    def configure(self, dense: Any, tuned: Any) -> Any:
        """Return the config of its run; the study sets the folder."""
        config = self._change(dense, tuned)
        if self.changes:
            config = type(config).from_dict(merged(config.to_dict(), self.changes))
        return config if self.image_size is None else config.at_size(self.image_size)

    @abstractmethod
    def _change(self, dense: Any, tuned: Any) -> Any:
        """Return the config of its run at the dense model's image size; see `configure`."""


@dataclass(frozen=True, kw_only=True)
class Dense(Entrant):
    """The dense model, fine-tuned like the others, perhaps on smaller images."""

    name: str = DENSE
    series: str = DENSE

    def _change(self, dense: Any, tuned: Any) -> Any:
        return tuned


@dataclass(frozen=True, kw_only=True)
class Changed(Entrant):
    """The dense model with the `routing` of a training config, unless it is searched, with its `methods`, or both."""

    routing: Any = None
    methods: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_routed(self) -> bool:
        """Whether some of its blocks are routed."""
        return not self.methods or self.routing is not None

    def _change(self, dense: Any, tuned: Any) -> Any:
        methods = {"methods": self.methods} if self.methods else {}
        return dataclasses.replace(tuned, routing=self.routing, **methods)


@dataclass(frozen=True, kw_only=True)
class Anew(Entrant):
    """A model trained from scratch, for as long as the others in total: dense with other `args`, or of a method."""

    is_tuned: ClassVar[bool] = False
    epochs: int
    args: Mapping[str, Any] = field(default_factory=dict)
    methods: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_routed(self) -> bool:
        """Whether its blocks choose what they run on."""
        return bool(self.methods)

    def _change(self, dense: Any, tuned: Any) -> Any:
        model = type(dense.model)(dense.model.name, {**dense.model.args, **self.args})
        config = dataclasses.replace(dense, model=model, epochs=self.epochs)
        return dataclasses.replace(config, methods=self.methods) if self.methods else config


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

    Example:
        >>> small = {"resolution": {0.5: {"kind": "resolution", "image_size": 24}}}
        >>> [entrant.name for entrant in create_rivals(small, {}, epochs=5, is_trained=True)]
        ['resolution-0.5']
    """
    entrants = []
    for series, budgets in rivals.items():
        for capacity, rival in budgets.items():
            control = controls.get(series)
            common: dict[str, Any] = {
                "name": f"{series}-{capacity:g}",
                "series": series,
                "capacity": capacity,
                "control": None if control is None else f"{control}-{capacity:g}",
                "image_size": rival.get("image_size"),
                "changes": rival.get("changes", {}),
            }
            fields = {key: value for key, value in rival.items() if key not in ("image_size", "changes")}
            entrants.append(_rival(common, fields, epochs, is_trained))
    return entrants


def _rival(common: dict[str, Any], fields: dict[str, Any], epochs: int, is_trained: bool) -> Entrant:
    """Return a rival from the fields that all entrants have and those of its kind."""
    name, kind = common["name"], fields.get("kind")
    one_of(f"rivals.{name}.kind", kind, [*sorted({*METHODS} - {"routing"}), "resolution", "smaller"])
    if kind == "resolution":
        refuse_unknown(f"field of rivals.{name}", fields, ["kind", "image_size"])
        if common["image_size"] is None:
            raise ValueError(f"rivals.{name} needs image_size")
        return Dense(is_trained=is_trained, **common)
    if kind == "smaller":
        refuse_unknown(f"field of rivals.{name}", fields, ["kind", "args", "checkpoint"])
        if fields.get("args") is None:
            raise ValueError(f"rivals.{name} needs args")
        if "checkpoint" in fields:
            model = {"args": fields["args"], "checkpoint": fields["checkpoint"]}
            return Dense(is_trained=is_trained, **{**common, "changes": merged({"model": model}, common["changes"])})
        return Anew(args=fields["args"], epochs=epochs, **common)
    routing = fields.pop("routing", None) if str(kind) in METHODS["routing"].follows else None
    if read_method(fields).starts_anew:
        return Anew(methods=[fields], epochs=epochs, **common)
    return Changed(methods=[fields], routing=routing, is_trained=is_trained, **common)
