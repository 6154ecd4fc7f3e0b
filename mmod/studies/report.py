"""What a study tells of its models: points, table, pictures and text, written to its folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmod.analysis.fronts import draw_tradeoff
from mmod.analysis.statistics import Estimate, published
from mmod.compare.table import DENSE, Table, best, close_groups, evaluated, gaps, paired_by_sample
from mmod.io.tables import Column, table_of
from mmod.planning.candidate import Candidate
from mmod.studies.kind import Candidates, Facts, Rows, StudyKind
from mmod.studies.results import COLUMNS, Point, StudyResult, flat, listed, write_outcome
from mmod.studies.runs import Run

# Groups of models without significant differences that a sentence names.
_GROUPS = 3


def write_study(
    config: Any,
    kind: StudyKind,
    table: Table,
    candidates: Candidates,
    runs: Mapping[str, Run[Any]],
    facts: Facts,
    more: Mapping[str, Any],
) -> StudyResult:
    """Write what is known of a study so far, and return it.

    Args:
        candidates: Those that are measured.
        runs: The runs of the first seed by name.
        more: Further entries of the record: the machine, and what the runs were trained with.
    """
    baselines = {} if kind.baselines is None else kind.baselines(config, table, candidates)
    points = points_of(table, candidates, config.score, baselines)
    epochs: Mapping[str, str] = more["epochs"]
    rows: Rows = [point.row() | ({"epochs": epochs[point.name]} if epochs else {}) for point in points]
    if kind.complete is not None:
        rows = kind.complete(config, table, rows, runs)
    told = kind.tell(config, table, candidates, rows, facts)
    shown = str(table_of(told.columns, [*rows, *told.last_rows]))
    summary = shown if told.summary is None else str(table_of(told.summary, rows))
    text = "\n\n".join(filter(None, [told.text, told.code]))
    measure = kind.measures[config.score]
    axes = kind.axes(config)
    record = {
        "config": dataclasses.asdict(config),
        **{name: value for name, value in more.items() if name != "epochs"},
        **facts,
        "recommended": list(told.recommended),
        "summary": summary,
        "code": told.code,
        "title": f"{measure[:1].upper()}{measure[1:]} against {', '.join(axes.values())}",
        "points": [dataclasses.asdict(point, dict_factory=published) for point in points],
    }
    noted = [{**row, "note": hint(candidates[row["name"]], row)} for row in rows]
    pictures = {"tradeoff": draw_tradeoff(noted, config.score, measure, axes), **(told.pictures or {})}
    folder = Path(config.output)
    write_outcome(folder, "tradeoff", record, [flat(row) for row in rows], f"{shown}\n\n{text}", pictures)
    return StudyResult(folder, points, rows, f"{shown}\n\n{text}", f"{summary}\n\n{text}", more["cpu_seconds"])


def points_of(
    table: Table, candidates: Candidates, score: str, baselines: Mapping[str, Mapping[str, Sequence[str]]]
) -> list[Point]:
    """Return candidates with their differences to the dense model, to their control and to the best of their baselines.

    Args:
        baselines: See `StudyKind.baselines`.
    """
    to_dense = gaps(table, score, dict.fromkeys(candidates, DENSE))
    # A control may not be measured yet.
    to_control = gaps(table, score, {name: candidate.control for name, candidate in candidates.items()})
    to_baselines: dict[str, dict[str, Estimate | str | None]] = {name: {} for name in candidates}
    for suffix, others in baselines.items():
        best_baseline = {name: best(table, score, names) for name, names in others.items()}
        for name, gap in gaps(table, score, best_baseline).items():
            to_baselines[name] |= {f"to_baseline{suffix}": gap, f"baseline{suffix}": best_baseline[name]}
    return [
        Point(
            name,
            candidate.series,
            candidate.budget,
            table.costs[name],
            table.figures(name),
            to_dense[name],
            to_control[name],
            to_baselines[name],
        )
        for name, candidate in candidates.items()
    ]


def named_columns(names: Sequence[str]) -> dict[str, Column]:
    """Return columns by name, see `COLUMNS`."""
    return {name: COLUMNS[name] for name in names}


def verdict(table: Table, score: str, names: Sequence[str]) -> str:
    """Say in one sentence between which models there is no significant difference, paired by sample or by seed.

    Example:
        >>> from mmod.compare.table import Measured
        >>> table = Table()
        >>> for name, values in {"dense": [95.0, 95.2], "a": [94.9, 95.2], "b": [70.0, 70.1]}.items():
        ...     for seed, value in enumerate(values):
        ...         table.add(name, seed, Measured({"top1": value}))
        >>> print(verdict(table, "top1", list(table.runs)))
        Paired over 2 seeds (95 % intervals), no significant difference between dense and a.
    """
    seeds = max((len(table.runs[name]) for name in names), default=0)
    is_by_sample = paired_by_sample(table, score, names)
    if seeds < 2 and not is_by_sample:
        return "One seed: differences are not tested. Add --seeds 5 for confidence intervals."
    paired = f"{evaluated(table, names[0]):,} samples" if is_by_sample else f"{seeds} seeds"
    groups = close_groups(table, score, names)
    text = "; ".join(listed(group, most=6) for group in groups[:_GROUPS])
    further = f"; {len(groups) - _GROUPS} more groups are as close" if len(groups) > _GROUPS else ""
    differing = f"no significant difference between {text}{further}" if text else "all differences are significant"
    return f"Paired over {paired} (95 % intervals), {differing}."


def hint(candidate: Candidate, row: Mapping[str, Any]) -> str:
    """Return differences and settings of a model, the text that a browser shows at its point."""
    lines = [f"{name.replace('_', ' ')}: {row[name]}" for name in ("to_dense", "to_control") if row[name] is not None]
    size = {} if candidate.image_size is None else {"image_size": candidate.image_size}
    settings = []
    for part in (candidate.routing or {}, *candidate.methods, candidate.changes.get("model", {}).get("args", {}), size):
        settings += [f"{name}: {value}" for name, value in part.items()]
    if settings:
        lines.append(", ".join(settings))
    return "\n".join(lines)
