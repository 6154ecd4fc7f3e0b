from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from mmod.ops import attention_importance, attention_with_importance, capture_importance


def full_map(q, k, mask=None, is_causal=False, scale=None) -> torch.Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    score = torch.einsum("bhqe,bhke->bhqk", q.double(), k.double()) * scale
    if is_causal:
        score = score.masked_fill(torch.ones(score.shape[-2:]).triu(1).bool(), -torch.inf)
    if mask is not None:
        score = score.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else score + mask
    return score.softmax(-1)


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
    found = attention_importance(q, k, is_causal=causal, chunk_elements=chunk)
    expected = full_map(q, k, is_causal=causal).mean((1, 2))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.sum(1), torch.ones(images))


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
    out, found = attention_with_importance(q, k, v, mask, valid_BN=valid)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)
    assert float(found[~valid].abs().max()) == 0
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
        weight = torch.randn_like(expected)
        found = torch.autograd.grad((out * weight).sum(), (q, k, v))
        for a, b in zip(found, torch.autograd.grad((expected * weight).sum(), (q, k, v)), strict=True):
            assert torch.equal(a, b)


def test_memory_grows_with_tokens_and_not_with_their_square() -> None:
    q = k = torch.randn(1, 2, 2048, 8)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        attention_importance(q, k, chunk_elements=1 << 16)
    assert largest <= 1 << 16


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
