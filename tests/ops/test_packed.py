from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mmod.ops import attend_within, pack_rows, packed, packed_attention, use
from mmod.ops import backend as choice
from tests.kit.attention_oracle import attend_by_loops, by_the_map, starts
from tests.kit.kernels import DEVICES, assert_as_exact_as_torch, everywhere, gradients, poisoned


def rows_of(lengths: list[int], heads: int = 4, shared: int = 4, width: int = 8, **options: Any) -> list[Tensor]:
    return [torch.randn(sum(lengths), n, width, **options) for n in (heads, shared, shared)]


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5),
    grouped=st.booleans(),
    causal=st.booleans(),
    slack=st.integers(0, 3),
)
def test_images_attend_to_themselves_alone(lengths: list[int], grouped: bool, causal: bool, slack: int) -> None:
    rows = [x.requires_grad_() for x in rows_of(lengths, shared=2 if grouped else 4, dtype=torch.float64)]
    expected = attend_by_loops(by_the_map, *rows, lengths, is_causal=causal, scale=8**-0.5)
    expected_all = [expected, *gradients(expected, rows)]
    for worth in (1, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packed, "ROWS_WORTH_A_CALL", worth)
            actual = packed_attention(*rows, starts(lengths), max(lengths) + slack, is_causal=causal)
        for a, b in zip([actual, *gradients(actual, rows)], expected_all, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("device", "dtype", "case"),
    everywhere([([1], False), ([0, 30, 0, 3], False), ([50, 7], True), ([0, 0], False)]),
    ids=str,
)
def test_the_kernel_is_as_exact_as_torch(device: str, dtype: torch.dtype, case: tuple[list[int], bool]) -> None:
    lengths, causal = case
    # Few bits, so that a gradient that is zero, as that of a single row, is so in every order of summation.
    values = [(x * 4).round() / 4 for x in rows_of(lengths, 2, 1, 16)]
    results = []
    for backend, precision in (("triton", dtype), ("torch", dtype), ("torch", torch.float64)):
        rows = [x.to(device, precision).requires_grad_() for x in values]
        with use(backend, "packed_attention"), poisoned():
            out = packed_attention(*rows, starts(lengths, device), max(lengths), is_causal=causal)
            results.append([out, *gradients(out, rows)])
    for kernel, plain, exact in zip(*results, strict=True):
        assert_as_exact_as_torch(kernel, plain, exact)


@pytest.mark.parametrize("device", DEVICES)
def test_graphs_hold_it_whole_for_any_batch(device: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(packed_attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for backend, lengths in (("torch", [4, 0, 9]), ("torch", [30, 20, 9, 25]), ("triton", [3, 0, 7, 2])):
        with use(backend, "packed_attention"):
            rows = [x.requires_grad_() for x in rows_of(lengths, 2, 2, device=device)]
            # Both batches for torch, of few and of many rows an image, run in one graph.
            with torch._dynamo.config.patch(error_on_recompile=backend == "torch"):
                out = compiled(*rows, starts(lengths, device), max(lengths))
            expected = packed_attention(*rows, starts(lengths, device), max(lengths))
            torch.testing.assert_close(out, expected)
            for a, b in zip(gradients(out, rows), gradients(expected, rows), strict=True):
                torch.testing.assert_close(a, b)


def test_dropped_probabilities_are_dropped_in_every_image() -> None:
    lengths = [20, 30]
    q, k, v = rows_of(lengths)
    v = torch.ones_like(v)
    out = packed_attention(q, k, v, starts(lengths), 30, dropout=0.5)
    assert not torch.allclose(out, v)
    assert abs(float(out.mean()) - 1) < 0.1


@pytest.mark.parametrize("causal", [False, True])
def test_xformers_attends_alike_where_it_is_installed(causal: bool) -> None:
    lengths = [0, 20, 5]
    if choice._problem("xformers") is not None:
        with pytest.raises(ValueError, match=r"xformers is (not installed|installed but cannot be used)"):
            use("xformers", "packed_attention")
        return
    rows = rows_of(lengths)
    with use("xformers", "packed_attention"), pytest.raises(ValueError, match="CUDA"):
        packed_attention(*rows, starts(lengths), 20, is_causal=causal)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "xformers is not installed; torch can run it"),
        ("import a_missing_library", "xformers is installed but cannot be used: ModuleNotFoundError"),
        ("raise OSError('built for another torch')", "cannot be used: OSError: built for another torch; torch can"),
    ],
)
def test_xformers_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None, message: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "xformers"]:
        monkeypatch.delitem(sys.modules, name)
    if content is None:
        monkeypatch.setitem(sys.modules, "xformers", None)
    else:
        (tmp_path / "xformers").mkdir()
        (tmp_path / "xformers" / "__init__.py").write_text(content)
        monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(choice, "_problem", choice._problem.__wrapped__)
    with pytest.raises(ValueError, match=message):
        use("xformers", "packed_attention")


@given(counts=st.lists(st.integers(0, 6), min_size=1, max_size=4), extra=st.integers(0, 2))
def test_packing_names_every_valid_slot_once(counts: list[int], extra: int) -> None:
    slots, tokens = max(counts) + extra, 9
    index = torch.stack([torch.randperm(tokens)[:slots] for _ in counts])
    valid = torch.arange(slots) < torch.tensor(counts).unsqueeze(1)
    packing = pack_rows(index, valid, sum(counts), tokens)
    assert packing.row_T.tolist() == [
        image * tokens + int(index[image, slot]) for image, count in enumerate(counts) for slot in range(count)
    ]
    assert packing.cu_seqlens.dtype == torch.int32
    assert packing.cu_seqlens.diff().tolist() == counts
    image_T = packed.image_of_rows(packing.row_T, packing.cu_seqlens)
    assert image_T.tolist() == [image for image, count in enumerate(counts) for _ in range(count)]
    assert valid.flatten()[packing.slot_T].all()


def test_a_host_sees_one_sequence_and_images_stay_apart() -> None:
    lengths = [3, 0, 5]
    valid = torch.arange(5) < torch.tensor(lengths).unsqueeze(1)
    packing = pack_rows(torch.arange(5).expand(3, -1), valid, 8, 9)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in rows_of(lengths, dtype=torch.float64))
    with attend_within(packing) as attention:
        out = F.scaled_dot_product_attention(q, k, v)
        drawn = torch.ones(1, 8, 4).new_empty((1, 1, 1)).bernoulli_(0.5)
    assert attention.calls == 1
    alone = F.scaled_dot_product_attention(q[:, :, 3:], k[:, :, 3:], v[:, :, 3:])
    torch.testing.assert_close(out[:, :, 3:], alone)
    assert drawn.shape == (1, 8, 1)
    assert drawn[0, :3].unique().numel() == drawn[0, 3:].unique().numel() == 1
    mask = torch.ones(8, 8, dtype=torch.bool)
    with attend_within(packing), pytest.raises(RuntimeError, match="without a mask"):
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
