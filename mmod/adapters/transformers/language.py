"""Language models: their decoder layers, and the tokens that may be skipped.

Axes: B samples, N tokens, D channels.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from mmod.adapters.base import BlockStack
from mmod.adapters.transformers.cache_base import CACHE, cache_of, chosen_samples
from mmod.adapters.transformers.images import IMAGES, Frames, ImageTokens, checked_mask
from mmod.adapters.transformers.layers import GROUPS, CompactRotary, DecoderLayerCall, is_sandwich
from mmod.adapters.transformers.masks import valid_tokens
from mmod.adapters.transformers.vision import TowerImportance
from mmod.blocks import ImportanceDecoderBlock, ModelHook, RoutedDecoderBlock, host_class
from mmod.config import RoutingConfig, Threshold
from mmod.routing import DecoderRouter, TokenGroups, assign_groups, decoded_groups

# Class of a decoder layer -> its positions are plain: one number per token, with one rotary embedding for all layers.
LAYERS = {
    "LlamaDecoderLayer": True,
    "MistralDecoderLayer": True,
    "Qwen2DecoderLayer": True,
    "Qwen3DecoderLayer": True,
    "Phi3DecoderLayer": True,
    "GemmaDecoderLayer": True,
    "Gemma2DecoderLayer": True,
    "Gemma3DecoderLayer": False,
    "Qwen2VLDecoderLayer": False,
    "Qwen2_5_VLDecoderLayer": False,
    "Qwen3VLTextDecoderLayer": False,
}
# Models that insert image features into the embedded tokens and pass keywords on to their language model.
JOINT = (
    "LlavaModel",
    "LlavaNextModel",
    "LlavaOnevisionModel",
    "InternVLModel",
    "Idefics3Model",
    "SmolVLMModel",
    "Mistral3Model",
    "Qwen2VLModel",
    "Qwen2_5_VLModel",
    "Qwen3VLModel",
)
PROTECTED = "protected_mask"


def is_decoder_layer(layer: nn.Module) -> bool:
    """Return whether a layer belongs to a supported language model."""
    return host_class(layer).__name__ in LAYERS


def find_language(model: nn.Module, name: str, layers: nn.ModuleList) -> BlockStack:
    """Return the decoder layers of a language model."""
    owner = name.rpartition(".")[0]
    text = model.get_submodule(owner)
    outer, _, place = owner.rpartition(".")
    entry = model.get_submodule(outer) if place in ("language_model", "text_model") else text
    if entry is not text and type(entry).__name__ not in JOINT:
        raise ValueError(
            f"cannot route the language model of a {type(entry).__name__}: its image tokens are found in "
            f"{', '.join(JOINT)} only"
        )
    config: Any = text.config
    # Compact positions need plain ones.
    plain = LAYERS[host_class(layers[0]).__name__]
    rotary = CompactRotary(text.get_submodule("rotary_emb")) if plain else None
    return BlockStack(
        library="transformers",
        names=tuple(f"{name}.{index}" for index in range(len(layers))),
        blocks=tuple(layers),
        prefix=0,
        dim=int(config.hidden_size),
        call_of=functools.partial(_call_of, rotary=rotary),
        language=True,
        reads_images=entry is not text,
        router=DecoderRouter,
        mixins=(RoutedDecoderBlock, ImportanceDecoderBlock),
        hooks=lambda routing: _hooks(GroupHook(entry, text, routing, plain), entry),
    )


def _hooks(groups: GroupHook, entry: nn.Module) -> list[tuple[nn.Module, ModelHook]]:
    return [(entry, groups), *(groups.tower.hooks if groups.tower is not None else ())]


def _call_of(layer: nn.Module, config: RoutingConfig | None, rotary: CompactRotary | None) -> DecoderLayerCall:
    signature = inspect.signature(host_class(layer).forward).parameters
    names = tuple(n for n, p in signature.items() if p.kind is p.POSITIONAL_OR_KEYWORD)[2:]
    if CACHE not in names:
        raise NotImplementedError(
            f"{host_class(layer).__name__} of transformers {transformers.__version__} takes no {CACHE!r}, only "
            f"{names}: install a version that pip chooses for mmod[vlm]"
        )
    attention: Any = layer.self_attn
    window = getattr(attention.config, "sliding_window", None)
    if config is not None and config.operator != "block" and config.gate.name != "identity" and is_sandwich(layer):
        raise ValueError(
            f"operator={config.operator!r} needs gate='identity' in a {host_class(layer).__name__}: a norm after the "
            "branch takes its weight away"
        )
    compact = rotary if config is not None and config.language.positions == "compact" else None
    return DecoderLayerCall(names, int(attention.layer_idx), attention.config, compact, window)


class GroupHook(ModelHook):
    """Computes, once for all layers, which tokens of a forward pass may be skipped.

    Args:
        entry: The hooked module, which takes `input_ids`.
        text: The module that holds the layers.
        plain: Rotary positions have one dimension.
    """

    def __init__(self, entry: nn.Module, text: nn.Module, config: RoutingConfig, plain: bool) -> None:
        self.config = config
        self.images = ImageTokens(entry.config if entry is not text else None)
        self.language = config.language
        tokens = self.language.tokens or ("image" if entry is not text else "all")
        self.tokens = "all" if tokens == "all" else "image"
        self.text_config: Any = text.config
        self.window: int | None = getattr(text.config, "sliding_window", None)
        self.names = tuple(inspect.signature(type(entry).forward).parameters)[1:]
        if self.tokens == "image" and not self.images.ids:
            raise ValueError(
                f"only image tokens may be skipped, but the config of this {type(entry).__name__} names no image "
                "token: set config.image_token_id, or route with tokens='all'"
            )
        capacities = config.capacity if isinstance(config.capacity, tuple) else (config.capacity,)
        if self.tokens == "all" and 0 in capacities:
            raise ValueError("capacity 0 is for image tokens: with tokens='all' it must be in (0, 1]")
        if self.language.positions == "compact" and not plain:
            raise ValueError(f"positions='compact' is not possible in {type(text).__name__}: it has several per token")
        split = any(hasattr(weight, "device_mesh") for weight in text.parameters())
        if split and config.wants_importance(training=True):
            raise ValueError(
                "tensor parallelism leaves each process the attention of its own heads, so that processes would keep "
                "different tokens: choose a router and losses that read no importance, such as router='linear'"
            )
        elsewhere = config.importance == "vision_tower" and config.wants_importance(training=True)
        self.tower = TowerImportance(entry) if elsewhere else None
        if elsewhere and self.tokens != "image":
            raise ValueError("router.importance='vision_tower' is defined for image tokens: route with tokens='image'")
        if isinstance(config.select, Threshold) and config.select != Threshold(config.select.threshold):
            raise ValueError("min_tokens and max_tokens are for images; a language model's threshold takes neither")

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Add the groups of the tokens to the keywords passed to every layer."""
        protected_BN, image_BN = kwargs.pop(PROTECTED, None), kwargs.pop(IMAGES, None)
        if image_BN is not None and self.tokens == "all":
            raise ValueError(f"{IMAGES} marks tokens that may be skipped, but this model was routed with tokens='all'")
        arguments = {**dict(zip(self.names, args)), **kwargs}
        kwargs[GROUPS] = self.groups(module, arguments, protected_BN, image_BN)
        return args, kwargs

    def groups(
        self, module: nn.Module, arguments: Mapping[str, Any], protected_BN: Tensor | None, image_BN: Tensor | None
    ) -> TokenGroups | None:
        """Return the groups of the tokens, or None when all of them run.

        Args:
            protected_BN: The user's mask of tokens to keep (B, N), or None.
            image_BN: The user's mask of image tokens (B, N), or None.
        """
        source = _source(arguments)
        cache: Any = cache_of(arguments)
        # The length of a static cache is a tensor; decoding must not synchronise with it.
        length: Tensor | int = 0 if cache is None else cache.get_seq_length()
        samples, tokens = source.shape[:2]
        decodes = tokens == 1 and (isinstance(length, Tensor) or length > 0)
        if not source.numel() or (self.tokens == "image" and decodes and image_BN is None):
            return None
        past = length if decodes else int(length)
        begun = decodes or bool(past)
        if self.tokens == "all" and begun:
            self._check_causal()
        valid_BN = valid_tokens(arguments.get("attention_mask"), source, past)
        if decodes and cache.is_compileable and torch.compiler.is_compiling():
            return decoded_groups(valid_BN)
        together, shown_BN, frames = not self.config.decides_alone(module.training), valid_BN, None
        if self.tokens == "image":
            kind_BN = self.images.kinds(module, arguments, image_BN)
            shown_BN = kind_BN > 0
            if self.language.frames is not None and together:
                frames = self.images.frames(arguments, kind_BN, valid_BN)
        gated_BN = shown_BN if frames is None else shown_BN & ~frames.apart_BN
        free_BN = gated_BN
        if protected_BN is not None:
            free_BN = gated_BN & ~checked_mask(PROTECTED, protected_BN, (samples, tokens)).bool()
        segment_BN = self._segments(arguments, cache)
        if segment_BN is not None and self.config.importance == "last_token":
            raise ValueError(
                "router.importance='last_token' reads the last token of a row, but rows are packed with several samples"
            )
        groups = assign_groups(
            free_BN, gated_BN, valid_BN, None if frames is None else self.language.frames, self.tokens == "image",
            segment_BN, None if frames is None else frames.first_BN,
        )  # fmt: skip
        importance = None if self.tower is None else functools.cache(functools.partial(self.tower.of, shown_BN))
        causal = segment_BN is None and self._is_causal(arguments.get("attention_mask"), tokens)
        groups = groups._replace(causal=causal, importance=importance)
        if begun and groups.skips and together:
            self._check_apart(module, groups, frames, cache)
        if not module.training and not groups.skips and sum(groups.always) == samples * tokens:
            return None
        return groups

    def _check_apart(self, module: nn.Module, groups: TokenGroups, frames: Frames | None, cache: Any) -> None:
        """Refuse image tokens after a cache if they must be chosen jointly with cached ones."""
        if self.config.reads_importance(module.training):
            problem = "importance needs the attention of all queries of the prompt"
        elif frames is not None:
            problem = "" if frames.complete else "the first one may belong to a partly cached frame"
        else:
            cached_B = chosen_samples(cache)
            both = cached_B is not None and any(old and any(new) for old, new in zip(cached_B.tolist(), groups.sizes))
            problem = "top-k over the image tokens of a sample cannot be split over calls" if both else ""
        if problem:
            raise ValueError(
                f"image tokens follow cached tokens, and {problem}: pass the full prompt at once, without "
                "prefill_chunk_size, or route by threshold or by frames"
            )

    def _segments(self, arguments: Mapping[str, Any], cache: Any) -> Tensor | None:
        """Return the sample index of every token if positions show that rows are packed."""
        position_BN = arguments.get("position_ids")
        if cache is not None or arguments.get("attention_mask") is not None or not isinstance(position_BN, Tensor):
            return None
        if position_BN.ndim != 2 or bool((position_BN.diff(dim=1) == 1).all()):
            return None
        if "flash" in self.text_config._attn_implementation:
            raise ValueError("flash attention needs the positions of packed samples, which routing removes: use sdpa")
        return nn.functional.pad((position_BN.diff(dim=1) != 1).cumsum(1), (1, 0))

    def _is_causal(self, mask: Any, tokens: int) -> bool:
        """Return whether attention over this many tokens masks only padding and future tokens."""
        pads_only = mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)
        both_ways = getattr(self.text_config, "use_bidirectional_attention", False)
        return pads_only and not both_ways and (self.window is None or tokens <= self.window)

    def _check_causal(self) -> None:
        if not self.config.decides_alone(training=False):
            raise ValueError(
                "text cannot be generated: text tokens may be skipped, and the choice depends on future tokens. "
                "Route with select='threshold', with inference_threshold (and the loss 'membership'), or with "
                f"tokens='image'; got router={self.config.router.name!r}, select={self.config.select!r}"
            )


def _source(arguments: Mapping[str, Any]) -> Tensor:
    """Return the ids (B, N) or the embeddings (B, N, D) passed to a language model."""
    source: Tensor | None = arguments.get("input_ids")
    source = arguments.get("inputs_embeds") if source is None else source
    if source is None:
        raise ValueError("pass input_ids or inputs_embeds")
    return source
