"""Routed models from open_clip's factory: whatever `open_clip.create_model` builds inside `routed` is routed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from mmod.adapters.open_clip import MODELS
from mmod.config import RoutingConfig
from mmod.methods.route import is_routed
from mmod.model import route_
from mmod.registry.routers import keep_new_routers


@contextlib.contextmanager
def routed(config: RoutingConfig | str | None = None, **parts: RoutingConfig | str | None) -> Iterator[None]:
    """Route every CLIP model that open_clip builds inside this context, before it loads weights or changes precision.

    It serves code that calls open_clip's factory itself, such as open_clip's training program. Elsewhere
    `mmod.route_` on the finished model does the same.

    Args:
        config: How to route both towers, as in `mmod.route_`.
        parts: How to route one tower, `image` or `text`, instead; None leaves it dense.

    Example:
        >>> import mmod, open_clip
        >>> sizes = {"width": 32, "heads": 2, "layers": 2, "context_length": 8, "vocab_size": 64}
        >>> vision = {"width": 32, "head_width": 16, "layers": 2, "patch_size": 8, "image_size": 32}
        >>> with routed(image=RoutingConfig(capacity=0.5)):
        ...     model = open_clip.create_model("ViT-B-32", embed_dim=16, vision_cfg=vision, text_cfg=sizes)
        >>> list(mmod.routed_blocks(model))
        ['visual.transformer.resblocks.1']
    """
    # `__init__`, because the factory loads weights right after it.
    originals = {model: model.__init__ for model in MODELS}

    def routing(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def build(self: nn.Module, *args: object, **kwargs: object) -> None:
            original(self, *args, **kwargs)
            route_(self, config, tokens=None, training_only=None, **parts)
            # Dense weights load strictly, and leave the new routers.
            self.register_load_state_dict_pre_hook(_complete)

        return build

    for model, original in originals.items():
        model.__init__ = routing(original)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for model, original in originals.items():
            model.__init__ = original  # type: ignore[method-assign]


def _complete(model: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    if is_routed(model):
        state.update(keep_new_routers(model, state, prefix))
