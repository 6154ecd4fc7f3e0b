"""What is checked before anything is timed: routed models against dense ones, and against their definition.

Axes: B images, N tokens, K slots per image.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from mmod.analysis.tracing import trace
from mmod.config import RoutingConfig, Threshold
from mmod.methods.route import routed_blocks
from mmod.model import unroute_
from mmod.routing import Router, Routing
from tests.kit.oracle import ImageLoop, kept_by
from tools.benchmarks.models.paths import sharing_copy

# The last kept and the first skipped score of an image must differ by this factor of their rounding error: closer
# ones may change places when the same sums are taken in another order.
CLEAR_MARGIN = 4
# Largest plausible error of torch's operations by dtype, as a share of the largest value.
PLAIN_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class WrongOutputError(RuntimeError):
    """The output of a routed model, or of an op, is wrong."""


def check_close(what: str, observed: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raise a WrongOutputError, named by `what`, unless two tensors agree.

    The tolerance is a share of the largest expected value; values that are not finite never agree.
    """
    error = _largest_error(what, observed, expected) / (_largest(expected) or 1.0)
    if not error <= tolerance:
        raise WrongOutputError(f"{what}: off by {error:.2e} of the largest value, allowed is {tolerance:.0e}")


def check_error_rule(what: str, observed: Tensor, plain: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Raise unless the error of a result is at most twice that of torch's operations in the inputs' dtype."""
    check_close(f"{what}, by torch", plain, exact, PLAIN_TOLERANCE[dtype])
    error = _largest_error(what, observed, exact)
    # 2 ulp are allowed in case torch's own error happens to be 0.
    allowed = 2 * _largest_error(what, plain, exact) + 2 * torch.finfo(plain.dtype).eps * _largest(exact)
    if not error <= allowed:
        raise WrongOutputError(
            f"{what}: off by {error:.2e} from float64, allowed is {allowed:.2e}, twice torch's error"
        )


def _largest_error(what: str, observed: Tensor, expected: Tensor) -> float:
    if observed.shape != expected.shape:
        raise WrongOutputError(f"{what}: the shape is {tuple(observed.shape)}, not {tuple(expected.shape)}")
    return _largest(observed.double() - expected.double())


def _largest(values: Tensor) -> float:
    return float(values.detach().abs().max()) if values.numel() else 0.0


def ungated(config: RoutingConfig, **changes: Any) -> RoutingConfig:
    """Return a config for top-k routing at gate 1, which is the dense model at capacity 1."""
    # "scale" needs a gate.
    skipped = "pass" if config.skipped == "scale" else config.skipped
    return config.replace(select="topk", gate="identity", skipped=skipped, **changes)


@torch.no_grad()
def check_dense(model: nn.Module, images: Tensor, tolerance: float = 1e-5) -> None:
    """Check that at capacity 1 and gate 1 a routed model's outputs are the dense ones, within a share of the largest
    output.
    """
    full = sharing_copy(model)
    for block in routed_blocks(full).values():
        block.router.capacity = Fraction(1)
        block.router.config = ungated(block.router.config)
    dense = unroute_(sharing_copy(model))
    check_close("routed at capacity 1 and gate 1 against dense", full(images), dense(images), tolerance)


@torch.no_grad()
def check_reference(model: nn.Module, images: Tensor, tolerance: float = 1e-5) -> None:
    """Check a routed model against a loop over single images and tokens, see `ImageLoop`.

    The loop takes the model's decisions, then scores and outputs are compared; the tolerance is a share of the
    largest value. Every decision is compared with that of Python's sort, or the threshold, on the model's scores:
    close scores may change places in another batch.
    """
    with trace(model) as decisions:
        output = model(images)
    loop = ImageLoop(model)
    blocks = routed_blocks(model)
    for image in range(images.shape[0]):
        decided = {name: _kept(routing, image) for name, routing in decisions.items()}
        expected, scores = loop.run(images[image : image + 1], decided)
        for name, kept in decided.items():
            score_BN = decisions[name].score_BN
            router = blocks[name].router
            check_close(f"the scores of {name} against a single image's", score_BN[image], scores[name], tolerance)
            wanted = kept_by(router, score_BN[image])
            if kept != wanted:
                raise WrongOutputError(f"{name} keeps {kept}, but by its scores it must keep {wanted}")
        check_close("the routed output against a loop over images", output[image], expected[0], tolerance)


def _kept(routing: Routing, image: int) -> list[int]:
    index_K = routing.kept.index_BK[image]
    if routing.kept.valid_BK is not None:
        index_K = index_K[routing.kept.valid_BK[image]]
    return index_K.tolist()


@torch.no_grad()
def clear_images(model: nn.Module, make: Callable[[int], Tensor], count: int, attempts: int = 20) -> Tensor:
    """Return `count` images for which every routed block decides clearly, from at most `attempts` batches.

    Elsewhere two correct computations may route differently: the last kept and the first skipped score differ by less
    than the rounding error to a float64 copy, or a token lies on the threshold.
    """
    exact = copy.deepcopy(model).double()
    clear: list[Tensor] = []
    for _ in range(attempts):
        images = make(count)
        with trace(model) as decisions:
            model(images)
        with trace(exact) as wanted:
            exact(images.double())
        clear += list(images[_clear(model, decisions, wanted)])
        if len(clear) >= count:
            return torch.stack(clear[:count])
    raise ValueError(
        f"only {len(clear)} of {count * attempts} random images are routed clearly, {count} are needed: scores are "
        "too alike, so outputs cannot be compared"
    )


def _clear(model: nn.Module, decisions: Mapping[str, Routing], wanted: Mapping[str, Routing]) -> Tensor:
    """Return for every image whether all blocks decide by more than the rounding error (B)."""
    clear = []
    for name, routing in decisions.items():
        score_BN = routing.score_BN.double()
        exact_BN = wanted[name].score_BN.double()
        # An image that an earlier block routes differently in float64 differs by far more than rounding.
        error_B = (score_BN - exact_BN).abs().amax(dim=1) / exact_BN.abs().amax(dim=1)
        error_B = error_B.clamp(min=torch.finfo(routing.score_BN.dtype).eps)
        clear.append(_margin(routing, routed_blocks(model)[name].router) > CLEAR_MARGIN * error_B)
    return torch.stack(clear).all(dim=0)


def _margin(routing: Routing, router: Router) -> Tensor:
    score_BN = routing.score_BN
    prefix = router.prefix
    if isinstance(router.config.select, Threshold):
        level_BN = router.config.router.normalised(score_BN)[:, prefix:]
        return (level_BN - router.config.select.single).abs().amin(dim=1) / level_BN.abs().amax(dim=1)
    kept = routing.kept.index_BK.shape[1] - prefix
    if not 0 < kept < score_BN.shape[1] - prefix:
        return torch.full_like(score_BN[:, 0], torch.inf)
    ranked_BN = score_BN[:, prefix:].sort(dim=1, descending=True).values
    return (ranked_BN[:, kept - 1] - ranked_BN[:, kept]) / score_BN.abs().amax(dim=1)
