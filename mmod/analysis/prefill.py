"""Prompts of a language model, as numbers of tokens, and passes over them on the meta device."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from mmod.adapters import BlockStack, adapted_model, find_parts
from mmod.analysis.counting import KnownValues, by_data
from mmod.analysis.tracing import Trace
from mmod.blocks import RoutedBlock, detach_hooks
from mmod.routing import TokenGroups, assign_groups
from mmod.values import check_fields

# All causal language models of transformers name their output layer so.
_HEAD = "lm_head"
# Arguments of towers that a prompt has for its text.
_OF_TEXT = {"input_ids", "attention_mask"}


@dataclass(frozen=True)
class Prompt:
    """Numbers of tokens of a prompt, whose prefill `mmod.flops` counts in a language model.

    Which tokens a routed layer may skip follows from their kinds alone, so that no ids are needed.

    Args:
        text_tokens: Text tokens.
        image_tokens: Image tokens, or those of each image or frame. The router "temporal" takes them as frames of one
            video.
        protected_tokens: Text tokens that `protected_mask` keeps where text may be skipped.
        pixels: The model's arguments for the images, such as `pixel_values` and `image_grid_thw`, or all of what its
            processor returns: vision tower and projector are counted too.

    Example:
        >>> Prompt(text_tokens=40, image_tokens=(576, 576)).tokens
        1192
    """

    text_tokens: Annotated[int, "[0, inf)"]
    image_tokens: Annotated[int | tuple[int, ...], "[0, inf)"] = 0
    protected_tokens: Annotated[int, "[0, inf)"] = 0
    pixels: Mapping[str, object] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.tokens < 1:
            raise ValueError("a prompt needs at least one token")
        if self.protected_tokens > self.text_tokens:
            raise ValueError(
                f"protected_tokens={self.protected_tokens} must lie between 0 and text_tokens={self.text_tokens}"
            )

    @property
    def images(self) -> tuple[int, ...]:
        """Tokens of each image."""
        if isinstance(self.image_tokens, int):
            return (self.image_tokens,)
        return self.image_tokens

    @property
    def tokens(self) -> int:
        """Number of all tokens."""
        return self.text_tokens + sum(self.images)


def language_stack(model: nn.Module) -> BlockStack:
    """Return the stack of a model's decoder layers."""
    # Not those of other parts, of which some need trials.
    parts = find_parts(model)
    if "language" not in parts:
        raise ValueError(f"this {type(model).__name__} has no language part")
    return parts["language"]()


class VisionPass:
    """A pass of a model of transformers over images alone: its vision tower and projector.

    Attributes:
        inputs: The arguments that describe images, on the CPU.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        # The inner model's names all arguments; the outer one's may take some as keywords.
        readers = [module for module in adapted_model(model).modules() if hasattr(module, "get_image_features")]
        if not readers:
            raise ValueError(f"this {type(model).__name__} has no vision tower: leave pixels out")
        inner: Any = readers[-1]
        self._read = inner.get_image_features
        named = set(inspect.signature(self._read).parameters) - _OF_TEXT
        self.inputs: dict[str, Tensor] = {}
        for name, value in inputs.items():
            if name in named and value is not None:
                self.inputs[name] = value.cpu()

    def run(self) -> None:
        """Read the images; the model may be on the meta device."""
        with KnownValues():
            self._read(**self.inputs)


class Prefill:
    """A pass of a language model on the meta device, whose hooks are taken off, over a prompt without vision tower.

    Attributes:
        inputs: Arguments of the module that holds the layers.
        heads: The output layers by name.
        free: Numbers of tokens that may be skipped, of each image or of all text; empty in a dense model.
        skips_text: Text may be skipped too.
    """

    def __init__(self, model: nn.Module, stack: BlockStack, prompt: Prompt) -> None:
        # It makes masks of tokens for models of transformers alone.
        from mmod.adapters.transformers.families import is_recurrent
        from mmod.adapters.transformers.groups import group_reader
        from mmod.adapters.transformers.layers import GROUPS

        self.dtype = next(weight.dtype for weight in model.parameters() if weight.is_floating_point())
        for name, layer in zip(stack.names, stack.blocks):
            if is_recurrent(layer):
                raise ValueError(
                    f"{name} has linear attention, which caches no keys: count a batch by mmod.flops(model, batch)"
                )
        for module in model.modules():
            if isinstance(module, nn.Linear) and not module.weight.is_floating_point():
                # In 4 or 8 bits, whose kernels need data: it is counted as a linear layer of its shape.
                shape = (module.out_features, module.in_features)
                module.__class__ = nn.Linear
                module.weight = nn.Parameter(torch.empty(shape, dtype=self.dtype, device="meta"))
        self.text = model.get_submodule(stack.block_list.rpartition(".")[0])
        self.heads: dict[str, nn.Module] = {}
        for name, module in model.named_modules():
            if name.rpartition(".")[2] == _HEAD:
                self.heads[name] = module
        reader = group_reader(model)
        # They read the values of tokens, such as where a prompt has images.
        detach_hooks(model)
        tokens = prompt.tokens
        self.inputs: dict[str, Any] = {
            "inputs_embeds": torch.empty(1, tokens, stack.dim, dtype=self.dtype, device="meta"),
            # A mask of all pairs is taken as it is, whatever windows layers have.
            "attention_mask": torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device="meta"),
        }
        self.skips_text = reader is not None and reader.tokens == "all"
        self.free: tuple[int, ...] = ()
        if reader is None:
            return
        self.free = prompt.images
        if self.skips_text:
            self.free = (tokens - prompt.protected_tokens,)
        # The first frame is never skipped.
        if reader.config.router.reads_frames:
            self.free = prompt.images[1:]
        frames = None
        if not self.skips_text and not reader.config.decides_alone(self.text.training):
            frames = reader.language.frames
        groups = _groups(tokens, self.free, frames, strict=not self.skips_text)
        self.inputs[GROUPS] = groups if groups.skips else None

    def run(self) -> Any:
        """Run the prefill and return its KV cache. The heads run for the last token alone, as in generation."""
        from transformers import DynamicCache

        from mmod.adapters.transformers.cache_base import cache_of, with_cache

        # Without a config it keeps the tokens outside of windows too.
        output = self.text(**with_cache(self.inputs, DynamicCache()), use_cache=True)
        for head in self.heads.values():
            head(output.last_hidden_state[:, -1:])
        return cache_of(output)

    def logits(self) -> Tensor:
        """Return what the heads say of every token, without a cache."""
        states = self.text(**self.inputs, use_cache=False).last_hidden_state
        return torch.cat([head(states) for head in self.heads.values()], dim=-1)


def _groups(tokens: int, free: tuple[int, ...], frames: str | int | None, *, strict: bool) -> TokenGroups:
    """Return groups of the last tokens of a prompt, which may be skipped; shapes depend on their numbers alone."""
    free_BN = torch.arange(tokens) >= tokens - sum(free)
    first_BN = torch.zeros_like(free_BN)
    start = tokens - sum(free)
    for size in filter(None, free):
        first_BN[start] = True
        start += size
    groups = assign_groups(
        free_BN[None],
        free_BN[None],
        torch.ones(1, tokens, dtype=torch.bool),
        frames=frames,
        strict=strict,
        first_BN=first_BN[None],
    )
    group_BN = groups.group_BN.to("meta")
    return groups._replace(
        group_BN=group_BN,
        gated_BN=groups.gated_BN.to("meta"),
        limit_BN=groups.limit_BN.to("meta"),
        # Read by some routers; the values do not matter.
        importance=lambda: torch.empty(1, tokens, device="meta"),
        earlier_BN=torch.zeros_like(group_BN),
    )


def shares_of_free(
    model: nn.Module, kept: float | Mapping[str, float] | Trace | None
) -> float | Mapping[str, float] | None:
    """Return what blocks keep of the tokens that may be skipped, from a trace where the cost follows from the data."""
    if not isinstance(kept, Trace):
        return kept
    if not by_data(model):
        return None
    shares = {}
    for name, routing in kept.items():
        block = model.get_submodule(name)
        if isinstance(block, RoutedBlock):
            free_BN = routing.tokens.free(routing.score_BN, block.router.prefix)
            shares[name] = float((routing.keep_BN & free_BN).sum() / free_BN.sum().clamp(min=1))
    return shares
