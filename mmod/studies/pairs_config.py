"""The configuration of a study of image-text models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mmod.studies.config import RUN_FIELDS, Evaluation, StudyConfig
from mmod.values import check_value, refuse_unknown

_TOWERS = ("image", "text")


@dataclass(frozen=True, kw_only=True)
class PairsStudyConfig(StudyConfig):
    """A study of image-text models: retrieval and zero-shot accuracy against FLOPs and latency of both towers.

    Args:
        routers: Names of series to the routing of their towers: `{image: {...}, text: {...}}`, with fields of
            `RoutingConfig`, or `preset: NAME` with changes; beside the towers stand `changes`, `tune` and `budgets`.
    """

    kind: Literal["pairs"] = "pairs"

    @property
    def evaluation(self) -> Evaluation:
        """How its models are evaluated and timed."""
        return self.evaluated_by("recall1")

    def check_settings(self) -> None:
        """Refuse series that do not say what they set of which tower; see `StudyConfig.check_settings`."""
        super().check_settings()
        # Images have one size, that of the tower.
        shared = [name for name in RUN_FIELDS if name != "image_size"]
        for series, fields in self.routers.items():
            for settings in (fields, *fields.get("budgets", {}).values()):
                refuse_unknown(f"tower in routers.{series}", settings, (*_TOWERS, *shared, "budgets"))
                for tower in _TOWERS:
                    check_value(f"routers.{series}.{tower}", settings.get(tower, {}), Mapping[str, Any])

    def check_named(self, series: str, routing: Mapping[str, Any]) -> None:
        """Check the routing of each tower; see `StudyConfig.check_named`."""
        for tower in routing.values():
            super().check_named(series, tower)

    def routing_at(self, fields: Mapping[str, Any], capacity: float | None) -> dict[str, object]:
        """Return the routing of both towers at a capacity."""
        return {tower: StudyConfig.routing_at(self, settings, capacity) for tower, settings in fields.items()}
