"""Options of the search for a plan, as configs spell them; imported without torch, so that `--help` is fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from mmod.values import Checked, check_value

FIT = "fit"
"""In place of a number of a candidate: the one that brings its FLOPs to its budget."""


@dataclass(frozen=True)
class PlanOptions(Checked, group="plan"):
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
    batches: Annotated[int, "[1, inf)"] = 4
    batch_size: Annotated[int, "[1, inf)"] = 16
    part: Literal["image", "text", "language"] | None = None
    cost: Literal["flops", "image_flops", "cache", "milliseconds"] = "flops"
    router: str | dict[str, Any] = "stride"
    options: Annotated[list[tuple[float, str, str]] | None, "[0, 1]"] = None
    divergence: Literal["kl", "cosine"] | None = None
    rounds: Annotated[int, "[0, inf)"] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        # Other budgets than milliseconds are shares of the dense model's cost.
        check_value("plan.budget", self.budget, float, "(0, inf)" if self.cost == "milliseconds" else "(0, 1)")
