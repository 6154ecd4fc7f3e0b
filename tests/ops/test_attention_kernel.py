from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tests.kit.attention_oracle import attend_by_loops, by_the_map, by_torch, starts
from tests.kit.kernels import DEVICES, PLACES, assert_as_exact_as_torch, everywhere, gradients, poisoned

pytest.importorskip("triton")
from mmod.ops.backend import register_flops
from mmod.ops.packed import attend_rows, attend_rows_backward


class Case(NamedTuple):
    """Rows of each sequence, and what else makes a difference."""

    lengths: list[int]
    heads: int = 1
    group: int = 1
    width: int = 16
    valid: bool = False
    causal: bool = False


CASES = {
    "one row": Case([1]),
    "common length": Case([197], width=32),
    "many rows": Case([150, 40]),
    "empty sequences": Case([0, 5, 0, 70, 1], heads=2, width=32),
    "nothing at all": Case([0, 0]),
    "grouped queries, odd width": Case([33, 20], heads=6, group=3, width=40),
    "wide heads": Case([9, 140], width=128),
    "causal": Case([150, 0, 5], heads=2, causal=True),
    "padding": Case([70, 9, 30], valid=True),
    "padding, causal": Case([7, 2, 80], heads=2, group=2, valid=True, causal=True),
}


# They are computed a second time, to the same bits.
TWICE = ("grouped queries, odd width", "padding, causal")


def inputs_of(case: Case) -> tuple[list[Tensor], dict[str, Any]]:
    """Return queries, keys and values as views of one projection, and the settings."""
    total, shared = sum(case.lengths), case.heads // case.group
    # Few bits, so that a gradient that is zero, as that of a single row, is so in every order of summation.
    projected = (torch.randn(total, case.heads + 2 * shared, case.width + 3) * 4).round()[..., 1:-2] / 4
    settings: dict[str, Any] = {"is_causal": case.causal}
    if case.valid:
        settings["valid"] = torch.rand(total) < 0.6
        settings["valid"][: case.lengths[0]] = False
    return list(projected.split([case.heads, shared, shared], dim=1)), settings


def attend(rows: list[Tensor], lengths: list[int], is_causal: bool = False, valid: Tensor | None = None) -> Tensor:
    return attend_rows(*rows, starts(lengths, str(rows[0].device)), max(lengths), valid, is_causal, 0.3)[0]


@pytest.mark.parametrize(("device", "dtype", "name"), everywhere(CASES), ids=str)
def test_kernels_are_as_exact_as_torch_in_poisoned_memory(device: str, dtype: torch.dtype, name: str) -> None:
    lengths = CASES[name].lengths
    values, settings = inputs_of(CASES[name])
    settings = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in settings.items()}
    results = []
    for kind in ("kernel", "torch", "exact"):
        precision = torch.float64 if kind == "exact" else dtype
        rows = [x.to(device, precision).requires_grad_() for x in values]
        if kind == "kernel":
            with poisoned():
                out = attend(rows, lengths, **settings)
                results.append([out, *gradients(out, rows)])
            if name in TWICE:
                again = attend(rows, lengths, **settings)
                for a, b in zip(results[0], [again, *gradients(again, rows)], strict=True):
                    assert torch.equal(a, b)
        else:
            out = attend_by_loops(by_torch if kind == "torch" else by_the_map, *rows, lengths, **settings)
            results.append([out, *gradients(out, rows)])
    for kernel, plain, exact in zip(*results, strict=True):
        assert_as_exact_as_torch(kernel, plain, exact)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_a_long_sequence_in_full(device: str, dtype: torch.dtype) -> None:
    values = [torch.randn(300, 1, 16).half() for _ in range(3)]
    actual = attend([x.to(device, dtype) for x in values], [300])
    plain, exact = (
        attend_by_loops(attention, *(x.to(device, precision) for x in values), [300])
        for attention, precision in ((by_torch, dtype), (by_the_map, torch.float64))
    )
    assert_as_exact_as_torch(actual, plain, exact)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_see_nothing_are_zero_and_so_are_their_gradients(device: str) -> None:
    q, k, v = (torch.randn(6, 1, 16, device=device, requires_grad=True) for _ in range(3))
    start, valid = starts([3, 3], device), torch.tensor([0, 0, 0, 1, 1, 0], dtype=torch.bool, device=device)
    out, lse = attend_rows(q, k, v, start, 3, valid, False, 0.3)
    assert not out[:3].any()
    assert bool((lse[:, :3] == -torch.inf).all())
    for gradient in gradients(out, [q, k, v]):
        assert not gradient[:3].any()
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("device", DEVICES)
def test_ops_keep_their_promises_to_torch(device: str) -> None:
    q, k, v = (torch.randn(9, heads, 16, device=device, requires_grad=True) for heads in (2, 1, 1))
    start = starts([4, 0, 5], device)
    arguments = (q, k, v, start, 5, torch.ones(9, dtype=torch.bool, device=device), True, 0.3)
    torch.library.opcheck(attend_rows, arguments)
    out, lse = attend_rows(*arguments)
    values = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    backward_arguments = [torch.randn_like(out), *values[:3], out.detach(), lse.detach(), *values[3:]]
    torch.library.opcheck(attend_rows_backward, backward_arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("device", DEVICES)
def test_flops_are_those_of_the_pairs(device: str) -> None:
    register_flops()
    q, k, v = (torch.randn(10, 2, 16, device=device, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        out = attend([q, k, v], [4, 0, 6])
    pairs = 2 * 16 * (4 * 4 + 6 * 6)
    assert counter.get_total_flops() == 4 * pairs
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == 10 * pairs
