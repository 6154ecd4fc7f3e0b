"""The configuration of training on image-text pairs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from typing_extensions import Self

from mmod.config import RoutingConfig
from mmod.data.config import PairsConfig
from mmod.training.engine.config import LoopConfig, StartConfig, resolve_routing
from mmod.values import check_fields

__all__ = ["ModelConfig", "RoutingParts", "TrainConfig"]


@dataclass(frozen=True)
class ModelConfig(StartConfig):
    """Which open_clip model is trained and from which weights.

    Args:
        name: A name that open_clip knows, `local-dir:FOLDER` or `hf-hub:REPOSITORY`.
        config: A JSON file with a model config of open_clip's form; its name without `.json` becomes one that
            open_clip knows.
        checkpoint: Starting weights, dense or routed: a file that open_clip reads (PyTorch, safetensors, big_vision's
            `.npz`), or a run folder. None starts from `pretrained` or from scratch.
        pretrained: Start from published weights: a tag of `open_clip.list_pretrained()`.
        image_checkpoint: Starting weights of the image tower alone: a file or folder as for `checkpoint`, of a whole
            model, of a tower, or of the timm model that the tower is made of, whose classifier is left out.
        locked: "image" trains no weight of the image tower but its routers' (LiT, arXiv 2111.07991); None trains all.
    """

    name: str
    config: str | None = None
    pretrained: str | None = field(default=None, kw_only=True)
    image_checkpoint: str | None = field(default=None, kw_only=True)
    locked: Literal["image"] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.checkpoint is not None and self.image_checkpoint is not None:
            raise ValueError(
                f"model.checkpoint={self.checkpoint!r} holds both towers: set it or model.image_checkpoint to null"
            )

    def started_from(self, checkpoint: str) -> Self:
        """Return the same model with all weights of a checkpoint, the image tower's too."""
        whole = dataclasses.replace(self, image_checkpoint=None)
        return dataclasses.replace(whole, checkpoint=checkpoint, pretrained=None)


@dataclass(frozen=True)
class RoutingParts:
    """How each tower is routed: fields of `mmod.RoutingConfig`, or `preset: NAME` with the fields to change.

    Args:
        image: Routing of the image tower; None leaves it dense.
        text: Routing of the text tower; None leaves it dense.
    """

    image: dict[str, Any] | None = None
    text: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_fields(self, "routing")
        if self.image is None and self.text is None:
            raise ValueError("routing needs an entry for image or text; use `routing: null` for a dense model")

    def configs(self) -> dict[str, RoutingConfig]:
        """Return the routing of each routed tower, presets resolved."""
        parts = {"image": self.image, "text": self.text}
        return {name: resolve_routing(fields) for name, fields in parts.items() if fields is not None}


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """Everything that decides the outcome of training on image-text pairs.

    Batches are accumulated with the negatives of all of them, as if they were one.

    Args:
        model: The model and its starting weights.
        data: Where pairs come from.
        routing: How each tower is routed; None trains the dense model.
        augment: Augmentation of training images: fields of `open_clip.transform.AugmentationCfg` (`{}` for open_clip's
            defaults). None prepares them as for evaluation.
        loss: "clip" for the contrastive loss, "siglip" for the sigmoid one, "coca" for contrast and captioning.
        distill: The teacher, if any, whose similarities within a batch are imitated.
        zero_shot: Also classify images by prompts: "scenes" asks which digit the captions of the embedded set name
            first, "imagenet:FOLDER" classifies the images in FOLDER/CLASS/ by open_clip's ImageNet names and templates.
    """

    model: ModelConfig
    data: PairsConfig = field(default_factory=PairsConfig)
    routing: RoutingParts | None = None
    augment: dict[str, Any] | None = field(default_factory=dict)
    loss: Literal["clip", "siglip", "coca"] = "clip"
    zero_shot: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = (self.zero_shot or "scenes").partition(":")[0]
        if kind not in ("scenes", "imagenet") or self.zero_shot == "imagenet":
            raise ValueError(f"zero_shot must be 'scenes' or 'imagenet:FOLDER', got {self.zero_shot!r}")

    def routing_configs(self) -> dict[str, RoutingConfig]:
        """Return the routing of each routed tower, presets resolved; empty for a dense model."""
        return {} if self.routing is None else self.routing.configs()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values only, with routing presets resolved, as the run folder keeps them."""
        routing = {name: config.to_dict() for name, config in self.routing_configs().items()}
        return {**super().to_dict(), "routing": routing or None}
