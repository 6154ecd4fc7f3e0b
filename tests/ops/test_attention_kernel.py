from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.ops.attention_oracle import attend_by_loops, by_the_map, by_torch, starts
from tests.ops.kernels import DEVICES, PLACES, assert_as_exact_as_torch, gradients, poisoned

pytest.importorskip("triton")
from mmod.ops.triton.attend import attend_rows, attend_rows_backward


class Case(NamedTuple):
    """Queries of each sequence; all its rows, where the index takes some; and what else makes a difference."""

    lengths: list[int]
    rows: list[int] | None = None
    heads: int = 1
    group: int = 1
    width: int = 16
    keys_too: bool = False
    valid: bool = False
    causal: bool = False


CASES = {
    "one row": Case([1]),
    "common length": Case([197], width=32, heads=2),
    "many keys": Case([20], rows=[1000]),
    "many rows": Case([130, 40], rows=[577, 40], keys_too=True),
    "empty sequences": Case([0, 5, 0, 70, 1], heads=2, width=32),
    "nothing at all": Case([0, 0]),
    "grouped queries, odd width": Case([33, 20], heads=6, group=3, width=40),
    "wide heads": Case([9, 140], width=128),
    "causal": Case([150, 0, 5], heads=2, causal=True),
    "padding": Case([70, 9, 30], valid=True),
    "rows by index": Case([7, 1, 30], rows=[20, 20, 60], heads=2, keys_too=True),
    "rows by index, empty slots": Case([7, 7, 7], rows=[20, 20, 20], keys_too=True, valid=True),
    "kept rows see all": Case([7, 1, 30], rows=[20, 0, 80], heads=2, group=2),
    "kept rows see all before them": Case([7, 2, 30], rows=[20, 20, 80], causal=True),
    "kept rows see each other, before them": Case([7, 2, 30], rows=[20, 20, 80], keys_too=True, causal=True),
}


def inputs_of(case: Case) -> tuple[list[Tensor], dict[str, Any], list[int], list[int]]:
    """Return queries, keys and values as views of one projection; the settings; and the lengths of both sides."""
    lengths, rows = case.lengths, case.rows
    if rows is not None:
        # An index names rows of its own sequence, so one without rows has none to name.
        lengths = [min(pair) for pair in zip(lengths, rows)]
    total = sum(rows or lengths)
    shared = case.heads // case.group
    # Few bits, so that a gradient that is zero, as that of a single row, is so in every order of summation.
    projected = (torch.randn(total, case.heads + 2 * shared, case.width + 3) * 4).round()[..., 1:-2] / 4
    q, k, v = projected.split([case.heads, shared, shared], dim=1)
    settings: dict[str, Any] = {"is_causal": case.causal}
    lengths_k = lengths
    if rows is not None:
        firsts = [0, *accumulate(rows)]
        settings["index_q"] = torch.cat(
            [torch.randperm(n)[:kept].sort().values + first for n, kept, first in zip(rows, lengths, firsts)]
        )
        if case.keys_too:
            settings["index_k"] = settings["index_q"]
        else:
            lengths_k = rows
    if case.valid:
        settings["valid"] = torch.rand(sum(lengths_k)) < 0.6
        settings["valid"][: lengths_k[0]] = False
    return [q, k, v], settings, lengths, lengths_k


def attend(rows: list[Tensor], settings: dict[str, Any], lengths: list[int], lengths_k: list[int]) -> Tensor:
    device = str(rows[0].device)
    tensors = [settings.get(name) for name in ("index_q", "index_k", "valid")]
    return attend_rows(
        *rows, starts(lengths, device), starts(lengths_k, device), max(lengths), max(lengths_k), *tensors,
        settings["is_causal"], 0.3,
    )[0]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_kernels_are_as_exact_as_torch_in_poisoned_memory(device: str, dtype: torch.dtype, name: str) -> None:
    values, settings, lengths, lengths_k = inputs_of(CASES[name])
    settings = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in settings.items()}
    results = []
    for kind in ("kernel", "torch", "exact"):
        wanted = torch.float64 if kind == "exact" else dtype
        rows = [x.to(device, wanted).requires_grad_() for x in values]
        if kind == "kernel":
            with poisoned():
                out = attend(rows, settings, lengths, lengths_k)
                results.append([out, *gradients(out, rows)])
        else:
            out = attend_by_loops(by_torch if kind == "torch" else by_the_map, *rows, lengths, lengths_k, **settings)
            results.append([out, *gradients(out, rows)])
    for kernel, plain, exact in zip(*results, strict=True):
        assert_as_exact_as_torch(kernel, plain, exact)


@pytest.mark.parametrize("name", ["grouped queries, odd width", "rows by index, empty slots"])
@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_twice_gives_the_same_bits(device: str, dtype: torch.dtype, name: str) -> None:
    values, settings, lengths, lengths_k = inputs_of(CASES[name])
    settings = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in settings.items()}
    rows = [x.to(device, dtype).requires_grad_() for x in values]
    once, again = (attend(rows, settings, lengths, lengths_k) for _ in range(2))
    for a, b in zip([once, *gradients(once, rows)], [again, *gradients(again, rows)], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_a_long_sequence_in_full(device: str, dtype: torch.dtype) -> None:
    values = [torch.randn(577, 1, 16).half() for _ in range(3)]
    found = attend([x.to(device, dtype) for x in values], {"is_causal": False}, [577], [577])
    plain, exact = (
        attend_by_loops(attention, *(x.to(device, wanted) for x in values), [577], [577])
        for attention, wanted in ((by_torch, dtype), (by_the_map, torch.float64))
    )
    assert_as_exact_as_torch(found, plain, exact)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_see_nothing_are_zero_and_so_are_their_gradients(device: str) -> None:
    q, k, v = (torch.randn(6, 1, 16, device=device, requires_grad=True) for _ in range(3))
    start, valid = starts([3, 3], device), torch.tensor([0, 0, 0, 1, 1, 0], dtype=torch.bool, device=device)
    out, lse = attend_rows(q, k, v, start, start, 3, 3, None, None, valid, False, 0.3)
    assert not out[:3].any()
    assert bool((lse[:, :3] == -torch.inf).all())
    for gradient in gradients(out, [q, k, v]):
        assert not gradient[:3].any()
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("device", DEVICES)
def test_ops_keep_their_promises_to_torch(device: str) -> None:
    q, k, v = (torch.randn(9, heads, 16, device=device, requires_grad=True) for heads in (2, 1, 1))
    start = starts([4, 0, 5], device)
    index, valid = torch.tensor([0, 2, 3, 8], device=device), torch.ones(9, dtype=torch.bool, device=device)
    arguments = (q, k, v, starts([2, 0, 2], device), start, 2, 5, index, None, valid, True, 0.3)
    torch.library.opcheck(attend_rows, arguments)
    out, lse = attend_rows(*arguments)
    values = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    given = [torch.randn_like(out), *values[:3], out.detach(), lse.detach(), *values[3:]]
    torch.library.opcheck(attend_rows_backward, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("device", DEVICES)
def test_flops_are_those_of_the_pairs(device: str) -> None:
    lengths, lengths_k = [4, 0, 6], [4, 0, 6]
    q, k, v = (torch.randn(10, 2, 16, device=device, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        out = attend([q, k, v], {"is_causal": False}, lengths, lengths_k)
    pairs = 2 * 16 * (4 * 4 + 6 * 6)
    assert counter.get_total_flops() == 4 * pairs
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 10 * pairs
