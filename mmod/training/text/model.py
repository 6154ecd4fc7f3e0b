"""From a config to a causal language model of bytes, routed or dense, and back to a folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from mmod.adapters.transformers.loading import forget_description
from mmod.analysis import prefill_flops
from mmod.data.readers.text import END
from mmod.methods import Method
from mmod.methods.base import deciding_together
from mmod.methods.read import is_added
from mmod.training.engine.checkpoint import find_weights, read_weights
from mmod.training.engine.model import load_weights, prepare_models
from mmod.training.text.config import BYTES, ModelConfig, TrainConfig

__all__ = ["create_dense", "create_models", "logits_of", "window_flops"]


def create_models(config: TrainConfig) -> tuple[nn.Module, nn.Module | None]:
    """Make the model to train and its teacher, on the CPU; see `mmod.training.engine.model.prepare_models`.

    Args:
        config: The run's config.

    Returns:
        The model, and the frozen teacher in eval mode or None.

    Raises:
        ValueError: If transformers knows no such model, or the checkpoint does not fit it.
        FileNotFoundError: If the checkpoint is not there.
    """

    def create_teacher(checkpoint: str) -> nn.Module:
        teacher = create_dense(config.model)
        if _load(teacher, checkpoint, None):
            raise ValueError(f"teacher {checkpoint!r} is routed; distill from a dense model")
        return teacher

    plain = dataclasses.replace(config, grad_checkpointing=False)

    def load(model: Any, checkpoint: str) -> dict[str, Tensor]:
        return _load(model, checkpoint, config.method_config())

    model, teacher = prepare_models(plain, create_dense(config.model), load, create_teacher)
    if config.grad_checkpointing:
        checkpointing: Any = model
        checkpointing.gradient_checkpointing_enable({"use_reentrant": False})
    return model, teacher


def create_dense(config: ModelConfig) -> Any:
    """Make the dense model that a config names, without the weights of its checkpoint.

    Args:
        config: The model's config.

    Returns:
        The model, in training mode, whose end token is the byte that ends a file.
    """
    fields: dict[str, Any] = {"vocab_size": BYTES, "pad_token_id": None, "bos_token_id": END, "eos_token_id": END}
    if config.config is not None:
        described: Any = AutoConfig.for_model(**{**fields, **config.config})
    else:
        folder = find_weights(str(config.checkpoint)).parent
        described = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if described.vocab_size != BYTES:
            raise ValueError(f"{str(folder)!r} holds a model of {described.vocab_size} tokens, not of {BYTES} bytes")
        # How the checkpoint was routed is said by its run's config.
        forget_description(described)
    return AutoModelForCausalLM.from_config(described).train()


def logits_of(model: Any, tokens: Tensor) -> Tensor:
    """Return what a model says of the byte that follows each of a text.

    Args:
        model: A causal language model.
        tokens: Bytes (B, L).

    Returns:
        Logits (B, L, 256).
    """
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def window_flops(model: Any, length: int, kept: Mapping[str, float] | None = None) -> int:
    """Count the forward pass of a window as training runs it: the top-k of routed layers, and logits of every byte.

    Args:
        model: A causal language model.
        length: Bytes of the window.
        kept: For threshold routing, whose cost follows from the text: name of each routed layer to the share it keeps.

    Raises:
        ValueError: A model routed by threshold, without `kept`.
    """
    with deciding_together(model):
        counts = prefill_flops(model, text_tokens=length, kept=kept)
    # A prompt's prefill needs the logits of its last token alone.
    return counts.routed + (length - 1) * counts.rest.routed


def _load(model: Any, checkpoint: str, method: Method | None) -> dict[str, Tensor]:
    """Load the dense part of a checkpoint, and return the weights of its routers and further experts.

    Where a method's weights took the place of dense ones, the model is changed by it and all of them are loaded.
    """
    state = read_weights(find_weights(Path(checkpoint)))
    if method is not None and method.replaced_in(state):
        method.apply_(model)
    own = set(model.state_dict())
    # What is tied is saved once.
    for name, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        state.setdefault(name, state[source])
    added = {name: value for name, value in state.items() if name not in own and is_added(name)}
    load_weights(model, {name: value for name, value in state.items() if name not in added}, checkpoint)
    return added
