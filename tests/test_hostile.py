"""Every hostile input ends as documented; one of each kind of binary data in a process that may do nothing else.

`python -m scripts.reliability hostile` runs all in such processes.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tests.hostile import Case, evaluate, run
from tests.hostile.cases import GROUPS


@pytest.mark.parametrize("group", GROUPS)
def test_hostile_inputs_end_as_documented(group: str, tmp_path: Path) -> None:
    cases = list(GROUPS[group]())
    assert len({case.name for case in cases}) == len(cases)
    faults = {}
    for number, case in enumerate(cases):
        folder = tmp_path / str(number) / "run"
        folder.mkdir(parents=True)
        with contextlib.chdir(folder):
            fault, _ = evaluate(case)
        if not fault and ((folder / "executed").exists() or (folder / "ran").exists()):
            fault = "code in the input was run"
        if not fault and len(list(folder.parent.iterdir())) > 1:
            fault = "a file was written outside the folder"
        faults[case.name] = fault
    assert {name: fault for name, fault in faults.items() if fault} == {}


# Of text, what runs or is written is seen above.
@pytest.mark.parametrize("group", ["weights", "saved models", "audits", "images", "shards"])
def test_hostile_inputs_hang_write_and_start_nothing(group: str) -> None:
    cases = list(GROUPS[group]())
    outcome = run(cases[len(cases) // 2])
    assert not outcome.fault, outcome.case.name


def test_what_a_case_may_not_do_is_a_fault() -> None:
    def write(_: object) -> None:
        open("../elsewhere", "w").close()

    def start(_: object) -> None:
        import subprocess

        subprocess.run(["true"], check=True)

    def refuse(_: object) -> None:
        raise ValueError("a name\nand a second line")

    assert run(Case("", "", "read", write)).fault == "a file was written outside the folder"
    assert "subprocess.Popen" in run(Case("", "", "read", start)).fault
    assert "a message of several lines" in run(Case("", "", "refused", refuse)).fault
    assert "not as documented" in run(Case("", "", "refused", lambda _: 3)).fault


def test_a_case_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.hostile.SECONDS", 0.2)

    def hang(_: object) -> None:
        while True:
            pass

    assert run(Case("", "", "read", hang)).fault == "no end within 0.2 s"
