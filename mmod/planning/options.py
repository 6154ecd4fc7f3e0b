"""Options of the search for a plan, as configs spell them; imported without torch, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mmod.values import check_fields


@dataclass(frozen=True)
class PlanOptions:
    """Options of the search for a plan, see `mmod.search_plan`.

    Args:
        budget: Share of the dense model's cost that the plan may have, or milliseconds.
        batches: Calibration batches, spread evenly over the training data.
        batch_size: Samples of a batch.
        part: The part that is planned; null for the image tower of image and pairs, the language model of chat and
            text.
        cost: Unit of the budget: "flops", "milliseconds" of a pass over a batch, or in a language model "cache" or
            "image_flops", those that image tokens add.
        router: Chooses the tokens of a capacity above 0; a name, or a mapping with options such as `importance`.
        options: Capacity, operator and context of every option; null for all that the blocks support.
        divergence: "kl" or "cosine"; null chooses by the model.
        rounds: Rounds in which options are scored again together with the choices of the plan so far.
    """

    budget: float = 0.5
    batches: int = 4
    batch_size: int = 16
    part: Literal["image", "text", "language"] | None = None
    cost: str = "flops"
    router: str | dict[str, Any] = "stride"
    options: list[tuple[float, str, str]] | None = None
    divergence: str | None = None
    rounds: int = 0

    def __post_init__(self) -> None:
        check_fields(
            self,
            "plan",
            budget="(0, inf)" if self.cost == "milliseconds" else "(0, 1)",
            batches="[1, inf)",
            batch_size="[1, inf)",
            cost=("flops", "image_flops", "cache", "milliseconds"),
            divergence=("kl", "cosine"),
            options="[0, 1]",
            rounds="[0, inf)",
        )
