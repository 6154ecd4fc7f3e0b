"""Whole routed models on the kernels, in Triton's interpreter or on a GPU: what torch computes, gradients included."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import mmod
from mmod.blocks import host_class
from mmod.blocks.rows import FusedNorm
from tests.kit.zoo import make_images, make_model

MODELS = ["vit_tiny_patch16_224", "aimv2_large_patch14_224", "vit_base_patch16_xp_224", "vit_base_patch16_rpn_224"]
CONFIGS = {
    "attention": mmod.RoutingConfig(capacity=0.4),
    "linear": mmod.RoutingConfig(router=mmod.score("linear", init_std=0.3), capacity=0.4),
    "p-mod": mmod.preset("p-mod", capacity=0.4, blocks="every_other", router={"init_std": 0.1}),
    "context": mmod.RoutingConfig(capacity=0.4, context="all"),
    "threshold": mmod.RoutingConfig(router=mmod.score("linear", init_std=0.3), select=mmod.Threshold(max_tokens=9)),
}
# Relative and absolute errors between two paths in the same type.
TOLERANCES = {torch.float32: (1e-4, 1e-5), torch.float16: (1e-2, 1e-2), torch.bfloat16: (5e-2, 5e-2)}
PLACES = [
    pytest.param(device, dtype, marks=pytest.mark.gpu if device == "cuda" else ())
    for device, dtype in [("cpu", torch.float32), *(("cuda", dtype) for dtype in TOLERANCES)]
]


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions in fp32 on a GPU are rounded to fewer bits unless they are told not to be."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def entry_norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, FusedNorm)]


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(
    ("name", "config"), [*((name, "attention") for name in MODELS), *((MODELS[0], config) for config in CONFIGS)]
)
def test_kernels_give_the_model_that_torch_gives(name: str, config: str, device: str, dtype: torch.dtype) -> None:
    model = mmod.route_(make_model(name, depth=2), CONFIGS[config]).to(device, dtype)
    images = make_images(name, 2).to(device, dtype)
    parameters = [p for p in model.parameters() if p.requires_grad]
    results = []
    for backend in ("torch", "triton"):
        with mmod.ops.use(backend, "gather_rows", "gather_norm", "merge_rows", "select_topk"):
            out = model(images)
            gradients = torch.autograd.grad(out.float().square().mean(), parameters, allow_unused=True)
        results.append([out, *(g for g in gradients if g is not None)])
    for actual, expected in zip(*results, strict=True):
        rtol, atol = TOLERANCES[dtype]
        # Gradients of a parameter differ in size by orders of magnitude; the largest sets the scale.
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol * max(1.0, float(expected.abs().max())))


def test_the_first_norm_is_computed_while_rows_are_gathered() -> None:
    model = mmod.route_(make_model(MODELS[0], depth=2), CONFIGS["attention"])
    (norm,) = entry_norms(model)
    computed = []
    host = host_class(norm)
    assert isinstance(norm, host)
    original = host.forward
    try:
        host.forward = lambda self, x: computed.append(self) or original(self, x)
        for backend, times in (("torch", 1), ("triton", 0)):
            computed.clear()
            with torch.no_grad(), mmod.ops.use(backend, "gather_norm"):
                model(make_images(MODELS[0], 1))
            assert computed.count(norm) == times
    finally:
        host.forward = original


def test_converted_norms_leave_no_trace() -> None:
    for name in MODELS:
        model = make_model(name)
        classes, keys = [type(module) for module in model.modules()], list(model.state_dict())
        mmod.route_(model, mmod.RoutingConfig())
        assert bool(entry_norms(model)) == (name != "vit_base_patch16_rpn_224")
        assert list(model.state_dict()) == keys
        assert len(entry_norms(pickle.loads(pickle.dumps(copy.deepcopy(model))))) == len(entry_norms(model))
        mmod.unroute_(model)
        assert [type(module) for module in model.modules()] == classes
