from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

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


ALONE = mmod.RoutingConfig(router="linear", blocks="late", capacity=0.5)
SHARED = mmod.RoutingConfig(router="attention", blocks="late", capacity=0.5)
MERGED = mmod.RoutingConfig(router="redundancy", skipped="merge", blocks="late", capacity=0.5)
# Two decisions in four blocks; blocks on the rows of one decision select their arguments once.
HALVES = mmod.RoutingConfig(
    router="redundancy", skipped=mmod.Merged("mlp"), blocks=(0, 1, 2, 3), capacity=(0.8, 0.8, 0.8, 0.4)
)


@pytest.mark.parametrize(
    ("config", "most"),
    [(ALONE, 22), (SHARED, 35), (MERGED, 38), (HALVES, 65)],
    ids=["alone", "shared", "merged", "halves"],
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
    with profiled(enter):
        model(images)
    assert len(names) <= most * len(mmod.routed_blocks(model)), names


@torch.no_grad()
def test_a_block_of_a_mod_calls_20_functions_in_6_files() -> None:
    """What a reader follows, and what is paid for, from the tokens before a routed block to those behind it."""
    model = mmod.route_(make_model("vit_tiny_patch16_224", depth=6), mmod.preset("a-mod", depth=6))
    block = model.blocks[3]
    images = make_images("vit_tiny_patch16_224", 1)
    files: list[str] = []
    running: list[FrameType] = []

    def follow(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "return" and running == [frame]:
            running.clear()
        elif event == "call" and path.is_relative_to(ROOT):
            if not running and frame.f_locals.get("self") is block:
                running.append(frame)
            if running:
                files.append(str(path.relative_to(ROOT)))

    model(images)
    with profiled(follow):
        model(images)
    assert files[0] == "blocks/routed.py"
    assert len(files) <= 20, files
    assert len(set(files)) <= 6, set(files)


@contextmanager
def profiled(function: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Call a function at each call of Python's, and of C's from Python."""
    sys.setprofile(function)
    try:
        yield
    finally:
        sys.setprofile(None)


class FirstTokens(nn.Module):
    """Blocks on the first half of the tokens: what routing costs without a decision."""

    def __init__(self, blocks: nn.Sequential) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x_BND: Tensor) -> Tensor:
        half = x_BND.shape[1] // 2
        out_BND = x_BND.clone()
        out_BND[:, :half] = self.blocks(x_BND[:, :half])
        return out_BND


class Operations(TorchDispatchMode):
    """Counts operations of torch."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def count_calls(model: nn.Module, images: Tensor) -> tuple[int, int]:
    """Return how many operations of torch a pass runs, and how many calls Python makes."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    model(images)
    with Operations() as operations:
        model(images)
    with profiled(count):
        model(images)
    return operations.count, calls


@pytest.mark.parametrize(
    ("config", "most_operations", "most_calls"),
    [(ALONE, 21, 55), (SHARED, 2.5, 50), (MERGED, 8, 60)],
    ids=["alone", "shared", "merged"],
)
@torch.no_grad()
def test_a_decision_adds_few_operations(config: mmod.RoutingConfig, most_operations: float, most_calls: float) -> None:
    """At batch 1, operations between the host's kernels are waited for."""
    depth = 12
    late = mmod.route_(make_model("vit_tiny_patch16_224", depth=depth), config)
    free = make_model("vit_tiny_patch16_224", depth=depth)
    blocks = len(mmod.routed_blocks(late))
    free.blocks = nn.Sequential(*free.blocks[: depth - blocks], FirstTokens(free.blocks[depth - blocks :]))
    images = make_images("vit_tiny_patch16_224", 1)
    operations, calls = count_calls(late, images)
    free_operations, free_calls = count_calls(free, images)
    assert operations - free_operations <= most_operations * blocks
    assert calls - free_calls <= most_calls * blocks
