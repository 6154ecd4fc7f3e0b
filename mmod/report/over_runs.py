"""What audits of several runs of one name found together, as those of a study's seeds have."""

from __future__ import annotations

from collections.abc import Sequence

from mmod.analysis.statistics import difference
from mmod.report.sources import AuditRecord

__all__ = ["HEADER", "rows_over_runs"]

_RANKS = "rank correlation"
HEADER = ["model", "figure", "runs", "mean over runs"]


def rows_over_runs(audits: Sequence[AuditRecord]) -> list[list[str]]:
    """Return a row for each figure of each name that several runs have, with 95 % intervals over these."""
    groups: dict[str, list[dict[str, float]]] = {}
    for record in audits:
        groups.setdefault(record.name.rpartition("/")[2], []).append(_figures(record))
    return [
        [name, figure, str(len(runs)), _told(figure, [own[figure] for own in runs])]
        for name, runs in groups.items()
        if len(runs) > 1
        for figure in runs[0]
        if all(figure in own for own in runs)
    ]


def _figures(record: AuditRecord) -> dict[str, float]:
    """Return the figures of an audit that can be averaged over runs."""
    audit, generation = record.audit, record.generation
    learned, *others = audit.conditions
    figures = {f"points above {own.name}": learned.accuracy.value - own.accuracy.value for own in others}
    figures |= {f"points above random, {own.group}: {own.name}": own.gap.value for own in audit.strata}
    figures |= {f"points above {own.group}, {own.name}": own.gap.value for own in audit.beside}
    figures |= {
        f"% of the decision in {block} told by {known}": 100 * own.share.value
        for block, told in audit.across.information.items()
        for known, own in told.items()
    }
    if generation is not None:
        for stretch in generation.stretches:
            where = f"of {stretch.text} tokens {stretch.first} to {stretch.last}"
            figures[f"% {where} decided as the top-k by the {generation.by}"] = 100 * stretch.agreement.value
            figures[f"% {where} decided so, above chance"] = 100 * stretch.above_chance.value
            figures[f"% {where} kept"] = 100 * stretch.kept.value
    if audit.leave_one_out is not None:
        parts = {"score": audit.leave_one_out.agreement, "token norm": audit.leave_one_out.norm}
        figures |= {
            f"{_RANKS} of {what} and worth in {block}": own.value
            for what, blocks in parts.items()
            for block, own in blocks.items()
        }
    return figures


def _told(figure: str, values: Sequence[float]) -> str:
    """Return the mean of a figure with its interval."""
    over = difference(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0))
    return format(over, "+.2f" if figure.startswith(_RANKS) else "+.1f")
