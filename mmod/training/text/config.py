"""The config of training a causal language model on text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from typing_extensions import Self

from mmod.data.config import TextConfig
from mmod.training.engine.config import LoopConfig, StartConfig, check_described

BYTES = 256
"""Vocabulary of a model of bytes."""


@dataclass(frozen=True)
class ModelConfig(StartConfig):
    """The decoder-only transformers model, which reads bytes, and its starting weights.

    Args:
        config: Fields of a transformers config with its `model_type`, such as `llama`; the vocabulary is the 256 bytes.
            None takes the checkpoint's.
        checkpoint: Starting weights, dense or routed: a run folder, or a folder that `save_pretrained` wrote. None
            starts from scratch.
    """

    config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pretrained not in (None, False):
            raise ValueError(
                f"no published weights read bytes: set model.checkpoint, not model.pretrained={self.pretrained!r}"
            )
        if self.config is not None:
            check_described(self.config)
        elif self.checkpoint is None:
            raise ValueError("give model.config, fields of a transformers config, or model.checkpoint")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """The config of training a causal language model.

    Args:
        model: The model and its starting weights.
        data: The text.
        routing: How the model is routed: fields of `mmod.RoutingConfig`, or `preset: NAME` with the fields to change.
            None trains the dense model.
        elastic: Each step also passes all tokens through all layers. That pass learns from the text, and the routed one
            from its outputs, so the same weights can draft with the one and verify with the other.
    """

    kind: Literal["text"] = "text"
    model: ModelConfig
    data: TextConfig = field(default_factory=TextConfig)
    routing: dict[str, object] | None = field(default=None, metadata={"names": ("preset",)})
    elastic: bool = False

    part = "language"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.elastic and not self.routings:
            raise ValueError("elastic trains a routed model: set routing, or elastic: false")
        if self.elastic:
            if self.grad_checkpointing:
                # Recomputed layers would skip tokens in the pass that ran all.
                raise ValueError("elastic cannot be combined with grad_checkpointing")
            self.refuse_training_only("elastic trains a routed model")

    def plain(self) -> Self:
        """Return the config without what training alone needs; see `RunConfig.plain`."""
        return dataclasses.replace(super().plain(), elastic=False)

    def depths(self) -> Mapping[str, int]:
        """Return the number of layers, if the config states it."""
        depth = (self.model.config or {}).get("num_hidden_layers")
        return {} if depth is None else {"language": depth}
