"""Causal language models of bytes, and their costs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from mmod.analysis import Prompt, flops
from mmod.analysis.counting import needed_shares
from mmod.methods.base import deciding_together
from mmod.methods.route import all_kept, deciding_by
from mmod.opening.open import open_start
from mmod.training.text.config import BYTES, ModelConfig


def create_dense(config: ModelConfig) -> Any:
    """Create the dense model without the weights of its checkpoint, in training mode; its end token ends a file."""
    # The run's config says how the checkpoint was routed.
    model: Any = open_start("text", vars(config)).model
    if model.config.vocab_size != BYTES:
        raise ValueError(
            f"{config.checkpoint!r} holds a model of {model.config.vocab_size} tokens, not of {BYTES} bytes"
        )
    return model.train()


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """Return the logits (B, L, 256) of the byte after each of some bytes (B, L)."""
    return model(input_ids=tokens, use_cache=False).logits


def every_token(model: nn.Module) -> AbstractContextManager[None]:
    """Context in which all tokens of a routed model run in all layers, weighted by their gates."""
    return deciding_by(model, all_kept)


def window_flops(model: Any, length: int, kept: Mapping[str, float] | None = None) -> int:
    """Count the forward pass of a window in training: top-k in routed layers, and the logits of every byte.

    The cost of threshold routing depends on the text: `kept` is the kept share by routed layer.
    """
    with deciding_together(model):
        # In training a layer may take the top-k, whatever its threshold in evaluation.
        counts = flops(model, Prompt(length), needed_shares(model, kept))
    # A prefill computes the logits of its last token alone.
    return counts.routed + (length - 1) * counts.rest.routed
