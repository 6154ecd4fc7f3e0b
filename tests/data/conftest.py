from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def trap_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, in which a payload that is run leaves a file."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not (tmp_path / "executed").exists()
