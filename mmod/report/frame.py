"""What is around the content of a report: style, the chart library, and the few lines that start it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ["frame"]

# Nothing may be fetched; the chart library makes functions from text, which needs 'unsafe-eval'.
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline' 'unsafe-eval'"

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
figure { margin: 1.5rem 0; } .chart { width: 100%; overflow-x: auto; } .chart:empty { min-height: 15rem; }
figcaption { color: var(--faint); font-size: .9rem; }
code, pre { font: .8rem/1.4 ui-monospace, monospace; } figcaption code { display: block; overflow-wrap: anywhere;
  white-space: pre-wrap; }
pre { overflow-x: auto; border: 1px solid var(--line); padding: .5rem; }
.wide { overflow-x: auto; margin: 1rem 0; } table { border-collapse: collapse; font-size: .85rem; }
caption { text-align: left; color: var(--faint); } th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--line);
  text-align: right; white-space: nowrap; } th:first-child { text-align: left; }
nav ul { columns: 18rem; margin: 0; padding-left: 1.2rem; }
img { max-width: 100%; height: auto; }
.vega-bind { margin: .4rem 0; } .vega-bind-name { font-weight: 600; } .vega-bind input[type=range] { width: 12rem; }
"""

# Draws figures that come near the view, in the colours of the page, and again where those change.
_START = """
const dark = matchMedia("(prefers-color-scheme: dark)");
const theme = () => dark.matches ? "dark" : "light";
const figures = [...document.querySelectorAll("figure:has(> .chart)")];
const queue = [];
let running = false;
async function draw(figure) {
  const spec = JSON.parse(figure.querySelector("script").textContent);
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name);
  const config = { background: null, autosize: { type: "fit-x", contains: "padding" },
    text: { color: colour("--ink") }, axis: { gridColor: colour("--line") },
    axisY: { labelLimit: Math.min(260, 0.35 * figure.clientWidth) } };
  const drawn = theme();
  await vegaEmbed(figure.querySelector(".chart"), spec,
    { renderer: "svg", actions: false, theme: drawn === "dark" ? "dark" : undefined, config });
  figure.dataset.drawn = drawn;
  // The page is shown and answers before all figures are there.
  await new Promise(resolve => setTimeout(resolve));
}
async function want(wanted) {
  queue.push(...wanted);
  if (running) return;
  running = true;
  try {
    while (queue.length) {
      const figure = queue.shift();
      if (figure.dataset.drawn !== theme()) await draw(figure);
    }
    document.documentElement.dataset.drawn = theme();
  } finally { running = false; }
}
const near = new IntersectionObserver(seen => want(seen.filter(one => one.isIntersecting).map(one => one.target)),
  { rootMargin: "100% 0px" });
figures.forEach(figure => near.observe(figure));
dark.addEventListener("change", () => want(figures.filter(figure => figure.dataset.drawn)));
addEventListener("beforeprint", () => want(figures));
"""


def frame(sections: Sequence[tuple[str, str]], bundle: str) -> str:
    """Return the page.

    Args:
        sections: The title of each section, and its content as HTML.
        bundle: The chart library.

    Example:
        >>> page = frame([("Maps", "<p>found</p>")], "window.vegaEmbed = () => {}")
        >>> page.startswith("<!doctype html>"), "<p>found</p>" in page
        (True, True)
    """
    links, content = "", ""
    for number, (title, own) in enumerate(sections, 1):
        name = f"section-{number}"
        links += f'<li><a href="#{name}">{escape(title)}</a></li>'
        content += f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(title)}</h2>{own}</section>'
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>Report of mmod</title>'
        f'<style>{_STYLE}</style></head><body><a class="skip" href="#found">Skip to what was found</a>'
        f'<header><h1>Report of mmod</h1></header><nav aria-label="Sections"><ul>{links}</ul></nav>'
        f'<main id="found">{content}</main>'
        f"<script>{_closed(bundle)}</script><script>{_START}</script></body></html>\n"
    )


def _closed(script: str) -> str:
    """Return a script in which nothing ends the element that it stands in."""
    return script.replace("</script", "<\\/script")
