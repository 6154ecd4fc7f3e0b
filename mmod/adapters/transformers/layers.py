"""Decoder layers: how transformers calls them, and their arguments for kept tokens.

Axes: B samples, H heads, N tokens, K slots per sample, L slots in a layer's cache and the new ones behind them, E
channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import _active_collector

from mmod.adapters.base import by_name
from mmod.adapters.masks import narrow_batch, pack_batch
from mmod.adapters.transformers.cache import RoutedLayer, open_routed_layer
from mmod.adapters.transformers.cache_base import RoutedCacheLayer, cache_of, with_cache
from mmod.adapters.transformers.cache_static import StaticRoutedLayer
from mmod.adapters.transformers.context import KeepingCache, attend_to_captured, checked_keys
from mmod.adapters.transformers.families import branch_ends
from mmod.adapters.transformers.masks import mask_of_kept
from mmod.adapters.transformers.structure import sees_both_ways
from mmod.blocks import map_rows
from mmod.blocks.call import Arguments, BlockCall
from mmod.ops import Packing, project_part
from mmod.ops.context import Captured, ProjectionName, known_projections
from mmod.routing import Routing, TokenGroups, TokenMasks

# Operators whose branch returns a tuple; as a constant, because an annotation in the class would make it a field.
TUPLES: tuple[str, ...] = ("attention",)
# The keyword that passes groups from a model's entry to its layers.
GROUPS = "mmod_groups"
_UNKNOWN = object()


@dataclass(frozen=True, eq=False)
class DecoderLayerCall(BlockCall):
    """How transformers calls one decoder layer.

    Args:
        names: The layer's parameters after the tokens, in order.
        attention: Its attention, or linear attention, which says at any time the number of its cache layer.
        compact: Rotary embeddings of compact positions; None for the original positions.
        window: Size of the sliding window, or None.
        reads_positions: Attention reads the positions of tokens, as Ministral 3 does to scale queries.
        projections: See `NamedArguments`.
        by_token: Names of arguments with a row for each token, if the whole layer runs on the kept tokens.
    """

    names: tuple[str, ...]
    attention: Any
    compact: CompactRotary | None = None
    window: int | None = None
    reads_positions: bool = False
    projections: tuple[ProjectionName, ...] | None = None
    by_token: tuple[str, ...] = ()

    operators = MappingProxyType({"attention": "self_attn", "mlp": "mlp"})
    tuples = TUPLES
    caches = True
    decodes = True

    @property
    def config(self) -> Any:
        """The config that its attention reads."""
        return self.attention.config

    @property
    def index(self) -> int:
        """Number of its cache layer, which changes with the layer's when others are cut out."""
        return int(self.attention.layer_idx)

    @property
    def contexts(self) -> tuple[str, ...]:
        """What kept tokens can attend to; flash attention has no mask between some queries and all keys."""
        if self.is_flash or self.projections is None:
            return ("kept",)
        return ("kept", "all")

    def bind(self, args: tuple[object, ...], kwargs: Arguments) -> dict[str, object]:
        """Return the arguments by name, including those that the layer only passes on."""
        return dict(by_name(self.names, args, kwargs))

    def groups(self, arguments: Arguments) -> TokenGroups | None:
        """Return the groups of the tokens, or None when all of them run."""
        groups = arguments.get(GROUPS, _UNKNOWN)
        if groups is _UNKNOWN:
            raise RuntimeError(
                "a routed layer does not know which tokens may be skipped: call the routed model, or the module inside "
                "it that takes input_ids"
            )
        return groups

    def masks(self, arguments: Arguments, x_BND: Tensor) -> TokenMasks | TokenGroups:
        """Return the groups of the tokens."""
        return self.groups(arguments) or TokenMasks()

    def can_pack(self, block: nn.Module, arguments: Arguments) -> bool:
        """Return whether rows can be packed: in prefill, with causal attention only."""
        # The lengths of packed rows depend on the data, which breaks graphs.
        if self.config._attn_implementation != "sdpa" or torch.compiler.is_compiling():
            return False
        groups = self.groups(arguments)
        cache = self._cache(arguments)
        if groups is None or not (groups.causal or arguments.get("attention_mask") is None):
            return False
        # Packed rows attend to each other only, not to what a cache holds.
        return cache is None or (isinstance(cache, RoutedLayer) and not cache.length)

    def pack(self, arguments: Arguments, x_BND: Tensor, routing: Routing, packing: Packing) -> dict[str, object]:
        """Return the arguments for kept tokens of all samples in one sequence."""
        packed = {**arguments, "attention_mask": None, "position_ids": self._positions(arguments)}
        for name in self._rows:
            if packed.get(name) is not None:
                packed[name] = map_rows(pack_batch, packed[name], packing.row_T, x_BND.shape[1])
        if self.compact is not None:
            # Compact positions count kept tokens, so all samples share one table.
            embeddings = self._compact_positions(x_BND[:1], packing.max_seqlen, None)["position_embeddings"]
            packed["position_embeddings"] = map_rows(pack_batch, embeddings, packing.slot_T, packing.max_seqlen)
        return packed

    def attend_to_all(
        self,
        block: nn.Module,
        forward: Callable[..., object],
        arguments: Arguments,
        x_BND: Tensor,
        z_BKD: Tensor,
        routing: Routing,
    ) -> object:
        """Return the host forward's output for kept tokens that attend to all tokens.

        Source: ShortV, arXiv 2504.00502 (text reads keys and values of image tokens that are frozen).
        """
        if self.is_flash:
            raise ValueError(
                "attention to tokens that do not run needs a mask: load the model with attn_implementation='sdpa'"
            )
        projections = known_projections(block, self.projections or ())
        narrowed = self._narrowed(arguments, x_BND, routing, self._cache(arguments), all_keys=True)
        # All tokens have keys, though only the kept ones have queries.
        self.begin_update(arguments, x_BND, routing, all_tokens=True)
        capture = KeepingCache(cache_of(arguments), ends=True)
        # It is not read, but without a mask hosts use another layout of keys.
        masked = {**arguments, "attention_mask": narrowed["attention_mask"]}
        try:
            with project_part(projections, queries=False):
                forward(x_BND, **with_cache(masked, capture))
        # Keys and values have reached the cache.
        except Captured:
            pass
        return attend_to_captured(projections, forward, narrowed, z_BKD, checked_keys(capture.kept, block))

    def branches(self, layer: nn.Module, which: str) -> Sequence[nn.Module]:
        """Return the modules whose outputs are added to the residual stream."""
        # A norm after the branch would undo a weight.
        attention, mlp = branch_ends(layer) or ("self_attn", "mlp")
        names = [mlp] if which == "mlp" else [attention, mlp]
        return [layer.get_submodule(name) for name in names]

    def first_norm(self, layer: nn.Module) -> nn.Module:
        """Return the norm at the entry of the layer."""
        return layer.get_submodule("input_layernorm")

    def record_no_attention(self, x_BND: Tensor) -> None:
        """Record an empty attention map where maps are recorded, so that maps keep their layer's index."""
        collected = _active_collector.get()
        if collected is not None and "attentions" in collected and self.config._attn_implementation == "eager":
            collected["attentions"].append(x_BND.new_zeros(x_BND.shape[0], self.config.num_attention_heads, 0, 0))

    def begin_whole(self, args: tuple[object, ...], kwargs: Arguments, x_BND: Tensor) -> Arguments | None:
        """Return the arguments of a call in which all tokens run, see `BlockCall.begin_whole`."""
        # Python overhead dominates decoding.
        if not args and self.hides_nothing(kwargs):
            self.begin_update(kwargs, x_BND, None)
            return kwargs
        arguments = self.bind(args, kwargs)
        if self.groups(arguments) is None:
            return self._run_all(arguments, x_BND)
        self.open_cache(arguments)
        return None

    def whole(self, arguments: Arguments, x_BND: Tensor) -> Arguments:
        """Return the arguments of a dense layer whose importance is read."""
        # A static cache holds keys of future tokens too: it also returns unused slots, and one of kept tokens does not.
        if not getattr(cache_of(arguments), "is_compileable", False):
            return arguments
        return self._run_all(arguments, x_BND)

    def _run_all(self, arguments: Arguments, x_BND: Tensor) -> Arguments:
        self.open_cache(arguments)
        selected = self.select_tokens(arguments, x_BND, None)
        self.begin_update(arguments, x_BND, None)
        return selected

    def shares(self, arguments: Arguments) -> bool:
        """Return whether layers share scores in a call: only where some tokens may be skipped."""
        groups = self.groups(arguments)
        return groups is not None and groups.skips

    def hides_nothing(self, arguments: Arguments) -> bool:
        """Return whether all tokens run and see all earlier tokens, so that the arguments need no change."""
        hides = self.window is not None or self.compact is not None or arguments.get("attention_mask") is not None
        if hides or arguments.get(GROUPS, _UNKNOWN) is not None:
            return False
        if cache_of(arguments) is None:
            return True
        cache = self._cache(arguments)
        return type(cache) is RoutedLayer and not cache.ragged

    def open_cache(self, arguments: Arguments) -> None:
        """Replace the dense cache layer by one of kept tokens, if there is a cache."""
        cache = cache_of(arguments)
        if cache is None:
            return
        open_routed_layer(cache, self.index)
        # Reading the config is slow in transformers, so it comes last.
        if isinstance(self._cache(arguments), StaticRoutedLayer) and self.is_flash:
            raise ValueError(
                "flash attention has no mask that hides the empty slots of a static cache: load the model with "
                "attn_implementation='sdpa', or use the default cache"
            )

    def begin_update(
        self,
        arguments: Arguments,
        x_BND: Tensor,
        routing: Routing | None,
        packing: Packing | None = None,
        all_tokens: bool = False,
    ) -> None:
        """Announce the tokens of the next update to the layer's cache, see `BlockCall.begin_update`."""
        cache = self._cache(arguments)
        if cache is None:
            return
        if routing is not None:
            cache.remember(routing.tokens)
        if routing is None or all_tokens:
            cache.begin_update_all(x_BND)
        elif packing is not None and isinstance(cache, RoutedLayer):
            cache.begin_update(routing.kept.index_BK, routing.kept.valid_BK, x_BND.shape[1], packing.slot_T)
        else:
            # Positions count all tokens so far, kept or not, as the host counts them.
            cache.begin_update(cache.length + routing.kept.index_BK, routing.kept.valid_BK, x_BND.shape[1])

    def select_tokens(self, arguments: Arguments, x_BND: Tensor, routing: Routing | None) -> Arguments:
        """Return the arguments for kept tokens, or for all tokens without a decision."""
        cache = self._cache(arguments)
        mask = arguments.get("attention_mask")
        if self.window is not None and self.is_flash:
            complete = routing is None and self.compact is None and mask is None
            self._check_window(self.window, x_BND.shape[1], cache, complete)
        if routing is not None or mask is not None or (cache is not None and cache.ragged):
            return self._narrowed(arguments, x_BND, routing, cache)
        if self.compact is not None:
            return {**arguments, **self._compact_positions(x_BND, x_BND.shape[1], cache)}
        return arguments

    def cached(self, arguments: Arguments) -> int:
        """Return the logical length of the layer's cache, 0 without a cache."""
        cache = cache_of(arguments)
        return 0 if cache is None else int(cache.get_seq_length(self.index))

    def _narrowed(
        self,
        arguments: Arguments,
        x_BND: Tensor,
        routing: Routing | None,
        cache: RoutedCacheLayer | None,
        all_keys: bool = False,
    ) -> dict[str, object]:
        attention = self.config._attn_implementation
        flash = "flash" in attention
        if not flash and attention not in ("sdpa", "eager"):
            raise ValueError(
                f"attention {attention!r} has no mask that can be narrowed to kept tokens; load the model with "
                "attn_implementation 'sdpa', 'eager' or 'flash_attention_2'"
            )
        if flash and arguments.get("cu_seq_lens_q") is not None:
            raise ValueError("packed samples with flash attention cannot be routed: use sdpa, or pad")
        narrowed = self.rows_of(arguments, routing)
        mask = self.mask_of(arguments, x_BND)
        narrowed["attention_mask"] = mask_of_kept(mask, x_BND, routing, cache, flash, all_keys)
        if self.compact is not None:
            slots = x_BND.shape[1] if routing is None else routing.kept.index_BK.shape[1]
            narrowed.update(self._compact_positions(x_BND, slots, cache))
        return narrowed

    def mask_of(self, arguments: Arguments, x_BND: Tensor) -> Tensor | None:
        """Return the mask of all tokens; None where attention is causal without one."""
        mask: Tensor | None = arguments.get("attention_mask")
        if mask is not None or not sees_both_ways(self.config):
            return mask
        # Without a mask, each token of a bidirectional layer sees all others.
        keys = x_BND.shape[1] + self.cached(arguments)
        return torch.ones(1, 1, x_BND.shape[1], keys, dtype=torch.bool, device=x_BND.device)

    def rows_of(self, arguments: Arguments, routing: Routing | None) -> dict[str, object]:
        """Return the arguments with the positions of the kept tokens."""
        narrowed = {**arguments, "position_ids": self._positions(arguments)}
        if routing is None:
            return narrowed
        for name in self._rows:
            if narrowed.get(name) is not None:
                narrowed[name] = map_rows(narrow_batch, narrowed[name], routing.kept.index_BK)
        return narrowed

    @property
    def _rows(self) -> tuple[str, ...]:
        """Arguments with a row for each token; rotary embeddings of compact positions are those of slots instead."""
        rotary = ("position_embeddings",) if self.compact is None else ()
        return ("position_ids", *rotary, *self.by_token)

    def _positions(self, arguments: Arguments) -> Tensor | None:
        """Return the positions of all tokens (1 or B, N), if attention reads them for more than to separate samples."""
        position_BN: Tensor | None = arguments.get("position_ids")
        # Flash attention would find boundaries of samples where positions leap.
        known = self.reads_positions and not self.is_flash and position_BN is not None and position_BN.ndim == 2
        return position_BN if known else None

    def _check_window(self, window: int, tokens: int, cache: RoutedCacheLayer | None, complete: bool) -> None:
        """Refuse flash attention with a sliding window if tokens are missing, now or in the cache."""
        if cache is not None:
            tokens += int(cache.length)
            complete = complete and not cache.ragged and bool(torch.as_tensor(cache.kept_B1 == cache.length).all())
        if tokens > window and not complete:
            raise ValueError(
                f"flash attention measures its sliding window of {window} among kept tokens instead of positions, and "
                f"this sequence has {tokens}: load the model with attn_implementation='sdpa'"
            )

    def _compact_positions(self, x_BND: Tensor, slots: int, cache: RoutedCacheLayer | None) -> dict[str, object]:
        assert self.compact is not None
        before_B1, length = (0, 0) if cache is None else (cache.kept_B1, cache.length)
        return {"position_embeddings": self.compact(x_BND, before_B1, slots, length), "position_ids": None}

    def _cache(self, arguments: Arguments) -> RoutedCacheLayer | None:
        """Return the layer's cache of kept tokens, or None before `open_cache`."""
        layers = getattr(cache_of(arguments), "layers", ())
        layer = layers[self.index] if self.index < len(layers) else None
        return layer if isinstance(layer, RoutedCacheLayer) else None

    @property
    def is_flash(self) -> bool:
        """Whether attention takes no mask of pairs."""
        return "flash" in self.config._attn_implementation


class RecurrentLayerCall(DecoderLayerCall):
    """How transformers calls a layer with linear attention: its state needs every token, so only its MLP is routed."""

    operators = MappingProxyType({"mlp": "mlp"})
    tuples = ()
    caches = False
    contexts = ("kept",)

    def hides_nothing(self, arguments: Arguments) -> bool:
        """Return whether all tokens run."""
        return arguments.get(GROUPS, _UNKNOWN) is None

    def open_cache(self, arguments: Arguments) -> None:
        """Leave the state to the host."""

    def select_tokens(self, arguments: Arguments, x_BND: Tensor, routing: Routing | None) -> Arguments:
        """Return the arguments, which are those of all tokens."""
        return arguments


# Frequencies of other rope types change with the length of the sequence.
_FIXED = ("default", "linear", "llama3", "yarn")


class CompactRotary:
    """Rotary embeddings of a language model by compact position, computed once for all layers and steps."""

    def __init__(self, rotary: nn.Module) -> None:
        self.rotary = rotary
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, ...]] = {}

    def __getstate__(self) -> dict[str, object]:
        """Leave the tables out of copies and pickles."""
        return {"rotary": self.rotary, "_tables": {}}

    def __call__(self, x_BND: Tensor, before_B1: Tensor | int, slots: int, past: Tensor | int) -> tuple[Tensor, ...]:
        """Return cosine and sine (1 or B, K, E) of the next compact positions."""
        fixed = isinstance(past, int) and getattr(self.rotary, "rope_type", None) in _FIXED
        if fixed and isinstance(before_B1, int) and not torch.compiler.is_compiling():
            return tuple(table[:, before_B1 : before_B1 + slots] for table in self._table(x_BND, before_B1 + slots))
        position_BK = before_B1 + torch.arange(slots, device=x_BND.device).expand(x_BND.shape[0], -1)
        if fixed and not torch.compiler.is_compiling():
            return tuple(table[0, position_BK] for table in self._table(x_BND, int(past) + slots))
        return self._computed(x_BND, position_BK)

    def _computed(self, like: Tensor, position_BK: Tensor) -> tuple[Tensor, ...]:
        # In a model on several devices, the module may be on another device than the layer.
        return tuple(value.to(like.device) for value in self.rotary(like, position_BK))

    def _table(self, like: Tensor, length: int) -> tuple[Tensor, ...]:
        """Return the embeddings of at least the first positions (1, length, E)."""
        key = like.device, like.dtype
        table = self._tables.get(key)
        if table is None or table[0].shape[1] < length:
            # Not as inference tensors, which could not be used in training.
            with torch.inference_mode(False), torch.no_grad():
                position_1L = torch.arange(1 << (max(length, 1024) - 1).bit_length(), device=like.device).unsqueeze(0)
                table = self._computed(torch.empty(0, device=like.device, dtype=like.dtype), position_1L)
            # Another thread may store a shorter table, so this call returns the local one.
            self._tables[key] = table
        return table
