"""The configuration of training a causal language model on text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mmod.config import RoutingConfig
from mmod.data.config import TextConfig
from mmod.training.engine.config import LoopConfig, StartConfig, check_sizes, resolve_method, resolve_routing

if TYPE_CHECKING:
    # By way of the package, which what reads the types of fields imports without torch.
    from mmod import methods

__all__ = ["BYTES", "ModelConfig", "TrainConfig"]

BYTES = 256
"""Tokens that a model of bytes knows."""


@dataclass(frozen=True)
class ModelConfig(StartConfig):
    """Which decoder-only transformers model of bytes is trained and from which weights.

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
        if self.config is None and self.checkpoint is None:
            raise ValueError("give model.config, fields of a transformers config, or model.checkpoint")
        check_sizes(self.config or {}, "model.config")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError(f"model.config needs a model_type, got {', '.join(self.config) or 'nothing'}")
        vocabulary = BYTES if self.config is None else self.config.get("vocab_size", BYTES)
        if vocabulary != BYTES:
            raise ValueError(f"model.config.vocab_size must be {BYTES}, as many as there are bytes, got {vocabulary}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """Everything that decides the outcome of training a causal language model.

    Args:
        model: The model and its starting weights.
        data: The text.
        routing: How the model is routed: fields of `mmod.RoutingConfig`, or `preset: NAME` with the fields to change.
            None trains the dense model.
        method: Another way to spend less, in the place of routing: `kind: recursions` or `experts` with the fields of
            that class in `mmod.methods`. None for none. A model with experts may be routed, too.
        elastic: Each step also passes all tokens through all layers. That pass learns the text, and the routed one
            learns what it says: the same weights then write drafts with the one and verify them with the other.
    """

    model: ModelConfig
    data: TextConfig = field(default_factory=TextConfig)
    routing: dict[str, Any] | None = None
    method: dict[str, Any] | None = None
    elastic: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.elastic and self.routing is None:
            raise ValueError("elastic trains a routed model: set routing, or elastic: false")
        method = self.method_config()
        if method is not None:
            if self.routing is not None and not method.precedes("routing"):
                raise ValueError("a model is routed or changed by a method: set routing or method to null")
            if self.grad_checkpointing:
                raise ValueError("a model that a method changed cannot be trained with grad_checkpointing")

    def routing_configs(self) -> dict[str, RoutingConfig]:
        """Return the routing by the name of its part, presets resolved; empty for a dense model."""
        if self.routing is None:
            return {}
        depth = (self.model.config or {}).get("num_hidden_layers")
        known = {"depth": depth} if "preset" in self.routing and depth is not None else {}
        return {"language": resolve_routing({**known, **self.routing})}

    def method_config(self) -> methods.Method | None:
        """Return the method that this run trains; None for none."""
        return resolve_method(self.method)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values only, with a routing preset resolved, as the run folder keeps them."""
        routing, method = [config.to_dict() for config in self.routing_configs().values()], self.method_config()
        plain = {**super().to_dict(), "routing": routing[0] if routing else None}
        # Folders of runs without one do not name it.
        plain.pop("method")
        return plain if method is None else {**plain, "method": method.to_dict()}
