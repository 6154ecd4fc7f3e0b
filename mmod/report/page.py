"""The page of a report: one HTML file without scripts that asks no network for anything."""

from __future__ import annotations

import json
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
from mmod.report.charts import HEADER, Chart, audit_charts, health_chart, rows_over_runs, study_chart
from mmod.report.frame import frame
from mmod.report.sources import PAGE, AuditRecord, RunRecord, StudyRecord, read_sources
from mmod.training.engine.logging import write_csv

# Figures of runs that are not folded away.
_OPEN_RUNS = 3
_STUDY_COMMAND = "mmod tradeoff study.yaml  # the config below, saved as study.yaml"
_MAPS = "Patches that routed blocks of {} keep"
_PLAN = (
    "Plan of {}, {}, searched for the first seed: the divergence that each option adds in each block, with chosen "
    "options as dots, and the least divergence at each budget"
)


def write_report(folders: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write the results of studies, audits and training runs as one HTML file, each figure as SVG and CSV beside it.

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

    sections = [
        *(_study_section(study, figure) for study in studies), *_common_section(audits),
        *(_audit_section(record, figure) for record in audits), *_runs_section(runs, figure),
    ]  # fmt: skip
    write_atomically(target / PAGE, frame(sections))
    return target / PAGE


class _Section(NamedTuple):
    """A section of the page."""

    title: str
    finding: str
    content: str


_Draw = Callable[[Chart], str]
"""Writes a figure's files and returns it as HTML."""


def _study_section(study: StudyRecord, figure: _Draw) -> _Section:
    maps = {path: _MAPS.format(path.stem.removeprefix("maps-")) for path in sorted(study.folder.glob("maps-*.svg"))}
    searches = sorted(study.folder.glob("seed0/*.plans/*.svg"))
    plans = {path: _PLAN.format(path.parent.stem, path.stem) for path in searches}
    tables = "".join(_table(header, rows, f"Models of {study.name}") for header, *rows in study.tables)
    return _Section(
        f"Study {study.name}",
        study.verdict,
        figure(study_chart(study, _STUDY_COMMAND)) + tables
        + _pictures(study.name, "Routing maps of single models", maps)
        + _pictures(study.name, "Plans that were searched", plans)
        + _details("Config", json.dumps(study.config, indent=2)) + _details("Environment", _lines(study.environment)),
    )  # fmt: skip


def _audit_section(record: AuditRecord, figure: _Draw) -> _Section:
    first, *others = map(figure, audit_charts(record))
    audit = record.audit
    header, *rows = audit.rows()
    return _Section(
        f"Audit of {record.name}",
        audit.verdict,
        first + _table(header, rows, f"Choices of tokens, {audit.images} images, {audit.draws} random draws")
        + f"<p>{escape(audit.across.verdict)} Never kept: {escape(audit.never())}.</p>"
        + _known(record) + "".join(others) + _strata_tables(record) + _generation(record)
        + _details("Environment", _lines(record.environment)),
    )  # fmt: skip


def _runs_section(runs: Sequence[RunRecord], figure: _Draw) -> list[_Section]:
    """Return the routers' figures during training; nothing where no run has a router."""
    drawn = [figure(chart) for run in runs if (chart := health_chart(run)) is not None]
    further = "".join(drawn[_OPEN_RUNS:])
    folded = further and f"<details><summary>Further runs</summary>{further}</details>"
    return [_Section("Routers while training", "", "".join(drawn[:_OPEN_RUNS]) + folded)] if drawn else []


def _known(record: AuditRecord) -> str:
    """Return a table of how far known facts of tokens explain decisions, if the audit measured it."""
    header, *rows = information_rows(record.audit.across.information)
    caption = "Share of the decision that a known fact of a token explains, with 95 % intervals over images"
    return _table(header, rows, caption) if rows else ""


def _generation(record: AuditRecord) -> str:
    """Return a table of decisions token by token in long texts, if the audit measured it."""
    generation = record.generation
    if generation is None:
        return ""
    header, *rows = generation_rows(generation)
    caption = (
        f"The {generation.by} token by token, beside the top-k of windows of {generation.window}, "
        f"{generation.texts} texts"
    )
    return _table(header, rows, caption)


def _strata_tables(record: AuditRecord) -> str:
    """Return verdicts and tables of strata and of other models, where there are any."""
    audit = record.audit
    routed = None if record.flops is None else float(record.flops["routed"])
    counted = {"this model": routed, **record.beside_flops}
    costs = ", ".join(f"{name} {cost / 1e6:.2f}" for name, cost in counted.items() if cost is not None)
    return _gaps(
        "The learned over the random choice in subsets", audit.strata, "random", strata_told(audit.strata)
    ) + _gaps(
        "The model over others on the same samples", audit.beside, "its",
        [*beside_told(audit.beside), f"MFLOPs of a sample: {costs or 'not counted'}."],
    )  # fmt: skip


def _gaps(caption: str, strata: Sequence[Stratum], other: str, verdicts: Sequence[str]) -> str:
    header, *rows = strata_rows(strata, other)
    return "".join(f"<p>{escape(verdict)}</p>" for verdict in verdicts) + _table(header, rows, caption) if rows else ""


def _agreements(audits: Sequence[AuditRecord]) -> str:
    """Return a table of the correlation of scores with the worth of single tokens, if audits measured it."""
    rows = []
    for record in audits:
        single = record.audit.leave_one_out
        if single is not None:
            worth = [f"{single.oracle:+.3f}", f"{single.random:+.3f}"]
            rows += [
                [record.name, name, f"{correlation:.2f}", f"{single.norm[name]:.2f}", str(single.images), *worth]
                for name, correlation in single.agreement.items()
            ]
    changes = ["loss change with the worthiest tokens", "with random ones"]
    header = ["model", "decision", "score", "token norm", "images", *changes]
    caption = "Rank correlation of score and norm with the worth of single tokens, left out one by one"
    return _table(header, rows, caption) if rows else ""


def _common_section(audits: Sequence[AuditRecord]) -> list[_Section]:
    """Return the tables over all audits."""
    if not audits:
        return []
    header = ["model", "points over random tokens", "explained by the best fixed position", "what the router uses"]
    rows = []
    for record in audits:
        audit = record.audit
        share = "" if audit.explained is None else f"{audit.explained:.2f}, {audit.position}"
        rows.append([record.name, f"{audit.gap:+.1f}", share, audit.kind, audit.across.kind])
    content = _table([*header, "blocks"], rows, "Verdicts, with 95 % intervals over images")
    if means := rows_over_runs(audits):
        caption = "Runs of one name, with 95 % intervals over runs, not corrected for their number"
        content += _table(HEADER, means, caption)
    return [_Section("Audits", "", content + _agreements(audits))]


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


def _pictures(study: str, title: str, texts: Mapping[Path, str]) -> str:
    """Return a study's SVG files with their texts, folded away; nothing without any."""
    shown = "".join(
        f"<figure>{inline_svg(path.read_text(), f'{study}-{path.parent.name}-{path.stem}', text)}"
        f"<figcaption>{escape(text)}</figcaption></figure>"
        for path, text in texts.items()
    )
    return f"<details><summary>{escape(title)}</summary>{shown}</details>" if shown else ""


def _details(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def _lines(values: Mapping[str, Any]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in values.items())
