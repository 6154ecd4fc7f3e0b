"""The programs and the notebook in examples/ run and print what they promise."""

from __future__ import annotations

import ast
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mmod.config import registry
from tests.kit.oracle import max_min_order
from tests.kit.pages import FENCE
from tests.kit.scripts import run_script

EXAMPLES = Path(__file__).parents[1] / "examples"
PRINTED = {
    "route_timm_vit.py": ["'blocks.5': 0.5", "of the dense FLOPs", "maps: routing_maps.png"],
    "look_inside.py": ["blocks.5 keeps half", "maps of (10, 10): inside.png"],
    "route_clip_towers.py": ["capacity 0.25: ", "for a caption", "similarity of images and captions"],
    "generate_with_small_cache.py": ["of the cache", "routed: True | same words: True"],
    "train_dit.py": ["skip blocks.2 blocks.3\n", "of the dense FLOPs", "blocks in evaluation: Block"],
}
SCORES = {"important_diversity.py": ["kept by important_diversity: {'blocks.1': 0.49"]}
NOTEBOOK = ["stride     0.54 of the dense FLOPs", "equal: True", "loss "]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PRINTED)
    assert {path.name for path in EXAMPLES.glob("scores/*.py")} == set(SCORES)


@pytest.mark.parametrize("name", PRINTED)
def test_programs_run(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    printed = capsys.readouterr().out
    assert all(text in printed for text in PRINTED[name]), printed
    if name == "route_timm_vit.py":
        assert Path("routing_maps.png").stat().st_size > 1000


@pytest.mark.parametrize("name", SCORES)
def test_scores_are_named_by_configs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_score(name)
    printed = capsys.readouterr().out
    assert all(text in printed for text in SCORES[name]), printed


def run_score(name: str) -> dict[str, Any]:
    """Run the file of a score, which registers it, and return its names."""
    names = runpy.run_path(str(EXAMPLES / "scores" / name), run_name="__main__")
    # Other tests list the scores of mmod.
    del registry.SCORES._entries[Path(name).stem], registry.SCORES._places[Path(name).stem]
    return names


def test_important_tokens_that_are_far_apart_come_first() -> None:
    make = run_score("important_diversity.py")["ImportantDiversityScore"]
    x, importance = torch.randn(2, 16, 6), torch.rand(2, 16)
    valid = torch.arange(16) < torch.tensor([[16], [14]])
    score = make(prefix=1)(x, valid, importance)
    assert (score[:, 0] == 2).all()
    for sample, real in enumerate((16, 14)):
        order = max_min_order(x[sample, 1:real], importance[sample, 1:real])
        for count in (1, 2, 7):
            assert set(score[sample, 1:real].topk(count).indices.tolist()) == set(order[:count])
        assert (score[sample, real:] == -1).all()


def test_the_first_notebook_is_the_page_whose_code_runs() -> None:
    assert run_script("scripts/notebook.py", "--check").returncode == 0
    page = (EXAMPLES.parent / "docs/get_started.md").read_text()
    cells = json.loads((EXAMPLES / "get_started.ipynb").read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    # The code of the page runs in `tests/test_docs.py`.
    assert code == [body.strip() for language, body in FENCE.findall(page) if language == "python"]
    text = "".join(line for cell in cells if cell["cell_type"] == "markdown" for line in cell["source"])
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text)]
    assert links
    assert all((EXAMPLES / link).exists() for link in links)


def test_notebooks_show_what_they_print_and_draw() -> None:
    shown: dict[str, list[str]] = {}
    for path in EXAMPLES.glob("*.ipynb"):
        outputs = [output for cell in json.loads(path.read_text())["cells"] for output in cell.get("outputs", [])]
        assert all(output.get("name") != "stderr" and output["output_type"] != "error" for output in outputs)
        shown[path.stem] = [kind for output in outputs for kind in output.get("data", {"text": ""})]
        assert path.stat().st_size < 500_000
    assert "image/png" in shown["choosing_a_router"]
    assert "text" in shown["get_started"]


def test_the_notebook_runs_cell_by_cell(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((EXAMPLES / "choosing_a_router.ipynb").read_text())["cells"]
    scope: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile(ast.parse("".join(cell["source"])), cell["id"], "exec"), scope)
    printed = capsys.readouterr().out
    assert all(text in printed for text in NOTEBOOK), printed
