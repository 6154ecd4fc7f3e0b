"""Ways to spend less on the image tokens of the real halves, without training: routing, fewer pixels, pooled tokens.

Budgets are shares of the FLOPs that image tokens add to a prompt in the language model.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

import mmod
from mmod import LanguageRouting, RoutingConfig
from mmod.analysis import Prompt, flops
from mmod.planning import drop_once, ratio_decay, stage_drop
from scripts.real_halves.model import PATCH, read_at

FASTV = "FastV: by the last token's attention"
SPREAD = "evenly spread"
VISIONZIP = "VisionZip: by the tower's attention"
LAST_TOKEN = mmod.score("attention", importance="last_token")
# A parameter is fitted to a five hundredth.
_HALVINGS = 9
_TOWER = mmod.score("attention", importance="vision_tower")


@dataclass(frozen=True)
class Row:
    """One way to run the model.

    Args:
        language: Routing of the language model.
        image: Routing of the tower.
        patches: Side of the image in patches; None for the evaluated one.
        tokens: Side of the grid of image tokens, means over as many windows of patches; None for one token a patch.
    """

    language: RoutingConfig | None = None
    image: RoutingConfig | None = None
    patches: int | None = None
    tokens: int | None = None

    def apply(self, model: Any, processor: Any, patches: int) -> None:
        """Change a dense model and its processor for images of so many patches a side."""
        side = self.patches or patches
        read_at(processor, side)
        if self.tokens is not None:
            model.model.multi_modal_projector = Pooled(model.model.multi_modal_projector, self.tokens)
            # The processor counts an image's tokens by the size of a patch.
            processor.patch_size = side * PATCH // self.tokens
        if self.language is not None:
            mmod.route_(model, language=self.language)
        if self.image is not None:
            mmod.route_(model, image=self.image)


class Pooled(nn.Module):
    """A projector that reads means over windows of patches.

    Args:
        projector: The projector.
        side: Side of the grid of windows.
    """

    def __init__(self, projector: nn.Module, side: int) -> None:
        super().__init__()
        self.projector = projector
        self.side = side

    def forward(self, x_BPD: Tensor) -> Tensor:
        """Return image tokens (B, side * side, E)."""
        rows = math.isqrt(x_BPD.shape[1])
        grid = x_BPD.transpose(1, 2).unflatten(2, (rows, rows))
        windows = F.adaptive_avg_pool2d(grid, self.side).flatten(2).transpose(1, 2)
        tokens: Tensor = self.projector(windows)
        return tokens


class ImageShare:
    """FLOPs that image tokens add to a prompt, as a share of those that they add in a dense model.

    Args:
        model: A dense model; it stays dense.
        text: Text tokens of the prompt.
        image: Image tokens of the dense model's prompt.
    """

    def __init__(self, model: Any, text: int, image: int) -> None:
        self._model = model
        self._text = text
        self._image = image
        self._text_alone = flops(model, Prompt(text)).dense
        self._dense = flops(model, Prompt(text, image)).dense - self._text_alone

    def __call__(self, config: RoutingConfig | None, image: int | None = None) -> float:
        """Return the share of a routed model, or of a dense one, that reads so many image tokens; None for as many."""
        prompt = Prompt(self._text, image or self._image)
        if config is None:
            return (flops(self._model, prompt).dense - self._text_alone) / self._dense
        mmod.route_(self._model, language=config)
        added = flops(self._model, prompt).routed - self._text_alone
        mmod.unroute_(self._model)
        return added / self._dense


def fitted(
    share: Callable[[RoutingConfig], float], family: Callable[[float], RoutingConfig], budget: float
) -> RoutingConfig:
    """Return the config of a family with the largest parameter in (0, 1) whose share is within the budget."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if share(family(middle)) <= budget:
            low = middle
        else:
            high = middle
    return family(low)


def spread(depth: int, first: int, capacity: float, router: Any, **options: Any) -> RoutingConfig:
    """Return a config that keeps the same share of tokens from a layer on."""
    return RoutingConfig(blocks=tuple(range(first, depth)), capacity=capacity, router=router, **options)


def families(depth: int) -> dict[str, Callable[[float], RoutingConfig]]:
    """Return the routings whose one parameter the budget sets, by name."""

    def fading(value: float, router: Any) -> RoutingConfig:
        decay = ratio_decay(depth, shift=value, floor=0.02)
        assert isinstance(decay.blocks, tuple)
        assert isinstance(decay.capacity, tuple)
        shares = dict(zip(decay.blocks, decay.capacity))
        # The first layers stay dense: there is no attention to choose by before them.
        kept = {block: share for block, share in shares.items() if block >= 2}
        return RoutingConfig(blocks=tuple(kept), capacity=tuple(kept.values()), router=router)

    def stages(value: float) -> RoutingConfig:
        return stage_drop(depth, keep=max(value, 1e-3)).replace(router=LAST_TOKEN)

    def once(after: int, router: Any, **options: Any) -> Callable[[float], RoutingConfig]:
        return lambda value: drop_once(depth, after=after, keep=max(value, 1e-3)).replace(router=router, **options)

    def frozen(value: float) -> RoutingConfig:
        return spread(depth, max(1, round(value * (depth - 1))), 0.0, "stride", context="all")

    def frozen_early(value: float) -> RoutingConfig:
        # The more of the budget there is, the sooner image tokens are computed again.
        last = max(2, round((1 - value) * (depth - 1)))
        return RoutingConfig(blocks=tuple(range(1, last)), capacity=0.0, router="stride", context="all")

    return {
        FASTV: once(2, LAST_TOKEN),
        "by the last token's attention, the rest frozen and readable": once(2, LAST_TOKEN, context="all"),
        "PyramidDrop": stages,
        "A-MoD: by all attention received": once(2, "attention"),
        "p-MoD's fading, by all attention received": lambda value: fading(value, "attention"),
        VISIONZIP: once(1, _TOWER),
        "DivPrune: a max-min set": once(1, "diversity"),
        "by change": once(2, "change"),
        SPREAD: once(1, "stride"),
        "at positions without gaps, evenly spread": once(1, "stride", language=LanguageRouting(positions="compact")),
        "random": once(1, "random"),
        "frozen late layers (ShortV)": frozen,
        "frozen early layers": frozen_early,
    }
