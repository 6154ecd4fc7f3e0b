"""What training, evaluation, audits, plans, studies and advice compute stays what it was when their code moves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.references import EXPECTED, REFERENCES, numbers

EXPECTATIONS = json.loads(EXPECTED.read_text())

SLOW = ("chat", "advice")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in REFERENCES]
)
def test_results_are_those_of_before(name: str, tmp_path: Path) -> None:
    expected = EXPECTATIONS[name]
    actual = REFERENCES[name](tmp_path)
    assert actual.keys() == expected.keys()
    differing = {}
    for path, value in actual.items():
        if value != pytest.approx(expected[path], rel=1e-3, abs=1e-3, nan_ok=True):
            differing[path] = (expected[path], value)
    assert not [path for path in differing if "loss" in path], differing
    # Another processor rounds otherwise, and near ties, such as an image's first guess, may fall to the other side.
    assert len(differing) <= len(expected) // 50, differing


def test_times_are_no_references() -> None:
    for values in EXPECTATIONS.values():
        assert values
        assert not any("latency" in path or "/ms" in path for path in values)
    assert numbers("run", {"ms": 3.0, "loss": "0.5", "done": True}) == {"run/loss": 0.5, "run/done": 1.0}
