"""The runs of a study: their order, their processes, and what the bar says."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest

from mmod.io import jobs
from mmod.io.files import LockedError
from mmod.io.jobs import Callback, Job, Runner
from mmod.io.progress import Bar
from mmod.io.stop import Stop, exit_after, heeding, signal_name
from tests.kit.processes import FORKING, run_processes


@dataclass(frozen=True, kw_only=True)
class Given(Job):
    """A job with a value that it works on."""

    value: Any


JOBS = [
    Given(name=name, seed=seed, value=f"{name}{seed}", starts_from=None if name == "base" else ("base", seed))
    for seed in (0, 1)
    for name in ("base", "dense", "a-mod")
]


def report(job: Given, callback: Callback) -> tuple[str, int]:
    callback(0.5)
    return job.value, os.getpid()


def fail(job: Given, callback: Callback) -> None:
    if job.seed == 1:
        time.sleep(120)
        job.value.touch()
    raise ValueError(f"{job.name}{job.seed} does not fit")


def test_runs_in_one_process_keep_their_order() -> None:
    outcomes = list(Runner(progress=False).run(JOBS, report))
    assert [job for job, _ in outcomes] == JOBS
    assert [result for _, result in outcomes] == [(job.value, os.getpid()) for job in JOBS]


def test_runs_side_by_side_wait_for_the_one_they_start_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "multiprocessing", FORKING)
    runner = Runner(processes=2, progress=False)
    outcomes = list(runner.run(JOBS, report))
    assert sorted(job.value for job, _ in outcomes) == sorted(job.value for job in JOBS)
    assert all(result[0] == job.value and result[1] != os.getpid() for job, result in outcomes)
    for seed in (0, 1):
        assert next(job.name for job, _ in outcomes if job.seed == seed) == "base"
    # The workers' CPU time counts too.
    assert runner.cpu_seconds > time.process_time() - runner.began
    # That of an earlier study in this process does not.
    assert Runner().cpu_seconds < min(0.5, time.process_time())


def meet(job: Given, callback: Callback) -> None:
    (job.value / job.name).touch()
    deadline = time.monotonic() + 60
    while len(list(job.value.iterdir())) < 2:
        assert time.monotonic() < deadline, f"{job} runs alone"
        time.sleep(0.05)


def test_runs_that_start_from_none_do_not_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(jobs, "multiprocessing", FORKING)
    # The second starts from a run that is none of these.
    alone = [
        Given(name="one", seed=0, value=tmp_path),
        Given(name="other", seed=0, value=tmp_path, starts_from=("base", 0)),
    ]
    assert len(list(Runner(processes=2, progress=False).run(alone, meet))) == 2


def meet_another(job: Given, callback: Callback) -> str:
    """Do a job unless another program does it, which ends when the job "last" is done."""
    if job.name == "taken" and not (job.value / "last").exists():
        raise LockedError("another process is writing")
    (job.value / job.name).touch()
    return job.name


@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_another_program_does_comes_after_the_others_and_before_what_starts_from_it(
    processes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs, "multiprocessing", FORKING)
    monkeypatch.setattr(jobs, "_PAUSE", 0.01)
    starts = {"taken": None, "after": ("taken", 0), "other": None, "last": None}
    runs = [Given(name=name, seed=0, value=tmp_path, starts_from=start) for name, start in starts.items()]
    done = [job.name for job, _ in Runner(processes=processes).run(runs, meet_another)]
    assert sorted(done) == sorted(starts)
    # It is done only once "last" is, and two that end together come in any order.
    assert done.index("taken") < done.index("after")
    assert capsys.readouterr().out.count("taken, seed 0: another process is writing. Until then others go") == 1


def test_a_run_that_fails_ends_the_study_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(jobs, "multiprocessing", FORKING)
    ended = tmp_path / "ended"
    with pytest.raises(ValueError, match="base0 does not fit"):
        list(
            Runner(processes=2, progress=False).run(
                [Given(name="base", seed=seed, value=ended) for seed in (0, 1)], fail
            )
        )
    assert not ended.exists()


def test_a_killed_study_leaves_no_process(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    assert run_processes(be_killed, pids) == [-signal.SIGKILL]
    until(lambda: not is_running(int(pids.read_text())))


def be_killed(pids: Path) -> None:
    def kill() -> None:
        until(lambda: pids.exists() and bool(pids.read_text()))
        os.kill(os.getpid(), signal.SIGKILL)

    jobs.multiprocessing = FORKING  # type: ignore[assignment]
    threading.Thread(target=kill).start()
    list(Runner(2, False).run([Given(name="base", seed=0, value=str(pids))], linger))


# Of a terminal and of a scheduler, which may signal all processes: a second signal of these would end a run at once.
STOPPED = ((signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGUSR1, True))


def test_a_study_ends_after_its_runs_have_saved(tmp_path: Path) -> None:
    # The studies stop side by side, since each waits for a second.
    codes = run_processes(stopped_study, tmp_path, world=len(STOPPED))
    for code, (number, _) in zip(codes, STOPPED, strict=True):
        said = (tmp_path / number.name).read_text()
        assert code == 128 + number
        assert "Traceback" not in said
        ends = {f"{number.name}: saved", f"study: {number.name}; runs are saved, and the same command goes on"}
        assert set(said.splitlines()) == ends
        assert said.count(": saved") == 2


def test_a_signal_that_comes_as_the_last_result_is_taken_ends_the_study(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(jobs, "multiprocessing", FORKING)
    results = Runner(processes=2, progress=False).run([Given(name="last", seed=0, value=tmp_path)], meet_another)
    next(results)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        next(results)
    assert stopped.value.code == 128 + signal.SIGTERM


def stopped_study(folder: Path) -> None:
    jobs.multiprocessing = FORKING  # type: ignore[assignment]
    number, everywhere = STOPPED[int(os.environ["RANK"])]
    os.dup2(os.open(folder / number.name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    pids = folder / f"{number.name} pids"

    def stop() -> None:
        until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        for pid in (os.getpid(), *map(int, pids.read_text().split() if everywhere else ())):
            os.kill(pid, number)

    threading.Thread(target=stop).start()
    list(Runner(2, False).run([Given(name="base", seed=seed, value=str(pids)) for seed in (0, 1)], save_when_stopped))


def save_when_stopped(job: Given, callback: Callback) -> None:
    with heeding(Stop()) as stop:
        with open(job.value, "a") as file:
            file.write(f"{os.getpid()} ")
        until(lambda: stop.number > 0)
        # Longer than the parent takes to pass a signal on.
        time.sleep(1)
        exit_after(stop.number, f"{signal_name(stop.number)}: saved")


def linger(job: Given, callback: Callback) -> None:
    with open(job.value, "a") as file:
        file.write(f"{os.getpid()} ")
    time.sleep(250)


def until(holds: Callable[[], bool]) -> None:
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started < 200
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    try:
        # An orphan that nobody has waited for yet has ended too.
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_bar_weighs_runs_by_their_work(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(job: Given, callback: Callback) -> None:
        for share in (0.25, 0.5, 0.25, 1.0):
            callback(share)

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    # Bars that an interrupted test left open would move this one a line down.
    monkeypatch.setattr(Bar, "_instances", WeakSet())
    list(Runner().run(JOBS, slowly))
    shown = capsys.readouterr().err
    assert re.search(r"study: 0 % .*base, seed 0 *\r", shown)
    # Without a number it says nothing of the time left.
    assert "?" not in shown
    assert re.search(r"16 % .*dense, seed 0, \d+:\d+ left", shown)
    assert re.search(r"83 % .*a-mod, seed 1, \d+:\d+ left", shown)
    # Nothing of the bar stays above the table that follows.
    assert shown.endswith("\r")
    assert not shown.split("\r")[-2].strip()
