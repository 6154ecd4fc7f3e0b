"""Which tokens of a language model's forward pass may be skipped, decided once for all of its layers.

Axes: B samples, N tokens.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.adapters.transformers.cache_base import cache_of, has_chosen
from mmod.adapters.transformers.families import gets_keys, number_of
from mmod.adapters.transformers.generation import PromptPart, Running, refuse_training_mode
from mmod.adapters.transformers.images import (
    IMAGE,
    IMAGES,
    LAYOUT,
    VIDEO,
    Frames,
    ImageTokens,
    checked_mask,
    has_pixels,
)
from mmod.adapters.transformers.layers import GROUPS
from mmod.adapters.transformers.structure import (
    Structure,
    pads_only,
    read_prompt,
    read_structure,
    source_of,
    uses_cache,
)
from mmod.adapters.transformers.tower import TowerImportance, TowerPixels, TowerReader
from mmod.adapters.transformers.vision import vision_part
from mmod.blocks import Arguments, ModelHook, model_hooks
from mmod.config import CHANGE, RoutingConfig, Threshold
from mmod.routing import TokenGroups, assign_groups, decoded_groups
from mmod.threads import PerThread

PROTECTED = "protected_mask"


def mark_pairs(module: nn.Module, arguments: Arguments) -> Arguments | None:
    """Tell layers whether the model around a language model replaces causal attention by a mask of pairs.

    Gemma 3 and PaliGemma let the tokens of an image see each other.
    """
    groups: TokenGroups | None = arguments.get(GROUPS)
    if groups is None or not groups.causal or pads_only(arguments.get("attention_mask")):
        return None
    return {**arguments, GROUPS: groups._replace(causal=False)}


class Inputs(NamedTuple):
    """What a forward pass says of its tokens, before any is chosen.

    Args:
        module: The model that inserts images.
        arguments: Its arguments, by name.
        cache: The cache of the pass, or None.
        decodes: It runs the next token of every sample.
        begun: Tokens before these are cached.
        structure: Padding and packed samples.
        part: What it reads of the prompt of `generate`; None outside.
        layout: The arguments that describe frames.
        copies: How many samples in a row are copies of one that these describe.
        labels_BN: The labels of the pass (B, N), or None.
    """

    module: nn.Module
    arguments: Arguments
    cache: Any
    decodes: bool
    begun: bool
    structure: Structure
    part: PromptPart | None
    layout: Arguments
    copies: int
    labels_BN: Tensor | None

    def described(self, kind_BN: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return kinds and packed samples of the rows that `layout` describes: the first copy of each sample."""
        segment_BN = self.structure.segment_BN
        if segment_BN is not None:
            segment_BN = segment_BN[:: self.copies]
        return kind_BN[:: self.copies], segment_BN

    def copied(self, value_BN: Tensor) -> Tensor:
        """Return values of such rows for all of their copies."""
        return value_BN.repeat_interleave(self.copies, dim=0)


class GroupReader:
    """Computes, once for all layers, which tokens of a forward pass may be skipped.

    Args:
        entry: The hooked module, which takes `input_ids`.
        text: The module that holds the layers.
        layers: Name of their list in it.
        plain: Rotary positions have one dimension.
    """

    def __init__(self, entry: nn.Module, text: nn.Module, layers: str, config: RoutingConfig, plain: bool) -> None:
        self.text = text
        self.layers = layers
        self.config = config
        self.images = ImageTokens(entry.config)
        self.running = PerThread(Running)
        self.language = config.language
        # p-MoD's skipped tokens are image tokens.
        images_only = entry is not text or bool(self.images.ids) or config.skipped == "scale"
        self.tokens = "image"
        if self.language.tokens == "all" or not (self.language.tokens or images_only):
            self.tokens = "all"
        self._check_tokens(entry, plain)
        self._check_parallel()
        self.image_reader = self._reader_of(entry)
        self._check_frames()
        select = config.select
        if isinstance(select, Threshold) and select != Threshold(select.threshold):
            raise ValueError("min_tokens and max_tokens are for images; a language model's threshold takes neither")

    def _check_tokens(self, entry: nn.Module, plain: bool) -> None:
        """Raise a ValueError unless the model has the tokens, and the positions, that the config speaks of."""
        if self.tokens == "image" and not self.images.ids:
            raise ValueError(
                f"only image tokens may be skipped, but the config of this {type(entry).__name__} names no image "
                "token: set config.image_token_id to the id that stands for images in prompts, such as -200 in the "
                f"original LLaVA, and pass {IMAGES} with inputs_embeds; or let text be skipped too, with "
                "language={'tokens': 'all'}"
            )
        capacities = self.config.capacity
        if not isinstance(capacities, tuple):
            capacities = (capacities,)
        if self.tokens == "all" and 0 in capacities:
            raise ValueError("capacity 0 is for image tokens: with tokens='all' it must be in (0, 1]")
        if self.language.positions == "compact" and not plain:
            title = type(self.text).__name__
            raise ValueError(f"positions='compact' is not possible in {title}: it has several per token")

    def _check_parallel(self) -> None:
        """Raise a ValueError if importance is read of heads that tensor parallelism spreads over processes."""
        split = any(hasattr(weight, "device_mesh") for weight in self.text.parameters())
        if split and self.config.importance != CHANGE and self.config.wants_importance(training=True):
            raise ValueError(
                "tensor parallelism gives each process the attention of its own heads only, so processes would keep "
                "different tokens: choose a router and losses that read no importance, such as router='linear'"
            )

    def _reader_of(self, entry: nn.Module) -> TowerReader | None:
        """Return what reads the vision tower, or pixels, for the image tokens; None if the config asks for neither."""
        config = self.config
        by_importance = config.importance == "vision_tower" and config.wants_importance(training=True)
        if not config.router.reads_pixels and not by_importance:
            return None
        part = vision_part(entry)
        if self.tokens != "image" or part is None:
            raise ValueError(
                f"router {config.router.name!r} reads the vision tower, or the pixels that it gets, for image tokens: "
                f"route with tokens='image' a model that has a tower, got a {type(entry).__name__}"
            )
        stack = part()
        if not config.router.reads_pixels:
            return TowerImportance(entry, stack)
        return TowerPixels(entry, stack, config.router)

    def label_hook(self, outermost: bool) -> ModelHook:
        """Return the hook that keeps the labels of a pass for the model that inserts images.

        Args:
            outermost: No module around the hooked one takes labels; modules inside may get others, or none.
        """
        # Labels that no model inside has read are forgotten, as after an error.
        drop = self.drop_labels if outermost else None
        return ModelHook(functools.partial(self.keep_labels, outermost), drop)

    def keep_labels(self, outermost: bool, module: nn.Module, arguments: Arguments) -> None:
        """Keep the labels of a call."""
        labels = arguments.get("labels")
        if outermost or labels is not None:
            self.running.value.labels_BN = labels

    def drop_labels(self, *call: object) -> None:
        """Forget the labels of a call that ends."""
        self.running.value.labels_BN = None

    def add_groups(self, module: nn.Module, arguments: Arguments) -> Arguments:
        """Add the groups of the tokens to the keywords passed to every layer."""
        # The host's forward knows neither mask.
        known = {name: value for name, value in arguments.items() if name not in (PROTECTED, IMAGES)}
        image_BN = arguments.get(IMAGES)
        if image_BN is not None:
            self.check_masks()
        # As a keyword of the host's own call, which gradient checkpointing repeats with the layer.
        return {**known, GROUPS: self.groups(module, known, arguments.get(PROTECTED), image_BN)}

    def check_masks(self) -> None:
        """Raise a ValueError if a mask of image tokens has no meaning, because text may be skipped too."""
        if self.tokens == "all":
            raise ValueError(
                f"{IMAGES} marks tokens that may be skipped, but this model was routed with tokens='all': leave it "
                "out, or route with tokens='image'"
            )

    def groups(
        self, module: nn.Module, arguments: Arguments, protected_BN: Tensor | None, image_BN: Tensor | None
    ) -> TokenGroups | None:
        """Return the groups of the tokens, or None when all of them run.

        Args:
            protected_BN: The user's mask of tokens to keep (B, N), or None.
            image_BN: The user's mask of image tokens (B, N), or None.
        """
        inputs = self._read(module, arguments, image_BN)
        if inputs is None:
            return None
        if inputs.decodes and inputs.cache.is_compileable and torch.compiler.is_compiling():
            # Shapes of a captured step must not follow from what it reads.
            return decoded_groups(inputs.structure.valid_BN)
        kind_BN = self._kinds(inputs, image_BN)
        frames = self._frames(inputs, kind_BN)
        groups = self._assign(inputs, kind_BN, frames, protected_BN)
        if inputs.begun and self._decides_together:
            self._check_cached(inputs, groups, frames)
        if not self.text.training and not groups.skips and sum(groups.always) == groups.group_BN.numel():
            return None
        return groups

    def _read(self, module: nn.Module, arguments: Arguments, image_BN: Tensor | None) -> Inputs | None:
        """Step 1: read what is cached, padded and packed; None if no token may be skipped."""
        labels_BN = self.running.value.take_labels()
        source = source_of(arguments)
        cache = cache_of(arguments)
        # The length of a static cache is a tensor; decoding must not synchronise with it.
        length: Tensor | int = 0 if cache is None else cache.get_seq_length()
        decodes = source.shape[1] == 1 and (isinstance(length, Tensor) or length > 0)
        if not source.numel() or (self.tokens == "image" and decodes and image_BN is None):
            return None
        # A prefill may wait for the device, once.
        past = length if decodes else int(length)
        begun = decodes or bool(past)
        if not decodes:
            self._check_numbers(arguments, cache)
        if self.tokens == "all" and begun:
            self._check_causal(decodes)
        structure = read_structure(arguments, source, past, self.text.config)
        if structure.segment_BN is not None and self.config.importance == "last_token":
            raise ValueError(
                "router.importance='last_token' reads the last token of a row, but rows are packed with several samples"
                ": pass one sample per row, or choose importance='per_viewer'"
            )
        part = None
        prompt = self.running.value.prompt
        if prompt is not None and not decodes:
            part = prompt.part(arguments, int(past))
        layout = arguments
        copies = 1
        # `generate` may keep the description of frames from the layers, if it computes the features of images before.
        if part is not None and not begun and all(layout.get(name) is None for name in LAYOUT):
            layout = {**layout, **part.prompt.layout}
            copies = part.copies
        return Inputs(module, arguments, cache, decodes, begun, structure, part, layout, copies, labels_BN)

    def _kinds(self, inputs: Inputs, image_BN: Tensor | None) -> Tensor:
        """Step 2: find the tokens that may be skipped, by modality (B, N); 0 are others."""
        if self.tokens == "all":
            return inputs.structure.valid_BN.long()
        part = inputs.part
        if image_BN is not None or part is None or part.prompt.kind_BN is None:
            return self.images.kinds(inputs.module, inputs.arguments, image_BN)
        return part.cut(part.prompt.kind_BN, inputs.structure.valid_BN.shape[1], 0)

    def _frames(self, inputs: Inputs, kind_BN: Tensor) -> Frames | None:
        """Step 3: find the boundaries of frames; None where tokens are not chosen frame by frame."""
        if self.tokens == "all" or self.language.frames is None or not self._decides_together:
            return None
        once_BN, segment_BN = inputs.described(kind_BN)
        valid_BN = inputs.structure.valid_BN[:: inputs.copies]
        frames = self.images.frames(inputs.layout, once_BN, valid_BN, segment_BN)
        return frames._replace(first_BN=inputs.copied(frames.first_BN), apart_BN=inputs.copied(frames.apart_BN))

    def _assign(
        self, inputs: Inputs, kind_BN: Tensor, frames: Frames | None, protected_BN: Tensor | None
    ) -> TokenGroups:
        """Step 4: assign tokens to the groups within which layers choose.

        Tokens outside frames always run, as do those that the user protects and those without a frame before.
        """
        structure = inputs.structure
        gated_BN = kind_BN > 0
        if frames is not None:
            gated_BN = gated_BN & ~frames.apart_BN
        free_BN = gated_BN
        if protected_BN is not None:
            shape = (gated_BN.shape[0], gated_BN.shape[1])
            free_BN = gated_BN & ~checked_mask(PROTECTED, protected_BN, shape).bool()
        earlier_BN = None
        if self.config.router.reads_frames:
            earlier_BN = self._earlier(inputs, kind_BN)
            free_BN = free_BN & (earlier_BN >= 0)
        groups = assign_groups(
            free_BN,
            gated_BN,
            structure.valid_BN,
            frames=None if frames is None else self.language.frames,
            strict=self.tokens == "image",
            segment_BN=structure.segment_BN,
            first_BN=None if frames is None else frames.first_BN,
            prompt_BN=self._prompt(inputs, kind_BN > 0),
        )
        importance = None
        if self.image_reader is not None:
            importance = functools.cache(functools.partial(self._values, inputs, kind_BN, self.image_reader))
            if inputs.part is not None and has_pixels(inputs.part.prompt.layout):
                # The first part of a prompt may have no image tokens, and the notes of the tower end with the pass.
                importance()
        return groups._replace(causal=structure.causal, importance=importance, earlier_BN=earlier_BN)

    def _values(self, inputs: Inputs, kind_BN: Tensor, reader: TowerReader) -> Tensor:
        """Return what image tokens get from the tower or from pixels (B, N).

        `generate` may compute the features of images once, before any pass, and read them in several: without a cache,
        and where the prompt is read in chunks. So the first of these notes the values of the whole prompt.
        """
        part = inputs.part
        if part is None or has_pixels(inputs.arguments):
            return reader.values_of(inputs.module, kind_BN, inputs.arguments)
        prompt = part.prompt
        if prompt.value_BN is None:
            assert prompt.kind_BN is not None
            # Cached images are not among those that the arguments describe.
            all_BN = F.pad(prompt.kind_BN[:, part.begin :], (part.begin, 0))
            prompt.value_BN = reader.values_of(inputs.module, all_BN, prompt.layout)
        return part.cut(prompt.value_BN, kind_BN.shape[1], reader.empty)

    @property
    def _decides_together(self) -> bool:
        """Whether tokens compete with each other, instead of meeting a threshold alone."""
        return not self.config.decides_alone(self.text.training)

    def _prompt(self, inputs: Inputs, image_BN: Tensor) -> Tensor | None:
        """Return which tokens the labels of a pass leave to the prompt (B, N), None for all.

        Image tokens are then chosen as in generation, which knows no word of the answer.
        """
        labels_BN = None
        if self.config.reads_attention(self.text.training):
            labels_BN = inputs.labels_BN
        # Other heads take one class, or the values of several, for a sample.
        if labels_BN is None or labels_BN.ndim != 2 or labels_BN.is_floating_point():
            return None
        if labels_BN.shape != image_BN.shape:
            raise ValueError(
                f"labels have shape {tuple(labels_BN.shape)} and the tokens {tuple(image_BN.shape)}, so the answer, "
                f"whose attention does not count as importance, is unknown: pass inputs_embeds, {IMAGES} and labels of "
                "one length, or route by a score that reads no attention, such as router='linear'"
            )
        return read_prompt(labels_BN, image_BN, inputs.structure.segment_BN)

    def _check_frames(self) -> None:
        """Raise a ValueError if the score reads frames, and no token that may be skipped belongs to one."""
        router = self.config.router
        has_frames = VIDEO in self.images.ids or router.images
        if router.reads_frames and (self.tokens != "image" or not has_frames):
            raise ValueError(
                f"router {router.name!r} compares frames of videos: route with language={{'tokens': 'image'}} a model "
                "that gets videos, or set router.images=True to compare successive images of a prompt"
            )

    def _earlier(self, inputs: Inputs, kind_BN: Tensor) -> Tensor:
        """Return the index of the token at the same position one frame earlier, -1 for none (B, N)."""
        images = self.config.router.images
        if inputs.begun and images and bool((kind_BN == IMAGE).any()):
            raise ValueError(
                "an image follows cached tokens, which may hold the frame before it: pass the full prompt at once, "
                "without past_key_values or prefill_chunk_size"
            )
        once_BN, segment_BN = inputs.described(kind_BN)
        return inputs.copied(self.images.earlier(inputs.layout, once_BN, images, segment_BN))

    def _check_cached(self, inputs: Inputs, groups: TokenGroups, frames: Frames | None) -> None:
        """Refuse a prompt whose image tokens must be chosen together, if some are cached or follow a cache."""
        advice = "route by a threshold on a score that learns, such as router='linear' with select='threshold'"
        cached = has_chosen(inputs.cache)
        problem = ""
        if self.config.reads_attention(self.text.training):
            # The prompt of a draft grows from call to call.
            goes_on = inputs.part is not None and not inputs.part.prompt.drafts
            if groups.skips or (goes_on and cached):
                problem = "importance needs the attention of all queries of the prompt"
        elif groups.skips and frames is not None:
            if not frames.complete:
                problem = "the first one may belong to a partly cached frame"
        elif groups.skips and cached:
            problem = "top-k over the image tokens of a sample cannot be split over calls"
            advice = f"{advice}, or frame by frame with tokens='span'"
        if problem:
            raise ValueError(
                f"image tokens are cached or follow cached tokens, and {problem}: pass the full prompt at once, "
                f"without past_key_values or prefill_chunk_size, or {advice}"
            )

    def _check_numbers(self, arguments: Arguments, cache: object) -> None:
        """Refuse a cache in which layers would not find their own keys and values, as after some were cut out."""
        config: Any = self.text.config
        if not uses_cache(arguments, config):
            return
        # The host runs no more layers than its config has, and makes a cache for as many.
        layers = list(self.text.get_submodule(self.layers).children())[: config.num_hidden_layers]
        numbers = [number_of(layer) for layer in layers if not gets_keys(layer)]
        cached = config.num_hidden_layers
        if cache is not None:
            cached = len(getattr(cache, "layers", numbers))
            if getattr(cache, "layer_class_to_replicate", None) is not None:
                # It grows with the layers that use it.
                cached = max(numbers) + 1
        kinds = list(getattr(config, "layer_types", None) or [""] * cached)[:cached]
        fits = len(set(numbers)) == len(numbers) and max(numbers) < len(kinds)
        # The host makes each kind of mask by the kind's first cache layer, and gives a layer that of its index.
        fits = fits and {kinds.index(kind) for kind in kinds} <= set(numbers)
        fits = fits and [kinds[number] for number in numbers] == kinds[: len(numbers)]
        if not fits:
            raise ValueError(
                f"layers of this {type(self.text).__name__} were cut out, moved or repeated, and the numbers of their "
                f"attention, {', '.join(map(str, numbers))}, do not fit a cache of {cached} layers. Number them from "
                "0, as in `for number, layer in enumerate(text.layers): layer.self_attn.layer_idx = number`, with "
                f"num_hidden_layers={len(layers)} in the config, or pass use_cache=False"
            )

    def _check_causal(self, decodes: bool) -> None:
        """Refuse text behind a cache if it is not decided token by token; a tuned prefix is cached in training too."""
        alone = self.config.decides_alone(training=False)
        if alone and decodes and not self.config.decides_alone(self.text.training):
            refuse_training_mode("routing")
        if not alone:
            images = ""
            if self.images.ids:
                images = ", or with tokens='image'"
            raise ValueError(
                "text cannot be generated: text tokens may be skipped, and the choice depends on future tokens. Route "
                "by a score that learns, such as router='linear', with select='threshold' or with inference_threshold "
                f"(and the loss 'membership'){images}; got router={self.config.router.name!r}, "
                f"select={self.config.select!r}"
            )


def group_reader(model: nn.Module) -> GroupReader | None:
    """Return what finds the tokens that layers of a model may skip; None if nothing in it does."""
    readers = (getattr(hook.before, "__self__", None) for hook in model_hooks(model))
    return next((reader for reader in readers if isinstance(reader, GroupReader)), None)
