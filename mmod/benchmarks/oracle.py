"""Is a routed model's output right? Checks against the dense model and a slow loop over single images.

No speed is worth reporting for a wrong result, so a benchmark runs these first.
Axes: B images, N tokens, K slots per image, D channels, H heads.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mmod.analysis.trace import trace
from mmod.benchmarks.models.free import sharing_copy
from mmod.blocks import ImportanceBlock, RoutedBlock, RoutedState, SharedScore, convert
from mmod.config import Threshold
from mmod.model import routed_blocks, unroute_
from mmod.routing import Router, Routing, apply_gate

# The last kept and the first skipped score of an image must differ by this many times the rounding of its scores:
# closer ones may change places when the same sums are taken in another order.
CLEAR_MARGIN = 4


# Error of torch's own operations by dtype, as a share of the largest value: beyond it, something is wrong with them.
PLAIN_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class WrongOutputError(RuntimeError):
    """The output of a routed model, or of an op, is not what it must be."""


def check_close(what: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Raise unless two tensors agree.

    Args:
        what: Names the comparison in the error.
        found: The tensor in question.
        expected: What it must be.
        tolerance: Largest difference allowed, as a share of the largest expected value.

    Raises:
        WrongOutputError: They differ by more, or one is not finite.
    """
    found, expected = found.detach(), expected.detach()
    if found.shape != expected.shape:
        raise WrongOutputError(f"{what}: the shape is {tuple(found.shape)}, not {tuple(expected.shape)}")
    if not expected.numel():
        return
    scale = float(expected.abs().max())
    error = float((found.double() - expected.double()).abs().max()) / (scale or 1.0)
    if not error <= tolerance:
        raise WrongOutputError(f"{what}: off by {error:.2e} of the largest value, allowed is {tolerance:.0e}")


def check_error_rule(what: str, found: Tensor, plain: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Raise unless a result is as near to the exact one as twice what torch's own operations reach in the same dtype.

    Args:
        what: Names the comparison in the error.
        found: The result in question.
        plain: What torch's own operations give.
        exact: The same in float64.
        dtype: Type of the inputs, in which results of a wider type are computed, too.

    Raises:
        WrongOutputError: It is further away, or not finite, or torch's own result is wrong.
    """
    found, plain, exact = found.detach(), plain.detach(), exact.detach()
    check_close(f"{what}, by torch", plain, exact, PLAIN_TOLERANCE[dtype])
    if found.shape != exact.shape:
        raise WrongOutputError(f"{what}: the shape is {tuple(found.shape)}, not {tuple(exact.shape)}")
    scale = float(exact.abs().max()) if exact.numel() else 0.0
    error, allowed = (float((x.double() - exact).abs().max()) if x.numel() else 0.0 for x in (found, plain))
    # Small results that torch hits by chance leave room for a rounding or two.
    allowed = 2 * allowed + 2 * torch.finfo(plain.dtype).eps * scale
    if not error <= allowed:
        raise WrongOutputError(
            f"{what}: off by {error:.2e} from float64, allowed is {allowed:.2e}, twice torch's error"
        )


@torch.no_grad()
def check_dense(model: nn.Module, images: Tensor, tolerance: float = 1e-5) -> None:
    """Check that at capacity 1 and gate 1 a routed model computes what the dense one does.

    Args:
        model: A routed model in evaluation; it is not changed.
        images: Images (B, C, height, width).
        tolerance: Largest difference allowed, as a share of the largest output.

    Raises:
        WrongOutputError: The outputs differ.
    """
    full = sharing_copy(model)
    for block in routed_blocks(full).values():
        block.router.capacity = Fraction(1)
        block.router.config = block.router.config.replace(select="topk", gate="identity")
    dense = unroute_(sharing_copy(model))
    check_close("routed at capacity 1 and gate 1 against dense", full(images), dense(images), tolerance)


@torch.no_grad()
def check_reference(model: nn.Module, images: Tensor, tolerance: float = 1e-5) -> None:
    """Check a routed model against a loop over single images and tokens.

    The loop scores on its own (importance from the full attention map), selects by Python's sort or by comparing with
    the threshold, and writes one token at a time. Where kept tokens attend to all, they are taken from the block's
    result for all tokens.

    Args:
        model: A routed model in evaluation; it is not changed.
        images: Images (B, C, height, width).
        tolerance: Largest difference of outputs and scores allowed, as a share of the largest one.

    Raises:
        WrongOutputError: Scores, selection or outputs differ.
    """
    with trace(model) as decisions:
        output = model(images)
    loop = sharing_copy(model)
    routers = {name: block.router for name, block in routed_blocks(model).items()}
    states: dict[str, _LoopState] = {}
    for name, module in loop.named_modules():
        if isinstance(module, RoutedBlock):
            states[name] = _LoopState(module.mod_state)
            convert(module, _LoopBlock, states[name])
        elif isinstance(module, ImportanceBlock):
            convert(module, _MapBlock, module.mod_state)
    for image in range(images.shape[0]):
        for name, state in states.items():
            state.routing = _only(decisions[name], image)
        expected = loop(images[image : image + 1])
        for name, state in states.items():
            assert state.seen_score_N is not None
            score = decisions[name].score_BN[image]
            check_close(f"the scores of {name} against a single image's", score, state.seen_score_N, tolerance)
            _check_selection(name, routers[name], _kept(decisions[name], image), decisions[name].score_BN, image)
        check_close("the routed output against a loop over images", output[image], expected[0], tolerance)


def _only(routing: Routing, image: int) -> Routing:
    part = slice(image, image + 1)
    gate_BK, valid_BK = routing.gate_BK, routing.valid_BK
    return Routing(
        routing.score_BN[part],
        routing.index_BK[part],
        None if gate_BK is None else gate_BK[part],
        None if valid_BK is None else valid_BK[part],
    )


def _kept(routing: Routing, image: int) -> list[int]:
    index_K = routing.index_BK[image]
    kept: list[int] = (index_K if routing.valid_BK is None else index_K[routing.valid_BK[image]]).tolist()
    return kept


def _check_selection(name: str, router: Router, kept: list[int], score_BN: Tensor, image: int) -> None:
    prefix, tokens = router.prefix, score_BN.shape[1]
    select = router.config.select
    if not isinstance(select, Threshold):
        score, count = score_BN[image].tolist(), max(1, prefix, math.floor(router.capacity * tokens))
        reached = sorted(range(prefix, tokens), key=lambda token: (-score[token], token))[: count - prefix]
    else:
        level = router.config.router.squashed(score_BN)[image].tolist()
        reached = [token for token in range(prefix, tokens) if level[token] >= select.threshold]
    expected = sorted([*range(prefix), *reached])
    if kept != expected:
        raise WrongOutputError(f"{name} keeps {kept}, but by its scores it must keep {expected}")


class _LoopState:
    """What a block of the loop knows: how it is called, where shared scores come from, and the given selection."""

    def __init__(self, routed: RoutedState) -> None:
        self.call = routed.call
        self.span, self.first, self.last = routed.span, routed.first, routed.last
        self.routing: Routing | None = None
        self.seen_score_N: Tensor | None = None


class _LoopBlock(nn.Module):
    """A routed block for one image, token by token, that applies a given selection and notes its own score."""

    router: Router
    mod_state: _LoopState

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        state, routing = self.mod_state, self.mod_state.routing
        assert routing is not None
        score_BN = self._score(x)
        state.seen_score_N = score_BN[0]
        kept = _kept(routing, 0)
        if not kept:
            return x
        z_BKD = torch.stack([x[0, token] for token in kept]).unsqueeze(0)
        if self.router.config.context == "all":
            y_BKD = super().forward(x, *args, **kwargs)[:, kept]
        else:
            only_kept = routing._replace(index_BK=torch.tensor([kept], device=x.device), valid_BK=None)
            y_BKD = super().forward(z_BKD, **state.call.select_tokens(state.call.bind(args, kwargs), x, only_kept))
        gate_BN = apply_gate(score_BN, self.router.config.gate.name, self.router.config.gate.scale)
        out = x.clone()
        for slot, token in enumerate(kept):
            gate = 1.0 if gate_BN is None else float(gate_BN[0, token])
            out[0, token] = z_BKD[0, slot] + gate * (y_BKD[0, slot] - z_BKD[0, slot])
        return out

    def _score(self, x: Tensor) -> Tensor:
        state, config = self.mod_state, self.router.config
        if config.router.shared and not (config.router.draws and state.first):
            assert state.span is not None
            shared = state.span.of(x, state.last)
            assert shared is not None
            return shared.score_BN
        assert self.router.score is not None
        score_BN: Tensor = self.router.score(x)
        if config.router.draws and state.span is not None:
            state.span.put(SharedScore(score_BN))
        return score_BN


class _MapBlock(nn.Module):
    """A dense block that takes importance from full attention maps."""

    mod_state: Any

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with _FullMaps() as maps:
            y = super().forward(x, *args, **kwargs)
        self.mod_state.span.put(SharedScore(torch.stack([m.mean(dim=(1, 2)) for m in maps.seen]).mean(dim=0)))
        return y


class _FullMaps(TorchFunctionMode):
    """Notes the attention map of every attention call inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            query, key = args[:2]
            scale = kwargs.get("scale") or query.shape[-1] ** -0.5
            product = query.double() @ key.double().transpose(-2, -1) * scale
            mask = kwargs.get("attn_mask")
            if mask is not None:
                product = product.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else product + mask
            self.seen.append(torch.softmax(product, dim=-1).float())
        elif func in (torch.softmax, Tensor.softmax, F.softmax) and result.ndim == 4:
            self.seen.append(result.float())
        return result


@torch.no_grad()
def clear_images(model: nn.Module, make: Callable[[int], Tensor], count: int, attempts: int = 20) -> Tensor:
    """Return images for which every routed block decides clearly.

    Where the last kept and the first skipped token score alike to within the rounding that a float64 copy shows, or a
    token lies on the threshold, two right computations may route differently, so only clear images can be compared.

    Args:
        model: A routed model in evaluation.
        make: Returns the given number of fresh images.
        count: Images wanted.
        attempts: Batches drawn at most.

    Raises:
        ValueError: Too few clear images among those drawn.
    """
    exact = copy.deepcopy(model).double()
    found: list[Tensor] = []
    for _ in range(attempts):
        images = make(count)
        with trace(model) as decisions:
            model(images)
        with trace(exact) as wanted:
            exact(images.double())
        found += list(images[_clear(model, decisions, wanted)])
        if len(found) >= count:
            return torch.stack(found[:count])
    raise ValueError(
        f"only {len(found)} of {count * attempts} random images are routed clearly, {count} are needed: scores are "
        "too alike, so outputs cannot be compared"
    )


def _clear(model: nn.Module, decisions: Mapping[str, Routing], wanted: Mapping[str, Routing]) -> Tensor:
    """Return for each image whether every block decides by more than the rounding that float64 shows (B)."""
    clear = []
    for name, routing in decisions.items():
        score_BN, exact_BN = routing.score_BN.double(), wanted[name].score_BN.double()
        # An image that float64 has routed otherwise in an earlier block differs by far more than rounding.
        error_B = (score_BN - exact_BN).abs().amax(dim=1) / exact_BN.abs().amax(dim=1)
        error_B = error_B.clamp(min=torch.finfo(routing.score_BN.dtype).eps)
        clear.append(_margin(routing, routed_blocks(model)[name].router) > CLEAR_MARGIN * error_B)
    return torch.stack(clear).all(dim=0)


def _margin(routing: Routing, router: Router) -> Tensor:
    score_BN, prefix = routing.score_BN, router.prefix
    if isinstance(router.config.select, Threshold):
        level_BN = router.config.router.squashed(score_BN)[:, prefix:]
        return (level_BN - router.config.select.threshold).abs().amin(dim=1) / level_BN.abs().amax(dim=1)
    kept = routing.index_BK.shape[1] - prefix
    if not 0 < kept < score_BN.shape[1] - prefix:
        return torch.full_like(score_BN[:, 0], torch.inf)
    ranked_BN = score_BN[:, prefix:].sort(dim=1, descending=True).values
    return (ranked_BN[:, kept - 1] - ranked_BN[:, kept]) / score_BN.abs().amax(dim=1)
