from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmod import ops
from mmod.ops import nearest_rows, redundancy_scores, regroup_rows, signed_sums, spread_evenly, tiles, unit_rows, use
from mmod.ops.hashing import random_scores
from tests.kit.cover import cover, in_turn
from tests.kit.kernels import DEVICES, assert_as_exact_as_torch, everywhere, poisoned

# B, N, E, prefix: one token, odd sizes, several tiles of a kernel, the lengths of common models.
SHAPES = [(1, 1, 3, 0), (2, 7, 5, 1), (3, 33, 48, 2), (1, 197, 64, 1), (1, 130, 100, 0)]


def rows_of(shape: tuple[int, int, int, int], device: str = "cpu") -> Tensor:
    """Return rows some of which are copies, as a view whose rows do not lie in order."""
    images, tokens, channels, _ = shape
    x = torch.randn(images, channels, tokens).transpose(1, 2)
    return x[:, torch.randint(0, max(1, tokens - tokens // 4), (tokens,))].to(device)


def valid_of(shape: tuple[int, int, int, int]) -> Tensor:
    valid = torch.rand(shape[0], shape[1]) < 0.7
    valid[:, : shape[3] + 1] = True
    return valid


def defined_scores(x: Tensor, prefix: int, valid: Tensor | None) -> Tensor:
    """Return the scores by a loop over pairs, in float64."""
    unit = torch.nn.functional.normalize(x.double(), dim=-1)
    score = torch.full(x.shape[:2], 2.0, dtype=torch.float64)
    for image in range(len(x)):
        counted = [n for n in range(prefix, x.shape[1]) if valid is None or valid[image, n]]
        order = spread_evenly(len(counted), torch.device("cpu"))
        for i, token in enumerate(counted):
            before = [other for j, other in enumerate(counted) if order[j] > order[i]]
            if before:
                score[image, token] = 1 - (unit[image, before] @ unit[image, token]).max()
    return score


TILES = cover([tiles.CHUNK_ELEMENTS, 64], SHAPES, [False, True])


@pytest.mark.parametrize(("elements", "shape", "padded"), TILES, ids=str)
def test_scores_are_those_of_a_loop_whatever_the_tile(
    monkeypatch: pytest.MonkeyPatch, shape: Any, padded: bool, elements: int
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(tiles, "CHUNK_ELEMENTS", elements)
    x, valid = rows_of(shape), valid_of(shape) if padded else None
    score, exact = redundancy_scores(unit_rows(x), shape[3], valid), defined_scores(x, shape[3], valid)
    counted = torch.ones(shape[:2], dtype=torch.bool) if valid is None else valid
    torch.testing.assert_close(score[counted].double(), exact[counted], atol=1e-6, rtol=0)


@pytest.mark.parametrize(("elements", "shape", "padded"), TILES, ids=str)
def test_rows_join_the_kept_row_most_like_them(
    monkeypatch: pytest.MonkeyPatch, shape: Any, padded: bool, elements: int
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(tiles, "CHUNK_ELEMENTS", elements)
    images, tokens, _, prefix = shape
    x, slots = unit_rows(rows_of(shape)), max(prefix + 1, tokens // 2)
    row, valid = kept_of(shape, slots)
    slot = nearest_rows(x, row, prefix, valid if padded else None)
    if not padded:
        # Rows that are known to be in no slot are compared alone, whatever their order.
        is_other = torch.ones(images, tokens, dtype=torch.bool).scatter(1, row, False)
        other = is_other.nonzero()[:, 1].view(images, -1).flip(1)
        assert torch.equal(nearest_rows(x, row, prefix, other_BR=other), slot)
    for image in range(images):
        open_slots = [k for k in range(prefix, slots) if not padded or valid[image, k]]
        alike = x[image].double() @ x[image, row[image, open_slots]].double().T
        for token in range(tokens):
            held = [k for k in range(slots) if row[image, k] == token and (not padded or valid[image, k])]
            if held:
                assert slot[image, token] == held[0]
            elif not open_slots:
                assert slot[image, token] == -1
            else:
                chosen = open_slots.index(int(slot[image, token]))
                assert alike[token, chosen] >= alike[token].max() - 1e-6


def kept_of(shape: tuple[int, int, int, int], slots: int) -> tuple[Tensor, Tensor]:
    """Return kept rows, the prefix first, and which slots are valid; an image may have no valid slot."""
    images, tokens, _, prefix = shape
    row = torch.stack([torch.randperm(tokens - prefix)[: slots - prefix].sort().values + prefix for _ in range(images)])
    row = torch.cat([torch.arange(prefix).expand(images, -1), row], dim=1)
    valid = torch.arange(slots) < torch.randint(0, slots + 1, (images, 1))
    return row, valid


@pytest.mark.parametrize(("device", "dtype", "shape", "channels"), everywhere(SHAPES, [None, 3, 48]), ids=str)
def test_the_kernel_of_unit_rows_is_as_exact_as_torch(
    device: str, dtype: torch.dtype, shape: Any, channels: int | None
) -> None:
    x = rows_of(shape, device).to(dtype)
    results = {}
    for backend in ("torch", "triton"):
        with use(backend, "unit_rows"), poisoned():
            results[backend] = unit_rows(x, channels)
    projection = signed_sums(torch.eye(shape[2], device=device)[None], channels)[0]
    sums = x.double() @ projection.double()
    assert_as_exact_as_torch(results["triton"], results["torch"], torch.nn.functional.normalize(sums, dim=-1))


@pytest.mark.parametrize(("shape", "padded"), in_turn(SHAPES, [False, True]), ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_scores_as_the_definition(device: str, shape: Any, padded: bool) -> None:
    x, valid = unit_rows(rows_of(shape, device)), valid_of(shape).to(device) if padded else None
    results = {}
    for backend in ("torch", "triton"):
        with use(backend, "redundancy_scores"), poisoned():
            results[backend] = redundancy_scores(x, shape[3], valid)
    torch.testing.assert_close(results["triton"], results["torch"], atol=1e-6, rtol=0)


@pytest.mark.parametrize(("shape", "padded"), in_turn(SHAPES, [True, False]), ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_joins_as_the_definition(device: str, shape: Any, padded: bool) -> None:
    row, valid = (value.to(device) for value in kept_of(shape, max(shape[3] + 1, shape[1] // 2)))
    # Products of small whole numbers are exact, so that ties are too.
    x = torch.randint(-2, 3, shape[:3], device=device).float()
    results = []
    for backend in ("torch", "triton"):
        with use(backend, "nearest_rows"), poisoned():
            results.append(nearest_rows(x, row, shape[3], valid if padded else None))
    assert torch.equal(*results)


@pytest.mark.parametrize(("device", "dtype", "channels", "padded"), everywhere([3, 8, 20], [False, True]), ids=str)
def test_the_kernel_draws_the_same_numbers(device: str, dtype: torch.dtype, channels: int, padded: bool) -> None:
    torch.manual_seed(channels)
    x, valid = torch.randn(5, 300, channels), torch.rand(5, 300) < 0.6
    results = []
    for backend in ("torch", "triton"):
        with use(backend, "random_scores"), poisoned():
            results.append(
                random_scores(
                    x.to(device, dtype), torch.tensor(2**32 - 5, device=device), valid.to(device) if padded else None
                )
            )
    assert torch.equal(*results)


def test_a_nan_row_finds_a_slot() -> None:
    x = unit_rows(torch.randn(1, 9, 4))
    x[0, 5] = torch.nan
    for backend in ("torch", *(["triton"] if "cpu" in DEVICES else [])):
        with use(backend, "nearest_rows"):
            assert nearest_rows(x, torch.tensor([[0, 2, 3]]), 1)[0, 5] == 1


def test_autocast_changes_no_decision() -> None:
    x = torch.randn(2, 60, 48)
    score = redundancy_scores(unit_rows(x), 1)
    row = score.topk(20).indices.sort().values
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(redundancy_scores(unit_rows(x), 1), score)
        joined = nearest_rows(unit_rows(x), row, 1)
    assert torch.equal(joined, nearest_rows(unit_rows(x), row, 1))


def test_a_decision_among_many_tokens_takes_memory_linear_in_their_number() -> None:
    # The map of all pairs would take a gigabyte; allocations are those of torch's CPU allocator.
    from torch.profiler import ProfilerActivity, profile

    x = torch.randn(1, 16385, 32)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        unit = unit_rows(x)
        score = redundancy_scores(unit, 1)
        row = score.topk(8192).indices.sort().values
        slot = nearest_rows(unit, row, 1)
    now = peak = 0
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    assert 0 < peak < 300 * 2**20
    assert slot.max() < 8192
    assert ops.group_sizes(slot, 8192).sum() == 16385


def test_a_compiled_graph_holds_one_operation_for_each_part_of_a_decision_among_groups() -> None:
    held: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        held.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    def decide(unit: Tensor, row: Tensor, other: Tensor) -> tuple[Tensor, ...]:
        # Eight tokens of the six rows; token and row have one number up to the fifth.
        again = regroup_rows(unit, torch.tensor([[0, 1, 2, 3, 4, 5, 5, 0]] * 2), row, 1, other_BR=other)
        sizes = ops.size_groups(again[1], 3, all_join=True)
        return redundancy_scores(unit, 1), nearest_rows(unit, row, 1, other_BR=other), *again, *sizes

    unit, row, other = unit_rows(torch.randn(2, 6, 8)), torch.tensor([[0, 2, 5]] * 2), torch.tensor([[4, 1, 3]] * 2)
    made = torch.compile(decide, backend=backend, fullgraph=True)(unit, row, other)
    assert all(map(torch.equal, made, decide(unit, row, other)))
    names = ("redundancy_by_tiles", "nearest_by_tiles", "regroup_by_tiles", "sizes_in_graph")
    assert {f"mmod.{name}.default" for name in names} <= set(held)
    assert not any("bmm" in name or "gather" in name for name in held)
    assert torch.equal(made[1], made[2])
    assert torch.equal(made[3], made[1][:, [0, 1, 2, 3, 4, 5, 5, 0]])


def test_scores_have_the_precision_of_the_rows_whatever_the_default_is() -> None:
    x = torch.randn(2, 9, 8)
    # A size that no other test has, so that what is kept for it is made here.
    expected = redundancy_scores(unit_rows(x), 1)
    try:
        torch.set_default_dtype(torch.float64)
        assert torch.equal(redundancy_scores(unit_rows(x), 1), expected)
        wider = torch.randn(2, 11, 8, dtype=torch.float32)
        redundancy_scores(unit_rows(wider), 1)
    finally:
        torch.set_default_dtype(torch.float32)
    redundancy_scores(unit_rows(wider), 1)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        torch.testing.assert_close(redundancy_scores(unit_rows(x).to(dtype), 1).float(), expected, rtol=0, atol=2e-2)
