"""The configuration of one training run, as typed dataclasses: what all have in common, and image classification."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mmod.config import RoutingConfig
from mmod.data.config import DataConfig
from mmod.planning.presets import preset
from mmod.values import check_fields

__all__ = [
    "CapacityScheduleConfig",
    "DistillConfig",
    "EmaConfig",
    "LossConfig",
    "MixupConfig",
    "ModelConfig",
    "OptimConfig",
    "RunConfig",
    "ScheduleConfig",
    "TrainConfig",
    "resolve_routing",
]


SCHEDULES = ("cosine", "tanh", "step", "multistep", "poly", "wsd", "rsqrt", "constant", "none")
"""Names of the learning-rate schedules that are functions of the step."""


@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained and from which weights.

    Args:
        name: A name of timm's registry.
        args: Further arguments of `timm.create_model`, such as `num_classes` or `img_size`.
        checkpoint: Starting weights, dense or routed: a `.safetensors` or PyTorch file, a run folder, or a
            folder written by `mmod.save_pretrained`. None starts from `pretrained` or from scratch.
        pretrained: Start from timm's published weights.
    """

    name: str
    args: dict[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    pretrained: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "model")
        if self.pretrained and self.checkpoint is not None:
            raise ValueError(f"model.pretrained and model.checkpoint={self.checkpoint!r} exclude each other")

    @property
    def has_weights(self) -> bool:
        """Whether training starts from trained weights."""
        return self.pretrained or self.checkpoint is not None


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser: arguments of `timm.optim.create_optimizer_v2`.

    Args:
        opt: A name of `timm.optim.list_optimizers`.
        lr: Learning rate.
        lr_per: When given, `lr` is meant for this many images per optimiser step and is scaled linearly
            to the actual number (all processes and accumulated batches together).
        weight_decay: Weight decay; biases and norms are exempt.
        momentum: Momentum of the optimisers that have one.
        layer_decay: Factor on the learning rate per layer, from the head down. None for no decay.
        args: Further arguments of the optimiser, such as `betas` or `eps`.
    """

    opt: str = "adamw"
    lr: float = 1e-3
    lr_per: int | None = None
    weight_decay: float = 0.05
    momentum: float = 0.9
    layer_decay: float | None = None
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(
            self,
            "optim",
            lr="[0, inf)",
            lr_per="[1, inf)",
            weight_decay="[0, inf)",
            momentum="[0, 1)",
            layer_decay="(0, 1]",
        )


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning-rate schedule, stepped at each optimiser step: arguments of timm's `create_scheduler_v2`.

    Args:
        sched: "cosine", "tanh", "step", "multistep", "poly", "wsd", "rsqrt", "constant" or "none".
        warmup_epochs: Epochs of linear warm-up.
        warmup_lr: Learning rate at the start of the warm-up.
        min_lr: Learning rate at the end.
        args: Further arguments of `create_scheduler_v2`.
    """

    sched: str = "cosine"
    warmup_epochs: int = 0
    warmup_lr: float = 1e-6
    min_lr: float = 0.0
    args: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.sched == "plateau":
            raise ValueError("schedule.sched='plateau' depends on metrics; choose a function of the step")
        check_fields(
            self, "schedule", sched=SCHEDULES, warmup_epochs="[0, inf)", warmup_lr="[0, inf)", min_lr="[0, inf)"
        )

    def check_rate(self, lr: float) -> None:
        """Raise a ValueError when the schedule would not end below where it starts.

        Args:
            lr: The learning rate that it starts at, or warms up to.
        """
        if self.sched not in ("constant", "none") and self.min_lr > lr:
            raise ValueError(f"schedule.min_lr must be at most the learning rate, {lr:g}, got {self.min_lr:g}")
        if self.warmup_epochs and self.warmup_lr > lr:
            raise ValueError(f"schedule.warmup_lr must be at most the learning rate, {lr:g}, got {self.warmup_lr:g}")


@dataclass(frozen=True)
class LossConfig:
    """The task's criterion.

    Args:
        kind: "ce" for cross entropy, "bce" for one binary cross entropy per class.
        smoothing: Label smoothing, in [0, 1).
    """

    kind: Literal["ce", "bce"] = "ce"
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "loss", smoothing="[0, 1)")


@dataclass(frozen=True)
class MixupConfig:
    """Mixing of images in a batch: arguments of `timm.data.Mixup`.

    Args:
        mixup_alpha: Alpha of mixup; 0 switches it off.
        cutmix_alpha: Alpha of cutmix; 0 switches it off.
        prob: Probability of mixing a batch or element.
        switch_prob: Probability of cutmix when both are on.
        mode: What shares one draw: the batch, a pair of images, or each image its own.
    """

    mixup_alpha: float = 0.8
    cutmix_alpha: float = 1.0
    prob: float = 1.0
    switch_prob: float = 0.5
    mode: Literal["batch", "pair", "elem"] = "batch"

    def __post_init__(self) -> None:
        check_fields(
            self,
            "mixup",
            mixup_alpha="[0, inf)",
            cutmix_alpha="[0, inf)",
            prob="[0, 1]",
            switch_prob="[0, 1]",
        )
        if self.mixup_alpha <= 0 and self.cutmix_alpha <= 0:
            raise ValueError("mixup needs mixup_alpha or cutmix_alpha above 0; use `mixup: null` for none")


@dataclass(frozen=True)
class EmaConfig:
    """Moving average of the weights: arguments of `timm.utils.ModelEmaV3`.

    Args:
        decay: Share of the old average kept at each optimiser step.
        use_warmup: Start with a small decay that grows with the steps.
    """

    decay: float = 0.9999
    use_warmup: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "ema", decay="[0, 1)")


@dataclass(frozen=True)
class DistillConfig:
    """Distillation: `weight * temperature^2 * KL(teacher || student)` is added to the task's loss.

    Args:
        teacher: "auto" is "dense" when a model with trained weights is routed and "none" otherwise;
            "dense" is the unrouted copy of the starting weights; a path is a checkpoint of the same
            architecture; anything else is a name of timm's registry, with its published weights.
        weight: Weight of the term.
        temperature: Divisor of both logits.
    """

    teacher: str = "auto"
    weight: float = 0.5
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "distill", weight="(0, inf)", temperature="(0, inf)")


@dataclass(frozen=True)
class CapacityScheduleConfig:
    """A capacity that falls linearly, once an epoch, from `start` to the one of the routing config.

    Args:
        start: Capacity of the first epoch, in (0, 1].
        epochs: The epoch (from 0) at which the final capacity is reached.
    """

    start: float = 1.0
    epochs: int = 5

    def __post_init__(self) -> None:
        check_fields(self, "capacity_schedule", start="(0, 1]", epochs="[1, inf)")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every kind of training is told.

    Args:
        output: The run folder, made when absent.
        epochs: Passes over the training data.
        optim: The optimiser.
        schedule: The learning-rate schedule.
        ema: Moving average of the weights; None for none.
        precision: "fp32", "bf16" (autocast) or "fp16" (autocast with loss scaling, CUDA only).
        accumulate: Batches per optimiser step.
        grad_clip: Largest norm of the gradient; None for no clipping.
        grad_checkpointing: Recompute activations in the backward pass to save memory.
        compile: Compile the model.
        device: "auto" takes the GPU when there is one; otherwise "cpu", "cuda" or another torch device.
        seed: Decides every random draw together with the step and the process.
        checkpoint_every: Optimiser steps between checkpoints, besides the one after each epoch; None
            for the latter only.
        eval_every: Epochs between evaluations; the last epoch is always evaluated.
        log_every: Optimiser steps between updates of the figures shown.
        tensorboard: Also write TensorBoard logs into the run folder.
    """

    output: str
    epochs: int = 10
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ema: EmaConfig | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    accumulate: int = 1
    grad_clip: float | None = None
    grad_checkpointing: bool = False
    compile: bool = False
    device: str = "auto"
    seed: int = 0
    checkpoint_every: int | None = None
    eval_every: int = 1
    log_every: int = 20
    tensorboard: bool = False

    def __post_init__(self) -> None:
        check_fields(
            self,
            epochs="[1, inf)",
            accumulate="[1, inf)",
            eval_every="[1, inf)",
            log_every="[1, inf)",
            checkpoint_every="[1, inf)",
            grad_clip="(0, inf)",
            seed="[0, inf)",
        )
        if not self.output:
            raise ValueError("output must name a folder, got ''")
        if self.optim.lr_per is None:
            self.schedule.check_rate(self.optim.lr)

    @property
    def free_keys(self) -> frozenset[str]:
        """Keys that say where and how to watch, not what comes out: a run may go on with others."""
        return frozenset({"output", "data.workers", "data.pin_memory", "log_every", "checkpoint_every", "tensorboard"})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values only, as the run folder keeps them."""
        # Through JSON, so that tuples become lists as they do when the file is read again.
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain


def resolve_routing(fields: Mapping[str, Any]) -> RoutingConfig:
    """Make a routing config from its fields, or from `preset: NAME` with the fields to change.

    Args:
        fields: Fields of `RoutingConfig`, or a preset's name and arguments.
    """
    fields = dict(fields)
    name = fields.pop("preset", None)
    return RoutingConfig.from_dict(fields) if name is None else preset(name, **fields)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(RunConfig):
    """Everything that decides the outcome of training an image classifier; the common keys are those of `RunConfig`.

    Args:
        model: The model and its starting weights.
        data: Where images come from and how they are augmented.
        routing: None trains the dense model. Otherwise the fields of `mmod.RoutingConfig`, or
            `preset: NAME` with the fields to change.
        loss: The task's criterion.
        mixup: Mixup and cutmix; None for neither.
        distill: The teacher, if any.
        capacity_schedule: Approach the capacity over some epochs; None starts at it.
    """

    model: ModelConfig
    data: DataConfig
    routing: dict[str, Any] | None = None
    loss: LossConfig = field(default_factory=LossConfig)
    mixup: MixupConfig | None = None
    distill: DistillConfig = field(default_factory=DistillConfig)
    capacity_schedule: CapacityScheduleConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mixup is not None and self.data.batch_size % 2:
            raise ValueError(f"mixup needs an even data.batch_size, got {self.data.batch_size}")
        if self.capacity_schedule is not None:
            if self.routing is None:
                raise ValueError("capacity_schedule needs a routing config")
            if self.capacity_schedule.epochs >= self.epochs:
                raise ValueError(
                    f"capacity_schedule.epochs={self.capacity_schedule.epochs} must be below epochs={self.epochs}, "
                    "so that the last epoch trains at the final capacity"
                )
        if self.distill.teacher == "dense" and not self.model.has_weights:
            raise ValueError("distill.teacher='dense' needs trained weights: set model.checkpoint or model.pretrained")
        self.routing_config()

    def routing_config(self) -> RoutingConfig | None:
        """Return the routing this run asks for, presets resolved; None for a dense model."""
        return None if self.routing is None else resolve_routing(self.routing)

    def teacher(self) -> str | None:
        """Return the teacher with "auto" resolved; None for no distillation."""
        if self.distill.teacher == "none":
            return None
        if self.distill.teacher == "auto":
            return "dense" if self.routing is not None and self.model.has_weights else None
        return self.distill.teacher

    def to_dict(self) -> dict[str, Any]:
        """Return plain values only, with routing presets resolved, as the run folder keeps them."""
        routing = self.routing_config()
        return {**super().to_dict(), "routing": None if routing is None else routing.to_dict()}
