"""The config of training an image classifier."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from typing_extensions import Self

from mmod.config import RoutingConfig
from mmod.data.config import DataConfig
from mmod.io.files import is_of_transformers
from mmod.opening.runs import LOCAL
from mmod.training.engine import config as engine
from mmod.training.engine.groups import TeacherConfig
from mmod.values import Checked, brief


@dataclass(frozen=True)
class ModelConfig(engine.StartConfig):
    """The model and its starting weights.

    Args:
        name: A name of timm's registry, or a folder that timm or transformers saved a model in.
        args: Further arguments of `timm.create_model`, such as `num_classes` or `img_size`; for a folder of
            transformers, fields of its config, also by these names.
        checkpoint: Starting weights, dense or routed: a `.safetensors` or PyTorch file, a checkpoint of another
            training script (its EMA weights if it has any), a run folder, or a folder written by
            `mmod.save_pretrained`. None starts from `pretrained` or from scratch. A checkpoint that timm can convert
            (DINOv2's names, or another image size where `args.img_size` is set) is converted as timm does it.
        head: "fresh" starts with a new classifier; the checkpoint's may be missing or have other classes. None
            takes all weights from the checkpoint.
        pretrained: Start from timm's published weights, or from those in the folder.
    """

    name: str
    args: dict[str, object] = field(default_factory=dict)
    head: Literal["fresh"] | None = field(default=None, kw_only=True)
    pretrained: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head is not None and self.checkpoint is None:
            raise ValueError(
                f"model.head={self.head!r} concerns the classifier of a checkpoint: set model.checkpoint; published "
                "weights get a new classifier wherever model.args.num_classes asks for one"
            )

    @property
    def has_weights(self) -> bool:
        """Whether training starts from a trained model, classifier included."""
        return super().has_weights and self.head is None

    @property
    def weights(self) -> dict[str, str]:
        """Where starting weights are read from: the folder of the model too, if they are its own."""
        folder = self.name.removeprefix(LOCAL)
        if self.pretrained and Path(folder).is_dir():
            return {"name": folder}
        return super().weights

    def started_from(self, checkpoint: str | None) -> Self:
        """Return the same model with all weights of a checkpoint, classifier included."""
        return dataclasses.replace(super().started_from(checkpoint), head=None)


@dataclass(frozen=True)
class LossConfig(Checked, group="loss"):
    """The task's criterion.

    Args:
        kind: "ce" for cross entropy, "bce" for one binary cross entropy per class.
        smoothing: Label smoothing, in [0, 1).
    """

    kind: Literal["ce", "bce"] = "ce"
    smoothing: Annotated[float, "[0, 1)"] = 0.0


@dataclass(frozen=True)
class MixupConfig(Checked, group="mixup"):
    """Mixing of the images in a batch: arguments of `timm.data.Mixup`.

    Args:
        mixup_alpha: Alpha of mixup; 0 disables it.
        cutmix_alpha: Alpha of cutmix; 0 disables it.
        prob: Probability of mixing a batch or element.
        switch_prob: Probability of cutmix if both are enabled.
        mode: Images that share one draw: those of a batch, of a pair, or none.
    """

    mixup_alpha: Annotated[float, "[0, inf)"] = 0.8
    cutmix_alpha: Annotated[float, "[0, inf)"] = 1.0
    prob: Annotated[float, "[0, 1]"] = 1.0
    switch_prob: Annotated[float, "[0, 1]"] = 0.5
    mode: Literal["batch", "pair", "elem"] = "batch"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mixup_alpha <= 0 and self.cutmix_alpha <= 0:
            raise ValueError("mixup needs mixup_alpha or cutmix_alpha above 0; use `mixup: null` for none")


@dataclass(frozen=True)
class DistillConfig(TeacherConfig):
    """Distillation of logits: `weight * KL(teacher || student)` is added to the task's loss.

    Args:
        weight: Weight of the term.
        features: Weight of a second term, the mean over final tokens of one minus the cosine between the teacher's and
            the student's; None for no such term.
    """

    weight: float = 0.5
    features: Annotated[float | None, "(0, inf)"] = None


@dataclass(frozen=True)
class ElasticConfig(Checked, group="elastic"):
    """One checkpoint for many budgets: a step trains the largest capacity, the smallest, and random ones in between.

    The largest capacity learns from the labels, the others from its outputs.

    Args:
        capacities: Capacities of all routed blocks, ascending; that of the routing config is one of them. The model is
            evaluated at all of them.
        samples: Number of capacities per step.

    Source: the sandwich rule and inplace distillation, Yu and Huang, arXiv 1903.05134.
    """

    capacities: Annotated[list[float], "(0, 1]"]
    samples: Annotated[int, "[2, inf)"] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        fault = ""
        if self.capacities != sorted(set(self.capacities)):
            fault = "must ascend"
        elif self.samples > len(self.capacities):
            fault = f"are fewer than elastic.samples={self.samples}, of which a step takes each another one"
        if fault:
            raise ValueError(f"elastic.capacities={self.capacities} {fault}; valid are [0.25, 0.5, 0.75, 1.0] and 4")


@dataclass(frozen=True, kw_only=True)
class TrainConfig(engine.LoopConfig):
    """The config of training an image classifier.

    Args:
        model: The model and its starting weights.
        data: The images and their augmentation. With `data.label_patch` the model classifies every patch and must not
            pool: `model.args.global_pool: ''`.
        routing: How the model is routed: fields of `mmod.RoutingConfig`, or `preset: NAME` with the fields to change.
            None trains the dense model.
        loss: The task's criterion.
        mixup: Mixup and cutmix; None for neither.
        distill: The teacher, if any.
        elastic: Train one checkpoint for several capacities; None for that of `routing` alone.
    """

    kind: Literal["image"] = "image"
    model: ModelConfig
    data: DataConfig
    routing: dict[str, object] | None = field(default=None, metadata={"names": ("preset",)})
    loss: LossConfig = field(default_factory=LossConfig)
    mixup: MixupConfig | None = None
    distill: DistillConfig = field(default_factory=DistillConfig)
    elastic: ElasticConfig | None = None

    part = "image"
    # timm converts the image encoder of a CLIP.
    converted_kinds = ("pairs",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_size()
        self._check_elastic()
        if self.distill.features is not None and self.teacher() is None:
            raise ValueError(f"distill.features={self.distill.features:g} needs a teacher: set distill.teacher")
        # timm mixes each image with its counterpart from the other end of the batch.
        if self.mixup is not None and self.data.batch_size % 2:
            raise ValueError(f"mixup needs an even data.batch_size, got {self.data.batch_size}")
        if self.mixup is not None and self.data.label_patch is not None:
            raise ValueError("mixup mixes the labels of images: with data.label_patch, set mixup: null")

    def depths(self) -> Mapping[str, int]:
        """Return the number of blocks, if the config states it."""
        depth = self.model.args.get("depth")
        return {"image": depth} if isinstance(depth, int) else {}

    def _check_size(self) -> None:
        """Refuse a model's size that is not that of the images, to which a model of any size would resample."""
        side = self.data.image_size
        for name in ("img_size", "image_size"):
            size = self.model.args.get(name)
            is_square = isinstance(size, (list, tuple)) and list(size) == [side, side]
            if is_square or size in (None, side):
                continue
            advice = f"set model.args.{name} to {side}, or data.image_size to the model's"
            patch = self.model.args.get("patch_size")
            if isinstance(patch, int) and patch > 0 and side % patch and not self.model.args.get("dynamic_img_pad"):
                near = nearest_multiple(side, patch)
                advice = f"set both to a multiple of model.args.patch_size {patch}, such as {near}"
            raise ValueError(f"data.image_size is {side} and model.args.{name} {brief(size)}; {advice}")

    def _check_elastic(self) -> None:
        if self.elastic is None:
            return
        # A preset whose capacity depends on the number of blocks has none yet.
        capacity = getattr(self.image_routing, "capacity", None)
        if capacity not in self.elastic.capacities:
            raise ValueError(
                "elastic needs a routing config whose capacity is one of elastic.capacities="
                f"{self.elastic.capacities}, got {capacity}"
            )
        if self.grad_checkpointing:
            # Recomputed blocks would run at the capacity of the last sample.
            raise ValueError("elastic cannot be combined with grad_checkpointing")
        self.refuse_training_only("elastic evaluates the model at several capacities")

    @classmethod
    def model_in(cls, folder: str) -> dict[str, object]:
        """Return the fields of `model` that stand for a saved model in a folder, which is a name too."""
        return {"name": folder, "pretrained": True}

    def keys_of_size(self, side: int) -> dict[str, object]:
        """Return the keys of the data's images, and of the model that reads them."""
        return {"data": {"image_size": side}, "model": {"args": {"img_size": side}}}

    def named_teacher(self, name: str) -> Self | None:
        """Return the config of a teacher in a folder of transformers or by a name of timm's registry, with weights."""
        if Path(name).exists() and not is_of_transformers(name):
            return None
        return dataclasses.replace(self, model=ModelConfig(name, {"in_chans": self.data.channels}, pretrained=True))

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return self.data.channels, self.data.image_size, self.data.image_size

    @property
    def has_classes(self) -> bool:
        """Whether the classifier is that of the starting weights."""
        return self.model.has_weights and self.data.label_patch is None

    @property
    def image_routing(self) -> RoutingConfig | None:
        """The routing of the model; None for a dense model."""
        return self.routings.get("image")


def nearest_multiple(side: int, patch: int) -> int:
    """Return the number of pixels next to a side that whole patches make up.

    Example:
        >>> nearest_multiple(60, 8), nearest_multiple(33, 8), nearest_multiple(3, 8)
        (64, 32, 8)
    """
    return max(1, round(side / patch)) * patch
