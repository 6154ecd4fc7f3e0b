"""Audits of runs on conversations."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mmod.audits.choices import default_choices
from mmod.audits.result import Audit
from mmod.studies import commands
from mmod.studies.audit.config import AUDITS
from mmod.studies.audit.sets import roles_of
from mmod.training import fit
from tests.kit.chat_configs import vlm_config

QUICK = ["--audit.draws", "1", "--audit.resamples", "100"]
ROUTED = {"language": {"router": "linear", "capacity": 0.5, "blocks": [1, 2], "language": {"tokens": "image"}}}


def test_a_run_on_conversations_is_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(vlm_config(tmp_path, "run", routing=ROUTED, trainer={"max_steps": 1}), progress=False)
    capsys.readouterr()
    commands.audit([str(tmp_path / "run"), *QUICK, "--audit.questions", "12", "--audit.leave_one_out", "1"])
    record = json.loads((tmp_path / "run/audit/audit.json").read_text())
    audit = Audit.from_dict(record["audit"])
    assert capsys.readouterr().out.startswith(str(audit))
    assert audit.images == 12
    assert [row.name for row in audit.conditions] == [
        "as learned",
        *(name for name in default_choices(False) if name != "shuffled"),
    ]
    assert len(audit.across.decisions) == 2
    for known in audit.across.information.values():
        # None but image tokens may be skipped, so that they have one role.
        assert set(known) == {"position", "kind of question"}
        assert known["kind of question"].share.value == pytest.approx(0, abs=0.01)
    kinds = [row for row in audit.strata if row.group == "kind of question"]
    assert len(kinds) > 1
    assert "text" not in {row.name for row in kinds}
    assert audit.leave_one_out is not None
    with pytest.raises(ValueError, match="questions must be"):
        AUDITS["chat"].from_dict({**vlm_config(tmp_path).to_dict(), "audit": {"questions": 1}})


def test_tokens_of_a_conversation_have_roles() -> None:
    processor = SimpleNamespace(tokenizer=SimpleNamespace(all_special_ids=[0, 9]), image_token_id=9)
    batch = {"input_ids": torch.tensor([[9, 9, 5, 6, 0]]), "labels": torch.tensor([[-100, -100, -100, 6, 0]])}
    (names,) = roles_of(batch, processor)["role"].tolist()
    assert names == ["image", "image", "question", "answer", "answer"]
