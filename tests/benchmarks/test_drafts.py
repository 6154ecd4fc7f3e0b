"""Self-speculative decoding of a trained run: the same tokens, and figures that follow from those of each prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mmod.training import fit
from tests.kit.text_configs import PREDICTOR, text_config
from tools.benchmarks.command import main
from tools.benchmarks.drafts import DraftConfig, summarise
from tools.benchmarks.report import benchmark


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text") / "elastic"
    fit(text_config(folder, routing=PREDICTOR, elastic=True, epochs=1), progress=False)
    return folder


def options(run: Path, out: Path, **changes: Any) -> list[str]:
    fields = {"run": run, "out": out, "prompts": 2, "prompt_tokens": 8, "new_tokens": 6, "rounds": 1, **changes}
    return [word for name, value in fields.items() for word in (f"--{name}", str(value))]


def test_a_command_generates_the_same_with_drafts_of_any_length(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["drafts", *options(run, tmp_path, draft_tokens="[0, 1, 5]", dtype="float64")])
    assert capsys.readouterr().out.strip() == (tmp_path / "benchmark.md").read_text().strip()
    rows = json.loads((tmp_path / "benchmark.json").read_text())["rows"]
    assert [row["draft_tokens"] for row in rows] == [0, 1, 5]
    for row in rows:
        assert row["identical"] == row["prompts"] == len(row["reports"]) == 2
        drafted, accepted = (sum(report[name] for report in row["reports"]) for name in ("drafted", "accepted"))
        assert row["acceptance"] == pytest.approx(accepted / drafted)
        assert row["per_pass"] == pytest.approx(12 / sum(report["passes"] for report in row["reports"]))
    # A single token is drafted before each full pass.
    assert all(report["drafted"] <= report["passes"] for report in rows[1]["reports"])
    assert rows[1]["per_pass"] <= 2
    with pytest.raises(SystemExit):
        main(["drafts", *options(run, tmp_path / "none", draft_tokens="[2, 2]")])


def test_a_row_adds_the_prompts_up() -> None:
    names = ("new_tokens", "drafted", "accepted", "passes", "plain_seconds", "draft_seconds", "identical")
    reports = [dict(zip(names, values)) for values in ((10, 8, 6, 4, 2.0, 1.0, True), (10, 4, 0, 10, 1.0, 2.0, False))]
    row = summarise(4, reports)
    assert (row["identical"], row["acceptance"], row["per_pass"]) == (1, 0.5, 20 / 14)
    assert (row["plain_rate"], row["rate"], row["speedup"].median) == (20 / 3, 20 / 3, 1.25)


def test_what_has_not_learned_both_passes_is_refused(tmp_path: Path) -> None:
    fit(text_config(tmp_path / "run", epochs=1, epoch_steps=1), progress=False)
    with pytest.raises(ValueError, match="was not trained with elastic: true"):
        benchmark(DraftConfig(run=str(tmp_path / "run"), out=str(tmp_path / "out")), progress=False)
