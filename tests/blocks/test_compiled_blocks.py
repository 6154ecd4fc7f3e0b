"""Graphs are shared: by blocks that are compiled one by one, and by batches that keep other numbers of tokens."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

import mmod
from tests.kit.zoo import make_images, make_model

NAME = "vit_tiny_patch16_224"
CONSECUTIVE = (1, 2, 3)
# A dense block has one graph; routed ones have one each for the first, the last and those between in their spans.
GRAPHS: list[tuple[str, tuple[int, ...], dict[str, Any], int]] = [
    ("attention", CONSECUTIVE, {}, 4),
    # As many as there are capacities, since a graph holds its number of rows, and one for the same rows again.
    ("redundancy", CONSECUTIVE, {"skipped": mmod.Merged(before="mlp"), "capacity": (0.8, 0.8, 0.6)}, 4),
]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    y = checkpoint(model, make_images(NAME, 2), use_reentrant=False)
    y.square().sum().backward()
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize(("router", "blocks", "fields", "graphs"), GRAPHS)
def test_compiled_blocks_share_graphs(router: str, blocks: tuple[int, ...], fields: Any, graphs: int) -> None:
    """Under gradient checkpointing of the whole model, too, which fails where graphs are recompiled or given up."""
    torch._dynamo.reset()
    config = mmod.RoutingConfig(router=router, blocks=blocks, **{"capacity": 0.4, **fields})
    model = mmod.route_(make_model(NAME, depth=blocks[-1] + 1), config).train()
    expected = gradients(model)
    model.zero_grad()
    compiler = CompileCounter()
    for block in model.blocks:
        block.compile(backend=compiler, dynamic=False)
    actual = gradients(model)
    assert compiler.frame_count == graphs
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_compiled_blocks_pass_rows_on_in_evaluation() -> None:
    torch._dynamo.reset()
    config = mmod.RoutingConfig(capacity=0.4, blocks=(1, 2))
    model, images = mmod.route_(make_model(NAME, depth=3), config), make_images(NAME, 2)
    expected = model(images)
    rows: list[int] = []

    def count_rows(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        rows.append(min(x.shape[1] for x in inputs if isinstance(x, torch.Tensor) and x.ndim == 3))
        return graph.forward

    for block in model.blocks:
        block.compile(backend=count_rows)
    # The second call takes the graphs of the first.
    for _ in range(2):
        torch.testing.assert_close(model(images), expected)
    assert rows == [17, 17, 6]


SCORE = mmod.score("linear", init_std=0.3)
THRESHOLDS = {
    # Three ways through a block, side by side in one model.
    "learned": mmod.RoutingConfig(
        router=SCORE,
        select=mmod.Threshold(0.5),
        blocks=(0, 1, 2),
        context=("kept", "all", "kept"),
        operator=("block", "block", "mlp"),
    ),
    "images": mmod.preset("mindskip", router={"name": "linear", "per": "sequence", "init_std": 5.0}, blocks=(0,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", THRESHOLDS)
@torch.no_grad()
def test_a_threshold_has_as_many_graphs_as_the_dense_model(name: str) -> None:
    """Numbers of kept tokens differ from batch to batch; the number of graphs does not grow with them."""
    config = THRESHOLDS[name]
    model = make_model(NAME, depth=config.blocks[-1] + 1, dynamic_img_size=True)
    graphs, slots = graphs_of(mmod.route_(model, config))
    assert slots
    assert graphs == graphs_of_the_dense_model()


@functools.cache
def graphs_of_the_dense_model() -> int:
    # However many blocks there are, a graph holds all of them.
    graphs, slots = graphs_of(make_model(NAME, depth=1, dynamic_img_size=True))
    assert not slots
    return graphs


def graphs_of(model: nn.Module) -> tuple[int, list[str]]:
    """Run compiled batches of several sizes; return the number of graphs, and what is said of slots for tokens."""
    # A graph of fixed numbers, then one for batches of another size, however many images they have.
    batches = [make_images(NAME, 2), torch.randn(3, 3, 80, 80), torch.randn(5, 3, 80, 80)]
    torch._dynamo.reset()
    compiler = CompileCounter()
    # A changed model looks at its first eager call once; between compiled calls, that would be one graph more.
    model(batches[0])
    run = torch.compile(model, backend=compiler, fullgraph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for images in batches:
            torch.testing.assert_close(run(images), model(images), rtol=1e-4, atol=1e-5)
    messages = [str(warning.message) for warning in caught]
    return compiler.frame_count, [message for message in messages if "gives every token a slot" in message]
