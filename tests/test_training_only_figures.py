"""`scripts/training_only.py` in its smallest form: what it writes, and that arms go on where they stopped."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from scripts import training_only

MODEL = ["--depth", "5", "--batch", "2"]
TIMES = ["--side", "64", "--rounds", "3", "--test", "2"]
ARMS = ["--side", "16", "--width", "64", "--sampling", "2", "--test", "8"]


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["training_only", *words, *MODEL])
    training_only.main()


def test_each_method_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, "times", str(tmp_path / "times.json"), *TIMES)
    rows = json.loads((tmp_path / "times.json").read_text())
    assert [row[0] for row in rows] == list(training_only.METHODS)
    assert rows[0][2] == [1, 1, 1]
    assert all(len(row) == 6 for row in rows)


def test_arms_go_on_where_they_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    for seconds in ("0.01", "0.1"):
        run(monkeypatch, "arms", str(tmp_path), *ARMS, "--seconds", seconds)
        figures = json.loads((tmp_path / "arms.json").read_text())
        assert list(figures) == list(training_only.ARMS)
        for name, figure in figures.items():
            state = torch.load(tmp_path / f"{name}.pt")
            assert state["seconds"] >= float(seconds)
            assert figure["steps"] == state["steps"]
        taken.append({name: figure["steps"] for name, figure in figures.items()})
    assert all(taken[0][name] <= taken[1][name] for name in training_only.ARMS)
    # Nothing is left to train.
    run(monkeypatch, "arms", str(tmp_path), *ARMS, "--seconds", "0.1")
    assert json.loads((tmp_path / "arms.json").read_text()) == figures
