"""What lmms-eval does with the entry point before it loads a model."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from transformers import LlavaForConditionalGeneration

import mmod
from tests.kit.processes import run_processes
from tests.kit.vlm_zoo import LINEAR, make_joint


def load_by_the_entry_point(folder: Path, blocks: int) -> None:
    """Load a routed folder, in a process of its own, whose transformers the entry point changes."""
    (point,) = (point for point in entry_points(group="lmms_eval.models") if point.name == "mmod")
    assert point.load()() == []
    model = LlavaForConditionalGeneration.from_pretrained(folder)
    assert sum(name.endswith("router") for name, _ in model.named_modules()) == blocks


def test_the_entry_point_lets_transformers_load_routed_folders(tmp_path: Path) -> None:
    model = mmod.route_(make_joint("llava"), language=LINEAR)
    model.save_pretrained(tmp_path)
    log = tmp_path / "log"
    blocks = len(mmod.routed_blocks(model))
    assert run_processes(load_by_the_entry_point, tmp_path, blocks, log=log) == [0], log.read_text()
