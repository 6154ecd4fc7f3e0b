from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from mmod.ops import inverse_rows, use
from mmod.ops.gate import apply_gate
from mmod.ops.select import Kept, kept_count, select_topk
from tests.kit.cover import in_turn
from tests.kit.kernels import DEVICES, assert_as_exact_as_torch, gradients, poisoned

# B, N, capacity, prefix: one token, one kept, all kept, only the prefix kept, lengths of common models, the longest.
CASES = [
    (2, 1, Fraction(1, 2), 0),
    (3, 7, Fraction(1, 10), 0),
    (3, 9, Fraction(1), 1),
    (2, 12, Fraction(1, 4), 3),
    (2, 197, Fraction(1, 2), 1),
    (2, 577, Fraction(1, 8), 5),
    (1, 1000, Fraction(3, 10), 0),
    (1, 8192, Fraction(7, 10), 1),
]
ODD = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-42, -1e-42, 3.0e38, -3.0e38])


def scores_of(images: int, tokens: int, device: str) -> Tensor:
    """Return scores of few values, among them all that compare or sort in a way of their own."""
    score = torch.randint(-3, 4, (images, tokens)).float() / 2
    odd = torch.rand(images, tokens) < 0.3
    score[odd] = ODD[torch.randint(0, len(ODD), (int(odd.sum()),))]
    return score.to(device)


def masks_of(images: int, tokens: int, prefix: int, device: str, masks: str) -> tuple[Tensor | None, Tensor | None]:
    """Return which tokens are valid, the first image having as few as it may, and which are protected."""
    valid, protect = None, None
    if "padded" in masks:
        valid = torch.rand(images, tokens) < 0.6
        valid[0, prefix:] = False
        valid[:, :prefix] = True
    if "protected" in masks:
        protect = torch.zeros(images, tokens, dtype=torch.bool)
        for image in range(images):
            protect[image, torch.randperm(tokens)[: torch.randint(0, prefix + 1, ())]] = True
        valid = None if valid is None else valid | protect
    return tuple(None if mask is None else mask.to(device) for mask in (valid, protect))  # type: ignore[return-value]


@pytest.mark.parametrize(("case", "masks"), in_turn(CASES, ["", "padded", "protected", "padded protected"]), ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_selects_what_sorting_selects(device: str, case: Any, masks: str) -> None:
    images, tokens, capacity, prefix = case
    score = scores_of(images, tokens, device)
    arguments = (score, capacity, prefix, *masks_of(images, tokens, prefix, device, masks))
    selections: list[Kept] = []
    for backend in ("torch", "triton", "triton"):
        with use(backend), poisoned():
            kept, gate = select_topk(*arguments)
        assert gate is None
        selections.append(kept)
    plain, kernel, again = selections
    assert torch.equal(kernel.index_BK, plain.index_BK)
    assert (kernel.valid_BK is None) == (plain.valid_BK is None)
    assert kernel.valid_BK is None or torch.equal(kernel.valid_BK, plain.valid_BK)
    assert torch.equal(kernel.inverse_BN, inverse_rows(plain.index_BK, tokens))
    assert torch.equal(kernel.index_BK, again.index_BK)


GATES = [("linear", 1.0), ("linear", 0.5), ("sigmoid", 0.1), ("tanh", 0.2)]


@pytest.mark.parametrize(("gate", "padded"), in_turn(GATES, ["padded", ""]), ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_gates_are_as_exact_as_torch(device: str, gate: tuple[str, float], padded: str) -> None:
    name, scale = gate
    score = 4 * torch.randn(3, 40, device=device).t().contiguous().t()
    score[0, :3] = torch.tensor([0.0, 30.0, -30.0])
    valid, _ = masks_of(3, 40, 1, device, padded)
    results = []
    for backend, dtype in (("torch", torch.float64), ("torch", torch.float32), ("triton", torch.float32)):
        leaf = score.to(dtype).requires_grad_()
        with use(backend), poisoned():
            _, weight = select_topk(leaf, Fraction(1, 2), 1, valid, gate=name, scale=scale)
            results.append([weight, *gradients(weight, [leaf])])
    for exact, plain, kernel in zip(*results):
        assert_as_exact_as_torch(kernel, plain, exact)


@pytest.mark.parametrize("device", DEVICES)
def test_empty_slots_still_name_tokens_of_their_own(device: str) -> None:
    valid = torch.zeros(1, 6, dtype=torch.bool, device=device)
    with use("triton"), poisoned():
        kept, _ = select_topk(torch.randn(1, 6, device=device), Fraction(1, 2), valid_BN=valid)
    assert kept.valid_BK is not None
    assert not kept.valid_BK.any()
    assert len(set(kept.index_BK[0].tolist())) == 3


def weigh(score: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    kept, gate = select_topk(score, Fraction(1, 2), 1, valid, gate="tanh", scale=0.2)
    assert gate is not None
    assert kept.inverse_BN is not None
    return kept.index_BK, gate * 2, kept.inverse_BN


@pytest.mark.parametrize("device", DEVICES)
def test_compiles_without_a_break(device: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(weigh, fullgraph=True, dynamic=True, backend="aot_eager")
    with use("triton"):
        for images in (2, 3):
            score = torch.randn(images, 9, device=device)
            results = []
            for function in (compiled, weigh):
                leaf = score.clone().requires_grad_()
                out = function(leaf)
                results.append([*out, *gradients(out[1], [leaf])])
            for one, other in zip(*results):
                torch.testing.assert_close(one, other)


@pytest.mark.parametrize("device", DEVICES)
def test_custom_ops_keep_the_rules_of_torch(device: str) -> None:
    score = torch.randn(2, 7, device=device, requires_grad=True)
    valid, protect = masks_of(2, 7, 1, device, "padded protected")
    plain = (3, 1, None, None, 1, 2)
    for inputs in [(score, *plain, "tanh", 0.2), (score.detach(), 3, 1, valid, protect, 1, 2, "identity", 0.0)]:
        torch.library.opcheck(torch.ops.mmod.select_topk.default, inputs)
    inverse = torch.ops.mmod.select_topk(score.detach(), *plain, "tanh", 0.2)[3]
    torch.library.opcheck(
        torch.ops.mmod.gate_grad.default, (torch.randn(2, 3, device=device), score.detach(), inverse, "tanh", 0.2)
    )


def test_more_tokens_than_a_program_holds_are_refused_by_the_kernel_alone() -> None:
    score = torch.randn(1, 8193)
    kept, _ = select_topk(score, Fraction(1, 2))
    assert kept.index_BK.shape == (1, kept_count(8193, Fraction(1, 2)))
    with use("triton"), pytest.raises(ValueError, match=r"it needs tokens <= 8192, got \(1, 8193\), "):
        select_topk(score, Fraction(1, 2))


def test_gates_of_torch_follow_their_formula() -> None:
    score = torch.tensor([[0.0, 1.0]])
    _, gate = select_topk(score, Fraction(1), gate="sigmoid", scale=0.1)
    assert torch.equal(gate, apply_gate(score, "sigmoid", 0.1))
