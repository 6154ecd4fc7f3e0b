from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import mmod
from tests.kit.zoo import make_images, make_model

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


@pytest.mark.parametrize(
    ("config", "most"),
    [
        (mmod.RoutingConfig(router="linear", blocks="late"), 23),
        (mmod.RoutingConfig(router="attention", blocks="late"), 37),
        (mmod.RoutingConfig(router="redundancy", skipped="merge", blocks="late"), 40),
    ],
    ids=["alone", "shared", "merged"],
)
@torch.no_grad()
def test_a_block_calls_few_functions(config: mmod.RoutingConfig, most: int) -> None:
    """At batch 1 each call is paid for; what a span shares is decided once."""
    model = mmod.route_(make_model("test_vit"), config)
    images = make_images("test_vit", 1)
    names: list[str] = []

    def enter(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(ROOT):
            names.append(frame.f_code.co_name)

    model(images)
    sys.setprofile(enter)
    try:
        model(images)
    finally:
        sys.setprofile(None)
    assert len(names) <= most * len(mmod.routed_blocks(model)), names
