from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmod.ops import attention_importance, attention_with_importance, capture_importance, tiles, use
from tests.kit.attention_oracle import full_map
from tests.kit.cover import cover
from tests.kit.kernels import DEVICES


def per_viewer(q, k, sees, valid) -> torch.Tensor:
    """Loop over keys in float64: the mean over the queries that see a key, each times the number of keys it sees."""
    images, heads, tokens, _ = q.shape
    sees = sees.expand(images, heads, tokens, tokens)
    attention = full_map(q, k, sees)
    importance = torch.zeros(images, tokens, dtype=torch.float64)
    for image in range(images):
        for key in range(tokens):
            for head in range(heads):
                viewers = [i for i in range(tokens) if sees[image, head, i, key] and valid[image, i]]
                rows = [float(attention[image, head, i, key] * sees[image, head, i].sum()) for i in viewers]
                importance[image, key] += sum(rows) / max(len(viewers), 1) / heads / int(valid[image].sum())
    return importance


def pairs(kind: str, images: int, heads: int, tokens: int, valid: torch.Tensor) -> torch.Tensor:
    causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]
    if kind == "padded":
        return causal & valid[:, None, None, :] | torch.eye(tokens, dtype=torch.bool)
    if kind == "window":
        return causal & ~torch.ones(tokens, tokens, dtype=torch.bool).tril(-3)
    if kind == "heads":
        return causal & (torch.rand(images, heads, tokens, tokens) > 0.3) | torch.eye(tokens, dtype=torch.bool)
    return causal


@given(
    images=st.integers(1, 2),
    heads=st.sampled_from([1, 2]),
    tokens=st.sampled_from([1, 5, 9]),
    kind=st.sampled_from(["causal", "padded", "window", "heads"]),
    bias=st.booleans(),
    chunk=st.sampled_from([1, 40, 1 << 20]),
    way=st.sampled_from(["fused", "written out"]),
)
def test_importance_per_viewer_is_the_loop_over_keys(images, heads, tokens, kind, bias, chunk, way) -> None:
    q, k, v = torch.randn(3, images, heads, tokens, 8)
    valid = torch.arange(tokens) < torch.tensor([tokens, max(1, tokens - 2)])[:images, None]
    valid = valid if kind == "padded" else torch.ones_like(valid)
    sees = pairs(kind, images, heads, tokens, valid)
    mask = torch.zeros(sees.shape).masked_fill(~sees, torch.finfo(torch.float32).min) if bias else sees
    expected = per_viewer(q, k, sees, valid)
    given_valid = valid if kind == "padded" else None
    if way == "fused":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiles, "CHUNK_ELEMENTS", chunk)
            importance = attention_importance(q, k, mask, valid_BN=given_valid, per_viewer=True)
    else:
        with capture_importance(given_valid, "per_viewer") as captured:
            score = q @ k.transpose(-2, -1) * 8**-0.5
            score = score + mask if bias else score.masked_fill(~mask, -torch.inf)
            _ = score.softmax(dim=-1) @ v
        importance = captured.importance_BN
    torch.testing.assert_close(importance.double(), expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("place", "grouped", "padded"), cover(["torch", "triton", "compiled"], [False, True], [False, True])
)
@pytest.mark.parametrize("device", DEVICES)
def test_every_way_of_causal_attention_counts_viewers(device: str, place: str, grouped: bool, padded: bool) -> None:
    q, k, v = (torch.randn(2, 1 if grouped and i else 2, 40, 16, device=device) for i in range(3))
    valid = torch.arange(40, device=device) < torch.tensor([[40], [31]], device=device)
    sees = torch.ones(40, 40, dtype=torch.bool).tril()[None, None]
    expected = per_viewer(q.cpu(), k.cpu(), sees, valid.cpu() if padded else torch.ones(2, 40, dtype=torch.bool))

    def run() -> torch.Tensor:
        return attention_with_importance(q, k, v, is_causal=True, valid_BN=valid if padded else None, per_viewer=True)[
            1
        ]

    if place == "compiled":
        torch._dynamo.reset()
        importance = torch.compile(run, fullgraph=True, backend="aot_eager")()
    else:
        with use(place, "attention_with_importance"):
            importance = run()
    counted = valid.cpu() if padded else torch.ones(2, 40, dtype=torch.bool)
    torch.testing.assert_close(importance.cpu().double()[counted], expected[counted], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("bias", [False, True])
def test_attention_spread_evenly_ranks_nobody(bias: bool) -> None:
    q = k = torch.zeros(2, 3, 17, 8)
    mask = torch.zeros(17, 17).masked_fill(torch.ones(17, 17).triu(1).bool(), -torch.inf) if bias else None
    importance = attention_importance(q, k, mask, is_causal=not bias, per_viewer=True)
    torch.testing.assert_close(importance, torch.full((2, 17), 1 / 17))


@pytest.mark.parametrize("mask", [None, "keys", "bias"])
def test_where_all_see_the_same_it_is_the_plain_mean(mask: str | None) -> None:
    q, k = torch.randn(2, 2, 3, 9, 8)
    valid = torch.arange(9) < torch.tensor([[9], [5]])
    masks = {None: None, "keys": valid[:, None, None, :], "bias": torch.randn(1, 3, 9, 9)}
    given_valid = valid if mask == "keys" else None
    plain = attention_importance(q, k, masks[mask], valid_BN=given_valid)
    torch.testing.assert_close(attention_importance(q, k, masks[mask], valid_BN=given_valid, per_viewer=True), plain)
