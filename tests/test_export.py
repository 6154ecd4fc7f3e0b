"""Routed models compile without a graph break, export and run elsewhere, with what they compute in eager mode."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim

import mmod
from mmod import RoutingConfig
from mmod.lab import Experts
from tests.kit.zoo import make_model

ROUTINGS = {
    "attention": RoutingConfig(capacity=0.5),
    "linear": RoutingConfig(router=mmod.score("linear", init_std=0.3), capacity=0.3),
    "stride": RoutingConfig(router="stride", capacity=(0.5, 0.25), blocks="all"),
    "change": RoutingConfig(router="change", capacity=0.5),
    "distilled": mmod.preset("distilled", router={"init_std": 0.3}),
    "threshold": RoutingConfig(router="attention", select=mmod.Threshold(1.0, max_tokens=7)),
    "learned threshold": mmod.preset("modification", select={"max_tokens": 7}, router={"init_std": 0.3}),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def routed(routing: str) -> nn.Module:
    # What is traced grows with the depth, and so does the time it takes.
    return mmod.route_(make_model("vit_tiny_patch16_224", depth=2), ROUTINGS[routing])


def images(batch: int, size: int = 64) -> Tensor:
    return torch.randn(batch, 3, size, size)


# Graphs of thresholds are counted in the tests of compiled blocks.
def test_compiles_without_a_break_for_any_batch() -> None:
    model = routed("change")
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, dynamic=True, backend="eager")
    x = images(2)
    torch.testing.assert_close(compiled(x), model(x))
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch in (3, 5):
            x = images(batch)
            torch.testing.assert_close(compiled(x), model(x))


# A router that learns by a loss of its own is compiled with it below.
def test_compiled_training_has_the_gradients_of_eager() -> None:
    model = routed("learned threshold").train()
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    x = images(2)
    for step, original in ((compiled, model), (model, model)):
        loss = step(x).square().mean()
        if mmod.routing_config(original).losses:
            loss = loss + mmod.auxiliary_loss(twin if step is compiled else model)
        loss.backward()
    assert_same_gradients(twin, model)


@pytest.mark.parametrize(
    ("method", "depth"), [(ROUTINGS["distilled"], 2), (Experts(choice="tokens"), 1)], ids=["routing", "experts"]
)
def test_one_graph_keeps_the_losses_of_several_passes(method: Any, depth: int) -> None:
    model = mmod.apply_(make_model("vit_tiny_patch16_224", depth=depth), method).train()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend=counter)
    views = [images(2), images(2)]
    for step in (model, compiled):
        # A backward pass that goes without the loss.
        step(views[1]).square().mean().backward()
        step.zero_grad()
        loss = sum(step(x).square().mean() for x in views)
        (loss + mmod.auxiliary_loss(step)).backward()
    assert_same_gradients(compiled._orig_mod, model)
    assert counter.frame_count == 1
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(20):
            compiled(views[0])
    assert len([warning for warning in told if "were not collected" in str(warning.message)]) == 1
    assert counter.frame_count == 2


# A C++ compiler takes a second for each kernel: those of a block, without the host's MLP and the rest of its model. To
# find out which vectors this processor has, torch would compile three times as much.
@torch.no_grad()
@torch._inductor.config.patch({"cpp.vec_isa_ok": False})
def test_inductor_gives_the_same_output() -> None:
    block: Any = routed("linear").blocks[1]
    block.mlp = nn.Identity()
    x = torch.randn(2, 17, 64)
    torch.testing.assert_close(torch.compile(block, fullgraph=True)(x), block(x), atol=1e-5, rtol=1e-4)


# Thresholds of importance go to ONNX below. A strict export reads the code as a compiler without graph breaks does.
def test_exports_strictly_with_a_dynamic_batch() -> None:
    model = routed("learned threshold")
    sizes = {0: Dim("batch", min=1, max=64)}
    module = torch.export.export(model, (images(2),), dynamic_shapes=(sizes,), strict=True).module()
    for batch in (1, 2, 7):
        x = images(batch)
        torch.testing.assert_close(module(x), model(x))


# Positions are rotated, by angles that differ from block to block.
def test_exports_with_a_dynamic_batch_and_image_size() -> None:
    model = make_model("vit_small_patch16_rope_mixed_224", depth=2, dynamic_img_size=True)
    mmod.route_(model, RoutingConfig(capacity=0.3))
    sizes = {0: Dim("batch", min=1, max=64), 2: 16 * Dim("rows", min=2, max=20), 3: 16 * Dim("columns", min=2, max=20)}
    # Not strict: a traced image size would be pinned by code of timm.
    module = torch.export.export(model, (images(2, 96),), dynamic_shapes=(sizes,), strict=False).module()
    for x in (images(1, 64), torch.randn(3, 3, 32, 128)):
        torch.testing.assert_close(module(x), model(x))


def test_unbounded_threshold_cannot_be_exported() -> None:
    model = mmod.route_(make_model("vit_tiny_patch16_224"), RoutingConfig(select=mmod.Threshold(1.0)))
    with pytest.raises(Exception, match="max_tokens"):
        torch.export.export(model, (images(2),), strict=False)


# The best tokens are chosen there in the tests of open_clip's towers.
def test_onnx_runs_in_onnx_runtime(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = routed("threshold")
    file = str(tmp_path / "model.onnx")
    torch.onnx.export(
        model, (images(2),), file, dynamo=True, dynamic_shapes=({0: Dim("batch", min=1, max=64)},), verbose=False
    )
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    for batch in (1, 2, 5):
        x = images(batch)
        (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(out), model(x), atol=1e-4, rtol=1e-4)


def test_torchscript_is_refused() -> None:
    for routing in ("attention", "linear"):
        with pytest.raises(RuntimeError, match=r"scripted.* Use torch\.export"):
            torch.jit.script(routed(routing))


@pytest.mark.parametrize("routing", ["attention", "linear", "stride", "threshold"])
@pytest.mark.parametrize(
    "record", [torch.jit.trace, lambda *args: torch.onnx.export(*args, "model.onnx", dynamo=False)]
)
def test_what_records_one_input_is_refused(routing: str, record: Callable[..., object]) -> None:
    message = r"torch\.jit\.trace.* Use torch\.export, torch\.onnx\.export\(dynamo=True\)"
    model = routed(routing)
    with warnings.catch_warnings():
        # At once: nothing of the model has run, of which a trace would warn.
        warnings.simplefilter("error", torch.jit.TracerWarning)
        with pytest.raises(RuntimeError, match=message):
            record(model, images(2))


def assert_same_gradients(one: nn.Module, other: nn.Module, atol: float = 1e-5) -> None:
    theirs = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, theirs[name].grad, atol=atol, rtol=1e-3)
