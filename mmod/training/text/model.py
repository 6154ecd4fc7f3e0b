"""Causal language models of bytes, and their costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from mmod.adapters.transformers.saving import forget_description
from mmod.analysis import Prompt, flops
from mmod.data.loader import END
from mmod.methods.base import deciding_together
from mmod.training.engine.checkpoint import find_weights
from mmod.training.engine.model import described
from mmod.training.text.config import BYTES, ModelConfig


def create_dense(config: ModelConfig) -> Any:
    """Create the dense model without the weights of its checkpoint, in training mode; its end token ends a file."""
    fields: dict[str, Any] = {"vocab_size": BYTES, "pad_token_id": None, "bos_token_id": END, "eos_token_id": END}
    if config.config is not None:
        model_config: Any = described({**fields, **config.config})
    else:
        folder = find_weights(str(config.checkpoint)).parent
        model_config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if model_config.vocab_size != BYTES:
            raise ValueError(f"{str(folder)!r} holds a model of {model_config.vocab_size} tokens, not of {BYTES} bytes")
        # The run's config says how the checkpoint was routed.
        forget_description(model_config)
    return AutoModelForCausalLM.from_config(model_config).train()


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """Return the logits (B, L, 256) of the byte after each of some bytes (B, L)."""
    return model(input_ids=tokens, use_cache=False).logits


def window_flops(model: Any, length: int, kept: Mapping[str, float] | None = None) -> int:
    """Count the forward pass of a window in training: top-k in routed layers, and the logits of every byte.

    The cost of threshold routing depends on the text: `kept` is the kept share by routed layer.
    """
    with deciding_together(model):
        counts = flops(model, Prompt(length), kept)
    # A prefill computes the logits of its last token alone.
    return counts.routed + (length - 1) * counts.rest.routed
