"""What the tests of all kernels share: where they run, how exact they must be, memory that shows what is unwritten."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.kit.cover import cover, in_turn

# A process either interprets all its kernels or compiles them.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ["cpu", _CUDA] if INTERPRETED else [_CUDA]
# Devices and dtypes together: the interpreter computes wrongly in bf16.
PLACES = [
    pytest.param(*values, marks=pytest.mark.gpu if "cuda" in values else (), id="-".join(map(str, values)))
    for values in [
        *([("cpu", torch.float32), ("cpu", torch.float16)] if INTERPRETED else []),
        *[("cuda", dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)],
    ]
]


def everywhere(*axes: Iterable[Any]) -> list[Any]:
    """Return places with values of other axes: all combinations on a GPU, few of them in the interpreter."""
    values = [list(axis) for axis in axes]
    interpreted = [place for place in PLACES if "cpu" in place.values]
    combined: list[Any] = []
    if interpreted and len(values) == 1:
        combined += [(place, one) for one, place in in_turn(values[0], interpreted)]
    elif interpreted:
        combined += cover(interpreted, *values)
    combined += itertools.product([place for place in PLACES if "cuda" in place.values], *values)
    return [pytest.param(*place.values, *remaining, marks=place.marks) for place, *remaining in combined]


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill uninitialised memory with NaN, or a large number, for as long as the context lasts."""

    def poison(create: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def poisonous(*args: Any, **kwargs: Any) -> Tensor:
            made = create(*args, **kwargs)
            if type(made) is not Tensor or made.device.type == "meta":
                return made
            return made.fill_(torch.nan if made.is_floating_point() else True if made.dtype == torch.bool else 99)

        return poisonous

    with (
        mock.patch("torch.empty", poison(torch.empty)),
        mock.patch("torch.empty_like", poison(torch.empty_like)),
        mock.patch.object(Tensor, "new_empty", poison(Tensor.new_empty)),
    ):
        yield


def gradients(out: Tensor | tuple[Tensor, ...], inputs: list[Tensor], seed: int = 1) -> list[Tensor]:
    """Return the gradients of fixed random weighted sums of the outputs.

    Args:
        out: One or several outputs.
        wanted: What to differentiate by.
        seed: Chooses the weights, which are the same in every dtype.
    """
    outs = [out] if isinstance(out, Tensor) else list(out)
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(value.shape, generator=generator).half() for value in outs]
    weights = [weight.to(value) for weight, value in zip(weights, outs)]
    return list(torch.autograd.grad(outs, inputs, weights, materialize_grads=True))


def assert_as_exact_as_torch(kernel: Tensor, plain: Tensor, exact: Tensor, name: str = "output") -> None:
    """Check the error rule: a kernel may err twice as much as torch in the same dtype, against float64.

    Args:
        kernel: What the kernel computes.
        plain: What torch computes in the same dtype.
        exact: What torch computes in float64.
        name: For the message.
    """
    assert kernel.dtype == plain.dtype, name
    assert kernel.shape == plain.shape, name
    if not kernel.numel():
        return
    error, allowed = ((value.double() - exact).abs().max().item() for value in (kernel, plain))
    # A rounding of the largest value is granted even where torch happens to be exact.
    granted = 2 * allowed + torch.finfo(kernel.dtype).eps * max(1e-3, exact.abs().max().item())
    assert error <= granted, f"{name}: {error:.3e} from float64, torch {allowed:.3e}"
