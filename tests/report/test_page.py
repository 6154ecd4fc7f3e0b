"""Reports hold all that was found, in one file that needs nothing else, also in a browser, which draws them."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from mmod import cli
from mmod.report.charts import draw_health, health_chart, rows_over_runs, thinned
from mmod.report.command import main
from mmod.report.page import write_report
from mmod.report.sources import RunRecord, read_sources
from tests.kit.records import PAGE, ROWS, TITLE, write_audit, write_isoflop, write_run, write_study


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("found")
    audits = root / "audits"
    write_audit(audits / "norm", "norm", capacity=(0.5, 0.25))
    write_run(write_audit(audits / "seed0/random", "random"))
    write_run(audits / "seed1/random", steps=2)
    return [write_study(root / "study"), audits]


@pytest.fixture(scope="module")
def report(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(folders, tmp_path_factory.mktemp("report") / "new")


class Page(HTMLParser):
    """The elements of a page, each with the figure that it stands in."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, Any]]] = []
        self.figure: str | None = None
        self.drawn: dict[str, list[str]] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "figure":
            self.figure = dict(attrs).get("id")
        if self.figure is not None:
            self.drawn.setdefault(self.figure, []).append(tag)
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "figure":
            self.figure = None


def test_the_page_is_whole_small_and_needs_no_other(report: Path) -> None:
    text = report.read_text()
    page = Page(text)
    assert not page.open
    assert len(text) < 5_000_000
    sources = [
        attributes[name] for tag, attributes in page.elements for name in ("src", "href") if attributes.get(name)
    ]
    # What is within it, and images that it holds.
    assert all(re.match(r"#|data:image/png;base64,", source) for source in sources)
    policy = next(
        attributes["content"]
        for tag, attributes in page.elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'")
    assert "script" not in policy
    assert not [
        tag for tag, attributes in page.elements if tag == "script" or any(name.startswith("on") for name in attributes)
    ]
    assert "<b>" not in text
    assert text.count("MFLOPs of a sample: this model ") == 2


def test_every_figure_is_drawn_with_its_words_and_its_command(report: Path) -> None:
    page = Page(report.read_text())
    names = [values["id"] for tag, values in page.elements if tag == "figure" and "id" in values]
    # The study's, routers of two runs in training, and of each audit conditions, strata, other models, kept share
    # and FLOPs.
    assert len(names) == len(set(names)) == 1 + 2 + 5 + 5
    for name in names:
        assert page.drawn[name].count("svg") == 1
        assert {"path", "text"} <= set(page.drawn[name])
    words = [attributes["aria-label"] for tag, attributes in page.elements if tag == "svg"]
    # Maps and plans.
    assert len(words) == len(names) + 2 + 2
    assert all(len(text) > 30 for text in words)
    assert report.read_text().count("mmod audit ") >= 10
    assert not [tag for tag, _ in page.elements if tag == "img"]
    titles = [text.partition(",")[0] for text in words]
    assert {"Patches that routed blocks of a keep", "Plan of searched"} <= set(titles)
    ids = [values["id"] for _, values in page.elements if "id" in values]
    assert len(ids) == len(set(ids))
    headings = [tag for tag, _ in page.elements if tag in ("h1", "h2")]
    assert headings == ["h1", *["h2"] * 5]


def test_the_page_opens_with_what_was_found(report: Path, folders: list[Path]) -> None:
    text = report.read_text()
    opening = text[: text.index("<figure")]
    assert "paired over 2 seeds" in opening
    for record in read_sources(folders[1:]).audits:
        assert html.escape(record.audit.verdict) in opening


def test_the_page_shows_the_pictures_of_the_study(report: Path) -> None:
    hints = re.findall("<title>([^<]*)</title>", report.read_text())
    assert {"a &lt;b&gt;&amp; b&lt;/b&gt;-0.5: 89.00 at 0.03\nrouter: norm"} <= set(hints)


def test_a_page_opens_what_is_recommended_and_folds_the_rest(tmp_path: Path) -> None:
    study = write_study(tmp_path / "study")
    for name in "bcd":
        (study / f"maps-{name}.svg").write_text((study / "maps-a.svg").read_text())

    def parts() -> tuple[str, str]:
        """Return a new page without and with what is folded."""
        text = write_report([study]).read_text()
        return re.sub(r"<details>.*?</details>", "", text, flags=re.DOTALL), text

    opened, text = parts()
    assert "<code>mmod tradeoff study.yaml  # the config below, saved as study.yaml</code>" in opened
    assert [f"blocks of {name} keep<" in opened for name in "abcd"] == [True, True, False, False]
    # A page of all maps would have many megabytes.
    assert [f"blocks of {name} keep<" in text for name in "abcd"] == [True, True, False, False]
    assert "maps of at most 2 models are on this page:\nmaps-c.svg\nmaps-d.svg<" in text
    assert "early exit</th><td></td>" in opened
    code = "c in Python:\n\n```python\nimport mmod\n\nmmod.route_(model)\n```"
    summary = [["model", "speed"], ["dense", "1.0"]]
    record = json.loads((study / "tradeoff.json").read_text())
    added = {"summary": summary, "recommended": ["c"], "code": code, "command": "mmod tradeoff my-model --seeds 2"}
    (study / "tradeoff.json").write_text(json.dumps({**record, **added}))
    opened, text = parts()
    assert "<code>mmod tradeoff my-model --seeds 2  # its whole config is below</code>" in opened
    assert [f"blocks of {name} keep<" in opened for name in "abcd"] == [False, False, True, False]
    assert "<p>c in Python:</p><pre>import mmod\n\nmmod.route_(model)</pre>" in opened[opened.index("<figure") :]
    assert "mmod.route_" not in opened[: opened.index("<figure")]
    # The table that fits is open, that of all columns is not.
    assert '<th scope="row">dense</th><td>1.0</td>' in opened
    assert "early exit</th><td></td>" not in opened
    assert "early exit</th><td></td>" in text


def test_another_report_and_other_files_are_not_replaced(report: Path, folders: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a report with another config"):
        write_report(folders[:1], report.parent)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds files but no report\.json"):
        write_report(folders, tmp_path)


def test_a_report_is_renewed_and_among_what_it_is_made_from_no_part_of_it(tmp_path: Path) -> None:
    write_run(write_study(tmp_path / "study") / "run")
    for output in (None, tmp_path / "page"):
        report = write_report([tmp_path / "study"], output)
        before = report.read_text()
        assert write_report([tmp_path / "study"], output) == report
        assert report.read_text() == before


def test_sources_are_read_as_they_were_written(folders: list[Path]) -> None:
    studies, audits, runs = read_sources([*folders, folders[0]])
    assert [study.name for study in studies] == ["study", "study (2)"]
    assert studies[0].title == TITLE
    assert [(row["name"], row["top1"]) for row in studies[0].rows] == [(row["name"], row["top1"]) for row in ROWS]
    assert studies[0].verdict == PAGE[1:]
    assert studies[0].tables == [[["model", "top-1 %"], ["dense", "90.0"], ["early exit", ""]]]
    assert [record.name for record in audits] == ["audits/norm", "audits/seed0/random"]
    assert [run.name for run in runs] == ["audits/seed0/random", "audits/seed1/random"]


def test_audits_of_one_name_are_averaged_and_others_left_out(folders: list[Path]) -> None:
    record = read_sources(folders[1:]).audits[0]
    single = record.audit.leave_one_out
    assert single is not None
    runs, norms = [], []
    for number in range(4):
        norms.append({name: dataclasses.replace(norm, value=number / 10) for name, norm in single.norm.items()})
        conditions = list(record.audit.conditions)
        conditions[1] = dataclasses.replace(
            conditions[1], accuracy=dataclasses.replace(conditions[1].accuracy, value=10.0 * number)
        )
        norm = dataclasses.replace(single, norm=norms[-1])
        audit = dataclasses.replace(record.audit, conditions=conditions, leave_one_out=norm, strata=[])
        runs.append(dataclasses.replace(record, name=f"seed{number}/a", audit=audit))
    # Of this one, nothing is known that all others have but the choices of tokens and the other models.
    runs[-1] = dataclasses.replace(runs[-1], audit=dataclasses.replace(runs[-1].audit, leave_one_out=None))
    assert rows_over_runs([*runs[:1], dataclasses.replace(record, name="b")]) == []
    rows = {figure: (name, count, text) for name, figure, count, text in rows_over_runs(runs)}
    assert not any("rank correlation" in figure or "random," in figure for figure in rows)
    learned = record.audit.conditions[0].accuracy.value
    name, count, text = rows["points above random"]
    assert (name, count) == ("a", "4")
    assert text.startswith(f"{learned - mean(10.0 * number for number in range(4)):+.1f} [")
    rows = {figure: (name, count, text) for name, figure, count, text in rows_over_runs(runs[:3])}
    # Of 0, 0.1 and 0.2: 4.303, Student's quantile, times 0.1 over the square root of 3.
    assert rows["rank correlation of token norm and worth in blocks.0"][2] == "+0.10 [-0.15, +0.35]"
    assert any(figure.startswith("points above dense, all images") for figure in rows)


def test_an_isoflop_study_has_its_page(tmp_path: Path) -> None:
    text = write_report([write_isoflop(tmp_path / "sizes")]).read_text()
    opening = text[: text.index("<figure")]
    assert "At 1e+09 training FLOPs mod is best with " in opening
    assert "-0.1000" in opening
    page = Page(text)
    assert page.drawn["sizes-isoflop"].count("svg") == 1
    assert text.count("<table>") == 2


def test_routers_of_a_long_run_stay_few(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=1000, blocks=4)
    (run,) = read_sources([tmp_path]).runs
    chart = health_chart(run)
    assert chart is not None
    assert "one logged step in 3" in chart.title
    rows, _ = thinned(run)
    assert len(rows) < 1700
    assert rows[0] == run.rows[0]
    assert rows[-1] == run.rows[-1]
    assert all(row in run.rows for row in rows[::97])
    axes = draw_health(rows).axes
    assert axes[0].get_title() == "share of tokens kept"
    assert len(axes) == 5
    assert health_chart(RunRecord("none", [])) is None


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        ("", "it is empty"),
        ("step,data,block,kept\n", "it is empty"),
        ("step,data,block,kept\n1,train,a,nan\n", "kept must be a finite number"),
        ("step,data,block,kept\n1,train,a,\n", "kept is empty"),
        ("step,data,block,kept\n1,train,a\n", "kept is empty"),
        ("step,data,block,kept,gate\n1,train,a,0.5,high\n", "gate must be "),
        ("step,data,block\n1,train,a\n", "KeyError: 'kept'"),
        ("step,kept\n1,0.5\n", "KeyError: 'data'"),
        (",data,block,kept\n,train,a,0.5\n", "KeyError: 'step'"),
        ("step,data,block,kept\n1,train,a,0.5,7\n", "TypeError"),
    ],
)
def test_routers_without_figures_are_refused_by_their_file(table: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "routers.csv").write_text(table)
    with pytest.raises(ValueError, match=rf"routers\.csv' holds no figures of routers \(.*{reason}"):
        read_sources([tmp_path])


def test_what_holds_nothing_or_something_else_is_refused(folders: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a study"):
        read_sources([tmp_path])
    with pytest.raises(FileNotFoundError, match="no folder"):
        read_sources([tmp_path / "none"])
    write_study(tmp_path / "study")
    (tmp_path / "study/tradeoff.svg").unlink()
    with pytest.raises(ValueError, match="is no study of this version with its table"):
        read_sources([tmp_path])
    (tmp_path / "study/tradeoff.json").unlink()
    record = json.loads((folders[1] / "norm/audit/audit.json").read_text())
    (tmp_path / "audit").mkdir()
    # The last is a key of an earlier version.
    costs = record.pop("baseline_flops")
    for change in ({"audit": 1}, {"generation": {"by": 1}}, {"beside_flops": costs}):
        broken = {**record, **change}
        (tmp_path / "audit/audit.json").write_text(json.dumps(broken))
        anew = re.escape(f"Delete the folder {str(tmp_path / 'audit')!r} and run {record['command']}, which makes it")
        with pytest.raises(ValueError, match=f"is no audit of `mmod audit` of this version .*{anew}"):
            read_sources([tmp_path])


def test_the_command_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["folder", "--outpu", "elsewhere"])
    assert end.value.code == 2
    with pytest.raises(SystemExit):
        main([])


def test_a_study_ends_with_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write_study(tmp_path / "study")
    monkeypatch.setattr("mmod.studies.commands.tradeoff", lambda arguments: [study])
    cli.run("tradeoff CONFIG", ["digits"])
    assert (study / "report/report.html").is_file()
    assert capsys.readouterr().out == f"Report: {study / 'report/report.html'}\n"


def test_a_study_whose_page_cannot_be_written_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write_study(tmp_path / "study")
    (study / "report").mkdir()
    (study / "report/mine.txt").write_text("notes")
    monkeypatch.setattr("mmod.studies.commands.tradeoff", lambda arguments: [study])
    cli.run("tradeoff CONFIG", ["digits"])
    assert re.search("^No report: .*holds", capsys.readouterr().out)
    assert [path.name for path in (study / "report").iterdir()] == ["mine.txt"]


DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium")


@pytest.fixture
def browser(report: Path) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    if not (DRIVER and BROWSER):
        pytest.skip("needs chromium and chromedriver")
    address = report.as_uri()
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        driver.set_window_size(1000, 900)
        driver.get(address)
        yield driver
        # What went wrong anywhere on the page, and what left it.
        assert [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"] == []
        assert asked(driver) <= {address, "data:"}
    finally:
        driver.quit()


def asked(driver: Any) -> set[str]:
    """Return the addresses that were asked for; of data that the page holds "data:" alone."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    urls = [
        message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"
    ]
    return {"data:" if url.startswith("data:") else url for url in urls}


def test_every_figure_is_drawn_and_says_what_it_shows(browser: Any) -> None:
    figures = browser.find_elements("css selector", "figure:has(> .chart)")
    assert len(figures) == 1 + 2 + 5 + 5
    for figure in figures:
        drawn = figure.find_element("css selector", "svg")
        assert drawn.rect["width"] > 100
        assert len(drawn.get_attribute("aria-label")) > 40


def test_a_phone_scrolls_one_way_and_dark_is_dark(browser: Any) -> None:
    size = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.refresh()
    assert browser.execute_script("return document.scrollingElement.scrollWidth") <= 360
    # Wide figures scroll within the page instead of shrinking until their labels cannot be read.
    shares = "return [...document.querySelectorAll('.chart svg')].map(svg => svg.clientWidth / svg.width.baseVal.value)"
    assert min(browser.execute_script(shares)) > 0.7
    paper = "return getComputedStyle(document.body).backgroundColor"
    ink = "return getComputedStyle(document.querySelector('figure text')).fill"
    light = browser.execute_script(paper), browser.execute_script(ink)
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    dark = browser.execute_script(paper), browser.execute_script(ink)
    assert light[0] == "rgb(255, 255, 255)"
    assert light[0] != dark[0]
    assert light[1] != dark[1]
