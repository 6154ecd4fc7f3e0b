"""The frame and style of a report, without any script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

# Nothing is fetched and no script runs, whatever names and tables contain.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --faint: #5a6068; --paper: #ffffff; --line: #d5d9de;
  --link: #0057a8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --faint: #a3abb5; --paper: #16181b; --line: #3a3f45; --link: #7ab8ff; }
}
body { margin: 0 auto; padding: 1rem; max-width: 60rem; font: 1rem/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); }
a { color: var(--link); }
.skip { position: absolute; left: -99rem; }
.skip:focus { left: 1rem; }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
h1 { font-size: 1.6rem; }
h2 { font-size: 1.25rem; margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: 1rem; }
.finding { white-space: pre-line; }
figure { margin: 1.5rem 0; } .chart svg { max-width: 100%; height: auto; }
g:has(> title):hover { stroke-width: 4; filter: brightness(1.25); }
figcaption { color: var(--faint); font-size: .9rem; }
code, pre { font: .8rem/1.4 ui-monospace, monospace; } figcaption code { display: block; overflow-wrap: anywhere;
  white-space: pre-wrap; }
pre { overflow-x: auto; border: 1px solid var(--line); padding: .5rem; }
.wide { overflow-x: auto; margin: 1rem 0; } table { border-collapse: collapse; font-size: .85rem; }
caption { text-align: left; color: var(--faint); } th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--line);
  text-align: right; white-space: nowrap; } th:first-child { text-align: left; }
nav ul { margin: 0; padding-left: 1.2rem; }
img { max-width: 100%; height: auto; }
"""


def frame(sections: Sequence[tuple[str, str, str]]) -> str:
    """Return the page, which opens with the findings, from title, finding and HTML content of its sections.

    Example:
        >>> page = frame([("Maps", "Digits are kept.", "<p>content</p>")])
        >>> page.startswith("<!doctype html>"), page.index("Digits are kept.") < page.index("<p>content</p>")
        (True, True)
    """
    links, body = "", ""
    for number, (title, finding, content) in enumerate(sections, 1):
        name = f"section-{number}"
        links += f'<li><a href="#{name}">{escape(title)}</a><div class="finding">{escape(finding)}</div></li>'
        body += f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(title)}</h2>{content}</section>'
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Report of mmod</title>'
        f'<style>{_STYLE}</style></head><body><a class="skip" href="#figures">Skip to the figures</a>'
        f'<header><h1>Report of mmod</h1></header><nav aria-label="Findings"><ul>{links}</ul></nav>'
        f'<main id="figures">{body}</main></body></html>\n'
    )
