"""Groups of tokens: the definitions against a loop, and kernels against the definitions, with gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmod.ops import add_updates, mean_rows, size_groups, use
from tests.kit.kernels import assert_as_exact_as_torch, everywhere, poisoned

# B, N, K, D
SHAPES = [(1, 1, 1, 1), (2, 40, 7, 24), (3, 70, 33, 130)]
OPS = ("size_groups", "mean_rows", "add_updates")


def cast(value: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    return value.to(device, dtype).requires_grad_()


def arguments(shape: tuple[int, int, int, int], joined: bool) -> tuple[Tensor, ...]:
    """Return rows as a view, slots, weights of rows, and updates."""
    images, tokens, slots, channels = shape
    x = torch.randn(images, channels, tokens).transpose(1, 2)
    slot = torch.randint(0 if joined else -1, slots, (images, tokens))
    if joined:
        slot[:, :slots] = torch.arange(slots)
    return x, slot, torch.randint(1, 5, (images, tokens)).float(), torch.randn(images, slots, channels)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_groups_are_what_a_loop_makes_of_them(shape: Any, joined: bool) -> None:
    x, slot, weight, update = (
        value.double() if value.is_floating_point() else value for value in arguments(shape, joined)
    )
    size, bias = size_groups(slot, shape[2], torch.float64)
    total = size_groups(slot, shape[2])[0].double()
    for image, group in torch.cartesian_prod(torch.arange(shape[0]), torch.arange(shape[2])).view(-1, 2).tolist():
        rows = slot[image] == group
        total[image, group] = weight[image, rows].sum()
        assert size[image, group] == rows.sum()
    torch.testing.assert_close(bias[:, 0, 0], size.clamp(min=1).double().log(), rtol=1e-6, atol=0)
    plain, weighted = (mean_rows(x, slot, n, w, all_join=joined) for n, w in ((size, None), (total, weight)))
    after = add_updates(x, update, slot, all_join=joined)
    for image, token in torch.cartesian_prod(torch.arange(shape[0]), torch.arange(shape[1])).view(-1, 2).tolist():
        group = int(slot[image, token])
        rows = slot[image] == group
        change = update[image, group] if group >= 0 else 0.0
        torch.testing.assert_close(after[image, token], x[image, token] + change)
        if group >= 0:
            torch.testing.assert_close(plain[image, group], x[image, rows].mean(dim=0))
            share = weight[image, rows] / weight[image, rows].sum()
            torch.testing.assert_close(weighted[image, group], share @ x[image, rows])
    assert not plain[size == 0].any()


@pytest.mark.parametrize(("device", "dtype", "shape", "weighted"), everywhere(SHAPES, [False, True]), ids=str)
def test_the_kernels_are_as_exact_as_torch(device: str, dtype: torch.dtype, shape: Any, weighted: bool) -> None:
    x, slot, weight, update = arguments(shape, joined=False)
    slot = slot.to(device)
    results: dict[str, list[Tensor]] = {}
    for name, kind in (("exact", torch.float64), ("torch", dtype), ("triton", dtype)):
        # Rounded once, so that all versions get the same numbers.
        rows, updates = (cast(value.to(dtype), device, kind) for value in (x, update))
        shares = weight.to(device) if weighted else None
        with use("triton" if name == "triton" else "torch", *OPS), poisoned():
            size, bias = size_groups(slot, shape[2], kind)
            mean = mean_rows(rows, slot, size * 2, shares)
            added = add_updates(rows, updates, slot)
        upstream = torch.linspace(-1, 1, mean.numel(), device=device, dtype=kind).view_as(mean)
        loss = (mean * upstream).sum() + added.square().sum()
        results[name] = [size, bias, mean, added, *torch.autograd.grad(loss, (rows, updates))]
        if device == "cuda":
            # Fused attention asks for rows at multiples of eight elements, and copies others.
            assert bias.stride(0) % 8 == bias.stride(2) % 8 == 0
    for kernel, plain, exact in zip(results["triton"], results["torch"], results["exact"]):
        assert_as_exact_as_torch(kernel, plain, exact)


def test_rows_of_no_group_leave_no_trace() -> None:
    x, slot = torch.tensor([[[1.0], [torch.inf], [torch.nan]]]), torch.tensor([[0, -1, -1]])
    for backend in ("torch", "triton"):
        with use(backend, *OPS):
            assert mean_rows(x, slot, torch.ones(1, 1)).tolist() == [[[1.0]]]
            updated = add_updates(x, torch.ones(1, 1, 1), slot)
            torch.testing.assert_close(updated, x + torch.tensor([[[1.0], [0.0], [0.0]]]), equal_nan=True)


def test_the_ops_transform_and_compile() -> None:
    x, slot, _, update = arguments(SHAPES[1], joined=True)

    def run(x: Tensor) -> Tensor:
        size, _ = size_groups(slot, SHAPES[1][2])
        mean = mean_rows(x, slot, size, all_join=True)
        return add_updates(x, update, slot, all_join=True).square().sum() + mean.square().sum()

    expected = torch.autograd.grad(run(x.requires_grad_()), x)[0]
    torch.testing.assert_close(torch.func.grad(run)(x), expected)
    torch.testing.assert_close(torch.compile(run, backend="aot_eager", fullgraph=True)(x), run(x))
    batch = torch.stack([x.detach(), 2 * x.detach()])
    torch.testing.assert_close(torch.vmap(run)(batch), torch.stack([run(value) for value in batch]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_mean_of_many_equal_rows_is_that_row_in_any_precision(dtype: torch.dtype) -> None:
    x = torch.rand(2, 1, 8).to(dtype).expand(-1, 1000, -1)
    slot = torch.zeros(2, 1000, dtype=torch.long)
    torch.testing.assert_close(mean_rows(x, slot, torch.full((2, 1), 1000.0)), x[:, :1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("all_join", [True, False])
def test_sizes_are_fp32_in_a_graph_under_any_default_dtype(dtype: torch.dtype, all_join: bool) -> None:
    slots = torch.tensor([[0, 0, 1, 2], [0, 1, 1, 1]])
    torch._dynamo.reset()
    compiled = torch.compile(lambda slots: size_groups(slots, 3, torch.float32, all_join=all_join), backend="aot_eager")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        sizes, bias = compiled(slots)
    finally:
        torch.set_default_dtype(before)
    assert sizes.dtype == bias.dtype == torch.float32
    assert sizes.tolist() == [[2, 1, 1], [1, 3, 0]]
