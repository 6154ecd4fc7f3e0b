"""What lmms-eval does with the entry point before it loads a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mmod
from tests.adapters.vlm_zoo import LINEAR, make_joint

CODE = """
import sys
from importlib.metadata import entry_points
points = [point for point in entry_points(group="lmms_eval.models") if point.name == "mmod"]
print(len(points), points[0].load()())
from transformers import LlavaForConditionalGeneration
model = LlavaForConditionalGeneration.from_pretrained(sys.argv[1])
print(sum(name.endswith("router") for name, _ in model.named_modules()))
"""


def test_the_entry_point_lets_transformers_load_routed_folders(tmp_path: Path) -> None:
    model = mmod.route_(make_joint("llava"), language=LINEAR)
    model.save_pretrained(tmp_path)
    done = subprocess.run([sys.executable, "-c", CODE, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout.split() == ["1", "[]", str(len(mmod.routed_blocks(model)))], done.stderr
