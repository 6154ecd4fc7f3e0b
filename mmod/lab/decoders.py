"""What experts and recursions need of decoder layers of transformers: texts of a call, and layers that run repeatedly.

Axes: B samples, N tokens, K slots per sample, L keys, D channels, H heads, E channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from mmod.adapters.transformers.cache_base import cache_of, with_cache
from mmod.adapters.transformers.context import KeepingCache, attend_to_captured, checked_keys
from mmod.adapters.transformers.masks import mask_of_queries, valid_tokens
from mmod.adapters.transformers.structure import read_structure, source_of
from mmod.blocks import Arguments, Deciding, modules_of
from mmod.ops.context import known_projections
from mmod.routing import Routing


def check_texts(kind: str, fills: bool, module: nn.Module, arguments: Arguments) -> None:
    """Refuse texts of a language model in which tokens cannot be chosen together.

    Args:
        kind: Kind of the method that chooses.
        fills: Padding would take the place of tokens.
    """
    choosing = [child for child in modules_of(module, kind) if isinstance(child, Deciding)]
    # Layers may have been removed since the method was applied.
    if not choosing or not choosing[0].mod_chooses_together(module.training):
        return
    cache = cache_of(arguments)
    past = 0
    if cache is not None:
        past = int(cache.get_seq_length())
    text = read_structure(arguments, source_of(arguments), past, module.config)
    if text.past:
        raise ValueError(
            f"text cannot be generated where {kind} choose among future tokens, as they do in training mode "
            "and with choice='topk': call model.eval(), and apply the method with choice='score', 'predictor' or "
            "'tokens'"
        )
    if text.segment_BN is not None:
        _refuse_rows(kind, "packed with several samples", "one sample per row")
    if fills and not bool(text.valid_BN.all()):
        _refuse_rows(kind, "padded", "texts of one length")


def _refuse_rows(choosers: str, state: str, valid: str) -> None:
    """Raise a ValueError where tokens of a row cannot be chosen together."""
    raise ValueError(
        f"{choosers} choose among the tokens of a row, but rows are {state}: pass {valid}, or apply the method with "
        "choice='tokens'"
    )


@dataclass(frozen=True, eq=False)
class SharedLayer:
    """How a decoder layer is called in one of its runs, by members of a `BlockCall`.

    Args:
        call: Its `DecoderLayerCall`.
        behind: How many cache layers stand between that of its first run and that of this one.
    """

    call: Any
    behind: int

    def valid(self, arguments: Mapping[str, object], x_BND: Tensor) -> Tensor | None:
        """Return which tokens are not padding (B, N); None without an attention mask."""
        mask = arguments.get("attention_mask")
        if mask is None:
            return None
        return valid_tokens(mask, x_BND, self.call.cached(arguments))

    def select_tokens(self, arguments: Mapping[str, object], x_BND: Tensor, routing: Routing) -> Mapping[str, object]:
        """Return the arguments for kept tokens; in the first run, these are all."""
        if not self.behind:
            return arguments
        # Each run has keys and values of its own.
        call = replace(self.call, attention=_Later(self.call.attention, self.behind))
        call.open_cache(arguments)
        selected: dict[str, object] = {}
        if routing.kept.index_BK.shape[1]:
            selected.update(call.select_tokens(arguments, x_BND, routing))
        call.begin_update(arguments, x_BND, routing)
        cache = cache_of(arguments)
        if cache is not None:
            selected = with_cache(selected, _LaterCache(cache, call.index))
        return selected

    def attend_to_all(
        self,
        block: nn.Module,
        forward: Callable[..., object],
        arguments: Mapping[str, object],
        x_BND: Tensor,
        z_BKD: Tensor,
        routing: Routing,
        keys: list[tuple[Tensor, Tensor]],
    ) -> object:
        """Return kept tokens after the layer, in which they attend to the keys of its first run.

        Args:
            keys: Keys and values (B, H, L, E) of all tokens; the first run, of all tokens, fills the empty list.
        """
        if self.call.is_flash:
            raise ValueError(
                "attention to tokens that do not run needs a mask: load the model with attn_implementation='sdpa'"
            )
        if not keys:
            keeping = KeepingCache(cache_of(arguments))
            # The layer believes that it has a cache: there every host shows its keys and values after their rotation.
            y = forward(x_BND, **with_cache(arguments, keeping))
            keys.append(checked_keys(keeping.kept, block))
            return y
        mask = mask_of_queries(self.call.mask_of(arguments, x_BND), x_BND, routing, keys[0][0].shape[2])
        narrowed = {**self.call.rows_of(arguments, routing), "attention_mask": mask}
        projections = known_projections(block, self.call.projections or ())
        return attend_to_captured(projections, forward, narrowed, z_BKD, keys[0])


@dataclass(frozen=True, eq=False)
class _Later:
    """An attention in a later run of its layer, which has another cache layer."""

    attention: Any
    behind: int

    @property
    def config(self) -> object:
        return self.attention.config

    @property
    def layer_idx(self) -> int:
        return int(self.attention.layer_idx) + self.behind


@dataclass
class _LaterCache:
    """The cache as a later run of a layer sees it, whose attention names the cache layer of the first run."""

    cache: Any
    index: int

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values (B, H, N, E) of new tokens; return the visible ones."""
        return self.cache.update(keys, values, self.index, *args, **kwargs)
