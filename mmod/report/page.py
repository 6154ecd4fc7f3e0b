"""The page of a report: one HTML file without scripts that asks no network for anything."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from mmod.analysis.audit.generation import generation_rows
from mmod.analysis.audit.information import information_rows
from mmod.analysis.audit.strata import Stratum, beside_told, strata_rows, strata_told
from mmod.analysis.style import inline_svg, svg_of
from mmod.io.claim import claim_folder
from mmod.io.files import write_atomically
from mmod.report.charts import Chart, audit_charts, tradeoff_chart
from mmod.report.frame import frame
from mmod.report.health import health_chart
from mmod.report.over_runs import HEADER, rows_over_runs
from mmod.report.sources import PAGE, AuditRecord, RunRecord, StudyRecord, read_sources
from mmod.training.engine.logging import write_csv

__all__ = ["write_report"]

# Figures of runs that are not folded away.
_OPEN_RUNS = 3
_STUDY_COMMAND = "mmod tradeoff study.yaml  # the config below, saved as study.yaml"
_MAPS = "Patches that routed blocks of {} keep"
# Those of other seeds lie beside it.
_PLANS = "seed0/*.plans/*.png"
_PLAN = (
    "Plan of {}, {}, searched for the first seed: what each choice adds to the divergence in each block, those "
    "that were taken as dots, and the least that a budget costs"
)


def write_report(folders: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write what studies, audits and training runs found as one HTML file, each figure as SVG and CSV beside it.

    Args:
        folders: Folders of studies and runs, or folders that hold several of them.
        output: Folder of the report; None for `report` in the first of the folders.

    Returns:
        The file.

    Raises:
        FileNotFoundError: If a folder is not there.
        FolderTakenError: If the folder of the report holds a report of other folders, or other files.
        ValueError: If a folder holds none of them.
    """
    sources = [Path(folder) for folder in folders]
    studies, audits, runs = read_sources(sources)
    target = Path(output) if output is not None else sources[0] / "report"
    claim_folder(target, {"folders": [str(path.resolve()) for path in sources]}, file="report.json", kind="a report")

    def figure(chart: Chart) -> str:
        svg = svg_of(chart.figure)
        write_atomically(target / f"{chart.name}.svg", svg)
        write_csv(target / f"{chart.name}.csv", chart.rows)
        files = f'<a href="{escape(chart.name)}.svg">SVG</a> <a href="{escape(chart.name)}.csv">CSV</a>'
        return (
            f'<figure id="{escape(chart.name)}"><div class="chart">{inline_svg(svg, chart.name, chart.text)}</div>'
            f"<figcaption>{escape(chart.title)}. {escape(chart.text)} {files}<code>{escape(chart.command)}</code>"
            "</figcaption></figure>"
        )

    parts = [
        *(_study_part(study, figure) for study in studies), *_common_part(audits),
        *(_audit_part(record, figure) for record in audits), *_runs_part(runs, figure),
    ]  # fmt: skip
    write_atomically(target / PAGE, frame(parts))
    return target / PAGE


class _Part(NamedTuple):
    """A part of the page."""

    title: str
    finding: str
    content: str


_Draw = Callable[[Chart], str]
"""Writes a figure's files and returns it as HTML."""


def _study_part(study: StudyRecord, figure: _Draw) -> _Part:
    header, *rows = study.table
    maps = {path: _MAPS.format(path.stem.removeprefix("maps-")) for path in sorted(study.folder.glob("maps-*.png"))}
    plans = {path: _PLAN.format(path.parent.stem, path.stem) for path in sorted(study.folder.glob(_PLANS))}
    return _Part(
        f"Study {study.name}",
        study.told,
        figure(tradeoff_chart(study, _STUDY_COMMAND)) + _table(header, rows, f"Models of {study.name}")
        + _pictures("Routing maps of single models", maps) + _pictures("Plans that were searched", plans)
        + _details("Config", json.dumps(study.config, indent=2)) + _details("Environment", _lines(study.environment)),
    )  # fmt: skip


def _audit_part(record: AuditRecord, figure: _Draw) -> _Part:
    first, *others = map(figure, audit_charts(record))
    audit = record.audit
    header, *rows = audit.rows()
    return _Part(
        f"Audit of {record.name}",
        audit.verdict,
        first + _table(header, rows, f"Choices of tokens, {audit.images} images, {audit.draws} random draws")
        + f"<p>{escape(audit.across.verdict)} Never kept: {escape(audit.never())}.</p>"
        + _known(record) + "".join(others) + _strata_tables(record) + _generation(record)
        + _details("Environment", _lines(record.environment)),
    )  # fmt: skip


def _runs_part(runs: Sequence[RunRecord], figure: _Draw) -> list[_Part]:
    """Return what routers did while they trained; nothing where no run has a router."""
    drawn = [figure(chart) for run in runs if (chart := health_chart(run)) is not None]
    further = "".join(drawn[_OPEN_RUNS:])
    folded = further and f"<details><summary>Further runs</summary>{further}</details>"
    return [_Part("Routers while training", "", "".join(drawn[:_OPEN_RUNS]) + folded)] if drawn else []


def _known(record: AuditRecord) -> str:
    """Return a table of what is known of tokens and says of decisions; nothing where an earlier version wrote none."""
    header, *rows = information_rows(record.audit.across.information)
    caption = "What is known of a token says so much of whether it is kept, with 95 % intervals over images"
    return _table(header, rows, caption) if rows else ""


def _generation(record: AuditRecord) -> str:
    """Return a table of decisions token by token in long texts; nothing where it was not asked for."""
    found = record.generation
    if found is None:
        return ""
    header, *rows = generation_rows(found)
    caption = f"The {found.by} token by token, beside the top-k of windows of {found.window}, {found.texts} texts"
    return _table(header, rows, caption)


def _strata_tables(record: AuditRecord) -> str:
    """Return the tables behind the figures of strata and of other models, and what they say, where there are any."""
    audit = record.audit
    own = None if record.flops is None else float(record.flops["routed"])
    counted = {"this model": own, **(record.beside_flops or {})}
    costs = ", ".join(f"{name} {cost / 1e6:.2f}" for name, cost in counted.items() if cost is not None)
    return _gaps(
        "The learned over the random choice in parts of the set", audit.strata, "random", strata_told(audit.strata)
    ) + _gaps(
        "The model over others on the same samples", audit.beside, "its",
        [*beside_told(audit.beside), f"MFLOPs of a sample: {costs or 'not counted'}."],
    )  # fmt: skip


def _gaps(caption: str, strata: Sequence[Stratum], other: str, told: Sequence[str]) -> str:
    header, *rows = strata_rows(strata, other)
    return "".join(f"<p>{escape(own)}</p>" for own in told) + _table(header, rows, caption) if rows else ""


def _agreements(audits: Sequence[AuditRecord]) -> str:
    """Return a table of what scores have to do with the worth of single tokens; nothing where it was not asked for."""
    rows = []
    for record in audits:
        single = record.audit.leave_one_out
        if single is not None:
            worth = [f"{single.oracle:+.3f}", f"{single.random:+.3f}"]
            rows += [
                [record.name, name, f"{own:.2f}", f"{single.norm[name]:.2f}", str(single.images), *worth]
                for name, own in single.agreement.items()
            ]
    changes = ["loss change with the worthiest tokens", "with random ones"]
    header = ["model", "decision", "score", "token norm", "images", *changes]
    caption = "Rank correlation of score and norm with the worth of single tokens, left out one by one"
    return _table(header, rows, caption) if rows else ""


def _common_part(audits: Sequence[AuditRecord]) -> list[_Part]:
    """Return what is shown of all audits together."""
    if not audits:
        return []
    header = [
        "model",
        "points over random tokens",
        "explained by the best fixed position",
        "what the router uses",
        "blocks",
    ]
    rows = []
    for record in audits:
        audit = record.audit
        share = "" if audit.explained is None else f"{audit.explained:.2f}, {audit.position}"
        rows.append([record.name, f"{audit.gap:+.1f}", share, audit.kind, audit.across.kind])
    verdicts = _table(header, rows, "Verdicts, with 95 % intervals over images")
    return [_Part("Audits", "", verdicts + _over_runs(audits) + _agreements(audits))]


def _over_runs(audits: Sequence[AuditRecord]) -> str:
    """Return a table of what audits of runs of one name found together; nothing without any."""
    caption = "Runs of one name, with 95 % intervals over runs, not corrected for their number"
    rows = rows_over_runs(audits)
    return _table(HEADER, rows, caption) if rows else ""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in cells)}</tr>'
        for first, *cells in rows
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table><caption>{escape(caption)}'
        f"</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _pictures(title: str, paths: Mapping[Path, str]) -> str:
    """Return pictures with what they show, folded away; nothing without any."""
    shown = "".join(
        f'<figure><img alt="{escape(text)}" src="data:image/png;base64,{b64encode(path.read_bytes()).decode()}">'
        f"<figcaption>{escape(text)}</figcaption></figure>"
        for path, text in paths.items()
    )
    return f"<details><summary>{escape(title)}</summary>{shown}</details>" if shown else ""


def _details(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _lines(values: Mapping[str, Any]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in values.items())
