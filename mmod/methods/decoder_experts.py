"""Checks of the texts that mixtures of experts in decoder layers run on."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from mmod.adapters.transformers.masks import valid_tokens
from mmod.methods.mixture import refuse_generation


class CompleteTexts:
    """A forward pre-hook that refuses incomplete or padded texts if experts choose among all tokens."""

    def __init__(self, mixture: str, names: tuple[str, ...]) -> None:
        self.mixture = mixture
        self.names = names

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the arguments of a forward pass."""
        mixture: Any = module.get_submodule(self.mixture)
        if not mixture.chooses_together(module.training):
            return
        arguments = {**dict(zip(self.names, args)), **kwargs}
        cache, mask = arguments.get("past_key_values"), arguments.get("attention_mask")
        if cache is not None and int(cache.get_seq_length()):
            refuse_generation("experts")
        source = arguments.get("inputs_embeds") if arguments.get("input_ids") is None else arguments["input_ids"]
        if mask is not None and source is not None and not bool(valid_tokens(mask, source, 0).all()):
            raise ValueError(
                "experts choose among the tokens of a text, and padding in this batch would take their slots: pass "
                "texts of one length, or apply the method with choice='tokens'"
            )


def watch_texts(model: nn.Module, layer: str) -> None:
    """Add the check to a language model."""
    owner, _, place = layer.rpartition("layers.")
    text = model.get_submodule(owner.rstrip("."))
    names = tuple(inspect.signature(type(text).forward).parameters)[1:]
    text.register_forward_pre_hook(CompleteTexts(f"layers.{place}.mlp", names), with_kwargs=True)


def unwatch_texts(model: nn.Module) -> None:
    """Remove the check that `watch_texts` added."""
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, CompleteTexts):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
