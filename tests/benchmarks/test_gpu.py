"""The GPU benchmark runs every part, outlives those that fail, crash or hang, and continues where it was."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest

from mmod.benchmarks import GpuConfig, SuiteFailedError, benchmark_gpu
from mmod.benchmarks.command import main
from mmod.benchmarks.gpu import benchmark as gpu_benchmark
from mmod.benchmarks.gpu.benchmark import PARTS, BenchmarkPart
from mmod.benchmarks.gpu.config import FIGURES, PartName, UnavailableError, figures_row
from mmod.benchmarks.gpu.programs import run_tests
from mmod.benchmarks.ops.cases import CASES
from mmod.benchmarks.report import BenchmarkReport, Row, Runs
from tests.processes import FORKING, run_processes


def _fails(config: GpuConfig) -> Runs:
    raise ValueError("no luck")


def _crashes(config: GpuConfig) -> Runs:
    os._exit(7)


def _lacks(config: GpuConfig) -> Runs:
    raise UnavailableError("there is no program")


def _row(name: str, folder: Path) -> list[Row]:
    with (folder / "calls").open("a") as calls:
        calls.write(name)
    if name == "b" and not (folder / "go").exists():
        time.sleep(600)
    return [figures_row(name, {"ms": 1.5})]


def _hangs(config: GpuConfig) -> Runs:
    runs = {name: partial(_row, name, Path(config.out)) for name in "ab"}
    return Runs("letters", FIGURES, runs)


def config(folder: Path, **options: Any) -> GpuConfig:
    return GpuConfig(device="cpu", out=str(folder), **options)


@pytest.fixture(autouse=True)
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_benchmark, "multiprocessing", FORKING)


def statuses(report: BenchmarkReport) -> dict[str, str]:
    return {row["part"]: row["status"] for row in report.rows}


def test_parts_that_fail_crash_or_hang_leave_the_others_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = {
        "fails": BenchmarkPart(_fails, 60), "crashes": BenchmarkPart(_crashes, 60),
        "hangs": BenchmarkPart(_hangs, 3), "lacks": BenchmarkPart(_lacks, 60),
    }  # fmt: skip
    monkeypatch.setattr(gpu_benchmark, "PARTS", parts)
    monkeypatch.setattr(gpu_benchmark, "LEAST_SECONDS", 0.0)
    with pytest.raises(SuiteFailedError, match=r"fails: ValueError: no luck; crashes: .* exit code 7; see") as error:
        benchmark_gpu(config(tmp_path), progress=False)
    expected = {"fails": "failed", "crashes": "failed", "hangs": "timed out", "lacks": "skipped"}
    assert statuses(error.value.report) == expected
    names = ("part", "status", "seconds", "what", "figures")
    cells = [tuple(row.get(name) for name in names) for row in error.value.report.rows]
    assert ("hangs", "timed out", None, "a", "ms 1.5") in cells, "rows of an unfinished part are shown"
    assert ("lacks", "skipped") in [c[:2] for c in cells if c[4] == "there is no program"]
    assert "no luck" in (tmp_path / "fails" / "log.txt").read_text()

    (tmp_path / "hangs" / "go").touch()
    monkeypatch.setattr(gpu_benchmark, "PARTS", {name: parts[name] for name in ("hangs", "lacks")})
    with pytest.raises(ValueError, match="another GPU benchmark: tests: "):
        benchmark_gpu(config(tmp_path, tests=["elsewhere"]), progress=False)
    report = benchmark_gpu(config(tmp_path, minutes=3.0), progress=False)
    assert statuses(report) == {"hangs": "done", "lacks": "skipped"}
    assert (tmp_path / "hangs" / "calls").read_text() == "abb", (
        "the first run is not repeated, nor is what lacks a program"
    )
    assert benchmark_gpu(config(tmp_path), progress=False).rows == report.rows, "nothing runs again"


def test_what_does_not_fit_the_budget_runs_in_the_next_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = {name: BenchmarkPart(_lacks, 60) for name in ("first", "second")}
    monkeypatch.setattr(gpu_benchmark, "PARTS", parts)
    report = benchmark_gpu(config(tmp_path, minutes=0.01), progress=False)
    assert statuses(report) == dict.fromkeys(parts, "not run yet")
    report = benchmark_gpu(config(tmp_path), progress=False)
    assert statuses(report) == dict.fromkeys(parts, "skipped")


def test_tests_need_the_repository(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"elsewhere/tests is not here: start in a checkout"):
        run_tests(config(tmp_path, tests=["elsewhere/tests"]))


def test_parts_are_those_that_can_be_asked_for(tmp_path: Path) -> None:
    assert tuple(PARTS) == get_args(PartName)
    with pytest.raises(ValueError, match=r"only must be one of 'environment', .* got 'speed'"):
        GpuConfig(only="speed")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="minutes must be"):
        GpuConfig(minutes=0)


def test_one_part_runs_alone_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["gpu", "--device=cpu", "--only=environment", f"--out={tmp_path / 'out'}"])
    table = capsys.readouterr().out
    assert (tmp_path / "out" / "benchmark.md").read_text() in table
    assert f"--out={tmp_path / 'out'}" in table
    rows = json.loads((tmp_path / "out" / "environment" / "benchmark.json").read_text())["rows"]
    assert rows[0]["figures"]["torch"] in table
    assert "gather_rows" in {row["what"] for row in rows}
    assert "not run yet" in table


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rehearsal_runs_every_part(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run_processes(rehearse, tmp_path / "out", log=log) == [0], log.read_text()


def rehearse(tmp_path: Path) -> None:
    gpu_benchmark.multiprocessing = FORKING  # type: ignore[assignment]
    # Tests of their own, which import nothing.
    tests = tmp_path.with_name("test_one.py")
    tests.write_text("import pytest\n\n\n@pytest.mark.gpu\ndef test_one(): pass\n")
    tests.with_name("pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    os.chdir(tests.parent)
    report = benchmark_gpu(config(tmp_path, minutes=30.0, tests=[tests.name]), progress=False)
    assert statuses(report) == {**dict.fromkeys(PARTS, "done"), "memcheck": "skipped"}
    shown: dict[str, list[str]] = {}
    for row in report.rows:
        shown.setdefault(row["part"], []).append(f"{row['what']} {row['figures']}")
    assert "passed 1, failed 0" in shown["tests"][0]
    assert [line.split()[0] for line in shown["training"]] == ["dense", "a-mod", "mod", "merging"]
    assert all("top-1" in line and "GFLOPs" in line for line in shown["training"])
    assert all("with importance / SDPA" in line for line in shown["attention"])
    assert all("speedup" in line and "of_free" in line for line in shown["models"] + shown["graphs"])
    assert all("decode" in line for line in shown["llava"])
    assert all("peak_of_dense" in line for line in shown["memory"])
    assert len(shown["ops"]) == len(CASES)
    for name in set(PARTS) - {"memcheck"}:
        assert json.loads((tmp_path / name / "benchmark.json").read_text())["rows"]
