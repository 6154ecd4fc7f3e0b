"""Modules under the names they had one version before."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

MOVED = {
    "mmod.adapters.timm_models": "mmod.registry.timm",
    "mmod.adapters.open_clip_models": "mmod.registry.open_clip",
    "mmod.measuring": "mmod.analysis",
}


@pytest.mark.parametrize("old", MOVED)
def test_old_names_are_the_new_modules(old: str) -> None:
    new = MOVED[old]
    sys.modules.pop(old, None)
    with pytest.warns(DeprecationWarning, match=f"this module is {new}") as warned:
        exec(f"import {old}; from {old} import *", {})
    assert warned[0].filename == "<string>"
    assert sys.modules[old] is importlib.import_module(new)


def test_the_launcher_of_scripts_of_timm_has_its_old_name(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, timm; print(timm.is_model('test_vit_mod'), sys.argv[1:])\n")
    command = [sys.executable, "-m", "mmod.adapters.timm_models", str(script), "--model", "x"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True ['--model', 'x']"
