"""Prefill and decoding are timed of right models only, and the cache's bytes are the kept share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mmod.config import PRESETS
from tools.benchmarks.checks import WrongOutputError
from tools.benchmarks.generation import GenerationConfig, GenerationModels
from tools.benchmarks.report import benchmark
from tools.benchmarks.suite import Criterion, SuiteConfig

TINY: dict[str, Any] = {
    "image_tokens": [24],
    "text_tokens": 8,
    "batch_sizes": [2],
    "hidden": 64,
    "layers": 6,
    "vocabulary": 50,
    "seconds": 0.0,
    "rounds": 2,
}


# Presets that decide for whole images, merge or restore tokens (no language model does), read pixels or videos, or are
# for training alone.
OTHERS = {"mindskip", "gradual", "ipcv", "evs", "pixelprune", "pixelprune-language", "tread"}


@pytest.mark.parametrize("name", sorted(set(PRESETS) - OTHERS))
def test_every_preset_passes_and_caches_what_it_keeps(name: str) -> None:
    models = GenerationModels(GenerationConfig(presets=[name], **TINY, train=True), 24, 2)
    models.check()
    with torch.no_grad():
        cached = models.cached(name)
        assert models.train_flop_speedup(name) > 1
    assert cached["cache_share"] == pytest.approx(cached["slots"] / 32)
    assert 0 < cached["cache_share"] < 1 < cached["flop_speedup"]


def test_a_report_names_every_cell(tmp_path: Path) -> None:
    sizes = {**TINY, "batch_sizes": [1, 2], "layers": 4}
    config = GenerationConfig(presets=["p-mod", "a-mod"], **sizes, train=True, out=str(tmp_path))
    report = benchmark(config, progress=False)
    rows = json.loads((tmp_path / "benchmark.json").read_text())["rows"]
    assert [(row["batch_size"], row["preset"]) for row in rows] == [(b, p) for b in (1, 2) for p in config.presets]
    assert all(row["of_flops"] == row["speedup"]["median"] / row["flop_speedup"] for row in rows)
    assert all(row["train_of_flops"] == row["train"]["median"] / row["train_flop_speedup"] for row in rows)
    assert report.markdown() == (tmp_path / "benchmark.md").read_text()
    threshold = Criterion(name="prefill", parts=["a"], column="of_flops", at_least=0.0, where={"preset": ["p-mod"]})
    assert threshold.check(rows)["rows"] == 2
    assert SuiteConfig(generation=[GenerationConfig(out="a")], thresholds=[threshold]).thresholds == [threshold]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("mmod.blocks.rows.write_kept", "against dense|pass"),
        ("mmod.adapters.transformers.layers.narrow_batch", "against dense|pass"),
    ],
)
def test_a_wrong_path_is_never_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str, message: str
) -> None:
    wrong = {"write_kept": lambda x, z, y, routing: x, "narrow_batch": lambda rows, index: rows[:, : index.shape[1]]}
    monkeypatch.setattr(target, wrong[target.rpartition(".")[2]])
    monkeypatch.setattr("mmod.analysis.timing._time_on_cpu", lambda *_: pytest.fail("timed"))
    with pytest.raises(WrongOutputError, match=message):
        benchmark(GenerationConfig(presets=["p-mod"], **TINY, out=str(tmp_path)), progress=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"presets": []}, "at least one"),
        ({"presets": ["nope"]}, "preset 'nope' is unknown; .*valid ones are 'a-mod', "),
        ({"hidden": 100}, "multiple of 64"),
        ({"text_tokens": 0}, "text_tokens must be an integer of at least 1"),
    ],
)
def test_wrong_use_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GenerationConfig(**changes)
