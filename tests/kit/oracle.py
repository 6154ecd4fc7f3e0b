"""Slow definitions: of routing, one image at a time, which benchmarks check models with too; of duplicate patches; of
max-min selection.

Axes: B images, N tokens.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmod.adapters import find_stack
from mmod.config import CHANGE, Threshold
from mmod.methods.route import routed_blocks
from mmod.model import unroute_
from mmod.ops.intercept import AttentionCall, AttentionIntercept
from mmod.routing import Router


def reference_forward(model: nn.Module, images: Tensor) -> Tensor:
    """Run a routed timm model by its definition; gradients reach the model's parameters."""
    loop = ImageLoop(model)
    return torch.cat([loop.run(image)[0] for image in images.split(1)])


def duplicates_by_loop(
    pixels_TRCHE: Tensor, tolerance: float, cell: int | None, levels: tuple[float, ...]
) -> tuple[list[float], list[int]]:
    """Return, patch by patch of a video, the difference to the patch that stands for it, and that patch.

    Args:
        pixels_TRCHE: Pixels in float64: T frames, R rows and C columns of patches, H channels of E pixels.
        levels: Grey levels of a unit of each channel.
    """
    frames, rows, columns = pixels_TRCHE.shape[:3]
    pixels_PHE = pixels_TRCHE.flatten(0, 2)
    side = max(rows, columns) if cell is None else cell
    differences: list[float] = []
    stands: list[int] = []
    for frame, row, column in itertools.product(range(frames), range(rows), range(columns)):
        differences.append(256.0 if frame == row % side == column % side == 0 else 255.0)
        stands.append((frame * rows + row) * columns + column)
        nearest = math.inf
        joined = stands[-1]
        for back, up, left in ((0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0)):
            if frame < back or row % side < up or column % side < left:
                continue
            other = stands[((frame - back) * rows + row - up) * columns + column - left]
            apart_H = (pixels_PHE[len(stands) - 1] - pixels_PHE[other]).abs().amax(dim=1)
            apart = max(float(value) * level for value, level in zip(apart_H, levels))
            if apart < nearest:
                nearest = apart
                joined = other
        differences[-1] = min(differences[-1], nearest)
        # Pixels in fp32 are exact to a fraction of a level.
        if nearest <= tolerance + (tolerance > 0) / 64:
            stands[-1] = joined
    return differences, stands


def max_min_order(x_ND: Tensor, weight_N: Tensor) -> list[int]:
    """Return the tokens in the order in which max-min selection takes them."""
    unit = torch.nn.functional.normalize(x_ND.double(), dim=-1)
    far = 1 - unit @ unit.T
    taken: list[int] = []
    for _ in range(len(x_ND)):
        value = {}
        for one in set(range(len(x_ND))) - set(taken):
            others = taken or [other for other in range(len(x_ND)) if other != one]
            value[one] = float(weight_N[one] * min(far[one, other] for other in others))
        taken.append(max(value, key=value.__getitem__))
    return taken


def kept_of(score: Sequence[float], count: int, prefix: int) -> list[int]:
    """Return the prefix and the best other tokens, `count` in total, ascending: ties by index, NaN last."""
    ranked = sorted(range(prefix, len(score)), key=lambda token: (math.isnan(score[token]), -score[token], token))
    return sorted([*range(prefix), *ranked[: count - prefix]])


def kept_by(router: Router, score_N: Tensor) -> list[int]:
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
    """The dense copy of a routed timm model, on the same weights, which runs one image at a time by the definition.

    Selection is by Python's sort. Blocks run on the image's kept tokens, and their update is added row by row;
    importance comes from full attention maps; the model itself runs everything between the blocks.
    """

    def __init__(self, model: nn.Module) -> None:
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self.model = unroute_(copy.deepcopy(model, shared))
        stack = find_stack(self.model)
        routed = routed_blocks(model)
        configs = [block.router.config for block in routed.values()]
        observed = {config.importance for config in configs if config.router.reads_importance}
        self._decided: Mapping[str, list[int]] | None = None
        self._scores: dict[str, Tensor] = {}
        # Importance in the last dense block, and scores of the first of consecutive routed blocks (N).
        self._importance: Tensor | None = None
        self._drawn: Tensor | None = None
        block: Any
        for name, block in zip(stack.names, stack.blocks):
            if name in routed:
                block.forward = partial(self._routed, name, routed[name], block.forward)
            else:
                block.forward = partial(self._dense, block.forward, observed)

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
        kept = kept_by(block.router, score) if self._decided is None else self._decided[name]
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
