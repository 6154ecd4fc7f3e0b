from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import mmod
from mmod.ops import attention_with_importance, packed_attention, use
from tests.kit.kernels import PLACES, gradients
from tests.kit.zoo import make_images, make_model

LENGTHS = torch.tensor([0, 9], dtype=torch.int32)


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = (x[0].transpose(0, 1) for x in (q, k, v))
    return packed_attention(*rows, LENGTHS.to(q.device), 9).transpose(0, 1).unsqueeze(0)


OPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "attention_with_importance": lambda q, k, v: attention_with_importance(q, k, v)[0],
    "packed_attention": packed,
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_normed_queries_and_keys_are_cast_as_autocast_does(
    device: str, dtype: torch.dtype, backend: str, op: str
) -> None:
    if dtype == torch.float32:
        pytest.skip("autocast is for half precision")
    results = []
    for function in (OPS[op], F.scaled_dot_product_attention):
        torch.manual_seed(0)
        q, k = (torch.randn(1, 2, 9, 16, device=device, requires_grad=True) for _ in range(2))
        v = torch.randn(1, 2, 9, 16, device=device, dtype=dtype, requires_grad=True)
        with torch.autocast(device, dtype), use(backend, op):
            out = function(q, k, v)
        results.append([out, *gradients(out, [q, k, v])])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_types_that_differ_are_refused(op: str, backend: str) -> None:
    q = torch.randn(1, 2, 9, 16)
    with (
        use(backend, op),
        pytest.raises(ValueError, match=r"one dtype, got torch.float32, torch.float32 and torch.float16"),
    ):
        OPS[op](q, q, q.half())


@pytest.mark.parametrize("select", ["topk", "threshold"])
def test_models_with_normed_queries_train_under_autocast(select: str) -> None:
    name = "vit_tiny_patch16_224"
    config = mmod.RoutingConfig(select=mmod.Threshold(1.0) if select == "threshold" else select)
    model = mmod.route_(make_model(name, qk_norm=True, depth=2), config)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(make_images(name, 3))
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
