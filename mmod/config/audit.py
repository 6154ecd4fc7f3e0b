"""Options of an audit, shared by `mmod.audit` and the command.

They are here and not next to the audit because the command's `--help` imports them, and answers without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from mmod.values import Checked


@dataclass(frozen=True)
class AuditConfig(Checked, group="audit"):
    """What an audit compares, and how precisely.

    Args:
        conditions: Choices of tokens to compare: "random", which must be among them, "stride", "centre", "border",
            "mean mask", "token norm", "inverted", "shuffled", and with a dense model "dense attention" and "reference
            entropy"; null for all. For a run, null leaves out "shuffled" where samples differ in length, and "reference
            entropy" where no head predicts tokens.
        draws: Random choices per image, over which results are averaged.
        margin: Points of accuracy. A gain over random tokens that is not significant, and whose interval ends below
            this margin, is no better than random.
        resamples: Number of bootstrap resamples and of sign draws.
        leave_one_out: Batches on which every token is left out of every decision once, one forward pass per token, to
            compare its effect with its score.
        grid: Rows and columns of the tokens that may be skipped; null takes the model's. Tokens that
            are no grid count as one row.
    """

    conditions: list[str] | None = None
    draws: Annotated[int, "[1, inf)"] = 5
    margin: Annotated[float, "[0, inf)"] = 5.0
    resamples: Annotated[int, "[100, inf)"] = 2000
    leave_one_out: Annotated[int, "[0, inf)"] = 0
    grid: Annotated[tuple[int, int] | None, "[1, inf)"] = None
