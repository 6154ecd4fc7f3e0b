"""torch and torchvision of different builds: one line says what to install, and `test_imports.py` when commands do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mmod.io.builds import check_builds, explain_unloaded
from tests.kit.installed import install


@pytest.mark.parametrize(
    ("torch", "needs", "tries"),
    [
        ("torch-9.1", "torch==9.1", False),
        ("torch-9.1", "torch (==9.1)", False),
        ("torch-9.2", "torch==9.1", True),
        ("torch-9.1+cpu", "torch==9.1", True),
        ("torch-9.1", "", False),
    ],
)
def test_torchvision_is_imported_only_where_versions_differ(
    torch: str, needs: str, tries: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "", torch)
    install(tmp_path, "raise RuntimeError('operator torchvision::nms does not exist')\n", "torchvision-9.1", needs)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    if not tries:
        check_builds()
        return
    with pytest.raises(RuntimeError) as raised:
        check_builds()
    said = explain_unloaded(raised.value)
    _, _, number = torch.partition("-")
    assert f"torch {number} and torchvision 9.1 are of different builds" in said
    end = "/whl/cpu`, or where that index gives another pair, the same without --index-url"
    assert said.endswith(end if "+cpu" in torch else "torch torchvision`")
    assert explain_unloaded(RuntimeError("another")) == ""
