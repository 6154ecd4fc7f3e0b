"""Reports hold all that was found, in one file that needs nothing else."""

from __future__ import annotations

import csv
import json
import re
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mmod import cli
from mmod.report import write_report
from mmod.report.charts import tradeoff_charts
from mmod.report.command import main
from mmod.report.health import health_chart
from mmod.report.sources import read_sources
from tests.report.records import write_audit, write_run, write_study

needs_charts = pytest.mark.skipif(find_spec("vl_convert") is None, reason="needs vl-convert-python, of the extra train")


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
    """The elements of a page, and the texts of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, Any]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data


@needs_charts
def test_the_page_is_whole_small_and_needs_no_other(report: Path) -> None:
    text = report.read_text()
    page = Page(text)
    assert not page.open
    assert len(text) < 5_000_000
    sources = [own[name] for tag, own in page.elements for name in ("src", "href") if own.get(name)]
    # What is beside it, within it, and images that it holds.
    assert all(re.match(r"[^:/]+\.(png|csv)$|#|data:image/png;base64,", source) for source in sources)
    policy = next(own["content"] for tag, own in page.elements if own.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "<b>" not in text.partition("<script")[0]
    assert text.count("MFLOPs of a sample: this model ") == 2


@needs_charts
def test_every_figure_has_its_words_its_command_and_its_files(report: Path, folders: list[Path]) -> None:
    page = Page(report.read_text())
    charts = [json.loads(script) for script in page.scripts if script.startswith("{")]
    names = [own["id"] for tag, own in page.elements if tag == "figure" and "id" in own]
    # Three costs of the study, maps, routers in training, and of each audit conditions, strata, other models, kept
    # share, FLOPs and once the blocks.
    assert len(charts) == len(names) == len(set(names)) == 3 + 1 + 1 + 6 + 5
    assert all(len(chart["description"]) > 40 for chart in charts)
    for name in names:
        assert (report.parent / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        with (report.parent / f"{name}.csv").open() as file:
            assert list(csv.DictReader(file))
    assert report.read_text().count("mmod audit ") >= len(names) - 4
    told = [own["alt"] for tag, own in page.elements if tag == "img"]
    assert [text.partition(",")[0] for text in told] == ["Patches that routed blocks of a keep", "Plan of searched"]
    ids = [own["id"] for _, own in page.elements if "id" in own]
    assert len(ids) == len(set(ids))
    headings = [tag for tag, _ in page.elements if tag in ("h1", "h2")]
    assert headings == ["h1", *["h2"] * 6]


@needs_charts
def test_maps_hold_what_blocks_kept(report: Path, folders: list[Path]) -> None:
    charts = [json.loads(script) for script in Page(report.read_text()).scripts if script.startswith("{")]
    maps = next(chart for chart in charts if "slider" in chart["description"])
    switch = next(param for param in maps["params"] if param["name"] == "model")
    assert switch["bind"]["options"] == ["audits/norm", "audits/seed0/random"]
    audits = read_sources(folders[1:]).audits
    for record in audits:
        veils = [row for row in maps["layer"][1]["data"]["values"] if row["model"] == record.name]
        assert record.maps is not None
        for number, kept in enumerate(record.maps["blocks"].values(), 1):
            skipped = [row["skipped"] for row in veils if row["block"] == number]
            assert [sorted({*own, *dropped}) for own, dropped in zip(kept, skipped)] == [list(range(16))] * 4


@needs_charts
def test_a_report_is_renewed_and_another_one_refused(report: Path, folders: list[Path], tmp_path: Path) -> None:
    before, picture = report.read_text(), report.parent / "maps.png"
    written = {path: path.stat().st_mtime_ns for path in report.parent.glob("*.png")}
    content = picture.read_bytes()
    picture.unlink()
    assert write_report(folders, report.parent) == report
    assert report.read_text() == before
    # Of the pictures none is drawn again but the one that is missing.
    again = {path: path.stat().st_mtime_ns for path in report.parent.glob("*.png")}
    assert {path for path in written if again[path] != written[path]} == {picture}
    assert picture.read_bytes() == content
    with pytest.raises(ValueError, match="a report with another config"):
        write_report(folders[:1], report.parent)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds files but no report\.json"):
        write_report(folders, tmp_path)


@needs_charts
def test_a_report_among_what_it_is_made_from_is_no_part_of_it(tmp_path: Path) -> None:
    write_run(write_study(tmp_path / "study") / "run")
    before = write_report([tmp_path / "study"]).read_text()
    assert (tmp_path / "study/report/routers.csv").exists()
    assert write_report([tmp_path / "study"]).read_text() == before


def test_sources_are_read_as_they_were_written(folders: list[Path]) -> None:
    studies, audits, runs = read_sources([*folders, folders[0]])
    assert [study.name for study in studies] == ["study", "study (2)"]
    assert studies[0].score == "top1"
    assert studies[0].costs() == ["gflops", "latency_ms", "latency_ms_b8"]
    assert studies[0].told.startswith("Paired over 2 seeds")
    assert studies[0].table == [["model", "top-1 %"], ["dense", "90.0"], ["early exit", ""]]
    points = {row["model"]: row.get("config") for row in tradeoff_charts(studies[0], "")[0].rows}
    assert list(points.values()) == [
        None, "router: norm, capacity: 0.5", "router: norm, capacity: 0.25", "kind: exit, confidence: 0.8"
    ]  # fmt: skip
    assert [record.name for record in audits] == ["audits/norm", "audits/seed0/random"]
    assert [run.name for run in runs] == ["audits/seed0/random", "audits/seed1/random"]


def test_routers_of_runs_stay_few_whatever_their_number(tmp_path: Path) -> None:
    for number in range(3):
        write_run(tmp_path / f"run{number}", steps=1000, blocks=4)
    runs = read_sources([tmp_path]).runs
    chart = health_chart(runs)
    assert chart is not None
    assert len(chart.rows) < 4100
    assert "one logged step in 4" in chart.title
    for run in runs:
        own = [
            {name: value for name, value in row.items() if name != "run"}
            for row in chart.rows
            if row["run"] == run.name
        ]
        assert own[0] == run.rows[0]
        assert own[-1] == run.rows[-1]
        assert all(row in run.rows for row in own[::97])
    assert health_chart([]) is None
    (tmp_path / "run0/routers.csv").write_text("step,data,block,kept\n1,train,a,nan\n")
    with pytest.raises(ValueError, match="holds no figures of routers"):
        read_sources([tmp_path])


def test_what_holds_nothing_or_something_else_is_refused(folders: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a study"):
        read_sources([tmp_path])
    with pytest.raises(FileNotFoundError, match="no folder"):
        read_sources([tmp_path / "none"])
    write_study(tmp_path / "study")
    (tmp_path / "study/tradeoff.csv").write_text("name\ndense\n")
    with pytest.raises(ValueError, match="is no study with its table"):
        read_sources([tmp_path])
    (tmp_path / "study/tradeoff.json").unlink()
    record = json.loads((folders[1] / "norm/audit/audit.json").read_text())
    (tmp_path / "audit").mkdir()
    for change in ({"images": ["https://example.org/image.png"]}, {"grid": ["4", 4]}, {"blocks": {"a": [["x"]]}}):
        broken = {**record, "maps": {**record["maps"], **change}}
        (tmp_path / "audit/audit.json").write_text(json.dumps(broken))
        with pytest.raises(ValueError, match="is no audit of `mmod audit`"):
            read_sources([tmp_path])


def test_the_command_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["folder", "--outpu", "elsewhere"])
    assert end.value.code == 2
    with pytest.raises(SystemExit):
        main([])


@needs_charts
def test_a_study_ends_with_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write_study(tmp_path / "study")
    monkeypatch.setattr("mmod.studies.command.main", lambda arguments: study)
    cli.run("tradeoff CONFIG", ["digits"])
    assert (study / "report/report.html").is_file()
    assert capsys.readouterr().out == f"Report: {study / 'report/report.html'}\n"


@pytest.mark.parametrize(
    ("missing", "said"),
    [(True, "vl_convert, which is not installed"), pytest.param(False, "holds", marks=needs_charts)],
)
def test_a_study_whose_page_cannot_be_written_ends_well(
    missing: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = write_study(tmp_path / "study")
    (study / "report").mkdir()
    (study / "report/mine.txt").write_text("notes")
    monkeypatch.setattr("mmod.studies.command.main", lambda arguments: study)
    if missing:
        monkeypatch.setitem(sys.modules, "vl_convert", None)
    cli.run("tradeoff CONFIG", ["digits"])
    assert re.search(f"^No report: .*({said})", capsys.readouterr().out)
    assert [path.name for path in (study / "report").iterdir()] == ["mine.txt"]
