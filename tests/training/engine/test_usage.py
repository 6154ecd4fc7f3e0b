"""Time, throughput and memory of a run are in its metrics and result, and go on where it was resumed."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path

import pytest

from mmod.opening.runs import list_checkpoints
from mmod.training.engine.checkpoint import load_checkpoint
from tests.kit.engine_worker import USAGE, run, tiny_config


def test_a_resumed_run_goes_on_with_the_sums(tmp_path: Path) -> None:
    config = tiny_config(output=tmp_path / "run", epochs=2)
    with pytest.raises(SystemExit):
        run(config, signals={7: signal.SIGTERM})
    stopped = load_checkpoint(list_checkpoints(tmp_path / "run/checkpoints")[0]).training["usage"]
    assert stopped["samples"] == 8 * 8
    assert stopped["cpu"] > 0
    result = run(config)
    rows = list(csv.DictReader((tmp_path / "run/metrics.csv").open()))
    figures = [{name: float(row[name]) for name in USAGE if row.get(name)} for row in rows]
    assert figures[1]["wall_seconds"] > stopped["wall"] * (1 - 1e-5) > figures[0]["wall_seconds"] * (1 - 1e-4)
    assert figures[1]["cpu_seconds"] > stopped["cpu"] * (1 - 1e-5)
    for last in (figures[1], result.usage, json.loads((tmp_path / "run/result.json").read_text())["usage"]):
        assert 0 <= last["data_wait"] < 1
        assert last["samples_per_second"] > 0
        assert last["peak_rss_mib"] > 10
        assert "peak_cuda_mib" not in last
    assert result.usage["wall_seconds"] >= figures[1]["wall_seconds"]
    # All 12 steps of both starts count.
    seconds = result.usage["wall_seconds"]
    assert 12 * 8 / result.usage["samples_per_second"] <= seconds
    assert run(config).usage == result.usage
