"""The page of a report: one HTML file without scripts, which needs no network."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from mmod.analysis.style import inline_svg
from mmod.io.files import read_text, write_atomically
from mmod.io.records import record_config
from mmod.io.tables import MarkdownTable
from mmod.report.charts import HEADER, Chart, audit_charts, health_chart, rows_over_runs
from mmod.report.sources import PAGE, AuditRecord, RunRecord, StudyRecord, read_sources

# Nothing is fetched and no script runs, whatever names and tables contain.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --faint: #5a6068; --paper: #ffffff; --line: #d5d9de;
  --link: #0057a8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --faint: #a3abb5; --paper: #16181b; --line: #3a3f45; --link: #7ab8ff; }
}
body { margin: 0 auto; padding: 1rem; max-width: 66rem; font: 1rem/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); }
a { color: var(--link); }
.skip { position: absolute; left: -99rem; }
.skip:focus { left: 1rem; }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
h1 { font-size: 1.6rem; }
h2 { font-size: 1.25rem; margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem; }
nav > ul { list-style: none; padding: 0; } .finding p, .finding ul { margin: .4rem 0; }
figure { margin: 1.5rem 0; } .chart { overflow-x: auto; } .chart svg { max-width: 100%; height: auto; }
g:has(> title):hover { stroke-width: 4; filter: brightness(1.25); }
figcaption { color: var(--faint); font-size: .9rem; }
code, pre { font: .8rem/1.4 ui-monospace, monospace; } figcaption code { display: block; overflow-wrap: anywhere;
  white-space: pre-wrap; }
pre { overflow-x: auto; border: 1px solid var(--line); padding: .5rem; }
.wide { overflow-x: auto; margin: 1rem 0; } table { border-collapse: collapse; font-size: .85rem; }
caption { text-align: left; color: var(--faint); } th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--line);
  text-align: right; white-space: nowrap; } th:first-child { text-align: left; } thead th { white-space: normal; }
img { max-width: 100%; height: auto; }
"""
# Figures of runs that are not folded away.
_OPEN_RUNS = 3
# Models of a study whose routing maps are on the page: each holds dozens of pictures, about a megabyte.
_SHOWN_MAPS = 2
_MAPS = "Patches that routed blocks of {} keep"
_PLAN = (
    "Plan of {}, {}, searched for the first seed: the divergence that each option adds in each block, with chosen "
    "options as dots, and the least divergence at each budget"
)


def write_report(folders: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write the results of studies, audits and training runs as one HTML file.

    Args:
        folders: Folders of studies and runs, or folders that hold several of them.
        output: Folder of the report; None for `report` in the first of the folders.

    Raises:
        FileNotFoundError: If a folder is not there.
        FolderTakenError: If the folder of the report holds a report of other folders, or other files.
        ValueError: If a folder holds none of them.
    """
    sources = [Path(folder) for folder in folders]
    studies, audits, runs = read_sources(sources)
    target = sources[0] / "report"
    if output is not None:
        target = Path(output)
    record_config(target, {"folders": [str(path.resolve()) for path in sources]}, file="report.json", kind="a report")

    sections = [
        *(_study_section(study) for study in studies),
        *_common_section(audits),
        *(_audit_section(record) for record in audits),
        *_runs_section(runs),
    ]
    write_atomically(target / PAGE, _frame(sections))
    return target / PAGE


class _Section(NamedTuple):
    """A section of the page, of which finding and content are HTML."""

    title: str
    finding: str
    content: str


def _figure(chart: Chart) -> str:
    """Return a figure as HTML."""
    name = escape(chart.name)
    svg = inline_svg(chart.svg, chart.name, chart.text)
    return (
        f'<figure id="{name}"><div class="chart">{svg}</div>'
        f"<figcaption>{escape(chart.title)}. {escape(chart.text)}<code>{escape(chart.command)}</code></figcaption>"
        "</figure>"
    )


def _study_section(study: StudyRecord) -> _Section:
    models = {path: path.stem.removeprefix("maps-") for path in sorted(study.folder.glob("maps-*.svg"))}
    maps = {path: _MAPS.format(model) for path, model in models.items()}
    searches = sorted(study.folder.glob("seed0/*.plans/*.svg"))
    plans = {path: _PLAN.format(path.parent.stem, path.stem) for path in searches}
    tables = "".join(_table(rows, f"Models of {study.name}") for rows in study.tables)
    if study.summary:
        tables = _table(study.summary, f"Models of {study.name}") + _folded("All columns", tables)
    recommended = [path for path, model in models.items() if model in study.recommended]
    # Where no recommended model has maps, as smaller images have none, those that lose least are shown.
    changes = {row.get("name"): float(row.get("to_dense/mean") or 0.0) for row in study.rows}
    by_loss = sorted(maps, key=lambda path: -changes.get(models[path], 0.0))
    shown = {path: maps[path] for path in (recommended or by_loss)[:_SHOWN_MAPS]}
    further = [path.name for path in maps if path not in shown]
    heading = f"In {study.folder}, since maps of at most {_SHOWN_MAPS} models are on this page:"
    text = f"{len(study.rows)} models of the study {study.name}, whose numbers are in the table below."
    command = f"mmod {study.kind} study.yaml  # the config below, saved as study.yaml"
    if study.command:
        command = f"{study.command}  # its whole config is below"
    drawn = Chart(f"{study.name}-{study.kind}", study.title, text, study.svg, command)
    verdict = ""
    for part in study.verdict:
        if isinstance(part, str):
            verdict += _rich(part)
        else:
            verdict += _table(part, "What is named")
    further_maps = ""
    if further:
        further_maps = _details("Routing maps of further models", "\n".join([heading, *further]))
    return _Section(
        f"Study {study.name}",
        verdict,
        _figure(drawn)
        + _pictures(study.name, shown)
        + _rich(study.code)
        + tables
        + further_maps
        + _folded("Plans that were searched", _pictures(study.name, plans))
        + _details("Config", json.dumps(study.config, indent=2))
        + _details("Environment", _lines(study.environment)),
    )


def _audit_section(record: AuditRecord) -> _Section:
    audit = record.audit
    # The picture of the verdict comes first, its tables next.
    first, *others = map(_figure, audit_charts(record))
    routed = None
    if record.flops is not None:
        routed = record.flops.routed
    counted = {"this model": routed, **record.baseline_flops}
    costs = [f"{name} {cost / 1e6:.2f}" for name, cost in counted.items() if cost is not None]
    parts = audit.sections()
    if record.baseline_flops and costs:
        parts.append(f"MFLOPs of a sample: {', '.join(costs)}.")
    if record.generation is not None:
        parts.append(record.generation.table())
    maps = dict.fromkeys(record.folder.glob("maps.svg"), _MAPS.format(record.name))
    return _Section(
        f"Audit of {record.name}",
        _rich(audit.verdict),
        first
        + "".join(map(_part, parts))
        + "".join(others)
        + _pictures(record.name, maps)
        + _details("Environment", _lines(record.environment)),
    )


def _part(part: str | MarkdownTable) -> str:
    if isinstance(part, str):
        return f"<p>{escape(part)}</p>"
    return _table(part.rows, part.caption)


def _runs_section(runs: Sequence[RunRecord]) -> list[_Section]:
    """Return the routers' figures during training; nothing where no run has a router."""
    charts = [health_chart(run) for run in runs]
    drawn = [_figure(chart) for chart in charts if chart is not None]
    if not drawn:
        return []
    content = "".join(drawn[:_OPEN_RUNS])
    further = "".join(drawn[_OPEN_RUNS:])
    content += _folded("Further runs", further)
    return [_Section("Routers while training", "", content)]


def _common_section(audits: Sequence[AuditRecord]) -> list[_Section]:
    """Return the tables over all audits."""
    if not audits:
        return []
    header = ["model", "points over random tokens", "explained by the best fixed position", "what the router uses"]
    rows = [[*header, "blocks"]]
    for record in audits:
        audit = record.audit
        share = ""
        if audit.explained is not None:
            share = f"{audit.explained:.2f}, {audit.position}"
        rows.append([record.name, f"{audit.gap:+.1f}", share, audit.kind, audit.across.kind])
    content = _table(rows, "Verdicts, with 95 % intervals over images")
    means = rows_over_runs(audits)
    if means:
        content += _table([HEADER, *means], "Runs of one name, with 95 % intervals over runs, not corrected")
    return [_Section("Audits", "", content)]


def _table(rows: Sequence[Sequence[str]], caption: str) -> str:
    header, *lines = rows
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = ""
    for first, *cells in lines:
        columns = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        body += f'<tr><th scope="row">{escape(first)}</th>{columns}</tr>'
    label = escape(caption)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{label}"><table><caption>{label}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _pictures(study: str, texts: Mapping[Path, str]) -> str:
    """Return a study's SVG files with their texts."""
    shown = ""
    for path, text in texts.items():
        svg = inline_svg(read_text(path), f"{study}-{path.parent.name}-{path.stem}", text)
        shown += f'<figure><div class="wide">{svg}</div><figcaption>{escape(text)}</figcaption></figure>'
    return shown


def _folded(title: str, content: str) -> str:
    """Return content that a click unfolds; nothing without any."""
    if content:
        return f"<details><summary>{escape(title)}</summary>{content}</details>"
    return ""


def _details(title: str, text: str) -> str:
    return _folded(title, f"<pre>{escape(text)}</pre>")


def _rich(text: str) -> str:
    """Return Markdown of paragraphs, lists and fenced code as HTML.

    Example:
        >>> print(_rich("What to use:\\n\\n- a < b\\n\\n```python\\nimport mmod\\n\\nx\\n```"))
        <p>What to use:</p><ul><li>a &lt; b</li></ul><pre>import mmod
        <BLANKLINE>
        x</pre>
    """

    def inline(words: str) -> str:
        return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(words))

    parts = re.split(r"^```\w*\n(.*?)\n```$", text, flags=re.MULTILINE | re.DOTALL)
    # Odd parts are those between fences.
    content = ""
    for number, part in enumerate(parts):
        if number % 2:
            content += f"<pre>{escape(part)}</pre>"
            continue
        for block in filter(None, part.strip().split("\n\n")):
            items = block.split("\n")
            if not all(item.startswith("- ") for item in items):
                content += f"<p>{inline(block)}</p>"
                continue
            listed = "".join(f"<li>{inline(item[2:])}</li>" for item in items)
            content += f"<ul>{listed}</ul>"
    return content


def _lines(values: Mapping[str, object]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in values.items())


def _frame(sections: Sequence[_Section]) -> str:
    """Return the page, which opens with the findings, from its sections."""
    links = ""
    body = ""
    for number, (title, finding, content) in enumerate(sections, 1):
        name = f"section-{number}"
        links += f'<li><a href="#{name}">{escape(title)}</a><div class="finding">{finding}</div></li>'
        body += f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(title)}</h2>{content}</section>'
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Report of mmod</title>'
        f'<style>{_STYLE}</style></head><body><a class="skip" href="#figures">Skip to the figures</a>'
        f'<header><h1>Report of mmod</h1></header><nav aria-label="Findings"><ul>{links}</ul></nav>'
        f'<main id="figures">{body}</main></body></html>\n'
    )
