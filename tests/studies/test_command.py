"""What the commands of studies print."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmod.studies import commands
from mmod.studies.kind_configs import ImageStudyConfig
from mmod.studies.report import StudyResult
from tests.kit.image_study import DENSE


def test_a_study_does_not_repeat_what_the_one_before_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(name: str) -> list[str]:
        code = f"{name} in Python:\n\n```python\nimport mmod\n```"
        return [f"| model |\n|---|\n| {name} |", "Images: digits.", code]

    typed: list[str] = []
    results = [StudyResult(tmp_path, [], [], "", printed(name), 1.0) for name in ("a", "b")]
    config = ImageStudyConfig(
        output=str(tmp_path), dense={**DENSE}, routers={"mod": {"preset": "mod"}}, then={"output": "b"}, tune=False
    )
    monkeypatch.setattr(commands, "parse_config", lambda *_, **__: config)
    monkeypatch.setattr("mmod.studies.study.run_study", lambda _, command: typed.append(command) or results.pop(0))
    assert list(commands.tradeoff(["my-model", "--dense", "my run"])) == [tmp_path, tmp_path]
    # For the report, as it was typed.
    assert typed == ["mmod tradeoff my-model --dense 'my run'"] * 2
    first = ["", "| model |", "|---|", "| a |", "Images: digits.", "a in Python:", "import mmod"]
    second = ["", "| model |", "|---|", "| b |", "b in Python:", "import mmod"]
    assert capsys.readouterr().out.splitlines() == [*first, *second]
