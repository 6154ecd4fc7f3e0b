"""The repository's folder `datasets` is no package, whoever is imported first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTHING = """
from transformers.utils import is_datasets_available
assert not is_datasets_available()
try:
    import datasets
except ModuleNotFoundError:
    print("missing")
"""
SOMETHING = "import datasets; print(datasets.__spec__.origin is None, datasets.mine.HERE)"


def run(imports: str, code: str, *places: Path) -> str:
    command = f"import sys; sys.path[:0] = {[str(place) for place in places]!r}; import {imports}\n{code}"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.parametrize("imports", ["mmod.adapters.transformers", "transformers.trainer, mmod.adapters.transformers"])
def test_without_the_package_it_is_missing(imports: str) -> None:
    assert run(imports, NOTHING, ROOT) == "missing"


@pytest.mark.parametrize("package", [True, False], ids=["a package", "a folder of the user's"])
def test_another_of_that_name_is_left_alone(package: bool, tmp_path: Path) -> None:
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "mine.py").write_text("HERE = True\n")
    if package:
        (tmp_path / "datasets" / "__init__.py").write_text("from datasets import mine\n")
    # A package is found wherever it stands on the path; a folder counts with others of its name.
    code = SOMETHING if package else "import datasets.mine; " + SOMETHING
    assert run("mmod.adapters.transformers", code, ROOT, tmp_path) == f"{not package} True"
