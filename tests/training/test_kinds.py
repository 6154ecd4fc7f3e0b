"""Kinds of training stand beside each other above the engine, in folders of the same files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mmod.training

ROOT = Path(mmod.training.__file__).parent
KINDS = ("image", "pairs", "chat", "text")


@pytest.mark.parametrize("folder", ["engine", *KINDS])
def test_a_kind_imports_the_engine_and_no_other_kind(folder: str) -> None:
    for path in (ROOT / folder).glob("*.py"):
        imported = set(re.findall(r"from mmod\.training\.(\w+)", path.read_text()))
        assert imported <= {"engine", folder}, path


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_the_files_that_the_package_names(kind: str) -> None:
    named = set(re.findall(r"- `(\w+\.py)`", mmod.training.__doc__ or ""))
    assert len(named) == 4
    missing = {name for name in named if not (ROOT / kind / name).is_file()}
    assert missing <= {"task.py"}
    assert not missing or (ROOT / kind / "trainer.py").is_file()
