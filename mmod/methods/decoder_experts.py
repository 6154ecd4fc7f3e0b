"""Mixtures of experts in decoder layers of transformers: which texts experts can choose among."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from mmod.adapters.transformers.masks import valid_tokens


class WholeTexts:
    """A forward pre-hook that refuses texts of which experts that choose together see too much or too little.

    Args:
        mixture: Name of a mixture of experts in the module that is hooked.
        names: Arguments of the module in order.
    """

    def __init__(self, mixture: str, names: tuple[str, ...]) -> None:
        self.mixture = mixture
        self.names = names

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the arguments of a forward pass.

        Raises:
            ValueError: Tokens follow a cache, or some are padding, where experts choose among the tokens of a text.
        """
        mixture: Any = module.get_submodule(self.mixture)
        if not mixture.chooses_together(module.training):
            return
        given = {**dict(zip(self.names, args)), **kwargs}
        cache, mask = given.get("past_key_values"), given.get("attention_mask")
        seen = 0 if cache is None else int(cache.get_seq_length())
        if seen:
            raise ValueError(
                "text cannot be generated where experts choose among tokens to come, as they do in training and "
                "without `sampling`: change the model with sampling='score' or 'predictor', or choice='tokens'"
            )
        source = given.get("inputs_embeds") if given.get("input_ids") is None else given["input_ids"]
        if mask is not None and source is not None and not bool(valid_tokens(mask, source, 0).all()):
            raise ValueError(
                "experts choose among the tokens of a text, and some of this batch are padding, which would take their "
                "slots: give texts of one length, or change the model with choice='tokens'"
            )


def watch_texts(model: nn.Module, layer: str) -> None:
    """Let a language model refuse texts that experts cannot choose among.

    Args:
        model: The model.
        layer: Name of a layer with experts.
    """
    owner, _, place = layer.rpartition("layers.")
    text = model.get_submodule(owner.rstrip("."))
    names = tuple(inspect.signature(type(text).forward).parameters)[1:]
    text.register_forward_pre_hook(WholeTexts(f"layers.{place}.mlp", names), with_kwargs=True)


def unwatch_texts(model: nn.Module) -> None:
    """Take back what `watch_texts` did.

    Args:
        model: The model.
    """
    for module in model.modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, WholeTexts):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
