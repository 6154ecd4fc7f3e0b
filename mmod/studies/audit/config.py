"""What is audited, and how; imported without torch, so that `--help` is answered at once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from mmod.config import AuditConfig
from mmod.plain import without
from mmod.training.engine.config import RunConfig
from mmod.training.kinds import extended


@dataclass(frozen=True)
class AuditOptions(AuditConfig):
    """Options of the audit of a run, see `mmod.audit`.

    Args:
        maps: Sample images of a classifier over which routing is drawn; 0 draws none.
        reference: Folder of a dense run of the same kind; its loss sorts images, its attention and entropy choose
            tokens.
        shifts: Changes of the images for further comparisons: "noise", "blur", "low resolution", "clutter".
        others: Further sets on which learned and random choice are compared: names to changed keys of `data`, as in
            `{aligned: {source: "digits:aligned"}}`.
        baselines: Folders of baseline runs of the same kind, evaluated on the same set and strata.
        questions: Conversations of `data.val` to evaluate, drawn at random; null for all. Those without images are
            left out.
        generation: Bytes that a model of text writes after prompts of `data.length`, to compare its decisions byte by
            byte with the top-k, which it must have been trained with; a multiple of `data.length`, or 0 for none.
        texts: Number of such texts, drawn evenly from the evaluation split.
    """

    maps: Annotated[int, "[0, inf)"] = 6
    reference: str | None = None
    shifts: list[str] = field(default_factory=list)
    others: dict[str, dict[str, object]] = field(default_factory=dict)
    baselines: list[str] = field(default_factory=list)
    questions: Annotated[int | None, "[2, inf)"] = None
    generation: Annotated[int, "[0, inf)"] = 0
    texts: Annotated[int, "[2, inf)"] = 32


@dataclass(frozen=True, kw_only=True)
class Audited:
    """The keys that an audit adds to a training config.

    Args:
        audit: Options of the audit. Its results go to the folder `audit` in `output`.
    """

    audit: AuditOptions = field(default_factory=AuditOptions)


AUDITS = extended(Audited)
"""The configs of audits by kind: training configs, whose model and data are audited on their device."""


def record_of(config: RunConfig) -> dict[str, object]:
    """Return the options that the results depend on, as plain values."""
    free = ["workers", "pin_memory"]
    # Captions are retrieved within a batch, so its size counts.
    if config.kind != "pairs":
        free.append("batch_size")
    plain = config.to_dict()
    data = without(plain["data"], free)
    return {name: plain[name] for name in ("model", "routing", "methods", "audit")} | {"data": data}
