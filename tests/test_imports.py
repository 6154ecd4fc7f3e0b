"""What importing mmod loads and leaves alone, and what it says of packages that are missing, asked in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest

import mmod
from mmod.lazy import name_missing_extra
from tests.kit.installed import install
from tests.kit.scripts import ROOT

HEAVY = ("torch", "timm", "triton", "open_clip", "transformers", "matplotlib", "webdataset", "sklearn", "torchvision")
# What torchvision does when its compiled half did not load.
BROKEN = 'import torch\ntorch.library.register_fake("torchvision::nms")(lambda: 0)\n'
# How threads of OpenMP wait.
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
# Commands, and the package without which they end.
TOOLS = {
    "tools/train_clip.py configs/clip/scenes.yaml": "open_clip",
    "tools/tradeoff.py configs/tradeoff/clip-scenes.yaml": "open_clip",
    "tools/train_open_clip.py --image {}": "open_clip",
    "tools/finetune_vlm.py configs/vlm/tiny-llava.yaml": "transformers",
    "tools/tradeoff.py configs/tradeoff/vlm.yaml": "transformers",
}
ASKED = """
import importlib, importlib.machinery, json, os, runpy, sys, warnings
from types import SimpleNamespace
import mmod

asked = json.load(sys.stdin)
said = {"modules": sum(name.split(".")[0] == "mmod" for name in sys.modules)}
said["imported"] = [name for name in asked["heavy"] if name in sys.modules]
for name in mmod.__all__:
    getattr(mmod, name)
said["names"] = [name for name in asked["heavy"] if name in sys.modules]
said["builds"] = []
for number, command in enumerate(asked["commands"]):
    log = f"{asked['builds']}/{number}"
    if not os.fork():
        for stream in (1, 2):
            os.dup2(os.open(f"{log}.{stream}", os.O_WRONLY | os.O_CREAT), stream)
        sys.path.insert(0, asked["builds"])
        sys.argv[1:] = command.split()
        runpy.run_module("mmod", run_name="__main__", alter_sys=True)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.wait()[1])
    said["builds"].append([code, *(open(f"{log}.{stream}").read().splitlines() for stream in (1, 2))])
# As on Windows, in all that follows.
sys.modules["fcntl"] = None
with warnings.catch_warnings():
    # It says once what its locks are then.
    warnings.simplefilter("ignore")
    import filelock
from tests.kit.scripts import run_script

def run(command):
    ended = run_script(*command.split())
    return [ended.returncode, ended.stderr.strip()]

def error_of(do):
    try:
        return do()
    except ModuleNotFoundError as error:
        return str(error)

def without(package, do):
    sys.modules[package] = None
    answer = error_of(do)
    del sys.modules[package]
    return answer

def draw():
    importlib.import_module("mmod.analysis.style").new_figure(2, 2)

def read():
    importlib.import_module("mmod.data.readers.hf_datasets").open_dataset("hf-datasets:json:x.json", ())

# Torch was imported before, so that a policy would have no effect.
run("mmod/__main__.py configs")
said["waiting"] = list(map(os.environ.get, asked["waiting"]))
said["matplotlib"] = without("matplotlib", draw)
for package in ("yaml", "timm"):
    said[f"command without {package}"] = without(package, lambda: run("mmod/__main__.py tradeoff digits-smallest"))
said["kinds"] = without("timm", lambda: sorted(importlib.import_module("mmod.methods").METHODS))
said["timm"] = without("timm", lambda: importlib.import_module("mmod.training").EvalResult)
sys.modules.update(open_clip=None, transformers=None)
said["tools"] = list(map(run, asked["tools"]))

def find(name, *_):
    # In a folder of the package's name, and nowhere else.
    return importlib.machinery.PathFinder.find_spec(name, [asked["folder"]]) if name == "datasets" else None

sys.meta_path.insert(0, SimpleNamespace(find_spec=find))
said["datasets"] = error_of(read)
importlib.import_module("mmod.io.files").locked, importlib.import_module("mmod.training").fit
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what a process found that imports mmod before anything else."""
    folder = tmp_path_factory.mktemp("beside")
    (folder / "datasets").mkdir()
    (folder / "datasets/digits.py").touch()
    builds = tmp_path_factory.mktemp("builds")
    install(builds, BROKEN, "torchvision-0.26.0+other")
    environment = {name: value for name, value in os.environ.items() if name not in WAITING}
    asked = json.dumps(
        {
            "heavy": HEAVY,
            "waiting": WAITING,
            "tools": list(TOOLS),
            "folder": str(folder),
            "builds": str(builds),
            "commands": ["--version", "train image digits/dense"],
        }
    )
    command = [sys.executable, "-c", ASKED]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


def missing(package: str, extra: str) -> str:
    return f'this needs the package {package}, which is not installed: pip install "mmod[{extra}]"'


def test_importing_is_lean_and_names_need_no_host_library(said: dict[str, Any]) -> None:
    assert said["modules"] < 40
    assert said["imported"] == []
    assert said["names"] == ["torch"]
    assert said["waiting"] == [None] * 3


def test_a_missing_package_is_named_and_locks_need_nothing_of_unix(said: dict[str, Any]) -> None:
    for package in ("matplotlib", "timm"):
        assert said[package] == missing(package, "train")
    for package in ("yaml", "timm"):
        assert said[f"command without {package}"] == [1, f"error: {missing(package, 'train')}"]
    for package, (code, message) in zip(TOOLS.values(), said["tools"], strict=True):
        extra = "clip" if package == "open_clip" else "vlm"
        assert (code, message) == (1, f"error: {missing(package, extra)}")


def test_commands_say_in_one_line_which_build_of_torchvision_to_install(said: dict[str, Any]) -> None:
    codes, shown, errors = zip(*said["builds"], strict=True)
    assert codes == (1, 1)
    # Versions are told before torchvision is imported.
    (told,), none = shown
    assert told == f"mmod {mmod.__version__}, torch {version('torch')}, torchvision 0.26.0+other"
    assert none == []
    for (line,) in errors:
        assert line.startswith("error: torch ")
        assert "and torchvision 0.26.0+other are of different builds (operator torchvision::nms does not exist)" in line
        assert "`pip install --force-reinstall torch torchvision" in line


def test_configs_name_methods_without_the_library_of_their_models(said: dict[str, Any]) -> None:
    assert {"merge", "experts", "recursions", "channels"} < set(said["kinds"])


def test_a_folder_of_a_packages_name_is_not_the_package(said: dict[str, Any]) -> None:
    assert said["datasets"] == missing("datasets", "datasets")
    # A name that an installed package lacks is not a missing package.
    with pytest.raises(ImportError, match="cannot import name 'nothing' from 'yaml'"), name_missing_extra():
        exec("from yaml import nothing")
