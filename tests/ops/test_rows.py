from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mmod.ops import gather_norm, gather_rows, inverse_rows, merge_rows, use
from tests.kit.kernels import DEVICES, PLACES, assert_as_exact_as_torch, everywhere, gradients, poisoned

# B, N, K, D: single tokens, everything kept, nothing kept, odd and wide rows, many tokens.
SHAPES = [
    (2, 1, 1, 5),
    (1, 7, 1, 3),
    (2, 9, 9, 33),
    (3, 9, 0, 8),
    (2, 197, 98, 48),
    (1, 300, 40, 130),
    (1, 500, 60, 17),
]
ODD = [(2, 9, 4, 33), (1, 16, 6, 1030)]


def rows_of(shape: tuple[int, int, int, int], device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, index, y and gate; indices are ascending, and x and y are views whose rows do not lie in order."""
    images, tokens, slots, channels = shape
    x = torch.randn(images, channels, tokens).transpose(1, 2)
    y = torch.randn(images, slots, channels + 3)[:, :, 1:-2]
    index = torch.rand(images, tokens).argsort(dim=1)[:, :slots].sort(dim=1).values
    gate = torch.randn(images, slots)
    return x.to(device, dtype), index.to(device), y.to(device, dtype), gate.to(device)


def put(x: Tensor, index: Tensor, y: Tensor) -> Tensor:
    """Write rows back as they are: without a gate, the rows before the block are not read."""
    return merge_rows(x, index, torch.full_like(y, torch.nan), y)


def merged_by_loops(
    x: Tensor, index: Tensor, z: Tensor, y: Tensor, gate: Tensor | None, valid: Tensor | None
) -> Tensor:
    images = []
    for image in range(x.shape[0]):
        rows = list(x[image].unbind())
        for slot, token in enumerate(index[image].tolist()):
            if valid is None or valid[image, slot]:
                weight = 1.0 if gate is None else gate[image, slot]
                rows[token] = z[image, slot] + weight * (y[image, slot] - z[image, slot])
        images.append(torch.stack(rows))
    return torch.stack(images)


def leaves(*tensors: Tensor | None, dtype: torch.dtype | None = None) -> list[Any]:
    made = [None if t is None else t.detach().to(dtype or t.dtype) for t in tensors]
    return [None if t is None else t.requires_grad_() for t in made]


@pytest.mark.parametrize(("device", "dtype", "shape"), everywhere(SHAPES), ids=str)
def test_gathering_moves_the_bits_of_torch(device: str, dtype: torch.dtype, shape: Any) -> None:
    x, index, _, _ = rows_of(shape, device, dtype)
    index_dtype = torch.int64 if shape[1] % 3 else torch.int32
    results = []
    for backend in ("torch", "triton", "triton"):
        (leaf,) = leaves(x)
        with use(backend), poisoned():
            out = gather_rows(leaf, index.to(index_dtype))
            results.append([out, *gradients(out, [leaf])])
    for out, grad in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(grad, results[0][1])


@pytest.mark.parametrize(("device", "dtype", "shape"), everywhere(SHAPES), ids=str)
def test_scattering_moves_the_bits_of_torch(device: str, dtype: torch.dtype, shape: Any) -> None:
    x, index, y, _ = rows_of(shape, device, dtype)
    results = []
    for backend in ("torch", "triton"):
        inputs = leaves(x, y)
        with use(backend), poisoned():
            out = put(inputs[0], index, inputs[1])
            results.append([out, *gradients(out, inputs)])
    for plain, kernel in zip(*results):
        assert torch.equal(kernel, plain)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("channels", [8, 7], ids=["wide", "odd"])
@pytest.mark.parametrize("images", [1, 3])
def test_rows_copied_whole_are_those_of_torch(images: int, channels: int, grad: bool) -> None:
    x, index, _, _ = rows_of((images, 9, 4, channels), "cpu", torch.float32)
    x, y = x.contiguous().requires_grad_(grad), torch.randn(images, 4, channels, requires_grad=grad)
    at = index.unsqueeze(-1).expand(-1, -1, channels)
    for ours, theirs in [
        (gather_rows(x, index.int()), torch.gather(x, 1, at)),
        (put(x, index.int(), y), torch.scatter(x, 1, at, y)),
        (put(x, index, y[:, :, 1:2].expand_as(y)), torch.scatter(x, 1, at, y[:, :, 1:2].expand_as(y))),
    ]:
        assert torch.equal(ours, theirs)
        if grad:
            for one, other in zip(gradients(ours, [x, y]), gradients(theirs, [x, y])):
                assert torch.equal(one, other)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no fast rule for index_copy_ under vmap
        batched = torch.func.vmap(put)(x[None], index[None], y[None])
    assert torch.equal(batched[0], put(x, index, y))


def test_moved_rows_pass_the_numerical_check_of_gradients_twice() -> None:
    x, index, _, _ = rows_of((2, 5, 2, 4), "cpu", torch.float64)
    x, y = x.contiguous().requires_grad_(), torch.randn(2, 2, 4, dtype=torch.float64, requires_grad=True)
    for function, inputs in ((gather_rows, (x, index)), (put, (x, index, y))):
        assert torch.autograd.gradcheck(function, inputs)
        assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize(
    ("device", "dtype", "shape", "parts"),
    everywhere([*SHAPES[:4], *ODD], [("gate",), ("gate", "valid"), ("valid",)]),
    ids=str,
)
def test_merging_is_as_exact_as_torch(device: str, dtype: torch.dtype, shape: Any, parts: Any) -> None:
    x, index, y, gate = rows_of(shape, device, dtype)
    z = torch.randn(y.shape).to(y)
    gated, valid = "gate" in parts, torch.rand(index.shape, device=device) < 0.6 if "valid" in parts else None
    results = []
    for backend, kind in (("torch", torch.float64), ("torch", dtype), ("triton", dtype)):
        tensors = [*leaves(x, z, y, dtype=kind), *leaves(gate if gated else None)]
        with use(backend), poisoned():
            out = (merged_by_loops if kind is torch.float64 else merge_rows)(tensors[0], index, *tensors[1:], valid)
            inputs = tensors if gated else tensors[:1] + tensors[2:3]
            results.append([out, *gradients(out, inputs)])
    for exact, plain, kernel in zip(*results):
        assert_as_exact_as_torch(kernel, plain, exact)
    kept = torch.zeros(x.shape[:2], dtype=torch.bool, device=device)
    kept.scatter_(1, index, torch.ones_like(index, dtype=torch.bool) if valid is None else valid)
    assert torch.equal(results[2][0][~kept], x[~kept])


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_merging_at_gate_one_writes_the_update_bit_by_bit(device: str, dtype: torch.dtype) -> None:
    x, index, y, gate = rows_of((2, 9, 4, 33), device, dtype)
    with use("triton"), poisoned():
        out = merge_rows(x, index, 100 * torch.randn(y.shape).to(y), y, torch.ones_like(gate))
        assert torch.equal(gather_rows(out, index), y)


@pytest.mark.parametrize("device", DEVICES)
def test_merging_takes_an_update_of_lower_precision(device: str) -> None:
    x, index, y, gate = rows_of((2, 9, 4, 33), device, torch.float32)
    for gates in (gate, None):
        results = []
        for backend in ("torch", "triton"):
            inputs = [*leaves(x, gather_rows(x, index)), *leaves(y.half())]
            with use(backend), poisoned():
                out = merge_rows(inputs[0], index, inputs[1], inputs[2], gates)
                results.append([out, *gradients(out, inputs[::2])])
        for plain, kernel in zip(*results):
            torch.testing.assert_close(kernel, plain)


@pytest.mark.parametrize(
    ("device", "dtype", "shape", "norm"),
    everywhere([*SHAPES[::3], *ODD], [("layer", "both"), ("layer", "none"), ("rms", "weight"), ("rms", "both")]),
    ids=str,
)
def test_gathering_with_a_norm_is_as_exact_as_torch(
    device: str, dtype: torch.dtype, shape: Any, norm: tuple[str, str]
) -> None:
    kind, affine = norm
    x, index, _, _ = rows_of(shape, device, dtype)
    weight, bias = torch.randn(2, shape[3]).to(device, dtype).unbind()
    results = []
    for backend, precision in (("torch", torch.float64), ("torch", dtype), ("triton", dtype)):
        parameters = [weight] * (affine != "none") + [bias] * (affine == "both")
        inputs = leaves(x + 1, *parameters, dtype=precision)
        with use(backend), poisoned():
            out = gather_norm(inputs[0], index, *inputs[1:], eps=1e-5, kind=kind)
            results.append([*out, *gradients(out, inputs)])
    assert torch.equal(results[2][0], results[1][0])
    for exact, plain, kernel in zip(*results):
        assert_as_exact_as_torch(kernel, plain, exact)


def together(x: Tensor, index: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
    z, normed = gather_norm(x, index, weight)
    return merge_rows(x, index, z + gather_rows(x, index), normed, gate, inverse_BN=inverse_rows(index, x.shape[1]))


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_bits_come_out_twice(device: str) -> None:
    x, index, _, gate = rows_of((2, 40, 13, 33), device, torch.float32)
    runs = []
    for _ in range(2):
        inputs = leaves(x, torch.ones(33, device=device), gate)
        with use("triton"), poisoned():
            out = together(inputs[0], index, *inputs[1:])
            runs.append([out, *gradients(out, inputs)])
    for one, other in zip(*runs):
        assert torch.equal(one, other)


@pytest.mark.parametrize("device", DEVICES)
def test_compiles_without_a_break(device: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(together, fullgraph=True, dynamic=True, backend="aot_eager")
    with use("triton"):
        for images in (2, 3):
            x, index, _, gate = rows_of((images, 9, 4, 33), device, torch.float32)
            results = []
            for function in (compiled, together):
                inputs = leaves(x, torch.ones(33, device=device), gate)
                out = function(inputs[0], index, *inputs[1:])
                results.append([out, *gradients(out, inputs)])
            for one, other in zip(*results):
                torch.testing.assert_close(one, other)


@pytest.mark.parametrize("device", DEVICES)
def test_custom_ops_keep_the_rules_of_torch(device: str) -> None:
    x, index, y, gate = rows_of((2, 5, 2, 6), device, torch.float32)
    x, y = x.contiguous().requires_grad_(), y.contiguous().requires_grad_()
    z, weight, inverse = y.detach().clone().requires_grad_(), torch.ones(6, device=device), inverse_rows(index, 5)
    valid = torch.tensor([[True, False], [True, True]], device=device)
    statistic = torch.rand(2, 2, device=device)
    mmod_ops = torch.ops.mmod
    for op, inputs in [
        (mmod_ops.gather_rows, (x, index, inverse)),
        (mmod_ops.spread_rows, (y, index, None, 5)),
        (mmod_ops.merge_rows, (x, index, z, y, gate.requires_grad_(), valid, inverse)),
        (mmod_ops.merge_rows, (x, index, None, y, None, None, None)),
        (mmod_ops.blank_rows, (x.detach(), index, valid, None)),
        (mmod_ops.merge_rows_grad, (x.detach(), index, z.detach(), y.detach(), gate.detach(), valid)),
        (mmod_ops.gather_norm, (x, index, weight.requires_grad_(), None, 1e-6, True)),
        (
            mmod_ops.gather_norm_grad,
            (z.detach(), y.detach(), z.detach(), index, weight.detach(), statistic, statistic, 5, True),
        ),
    ]:
        torch.library.opcheck(op.default, inputs)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_moved_rows_have_gradients(device: str) -> None:
    x, index, _, _ = rows_of((2, 5, 2, 3), device, torch.float32)
    second = []
    for backend in ("torch", "triton"):
        (leaf,) = leaves(x)
        with use(backend):
            (grad,) = torch.autograd.grad(gather_rows(leaf, index).square().sum(), leaf, create_graph=True)
            second.append(torch.autograd.grad(grad.square().sum(), leaf)[0])
    torch.testing.assert_close(*second)


@pytest.mark.parametrize("device", DEVICES)
def test_moving_rows_counts_no_flops(device: str) -> None:
    x, index, _, gate = rows_of((2, 9, 4, 33), device, torch.float32)
    with use("triton"), FlopCounterMode(display=False) as counter:
        together(x, index, torch.ones(33, device=device), gate)
    assert counter.get_total_flops() == 0


@pytest.mark.parametrize("move", [gather_rows, put], ids=lambda f: f.__name__)
def test_rows_of_a_packed_batch_are_those_of_one_long_image(move: Callable[..., Tensor]) -> None:
    x, index, y, _ = rows_of((3, 6, 2, 4), "cpu", torch.float32)
    row_1T = (index + 6 * torch.arange(3).unsqueeze(1)).reshape(1, -1)
    more = [] if move is gather_rows else [y]
    packed = move(x.reshape(1, 18, 4), row_1T, *[value.reshape(1, 6, 4) for value in more])
    assert torch.equal(packed.reshape(-1, 4), move(x, index, *more).reshape(-1, 4))


def test_an_unknown_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="'layer', 'rms'"):
        gather_norm(torch.zeros(1, 2, 3), torch.zeros(1, 1, dtype=torch.int64), kind="batch")


@pytest.mark.gpu
def test_rows_are_found_beyond_two_to_the_31() -> None:
    x = torch.zeros(3, 4096, 262144, dtype=torch.bfloat16, device="cuda")
    x[2, 4095] = 1
    index = torch.tensor([[4095]] * 3, device="cuda")
    with use("triton"):
        assert gather_rows(x, index)[2].eq(1).all()
        out = put(x, index, torch.full((3, 1, 262144), 2.0, dtype=torch.bfloat16, device="cuda"))
        assert gather_rows(out, index).eq(2).all()
