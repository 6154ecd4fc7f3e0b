"""Audits of runs on text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from mmod.audits.result import Audit
from mmod.report.sources import read_sources
from mmod.studies import commands
from mmod.studies.audit.config import AUDITS
from mmod.studies.audit.run import audit_run
from mmod.training import fit
from mmod.training.text.evaluate import evaluate_batch
from mmod.training.text.kind import create_dense
from tests.kit.text_configs import PREDICTOR, text_config

QUICK = ["--audit.draws", "1", "--audit.resamples", "100"]


def test_a_run_on_text_is_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(text_config(tmp_path / "dense", epochs=1), progress=False)
    start = {"checkpoint": str(tmp_path / "dense")}
    fit(text_config(tmp_path / "routed", epochs=1, model=start, routing=PREDICTOR), progress=False)
    capsys.readouterr()
    long = ["--audit.generation", "32", "--audit.texts", "3"]
    commands.audit([str(tmp_path / "routed"), *QUICK, "--audit.reference", str(tmp_path / "dense"), *long])
    record = json.loads((tmp_path / "routed/audit/audit.json").read_text())
    audit = Audit.from_dict(record["audit"])
    assert capsys.readouterr().out.startswith(str(audit))
    assert audit.images == 6
    (read,) = read_sources([tmp_path / "routed"]).audits
    assert read.generation is not None
    assert (read.generation.by, read.generation.texts, len(read.generation.stretches)) == ("predictor", 3, 2 * 2)
    assert str(read.generation) in (tmp_path / "routed/audit/audit.md").read_text()
    with pytest.raises(ValueError, match=r"generation must be a multiple of data\.length=32, got 33"):
        audit_run(AUDITS["text"].from_dict({**text_config(tmp_path).to_dict(), "audit": {"generation": 33}}))
    assert [row.name for row in audit.conditions[-2:]] == ["dense attention", "reference entropy"]
    for known in audit.across.information.values():
        assert set(known) == {"position", "role"}
        assert {"letter", "space", "end of line", "punctuation"} <= set(known["role"].kept)
    assert {row.group for row in audit.strata} == {"loss of the dense model"}
    with pytest.raises(ValueError, match="shifts change images"):
        commands.audit(
            [str(tmp_path / "routed"), *QUICK, "--audit.shifts", "[noise]", "--output", str(tmp_path / "other")]
        )


def test_windows_are_evaluated_one_by_one() -> None:
    model = create_dense(text_config(Path("run")).model).eval()
    tokens = torch.randint(256, (3, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        rows = evaluate_batch(model, (tokens[:, :-1], tokens[:, 1:]))
        loss_B, right_B = rows["loss"], rows["outcome"]
        for window, loss, right in zip(tokens, loss_B, right_B):
            logits = model(input_ids=window[None, :-1]).logits[0]
            assert float(loss) == pytest.approx(float(cross_entropy(logits.double(), window[1:])), rel=1e-5)
            assert float(right) == float((logits.argmax(-1) == window[1:]).double().mean())
