"""A suite runs every part, outlives those that fail, crash or hang, and continues where it was; checks of a GPU."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from mmod.benchmarks import SuiteConfig, SuiteFailedError, benchmark_suite, suite
from mmod.benchmarks.command import main
from mmod.benchmarks.gpu.checks import CHECKS, CheckConfig
from mmod.benchmarks.gpu.config import FIGURES, GpuOptions, figures_row
from mmod.benchmarks.gpu.programs import run_tests
from mmod.benchmarks.report import BenchmarkReport, Row, Runs, UnavailableError
from mmod.io.yaml import read_yaml
from tests.processes import FORKING, run_processes
from tests.scripts import ROOT

REHEARSAL = ROOT / "configs/benchmark/rehearsal.yaml"


def _fails(config: GpuOptions) -> Runs:
    raise ValueError("no luck")


def _crashes(config: GpuOptions) -> Runs:
    os._exit(7)


def _lacks(config: GpuOptions) -> Runs:
    raise UnavailableError("there is no program")


def _row(name: str, folder: Path) -> list[Row]:
    with (folder / "calls").open("a") as calls:
        calls.write(name)
    if name == "b" and not (folder / "go").exists():
        time.sleep(600)
    return [figures_row(name, {"ms": 1.5})]


def _hangs(config: GpuOptions) -> Runs:
    return Runs("letters", FIGURES, {name: partial(_row, name, Path(config.out)) for name in "ab"})


def config(folder: Path, *names: str, limits: dict[str, float] | None = None, **options: Any) -> SuiteConfig:
    """Return a suite of checks; a check may be replaced by another function of its name."""
    checks = [CheckConfig(check=name, out=name, device="cpu", limit=(limits or {}).get(name)) for name in names]  # type: ignore[arg-type]
    return SuiteConfig(checks=checks, out=str(folder), **options)


@pytest.fixture(autouse=True)
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "multiprocessing", FORKING)


def statuses(report: BenchmarkReport) -> dict[str, str]:
    lines = [note.partition(": ") for note in report.notes if not note.startswith("## ")]
    return {name: state.partition(",")[0] for name, _, state in lines}


def test_parts_that_fail_crash_or_hang_leave_the_others_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = {"tests": _fails, "training": _crashes, "attention": _hangs, "memcheck": _lacks}
    for name, function in parts.items():
        monkeypatch.setitem(CHECKS, name, function)
    monkeypatch.setattr(suite, "LEAST_SECONDS", 0.0)
    all_parts = config(tmp_path, *parts, limits={"attention": 3})
    with pytest.raises(SuiteFailedError, match=r"tests: ValueError: no luck; training: .* exit code 7; see") as error:
        benchmark_suite(all_parts, progress=False)
    report = error.value.report
    expected = {"tests": "failed", "training": "failed", "attention": "timed out", "memcheck": "skipped"}
    assert statuses(report) == expected
    assert any("| a    | ms 1.5  |" in note for note in report.notes), "rows of an unfinished part are shown"
    assert any(note.endswith("there is no program") for note in report.notes)
    assert "no luck" in (tmp_path / "tests" / "log.txt").read_text()

    (tmp_path / "attention" / "go").touch()
    monkeypatch.setitem(CHECKS, "tests", partial(_row_of, "tests"))
    monkeypatch.setitem(CHECKS, "training", partial(_row_of, "training"))
    with pytest.raises(ValueError, match="another config"):
        benchmark_suite(config(tmp_path, *parts, "environment"), progress=False)
    report = benchmark_suite(all_parts, progress=False)
    assert statuses(report) == {**dict.fromkeys(parts, "done"), "memcheck": "skipped"}
    assert (tmp_path / "attention" / "calls").read_text() == "abb", "the first run is not repeated"
    for name in parts:
        monkeypatch.setitem(CHECKS, name, _fails)
    assert benchmark_suite(all_parts, progress=False).notes == report.notes, "nothing runs again"


def _row_of(name: str, config: GpuOptions) -> Runs:
    return Runs(name, FIGURES, {name: lambda: [figures_row(name, {})]})


def test_what_does_not_fit_the_budget_runs_in_the_next_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in CHECKS:
        monkeypatch.setitem(CHECKS, name, _lacks)
    report = benchmark_suite(config(tmp_path, "tests", "memcheck", minutes=0.01), progress=False)
    assert statuses(report) == {"tests": "not run yet", "memcheck": "not run yet"}
    report = benchmark_suite(config(tmp_path, "tests", "memcheck", only="memcheck"), progress=False)
    assert statuses(report) == {"tests": "not run yet", "memcheck": "skipped"}
    report = benchmark_suite(config(tmp_path, "tests", "memcheck"), progress=False)
    assert statuses(report) == {"tests": "skipped", "memcheck": "skipped"}


def test_parts_run_in_the_order_that_is_asked_for(tmp_path: Path) -> None:
    ordered = config(tmp_path, "tests", "memcheck", "attention", first=["attention"])
    assert [member.out for member in ordered.benchmarks] == ["attention", "tests", "memcheck"]
    with pytest.raises(ValueError, match="unknown part in first or only speed; valid ones are tests"):
        config(tmp_path, "tests", only="speed")


def test_tests_need_the_repository(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"elsewhere/tests is not here: start in a checkout"):
        run_tests(GpuOptions(device="cpu", out=str(tmp_path), tests=["elsewhere/tests"]))


def test_checks_are_those_that_can_be_asked_for() -> None:
    assert tuple(CHECKS) == get_args(get_type_hints(CheckConfig)["check"])
    with pytest.raises(ValueError, match="limit must be"):
        CheckConfig(check="tests", out="tests", limit=0)


def test_one_part_runs_alone_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["suite", "--config", str(REHEARSAL), "--only=environment", f"--out={tmp_path / 'out'}"])
    table = capsys.readouterr().out
    assert (tmp_path / "out" / "benchmark.md").read_text() in table
    rows = json.loads((tmp_path / "out" / "environment" / "benchmark.json").read_text())["rows"]
    assert rows[0]["figures"]["torch"] in table
    assert "gather_rows" in {row["what"] for row in rows}
    assert "not run yet" in table


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rehearsal_runs_every_part(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run_processes(rehearse, tmp_path / "out", log=log) == [0], log.read_text()


def rehearse(folder: Path) -> None:
    suite.multiprocessing = FORKING  # type: ignore[assignment]
    # Tests of their own, which import nothing.
    tests = folder.with_name("tests") / "ops" / "test_one.py"
    tests.parent.mkdir(parents=True)
    (tests.parents[1] / "blocks").mkdir()
    tests.write_text("import pytest\n\n\n@pytest.mark.gpu\ndef test_one(): pass\n")
    (folder.parent / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    os.chdir(folder.parent)
    main(["suite", "--config", str(REHEARSAL), f"--out={folder}"])
    report = json.loads((folder / "benchmark.json").read_text())
    names = read_yaml(REHEARSAL)["first"]
    assert [note.partition(",")[0] for note in report["notes"][: len(names)]] == [
        f"{name}: {'skipped' if name == 'memcheck' else 'done'}" for name in names
    ]
    rows = {name: json.loads((folder / name / "benchmark.json").read_text())["rows"] for name in names[:-1]}
    assert rows["tests"][0]["text"].startswith("passed 1, failed 0")
    assert [row["what"] for row in rows["training"]] == ["dense", "a-mod", "mod", "merging"]
    assert all("top-1" in row["text"] and "GFLOPs" in row["text"] for row in rows["training"])
    assert all("with importance / SDPA" in row["text"] for row in rows["attention"])
    assert all(row["peak_of_dense"] for row in rows["memory"])


def test_the_half_hour_on_a_gpu_has_the_parts_of_its_rehearsal() -> None:
    whole, small = (read_yaml(REHEARSAL.with_stem(name)) for name in ("gpu", "rehearsal"))
    assert set(whole["first"]) - {"graphs"} == set(small["first"])
    boxes = [part["limit"] for kind in ("checks", "ops", "models", "generation") for part in whole[kind]]
    assert sum(boxes) == 1390
