from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmod.ops import routed_attention, use
from tests.ops.attention_oracle import attend_by_loops, by_the_map
from tests.ops.kernels import PLACES, assert_as_exact_as_torch, gradients, poisoned


def kept(images: int, tokens: int, slots: int) -> Tensor:
    return torch.rand(images, tokens).argsort(dim=1)[:, :slots].sort(dim=1).values


def by_definition(q: Tensor, k: Tensor, v: Tensor, index: Tensor, context: str, valid: Any, is_causal: bool) -> Tensor:
    images, tokens, slots = q.shape[0], q.shape[2], index.shape[1]
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    place = (index + torch.arange(images, device=index.device).unsqueeze(1) * tokens).flatten()
    out = attend_by_loops(
        by_the_map, *rows, [slots] * images, [slots if context == "kept" else tokens] * images,
        index_q=place, index_k=place if context == "kept" else None,
        valid=None if valid is None else valid.flatten(), is_causal=is_causal, scale=q.shape[-1] ** -0.5,
    )  # fmt: skip
    return out.unflatten(0, (images, slots)).transpose(1, 2)


@given(
    images=st.integers(1, 3),
    tokens=st.integers(1, 20),
    share=st.floats(0, 1),
    context=st.sampled_from(["kept", "all"]),
    grouped=st.booleans(),
    causal=st.booleans(),
    hidden=st.booleans(),
)
def test_kept_tokens_attend_by_the_definition(images, tokens, share, context, grouped, causal, hidden) -> None:
    slots = max(1, int(tokens * share))
    q = torch.randn(images, 4, tokens, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(images, 2 if grouped else 4, tokens, 8).double().requires_grad_() for _ in range(2))
    index = kept(images, tokens, slots)
    valid = torch.rand(images, slots if context == "kept" else tokens) < 0.5 if hidden else None
    found = routed_attention(q, k, v, index, context, valid=valid, is_causal=causal)
    expected = by_definition(q, k, v, index, context, valid, causal)
    for a, b in zip([found, *gradients(found, [q, k, v])], [expected, *gradients(expected, [q, k, v])]):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("tokens", "slots", "context", "causal", "hidden"),
    [
        (1, 1, "kept", False, False),
        (197, 98, "kept", False, False),
        (197, 24, "all", False, True),
        (60, 60, "kept", True, True),
        (60, 1, "all", True, False),
    ],
)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_the_kernel_is_as_exact_as_gathering(device, dtype, tokens, slots, context, causal, hidden) -> None:
    # Few bits, so that a gradient that is zero, as that of a single row, is so in every order of summation.
    values = [(torch.randn(2, heads, tokens, 16) * 4).round() / 4 for heads in (2, 1, 1)]
    index = kept(2, tokens, slots).to(device)
    count = slots if context == "kept" else tokens
    valid = (torch.rand(2, count) < 0.7).to(device) if hidden else None
    results = []
    for backend, wanted in (("triton", dtype), ("torch", dtype), ("torch", torch.float64)):
        rows = [x.to(device, wanted).requires_grad_() for x in values]
        with use(backend, "routed_attention"), poisoned():
            out = routed_attention(*rows, index, context, valid=valid, is_causal=causal)
            results.append([out, *gradients(out, rows)])
    for kernel, plain, exact in zip(*results, strict=True):
        assert_as_exact_as_torch(kernel, plain, exact)


def test_context_all_gives_the_rows_of_dense_attention() -> None:
    q, k, v = torch.randn(3, 2, 3, 11, 8).double()
    index = kept(2, 11, 4)
    dense = F.scaled_dot_product_attention(q, k, v)
    rows = dense.gather(2, index[:, None, :, None].expand(-1, 3, -1, 8))
    torch.testing.assert_close(routed_attention(q, k, v, index, "all"), rows)


def test_graphs_hold_it_whole_for_any_batch() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(routed_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for images in (2, 3):
        q, k, v = torch.randn(3, images, 2, 9, 16).requires_grad_()
        index = kept(images, 9, 4)
        out, expected = compiled(q, k, v, index), routed_attention(q, k, v, index)
        torch.testing.assert_close(out, expected)
        for a, b in zip(gradients(out, [q, k, v]), gradients(expected, [q, k, v]), strict=True):
            torch.testing.assert_close(a, b)


def test_an_unknown_context_names_the_known_ones() -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match="'kept', 'all', got 'some'"):
        routed_attention(q, q, q, torch.tensor([[0]]), "some")
