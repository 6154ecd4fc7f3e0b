"""Whole routed models on a GPU as users get them: the same bits in any memory, compiled, and in CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mmod
from tests.kit.kernels import poisoned
from tests.kit.zoo import make_images, make_model

pytestmark = pytest.mark.gpu

NAME = "vit_tiny_patch16_224"
CONFIGS = {
    "attention": mmod.RoutingConfig(capacity=0.4),
    "linear": mmod.RoutingConfig(router=mmod.score("linear", init_std=0.3), capacity=0.4),
    "late": mmod.RoutingConfig(capacity=0.25, blocks="late"),
    "context": mmod.RoutingConfig(capacity=0.4, context="all"),
    "merge": mmod.preset("gradual", depth=4),
}
TYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def routed(config: str, dtype: torch.dtype) -> nn.Module:
    return mmod.route_(make_model(NAME), CONFIGS[config]).to("cuda", dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS)
@torch.no_grad()
def test_the_same_bits_come_out_twice_whatever_memory_held(config: str, dtype: torch.dtype) -> None:
    model, images = routed(config, dtype), make_images(NAME, 3).to("cuda", dtype)
    expected = model(images)
    assert expected.isfinite().all()
    with poisoned():
        actual = model(images)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS)
@torch.no_grad()
def test_a_graph_of_the_eager_model_serves_other_images(config: str, dtype: torch.dtype) -> None:
    model, images = routed(config, dtype), make_images(NAME, 3).to("cuda", dtype)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(images)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Fails if the model waits for the GPU anywhere.
    with torch.cuda.graph(graph):
        out = model(images)
    for seed in (2, 3):
        images.copy_(make_images(NAME, 3, seed=seed))
        graph.replay()
        assert torch.equal(out, model(images))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("config", ["attention", "linear"])
def test_compiled_models_compute_what_eager_ones_do(config: str, mode: str) -> None:
    torch.compiler.reset()
    model = routed(config, torch.float32)
    compiled = torch.compile(model, mode=mode, fullgraph=True)
    with torch.no_grad():
        for seed in (1, 2, 3):
            images = make_images(NAME, 3, seed=seed).cuda()
            torch.testing.assert_close(compiled(images).clone(), model(images), rtol=1e-4, atol=1e-4)
