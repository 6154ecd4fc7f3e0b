"""A suite runs every part, outlives those that fail, crash or hang, and continues where it was; checks of a GPU."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from subprocess import Popen
from types import SimpleNamespace
from typing import Any

import pytest

from mmod.config.parse import read_config
from mmod.io.yaml import read_yaml
from tests.kit.processes import FORKING, run_processes
from tests.kit.scripts import ROOT, run_script
from tools.benchmarks import suite
from tools.benchmarks.command import config_class, main
from tools.benchmarks.ops import case as op_case
from tools.benchmarks.program import COLUMNS, ProgramConfig
from tools.benchmarks.report import BenchmarkReport, Row, Runs, UnavailableError
from tools.benchmarks.suite import SuiteConfig, SuiteFailedError, benchmark_suite

REHEARSAL = ROOT / "configs/benchmark/rehearsal.yaml"


def _fails(config: ProgramConfig) -> Runs:
    raise ValueError("no luck")


def _crashes(config: ProgramConfig) -> Runs:
    os._exit(7)


def _lacks(config: ProgramConfig) -> Runs:
    raise UnavailableError("there is no program")


def _row(name: str, folder: Path) -> list[Row]:
    with (folder / "calls").open("a") as calls:
        calls.write(name)
    if name == "b" and not (folder / "go").exists():
        time.sleep(600)
    return [{"result": f"{name} took 1.5 ms"}]


def _hangs(config: ProgramConfig) -> Runs:
    return Runs("letters", COLUMNS, {name: partial(_row, name, Path(config.out)) for name in "ab"})


PARTS: dict[str, Callable[[ProgramConfig], Runs]] = {}


def config(folder: Path, *names: str, limits: dict[str, float] | None = None, **options: Any) -> SuiteConfig:
    """Return a suite of programs, in the place of which the functions of `PARTS` run."""
    programs = [ProgramConfig(command=["true"], out=name, limit=(limits or {}).get(name)) for name in names]
    return SuiteConfig(programs=programs, out=str(folder), **options)


@pytest.fixture(autouse=True)
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "multiprocessing", FORKING)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[ProgramConfig], Runs]]:
    PARTS.clear()
    monkeypatch.setattr(ProgramConfig, "runs", lambda self: PARTS[Path(self.out).name](self))
    return PARTS


def statuses(report: BenchmarkReport) -> dict[str, str]:
    lines = [note.partition(": ") for note in report.notes if not note.startswith("## ")]
    return {name: state.partition(",")[0] for name, _, state in lines}


def test_parts_that_fail_crash_or_hang_leave_the_others_alone(
    monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any], tmp_path: Path
) -> None:
    parts |= {"tests": _fails, "training": _crashes, "attention": _hangs, "memcheck": _lacks}
    monkeypatch.setattr(suite, "LEAST_SECONDS", 0.0)
    all_parts = config(tmp_path, *parts, limits={"attention": 3})
    with pytest.raises(SuiteFailedError, match=r"tests: ValueError: no luck; training: .* exit code 7; see") as error:
        benchmark_suite(all_parts, progress=False)
    report = error.value.report
    expected = {"tests": "failed", "training": "failed", "attention": "timed out", "memcheck": "skipped"}
    assert statuses(report) == expected
    assert any("| a took 1.5 ms |" in note for note in report.notes), "rows of an unfinished part are shown"
    assert any(note.endswith("there is no program") for note in report.notes)
    assert "no luck" in (tmp_path / "tests" / "log.txt").read_text()

    (tmp_path / "attention" / "go").touch()
    parts |= {name: partial(_row_of, name) for name in ("tests", "training")}
    with pytest.raises(ValueError, match="another config"):
        benchmark_suite(config(tmp_path, *parts, "environment"), progress=False)
    report = benchmark_suite(all_parts, progress=False)
    assert statuses(report) == {**dict.fromkeys(parts, "done"), "memcheck": "skipped"}
    assert (tmp_path / "attention" / "calls").read_text() == "abb", "the first run is not repeated"
    parts |= dict.fromkeys(parts, _fails)
    assert benchmark_suite(all_parts, progress=False).notes == report.notes, "nothing runs again"


def _row_of(name: str, config: ProgramConfig) -> Runs:
    return Runs(name, COLUMNS, {name: lambda: [{"result": name}]})


def test_what_does_not_fit_the_budget_runs_in_the_next_call(parts: dict[str, Any], tmp_path: Path) -> None:
    parts |= dict.fromkeys(("tests", "memcheck"), _lacks)
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


def test_the_last_paragraph_of_a_program_is_its_result(tmp_path: Path) -> None:
    code = "import os, sys; print('begun\\n\\none', os.environ['LETTER']); print(os.path.isdir(sys.argv[1]))"
    program = ProgramConfig(
        command=["python", "-c", code, "{folder}"], environment={"LETTER": "a"}, needs=[str(tmp_path)], out="x"
    )
    ((name, run),) = program.runs().calls.items()
    assert (name, run()) == ("program", [{"result": "one a"}, {"result": "True"}])


def test_a_program_that_fails_or_is_missing_says_so(tmp_path: Path) -> None:
    (run,) = ProgramConfig(command=["python", "-c", "print('no luck'); exit(3)"], out="x").runs().calls.values()
    with pytest.raises(RuntimeError, match="python ended with exit code 3: no luck"):
        run()
    with pytest.raises(UnavailableError, match=r"elsewhere/tests, no-such-program is not here"):
        ProgramConfig(command=["no-such-program"], needs=["elsewhere/tests"], out="x").runs()
    with pytest.raises(ValueError, match="command must name a program"):
        ProgramConfig(command=[], out="x")
    with pytest.raises(ValueError, match="limit must be"):
        ProgramConfig(command=[sys.executable], out="x", limit=0)


def test_one_part_runs_alone_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["suite", "--config", str(REHEARSAL), "--only=environment", f"--out={tmp_path / 'out'}"])
    table = capsys.readouterr().out
    assert (tmp_path / "out" / "benchmark.md").read_text() in table
    assert "environment: skipped" in table, "its script is in the repository"
    assert "scripts/gpu_checks.py is not here" in table
    assert "not run yet" in table


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_rehearsal_runs_every_part(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run_processes(rehearse, tmp_path / "out", log=log) == [0], log.read_text()


def start_script(words: list[str], **options: Any) -> Any:
    """Run a script of the repository in this process, which has imported what it needs; start other programs.

    One test needs no processes beside that of pytest.
    """
    if "scripts.gpu_checks" not in words:
        return Popen([{"auto": "0"}.get(word, word) for word in words], **options)
    done = run_script("-m scripts.gpu_checks", *words[3:])
    return SimpleNamespace(stdout=io.StringIO(done.stdout + done.stderr), wait=lambda: done.returncode)


def rehearse(folder: Path) -> None:
    suite.multiprocessing = FORKING  # type: ignore[assignment]
    subprocess.Popen = start_script  # type: ignore[misc,assignment]
    # Rates mean nothing here, so their measurement may be quick.
    for sizes in (op_case.COPIED_BYTES, op_case.FLUSHED_BYTES):
        sizes["cpu"] = 1 << 16
    op_case.PRODUCT_SIDE["cpu"] = 16
    # Tests of their own, which import nothing.
    tests = folder.with_name("tests") / "ops" / "test_one.py"
    tests.parent.mkdir(parents=True)
    (tests.parents[1] / "blocks").mkdir()
    tests.write_text("import pytest\n\n\n@pytest.mark.gpu\ndef test_one(): pass\n")
    (folder.parent / "scripts").symlink_to(ROOT / "scripts")
    (folder.parent / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    os.chdir(folder.parent)
    main(["suite", "--config", str(REHEARSAL), f"--out={folder}"])
    report = json.loads((folder / "benchmark.json").read_text())
    names = read_yaml(REHEARSAL)["first"]
    assert [note.partition(",")[0] for note in report["notes"][: len(names)]] == [
        f"{name}: {'skipped' if name == 'memcheck' else 'done'}" for name in names
    ]
    rows = {name: json.loads((folder / name / "benchmark.json").read_text())["rows"] for name in names[:-1]}
    results = {name: "\n".join(row["result"] for row in rows[name]) for name in ("tests", "training", "attention")}
    assert "1 passed" in results["tests"]
    assert [line.partition(":")[0] for line in results["training"].splitlines()] == ["dense", "a-mod", "mod", "merging"]
    assert all("top-1" in line and "GFLOPs" in line for line in results["training"].splitlines())
    assert all("with importance / SDPA" in line for line in results["attention"].splitlines())
    assert any(row["result"].startswith("gather_rows: runs") for row in rows["environment"])
    assert all(row["peak_of_dense"] for row in rows["memory"])


def test_the_half_hour_on_a_gpu_has_the_parts_of_its_rehearsal() -> None:
    full, small = (read_yaml(REHEARSAL.with_stem(name)) for name in ("gpu", "rehearsal"))
    assert set(full["first"]) - {"graphs"} == set(small["first"])
    boxes = [part["limit"] for kind in ("programs", "ops", "models", "generation") for part in full[kind]]
    assert sum(boxes) == 1390


def test_programs_of_suites_are_there_and_take_their_options() -> None:
    for name in ("gpu", "rehearsal"):
        for program in read_yaml(REHEARSAL.with_stem(name))["programs"]:
            words = program["command"]
            assert all((ROOT / word).is_file() for word in words if word.endswith(".py"))
            if "tools/benchmark.py" in words:
                mode, *options = words[words.index("tools/benchmark.py") + 1 :]
                read_config(options, config_class(mode))
