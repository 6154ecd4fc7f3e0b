from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import mmod
from tests.kit.zoo import make_model

ROOT = Path(mmod.__file__).parent


def test_a_token_walks_through_few_files() -> None:
    """A reader who follows the tokens through a routed block seldom comes back to a file that he left."""
    model = mmod.route_(make_model("test_vit"), mmod.RoutingConfig(router="linear", capacity=0.5, blocks=(1,)))
    block, x = model.blocks[1], torch.randn(1, 17, 64)
    files: list[str] = []

    def enter(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and [str(path)] != files[-1:]:
            files.append(str(path))

    previous = sys.gettrace()
    with torch.no_grad():
        block(x)
        sys.settrace(enter)
        try:
            block(x)
        finally:
            sys.settrace(previous)
    assert str(ROOT / "ops" / "rows.py") in files
    assert len(files) - len(set(files)) <= 6, files
