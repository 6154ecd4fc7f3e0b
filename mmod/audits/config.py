"""What is audited, and how; imported without torch, so that `--help` is answered at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mmod.training.kinds import config_with
from mmod.values import check_fields


@dataclass(frozen=True)
class AuditOptions:
    """Options of an audit, see `mmod.audit`.

    Args:
        conditions: Choices of tokens to compare, with "random"; null for all. "shuffled" needs samples of equal length
            and "reference entropy" a head that predicts tokens, so null leaves them out where these are missing.
        draws: Random choices per image.
        margin: Points of accuracy below which a gain over random tokens may count as none.
        resamples: Number of bootstrap resamples of the images.
        positions_split: Split on which kept positions are counted, in the form of `data.val` for pairs and
            conversations; null for the evaluation set.
        maps: Sample images of a classifier over which routing is drawn; 0 draws none.
        reference: Folder of a dense run of the same kind; its loss sorts images, its attention and entropy choose
            tokens.
        shifts: Names of `mmod.analysis.audit.SHIFTS`: changes of the images for further comparisons.
        others: Further sets on which learned and random choice are compared: names to changed keys of `data`, as in
            `{aligned: {source: "digits:aligned"}}`.
        leave_one_out: Batches on which every token is left out once.
        beside: Folders of baseline runs of the same kind, evaluated on the same set and strata.
        questions: Conversations of `data.val` that are asked, drawn at random; null for all. Those without images are
            left out.
        generation: Bytes that a model of text writes after prompts of `data.length`, to compare its decisions byte by
            byte with the top-k, which it must have been trained with; a multiple of `data.length`, or 0 for none.
        texts: Number of such texts, drawn evenly from the evaluation split.
    """

    conditions: list[str] | None = None
    draws: int = 5
    margin: float = 5.0
    resamples: int = 2000
    positions_split: str | None = None
    maps: int = 6
    reference: str | None = None
    shifts: list[str] = field(default_factory=list)
    others: dict[str, dict[str, Any]] = field(default_factory=dict)
    leave_one_out: int = 0
    beside: list[str] = field(default_factory=list)
    questions: int | None = None
    generation: int = 0
    texts: int = 32

    def __post_init__(self) -> None:
        check_fields(
            self, "audit", margin="(0, inf)", draws="[1, inf)", resamples="[100, inf)", maps="[0, inf)",
            leave_one_out="[0, inf)", questions="[2, inf)", generation="[0, inf)", texts="[2, inf)",
        )  # fmt: skip


def audit_config(kind: str) -> Any:
    """Return the dataclass of the config of an audit: that of a kind of training, with `audit`."""
    purpose = "Options of the audit. Its results go to the folder `audit` in `output`."
    return config_with(kind, "audit", AuditOptions, purpose)
