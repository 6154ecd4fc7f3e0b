"""The configuration of a study of vision-language models."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from mmod.studies.config import Evaluation, StudyConfig
from mmod.values import one_of

if TYPE_CHECKING:
    from mmod.training.engine.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class ChatStudyConfig(StudyConfig):
    """A study of vision-language models: answers by type of question against prefill, decoding and cache.

    Args:
        part: The part that is routed.
        baselines: Smaller images: names of series to their budgets, the capacities of the routed models that they are
            matched to, with `{kind: resolution, image_size: SIDE}`.
        maps: Evaluation questions for which kept image tokens are drawn; 0 draws none.
    """

    opens_names: ClassVar[bool] = True
    kind: Literal["chat"] = "chat"
    capacities: list[float | None] = field(default_factory=lambda: [None])
    before: bool = False
    part: Literal["language", "image"] = "language"
    baselines: dict[str, dict[float, dict[str, Any]]] = field(default_factory=dict)
    maps: Annotated[int, "[0, inf)"] = 4
    latency_batch: int = 8
    latency_rounds: int = 5

    @property
    def evaluation(self) -> Evaluation:
        """How its models are evaluated, timed and drawn."""
        return dataclasses.replace(self.evaluated_by("right"), maps=self.maps)

    def check_settings(self) -> None:
        """Refuse baselines other than smaller images; see `StudyConfig.check_settings`."""
        super().check_settings()
        for name, budgets in self.baselines.items():
            for fields in budgets.values():
                one_of(f"baselines.{name}.kind", fields.get("kind"), ["resolution"])

    def check_runs(self, dense: RunConfig, tuned: RunConfig) -> None:
        """Refuse training configs without questions."""
        if dense.data.val is None or tuned.data.val is None:
            raise ValueError(f"{self.dense!r} has no data.val, so there is nothing to ask")

    def check_named(self, series: str, routing: Mapping[str, Any]) -> None:
        """Check the routing of the part; see `StudyConfig.check_named`."""
        super().check_named(series, routing[self.part])

    def routing_at(self, fields: Mapping[str, Any], capacity: float | None) -> dict[str, object]:
        """Return the routing of the part that is routed."""
        return {self.part: super().routing_at(fields, capacity)}
