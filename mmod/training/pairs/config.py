"""The config of training on image-text pairs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from typing_extensions import Self

from mmod.data.config import PairsConfig
from mmod.io.configs import find_config
from mmod.io.files import is_of_transformers
from mmod.opening.runs import LOCAL
from mmod.training.engine.config import LoopConfig, StartConfig


@dataclass(frozen=True)
class ModelConfig(StartConfig):
    """The model of open_clip or transformers, and its starting weights.

    Args:
        name: A name that open_clip knows, `local-dir:FOLDER` or `hf-hub:REPOSITORY`; or a folder in which transformers
            saved a CLIP or SigLIP with its processor.
        config: A JSON file with a model config in open_clip's format; its name without `.json` becomes one that
            open_clip knows.
        checkpoint: Starting weights, dense or routed: a file that open_clip reads (PyTorch, safetensors, big_vision's
            `.npz`), or a run folder. None starts from `pretrained` or from scratch.
        pretrained: Start from published weights: a tag of `open_clip.list_pretrained()`.
        image_checkpoint: Starting weights of the image tower alone: a file or folder as for `checkpoint`, of a full
            model, of a tower, or of the timm model inside the tower, without its classifier.
        locked: "image" trains only the routers of the image tower (LiT, arXiv 2111.07991); None trains all weights.
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

    @property
    def has_weights(self) -> bool:
        """Whether training starts from trained weights; a folder and a repository bring theirs."""
        return super().has_weights or ":" in self.name or is_of_transformers(self.name)

    @property
    def weights(self) -> dict[str, str]:
        """Where starting weights are read from: a file instead of a published tag too, and the folder of the model.

        And the file that describes the model, which weights alone do not.
        """
        paths = {}
        if self.config is not None:
            paths["config"] = str(find_config(self.config))
        # All weights come from a checkpoint if there is one.
        if self.checkpoint is not None:
            return {**paths, **super().weights}
        folder = self.name.removeprefix(LOCAL)
        if self.pretrained is not None:
            if Path(self.pretrained).exists():
                paths["pretrained"] = self.pretrained
        elif Path(folder).is_dir():
            paths["name"] = folder
        if self.image_checkpoint is not None:
            paths["image_checkpoint"] = self.image_checkpoint
        return paths

    def started_from(self, checkpoint: str | None) -> Self:
        """Return the same model with all weights of a checkpoint, the image tower's included."""
        return dataclasses.replace(self, image_checkpoint=None, checkpoint=checkpoint, pretrained=None)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """The config of training on image-text pairs.

    Accumulated batches share their negatives, as if they were one batch.

    Args:
        model: The model and its starting weights.
        data: The pairs.
        routing: The routing by tower (`image`, `text`): fields of `mmod.RoutingConfig`, or `preset: NAME` with the
            fields to change. None leaves the model, or one part, dense.
        augment: Augmentation of training images: fields of `open_clip.transform.AugmentationCfg` (`{}` for open_clip's
            defaults). None prepares them as for evaluation.
        loss: "clip" for the contrastive loss, "siglip" for the sigmoid one, "coca" for contrast and captioning.
        distill: The teacher, if any; the model imitates its similarities within a batch.
        zero_shot: Also classify images by prompts: "scenes" classifies the first digit in the captions of the embedded
            set, "imagenet:FOLDER" classifies the images in FOLDER/CLASS/ by open_clip's ImageNet names and templates.
    """

    kind: Literal["pairs"] = "pairs"
    model: ModelConfig
    data: PairsConfig = field(default_factory=PairsConfig)
    routing: dict[str, dict[str, object] | None] | None = field(default=None, metadata={"names": ("image", "text")})
    augment: dict[str, object] | None = field(default_factory=dict)
    loss: Literal["clip", "siglip", "coca"] = "clip"
    zero_shot: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        embedded = PairsConfig()
        # A model of the user's pairs would be scored on ours, without a word.
        sources = self.data.train
        if isinstance(sources, str):
            sources = [sources]
        trains_on_ours = any(source.startswith("scenes:") for source in sources)
        if self.data.val == embedded.val and not trains_on_ours:
            raise ValueError(
                f"data.val is {embedded.val!r}, which says little of a model trained on {self.data.train!r}: set it to "
                "pairs of yours"
            )
        kind = (self.zero_shot or "scenes").partition(":")[0]
        if kind not in ("scenes", "imagenet") or self.zero_shot == "imagenet":
            raise ValueError(f"zero_shot must be 'scenes' or 'imagenet:FOLDER', got {self.zero_shot!r}")

    @property
    def evaluated_folders(self) -> tuple[str, ...]:
        """The folder of `zero_shot`; see `RunConfig.evaluated_folders`."""
        folder = (self.zero_shot or "").partition(":")[2]
        return (folder,) if folder else ()
