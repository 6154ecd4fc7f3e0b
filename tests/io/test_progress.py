"""Progress off a terminal is plain lines now and then, and one mechanism shows all of it."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
from typing import Any

import pytest

import mmod.io.progress
from mmod.io.jobs import Callback, Job, Runner
from mmod.io.progress import SECONDS, Stages, progress_bar
from tests.kit.scripts import ROOT


class Clock:
    """Seconds that pass only when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(mmod.io.progress, "time", clock := Clock())
    return clock


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("options", [{}, {"leave": False}], ids=["stays", "leaves"])
def test_off_a_terminal_there_are_lines_now_and_then(
    clock: Clock, capsys: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    for _ in progress_bar(range(300), desc="epoch 1/2", unit="samples", mininterval=0, miniters=1, **options):
        clock.now += 10
    lines = capsys.readouterr().err.splitlines()
    # Every ten minutes at least, however long the run is.
    assert [line.split()[2] for line in lines[:8]] == ["6", "12", "24", "48", "96", "156", "216", "276"]
    assert len(lines) == 8 + (not options)
    assert all(
        re.fullmatch(r"epoch 1/2: \d+ of 300 samples, \d\d:\d\d elapsed, \d\d:\d\d left", line) for line in lines
    )
    assert options or lines[-1].startswith("epoch 1/2: 300 of 300")


def test_times_are_those_of_a_clock_that_sleeps_with_the_machine(clock: Clock) -> None:
    with progress_bar(total=10, mininterval=0, miniters=1) as bar:
        for _ in range(5):
            clock.now += 40
            bar.update(1)
        assert bar.format_dict["elapsed"] == 200
        assert bar.format_dict["rate"] == pytest.approx(1 / 40)


def test_the_time_left_knows_what_was_done_before(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Any] = []

    def create(**options: Any) -> Any:
        bars.append(progress_bar(**options))
        return bars[-1]

    monkeypatch.setattr("mmod.io.jobs.progress_bar", create)

    def resumed(job: Job, callback: Callback) -> None:
        if job.name == "resumed":
            callback(0.75)

    jobs = [Job("read", 0, work=2.0), Job("resumed", 0, work=4.0)]
    list(Runner().run(jobs, resumed))
    (bar,) = bars
    # Of the second job, a quarter was done now.
    assert (bar.n, bar.initial) == (6, 5)


def test_a_bar_by_hand_counts_and_shows_figures(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(desc="a", total=4, initial=2) as bar:
        bar.update(1)
        bar.set_postfix({"loss": "0.5"})
        assert bar.n == 3
        mmod.io.progress.say("a line")
    assert capsys.readouterr().err.splitlines()[-1].endswith("elapsed, loss=0.5")
    with progress_bar(desc="nothing", total=4, shown=False) as bar:
        bar.update(4)
    assert not capsys.readouterr().err


def test_stages_say_no_time_left_by_little_of_the_work(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := io.StringIO())
    with Stages("advise") as stages:
        stages.expect(1000.0)
        stages.begin("slow", 100.0)
        for done in range(11):
            clock.now += 600
            stages.update(done / 10)
    said = screen.getvalue().splitlines()
    assert [bool(re.search(r"slow, [0-9:]+ left$", line)) for line in said] == [False] * 5 + [True] * 6
    assert said[0] == "advise: 0 % slow"


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    list(progress_bar(range(3), desc="epoch"))
    assert "\r" in screen.getvalue()
    assert "100%|" in screen.getvalue()


def test_a_terminal_of_no_size_has_a_bar_too(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        list(progress_bar(range(3), desc="epoch"))
        assert b"epoch: 100%|##########| 3/3" in os.read(screen, 4096).replace("█".encode(), b"#")
    os.close(screen)


def test_a_study_off_a_terminal_says_what_is_done_in_lines(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    def do(job: Job, callback: Callback) -> None:
        clock.now += SECONDS
        callback(1.0)

    jobs = [Job(name, seed) for seed in range(3) for name in ("dense", "mod")]
    assert len(list(Runner().run(jobs, do))) == 6
    said = capsys.readouterr().err
    assert "\r" not in said
    # The table that follows says that all are done.
    assert [line.split()[1] for line in said.splitlines()] == ["16", "33", "66"]


def test_every_bar_is_made_in_one_place() -> None:
    users = [path for path in (ROOT / "mmod").rglob("*.py") if re.search(r"\bimport tqdm\b", path.read_text())]
    assert [path.name for path in users] == ["progress.py"]
