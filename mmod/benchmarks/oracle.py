"""Oracle of routed models: their definition as a slow loop over single images, and checks against it.

Benchmarks run the checks before they time anything; tests check every model against the same definition.
Axes: B images, N tokens, K slots per image.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence, Set
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmod.adapters import find_stack
from mmod.analysis.trace import trace
from mmod.benchmarks.models.paths import sharing_copy
from mmod.blocks import host_class
from mmod.config import CHANGE, RoutingConfig, Threshold
from mmod.methods.route import routed_blocks
from mmod.model import unroute_
from mmod.ops.intercept import AttentionCall, AttentionIntercept
from mmod.routing import Router, Routing

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
            wanted = _keep(router, score_BN[image])
            if kept != wanted:
                raise WrongOutputError(f"{name} keeps {kept}, but by its scores it must keep {wanted}")
        check_close("the routed output against a loop over images", output[image], expected[0], tolerance)


def _kept(routing: Routing, image: int) -> list[int]:
    index_K = routing.kept.index_BK[image]
    if routing.kept.valid_BK is not None:
        index_K = index_K[routing.kept.valid_BK[image]]
    return index_K.tolist()


def kept_of(score: Sequence[float], count: int, prefix: int) -> list[int]:
    """Return the prefix and the best other tokens, `count` in total, ascending: ties by index, NaN last."""
    ranked = sorted(range(prefix, len(score)), key=lambda token: (math.isnan(score[token]), -score[token], token))
    return sorted([*range(prefix), *ranked[: count - prefix]])


def _keep(router: Router, score_N: Tensor) -> list[int]:
    """Return the tokens of one image that a router must keep."""
    prefix = router.prefix
    tokens = score_N.shape[0]
    select = router.config.select
    if not isinstance(select, Threshold):
        return kept_of(score_N.tolist(), max(1, prefix, math.floor(router.capacity * tokens)), prefix)
    level = router.config.router.normalised(score_N[None])[0].tolist()
    return [token for token in range(tokens) if token < prefix or level[token] >= select.single]


_GATES: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "identity": lambda score, scale: torch.ones_like(score),
    "linear": lambda score, scale: scale * score,
    "sigmoid": lambda score, scale: scale * torch.sigmoid(score),
    "tanh": lambda score, scale: 1 + scale * torch.tanh(score),
}


class ImageLoop:
    """A copy of a routed timm model, on the same weights, that runs one image at a time by the definition.

    Selection is by Python's sort. Blocks run by their host class on the image's kept tokens, row by row; importance
    comes from full attention maps; the model itself runs everything between the blocks.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = sharing_copy(model)
        stack = find_stack(self.model)
        routed = routed_blocks(self.model)
        configs = [block.router.config for block in routed.values()]
        observed = {config.importance for config in configs if config.router.reads_importance}
        self._decided: Mapping[str, list[int]] | None = None
        self._scores: dict[str, Tensor] = {}
        # Importance in the last dense block, and scores of the first of consecutive routed blocks (N).
        self._importance: Tensor | None = None
        self._drawn: Tensor | None = None
        block: Any
        for name, block in zip(stack.names, stack.blocks):
            run = partial(host_class(block).forward, block)
            if name in routed:
                block.forward = partial(self._routed, name, block, run)
            else:
                block.forward = partial(self._dense, run, observed)

    def run(self, image: Tensor, decided: Mapping[str, list[int]] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the output and every block's scores (N), for decisions by these scores or those of the caller."""
        self._decided = decided
        self._scores = {}
        return self.model(image), self._scores

    def _dense(self, run: Callable[..., Tensor], observed: Set[str], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self._drawn = None
        if not observed:
            return run(x, *args, **kwargs)
        if CHANGE in observed:
            y = run(x, *args, **kwargs)
            self._importance = (y - x)[0].double().square().sum(dim=-1).sqrt()
            return y
        with _FullMaps() as maps:
            y = run(x, *args, **kwargs)
        if maps.maps:
            self._importance = torch.stack([m.mean(dim=(1, 2)) for m in maps.maps]).mean(dim=0)[0]
        return y

    def _routed(
        self, name: str, block: Any, run: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        config = block.router.config
        if config.operator != "block":
            raise ValueError(f"{name} skips its {config.operator} alone, which this definition does not know")
        score = self._scores[name] = self._score(block.router, x)
        kept = _keep(block.router, score) if self._decided is None else self._decided[name]
        if not kept:
            return x
        index = torch.tensor(kept, device=x.device)
        if config.context == "all":
            y = run(x, *args, **kwargs)[:, index]
        else:
            y = run(x[:, index], **_narrow(block.mod_state.call, index, args, kwargs))
        gate = _GATES[config.gate.name](score, config.gate.scale).to(x.dtype)
        rows = list(x[0].unbind(0))
        for slot, token in enumerate(kept):
            rows[token] = rows[token] + gate[token] * (y[0, slot] - rows[token])
        if config.skipped == "scale":
            rows = [row if token in kept else gate[token] * row for token, row in enumerate(rows)]
        return torch.stack(rows).unsqueeze(0)

    def _score(self, router: Router, x: Tensor) -> Tensor:
        if router.config.router.reads_importance:
            assert self._importance is not None
            return self._importance
        if router.config.router.shares_own_score and self._drawn is not None:
            return self._drawn
        assert router.score is not None
        score: Tensor = router.score(x)[0]
        self._drawn = score if router.config.router.shares_own_score else None
        return score


def _narrow(call: Any, index: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a timm block's arguments after the tokens for the kept tokens alone."""
    narrowed = {**dict(zip(call.names, args)), **kwargs}
    for name, value in narrowed.items():
        if name == "rope" and value is not None:
            narrowed[name] = value[..., index[call.rope_prefix :] - call.rope_prefix, :]
        elif isinstance(value, Tensor):
            # A mask of pairs loses queries and keys, one of keys alone only keys.
            if value.shape[-2] > 1:
                value = value[..., index, :]
            narrowed[name] = value[..., index]
    return narrowed


class _FullMaps(AttentionIntercept):
    """Records the attention map of every attention call inside it, in float32 or better and without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.maps: list[Tensor] = []

    def attend(self, call: AttentionCall) -> Tensor:
        result = call.run()
        query = call.query.detach().double()
        key = call.key.detach().double()
        mask = call.attn_mask
        product = query @ key.transpose(-2, -1) * (call.scale or query.shape[-1] ** -0.5)
        if mask is not None:
            product = product.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else product + mask
        self._add(torch.softmax(product, dim=-1), result)
        return result

    def observe(self, score: Tensor, attention: Tensor) -> None:
        self._add(attention.detach(), attention)

    def _add(self, attention: Tensor, result: Tensor) -> None:
        self.maps.append(attention.to(torch.promote_types(result.dtype, torch.float32)))


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
