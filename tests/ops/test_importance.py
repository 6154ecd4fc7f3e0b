from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.backends.common import aot_autograd
from torch.utils.flop_counter import FlopCounterMode

from mmod.analysis.memory import ActivationMemory
from mmod.ops import attention_importance, attention_with_importance, capture_importance, shared_map, tiles, use
from mmod.ops import importance as importance_module
from mmod.ops.backend import register_flops
from tests.kit.attention_oracle import full_map
from tests.kit.cover import in_turn
from tests.kit.kernels import DEVICES, assert_as_exact_as_torch, everywhere, gradients, poisoned


@given(
    images=st.integers(1, 3),
    heads=st.sampled_from([1, 2, 6]),
    tokens=st.sampled_from([1, 2, 7, 33]),
    chunk=st.sampled_from([1, 50, 1000, 1 << 20]),
    grouped=st.booleans(),
    causal=st.booleans(),
)
def test_importance_is_the_column_mean_of_the_map(images, heads, tokens, chunk, grouped, causal) -> None:
    q = torch.randn(images, heads, tokens, 16)
    k = torch.randn(images, 1 if grouped else heads, tokens, 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "CHUNK_ELEMENTS", chunk)
        importance = attention_importance(q, k, is_causal=causal)
    expected = full_map(q, k, is_causal=causal).mean((1, 2))
    torch.testing.assert_close(importance.double(), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(importance.sum(1), torch.ones(images))


@pytest.mark.parametrize("kind", ["bool", "bias", "keys"])
def test_masks_and_padding(kind: str) -> None:
    q, k, v = torch.randn(3, 2, 3, 9, 16)
    valid = torch.arange(9) < torch.tensor([[9], [5]])
    mask = {
        "bool": (valid[:, None, :, None] & valid[:, None, None, :]) | torch.eye(9, dtype=torch.bool),
        "bias": torch.randn(2, 1, 9, 9).masked_fill(~valid[:, None, None, :], -1e30),
        "keys": valid[:, None, None, :],
    }[kind]
    attention = full_map(q, k, mask)
    expected = (attention * valid[:, None, :, None]).sum((1, 2)) / (3 * valid.sum(1, keepdim=True))
    out, importance = attention_with_importance(q, k, v, mask, valid_BN=valid)
    torch.testing.assert_close(importance.double(), expected, rtol=1e-5, atol=1e-7)
    assert float(importance[~valid].abs().max()) == 0
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("grad", [False, True])
def test_output_is_that_of_fused_attention_with_its_gradient(dtype: torch.dtype, grad: bool) -> None:
    q, k, v = (torch.randn(2, 3, 17, 16, dtype=dtype, requires_grad=grad) for _ in range(3))
    out, importance = attention_with_importance(q, k, v)
    expected = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    assert not importance.requires_grad
    assert importance.dtype == torch.promote_types(dtype, torch.float32)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(
        importance.double(), full_map(q, k).mean((1, 2)), rtol=tolerance, atol=1e-7, check_dtype=False
    )
    if grad:
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        reference = gradients(F.scaled_dot_product_attention(*exact), exact)
        for rows in zip(gradients(out, [q, k, v]), gradients(expected, [q, k, v]), reference, strict=True):
            assert_as_exact_as_torch(*rows)


@pytest.mark.parametrize("elements", [1, 40, 200, 700, 1 << 20])
def test_pieces_of_any_size_give_the_same(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(3, 17, 3, 2, 16).permute(2, 0, 3, 1, 4).requires_grad_().unbind(0)
    monkeypatch.setattr(tiles, "CHUNK_ELEMENTS", elements)
    with poisoned():
        out, importance = attention_with_importance(q, k, v)
        with torch.no_grad():
            again, same = attention_with_importance(q, k, v)
    expected = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, expected)
    assert out.stride() == expected.stride()
    torch.testing.assert_close(importance.double(), full_map(q, k).mean((1, 2)), rtol=1e-5, atol=1e-7)
    assert torch.equal(out, again)
    assert torch.equal(importance, same)
    for a, b in zip(gradients(out, [q, k, v]), gradients(expected, [q, k, v]), strict=True):
        torch.testing.assert_close(a, b)


# Tokens, grouped queries, causal, padding, width of heads.
CASES = [
    (1, False, False, False, 32),
    (197, False, False, False, 64),
    (150, False, False, False, 16),
    (70, True, True, False, 40),
    (70, True, False, True, 128),
    (70, False, True, True, 16),
]


@pytest.mark.parametrize(("device", "dtype", "case"), everywhere(CASES), ids=str)
def test_the_kernels_are_as_exact_as_torch(device, dtype, case) -> None:
    tokens, grouped, causal, padding, width = case
    values = [
        (torch.randn(2 if tokens < 100 else 1, heads, tokens, width) * 4).round() / 4
        for heads in ((2, 1, 1) if grouped else (2, 2, 2) if tokens < 100 else (1, 1, 1))
    ]
    valid = torch.arange(tokens, device=device) < torch.tensor([[tokens], [tokens - 20]], device=device)
    mask = valid[:, None, None, :] if padding and not causal else None
    results = []
    for backend, precision in (("triton", dtype), ("torch", dtype), ("torch", torch.float64)):
        rows = [x.to(device, precision).requires_grad_() for x in values]
        with use(backend, "attention_with_importance"), poisoned():
            out, importance = attention_with_importance(
                *rows, mask, is_causal=causal, valid_BN=valid if padding else None
            )
            results.append([importance, out, *(gradients(out, rows) if tokens < 100 else [])])
    assert not results[0][0].requires_grad
    for kernel, plain, exact in zip(*results, strict=True):
        assert_as_exact_as_torch(kernel, plain, exact)


@pytest.mark.parametrize("device", DEVICES)
def test_the_kernels_give_the_same_bits_twice(device: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 16, device=device)
    with use("triton", "attention_with_importance"):
        once, again = attention_with_importance(q, k, v), attention_with_importance(q, k, v)
    assert torch.equal(once[0], again[0])
    assert torch.equal(once[1], again[1])


def test_what_kernels_would_compute_wrongly_is_refused_by_them() -> None:
    q, k, v = torch.randn(3, 1, 1, 4, 16)
    pairs = torch.zeros(4, 4)
    # Nothing else about them is refused.
    with use("triton", "attention_with_importance"):
        attention_with_importance(q, k, v)
    for keys, values, mask in ((k, v, pairs), (k[:, :, :3], v[:, :, :3], None), (k, v[..., :8], None)):
        expected = torch.nn.functional.scaled_dot_product_attention(q, keys, values, mask)
        torch.testing.assert_close(attention_with_importance(q, keys, values, mask)[0], expected)
        with use("triton", "attention_with_importance"), pytest.raises(ValueError, match="it needs head_dim <= 128"):
            attention_with_importance(q, keys, values, mask)


@pytest.mark.parametrize("grad", [False, True])
def test_memory_grows_with_tokens_and_not_with_their_square(grad: bool) -> None:
    # The map would take 96 MiB.
    q, k, v = (torch.randn(1, 6, 2049, 8, requires_grad=grad) for _ in range(3))
    mask = torch.ones(1, 1, 1, 2049, dtype=torch.bool)
    for mask_or_none in (None, mask):
        with ActivationMemory([q, k, v, mask]) as memory:
            attention_with_importance(q, k, v, mask_or_none)
        assert memory.peak < 64 << 20


@pytest.mark.parametrize(("kind", "grad"), in_turn(["plain", "causal", "grouped", "mask"], [True, False]))
def test_graphs_hold_no_map_and_serve_any_batch(kind: str, grad: bool) -> None:
    torch._dynamo.reset()
    largest = 0

    def watch(graph: torch.fx.GraphModule, examples: list[torch.Tensor]) -> torch.fx.GraphModule:
        nonlocal largest
        for node in graph.graph.nodes:
            for value in torch.utils._pytree.tree_leaves(node.meta.get("val")):
                if isinstance(value, torch.Tensor):
                    # To ask a symbol for its number would fix it; each stands for the batch.
                    largest = max(largest, math.prod(n if isinstance(n, int) else 2 for n in value.shape))
        return graph

    def run(q, k, v, mask):
        return attention_with_importance(q, k, v, mask, is_causal=kind == "causal")

    compiled = torch.compile(run, fullgraph=True, backend=aot_autograd(fw_compiler=watch, bw_compiler=watch))
    for images in (2, 3):
        q, k, v = (
            torch.randn(images, 1 if kind == "grouped" and i else 2, 50, 4, requires_grad=grad) for i in range(3)
        )
        mask = torch.ones(images, 1, 1, 50, dtype=torch.bool) if kind == "mask" else None
        for x in (q, k, v, *([] if mask is None else [mask])):
            torch._dynamo.mark_dynamic(x, 0)
        with torch._dynamo.config.patch(error_on_recompile=True):
            actual, expected = compiled(q, k, v, mask), run(q, k, v, mask)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b)
        if grad:
            for a, b in zip(gradients(actual[0], [q, k, v]), gradients(expected[0], [q, k, v]), strict=True):
                torch.testing.assert_close(a, b)
    assert 0 < largest < 2 * 2 * 50 * 50


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("tokens", "heads_of_keys"), [(1, 2), (128, 2), (300, 1)])
def test_a_causal_map_is_taken_in_pieces_below_the_diagonal(tokens: int, heads_of_keys: int, grad: bool) -> None:
    q, k, v = (torch.randn(2, heads, tokens, 4).requires_grad_(grad) for heads in (2, heads_of_keys, heads_of_keys))
    out, importance = attention_with_importance(q, k, v, is_causal=True)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads_of_keys == 1)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(importance, full_map(q.detach(), k.detach(), is_causal=True).mean((1, 2)).float())
    if grad:
        for a, b in zip(gradients(out, [q, k, v]), gradients(expected, [q, k, v]), strict=True):
            torch.testing.assert_close(a, b)


def test_ops_keep_their_promises_to_torch() -> None:
    q, k, v = torch.randn(3, 2, 2, 5, 4).requires_grad_()
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    for keeps_lse in (False, True):
        rows = [x if keeps_lse else x.detach() for x in (q, k, v)]
        torch.library.opcheck(shared_map.shared_attention, (*rows, 0.5, keeps_lse, not keeps_lse, None))
        torch.library.opcheck(shared_map.shared_attention, (*rows, 0.5, keeps_lse, keeps_lse, torch.arange(5.0)))
    arguments = (q.detach(), k.detach(), mask, True, 0.5, mask[:, 0, 0], None, None)
    torch.library.opcheck(importance_module.received_attention, arguments)


def test_flops_of_graphs_are_those_of_the_eager_calls() -> None:
    register_flops()
    q, k, v = torch.randn(3, 1, 2, 10, 4)
    for op, arguments, products in (
        (shared_map.shared_attention, (q, k, v, 0.5, False, False, None), 2),
        (importance_module.received_attention, (q, k, None, False, 0.5, None, None, None), 1),
    ):
        with FlopCounterMode(display=False) as counter:
            op(*arguments)
        assert counter.get_total_flops() == products * 2 * 2 * 10 * 10 * 4


def test_written_out_attention_is_read_at_its_softmax() -> None:
    q, k, v = torch.randn(3, 2, 2, 6, 8)
    captured = capture_importance()
    with captured:
        _ = (q @ k.transpose(-2, -1) * 8**-0.5).softmax(dim=-1) @ v
        _ = F.scaled_dot_product_attention(q, k, v)
    assert captured.calls == 2
    torch.testing.assert_close(captured.importance_BN.double(), full_map(q, k).mean((1, 2)), rtol=1e-5, atol=1e-7)


def test_nothing_is_left_behind() -> None:
    q = torch.randn(1, 1, 4, 8)
    with capture_importance() as captured:
        pass
    F.scaled_dot_product_attention(q, q, q)
    assert captured.importance_BN is None
