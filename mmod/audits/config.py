"""What is audited, and how; imported without torch, so that `--help` is answered at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mmod.training.chat import config as chat
from mmod.training.image.config import TrainConfig
from mmod.training.pairs import config as pairs
from mmod.training.text import config as text
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

    def __post_init__(self) -> None:
        limits = {"draws": "[1, inf)", "resamples": "[100, inf)", "maps": "[0, inf)", "leave_one_out": "[0, inf)"}
        check_fields(self, "audit", margin="(0, inf)", **limits)


@dataclass(frozen=True, kw_only=True)
class AuditConfig(TrainConfig):
    """The keys of a training config, whose `model`, `data`, `routing` and `device` say what is audited.

    Args:
        audit: Options of the audit. Its results go to the folder `audit` in `output`.
    """

    audit: AuditOptions = field(default_factory=AuditOptions)


@dataclass(frozen=True, kw_only=True)
class PairsAuditConfig(pairs.TrainConfig):
    """The keys of a training config on pairs; images and captions are matched within a batch of `data.batch_size`.

    Args:
        audit: Options of the audit.
    """

    audit: AuditOptions = field(default_factory=AuditOptions)


@dataclass(frozen=True, kw_only=True)
class TextAuditConfig(text.TrainConfig):
    """The keys of a training config on text; see `AuditConfig`.

    Args:
        audit: Options of the audit.
        generation: Bytes that the model writes after prompts of `data.length`, to compare its decisions byte by byte
            with the top-k, which it must have been trained with; a multiple of `data.length`, or 0 for none.
        texts: Number of such texts, drawn evenly from the evaluation split.
    """

    audit: AuditOptions = field(default_factory=AuditOptions)
    generation: int = 0
    texts: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "", generation="[0, inf)", texts="[2, inf)")
        if self.generation % self.data.length:
            raise ValueError(f"generation must be a multiple of data.length={self.data.length}, got {self.generation}")


@dataclass(frozen=True, kw_only=True)
class ChatAuditConfig(chat.TrainConfig):
    """The keys of a training config on conversations; see `AuditConfig`.

    Args:
        audit: Options of the audit. Conversations without images are left out.
        questions: Conversations of `data.val` that are asked, drawn at random; null for all.
    """

    audit: AuditOptions = field(default_factory=AuditOptions)
    questions: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "", questions="[2, inf)")


AnyConfig = AuditConfig | PairsAuditConfig | ChatAuditConfig | TextAuditConfig
AUDITS: dict[str, type[AnyConfig]] = {
    "image": AuditConfig,
    "pairs": PairsAuditConfig,
    "chat": ChatAuditConfig,
    "text": TextAuditConfig,
}
"""Name of each kind of training to the config of its audits."""
