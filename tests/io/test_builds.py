"""torch and torchvision of different builds: one line says what to install, where a command or a user meets it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mmod
from mmod.io.builds import check_builds, explain_unloaded
from tests.kit.scripts import ROOT

# What torchvision does when its compiled half did not load.
BROKEN = 'import torch\ntorch.library.register_fake("torchvision::nms")(lambda: 0)\n'


def installed(folder: Path, package: str, name: str, needs: str = "") -> None:
    described = folder / f"{name}.dist-info"
    described.mkdir()
    title, _, number = name.partition("-")
    lines = ["Metadata-Version: 2.1", f"Name: {title}", f"Version: {number}"]
    (described / "METADATA").write_text("\n".join([*lines, *([f"Requires-Dist: {needs}"] if needs else []), ""]))
    (folder / title).mkdir()
    (folder / title / "__init__.py").write_text(package)


# Each command in a process of its own, which need not import torch once more.
RUN = """
import os, runpy, sys
import torch

for command in sys.argv[1:]:
    if not os.fork():
        sys.argv[1:] = command.split()
        runpy.run_module("mmod", run_name="__main__", alter_sys=True)
        os._exit(0)
    print("exit code", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_commands_say_in_one_line_what_to_install(tmp_path: Path) -> None:
    installed(tmp_path, BROKEN, "torchvision-0.26.0+other")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", RUN, "--version", "train image digits/dense"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    # Versions are told before torchvision is imported.
    assert ended.stdout.splitlines() == [f"mmod {mmod.__version__}", "exit code 1", "exit code 1"], ended.stderr
    lines = ended.stderr.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("error: torch ")
        assert "and torchvision 0.26.0+other are of different builds (operator torchvision::nms does not exist)" in line
        assert "`pip install --force-reinstall torch torchvision" in line


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
    installed(tmp_path, "", torch)
    installed(tmp_path, "raise RuntimeError('operator torchvision::nms does not exist')\n", "torchvision-9.1", needs)
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
