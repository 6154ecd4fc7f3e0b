"""What configs of all kinds of training have in common: the run, its optimiser, its weights to start from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import Self

from mmod.config import Plan, RoutingConfig
from mmod.planning.presets import preset
from mmod.values import Limit, check_fields, check_value

if TYPE_CHECKING:
    # By way of the package, which what reads the types of fields imports without torch.
    from mmod import methods

__all__ = [
    "TeacherConfig",
    "EmaConfig",
    "LoopConfig",
    "OptimConfig",
    "RunConfig",
    "ScheduleConfig",
    "StartConfig",
    "check_sizes",
    "resolve_method",
    "resolve_routing",
]


SCHEDULES = ("cosine", "tanh", "step", "multistep", "poly", "wsd", "rsqrt", "constant", "none")
"""Names of the learning-rate schedules that are functions of the step."""


_SIZES = {"hidden_size", "intermediate_size", "head_dim"} | {
    f"num_{name}" for name in ("hidden_layers", "attention_heads", "key_value_heads")
}


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


def check_sizes(described: Mapping[str, Any], name: str) -> None:
    """Raise unless the sizes among the fields of a transformers config are integers of at least 1.

    Args:
        described: The fields, or those of a part among them.
        name: What they are called.
    """
    for key, value in described.items():
        if isinstance(value, Mapping):
            check_sizes(value, f"{name}.{key}")
        elif key in _SIZES:
            check_value(f"{name}.{key}", value, int | None, "[1, inf)")


@dataclass(frozen=True, kw_only=True)
class StartConfig:
    """From which weights training starts.

    Args:
        checkpoint: Starting weights, dense or routed: a file or a run folder. None starts from `pretrained` or from
            scratch.
        pretrained: Start from published weights.
    """

    checkpoint: str | None = None
    pretrained: bool | str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "model")
        if self.pretrained not in (None, False) and self.checkpoint is not None:
            raise ValueError(
                f"model.pretrained={self.pretrained!r} and model.checkpoint={self.checkpoint!r} exclude each other"
            )

    @property
    def has_weights(self) -> bool:
        """Whether training starts from trained weights."""
        return self.pretrained not in (None, False) or self.checkpoint is not None

    def started_from(self, checkpoint: str) -> Self:
        """Return the same model with the weights of a checkpoint.

        Args:
            checkpoint: A file or a run folder.
        """
        return dataclasses.replace(self, checkpoint=checkpoint, pretrained=type(self).pretrained)


@dataclass(frozen=True)
class TeacherConfig:
    """Distillation: what a teacher says of the same samples is imitated.

    Args:
        teacher: "auto" is "dense" when a model with trained weights is routed or changed by a method, "none" otherwise;
            "dense" is the unrouted copy of the starting weights; a path is a checkpoint of the same architecture. For
            image classifiers anything else is a name of timm's registry, with its published weights.
        weight: Weight of the term.
    """

    teacher: str = "auto"
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "distill", weight="(0, inf)")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every run is told.

    Args:
        output: The run folder, made when absent.
        seed: Decides every random draw together with the step and the process.
    """

    output: str
    seed: int = 0

    def check(self, **limits: Limit) -> None:
        """Raise unless each field holds a valid value; see `mmod.values.check_fields`.

        Args:
            limits: What narrows the types of fields.
        """
        check_fields(self, "", seed="[0, inf)", **limits)
        if not self.output:
            raise ValueError("output must name a folder, got ''")

    @property
    def free_keys(self) -> frozenset[str]:
        """Keys that say where and how to watch, not what comes out: a run may go on with others."""
        return frozenset({"output"})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values only, as the run folder keeps them."""
        # Through JSON, so that tuples become lists as they do when the file is read again.
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """Make a config from plain nested values, as a YAML file holds them.

        Args:
            fields: Fields of the config.

        Returns:
            The checked config.

        Raises:
            ValueError: If a key is unknown (the valid ones are named) or a value does not fit its type.

        Example:
            >>> from mmod.training import TrainConfig
            >>> fields = {"output": "run", "model": {"name": "deit_tiny_patch16_224"}, "data": {"source": "digits"}}
            >>> TrainConfig.from_dict({**fields, "optim": {"lr": 2e-4}}).optim.lr
            0.0002
        """
        from mmod.training.engine.parse import config_from

        return config_from(fields, cls)

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Self:
        """Read a config file and apply command-line overrides to it.

        Args:
            path: A YAML file with the fields of this class.
            overrides: Arguments such as `["--epochs", "1", "--optim.lr=1e-4"]`.

        Returns:
            The checked config.

        Raises:
            ValueError: If a key is unknown (the valid ones are named) or a value does not fit its type.

        Example:
            >>> import pathlib, tempfile
            >>> from mmod.training import TrainConfig
            >>> path = pathlib.Path(tempfile.mkdtemp()) / "config.yaml"
            >>> _ = path.write_text("{output: run, model: {name: deit_tiny_patch16_224}, data: {source: digits}}")
            >>> TrainConfig.load(path, ["--optim.lr", "2e-4"]).optim.lr
            0.0002
        """
        from mmod.training.engine.parse import load_config

        return load_config(path, overrides, kind=cls)


def resolve_routing(fields: Mapping[str, Any]) -> RoutingConfig:
    """Make a routing config from its fields, or from `preset: NAME` or `plan: FILE` with other fields.

    Args:
        fields: Fields of `RoutingConfig`; or a preset's name and arguments; or the file of a plan, which says blocks,
            capacities, operators, contexts and mostly the router, and fields that it does not say or another router.

    Raises:
        ValueError: Both a preset and a plan.
    """
    fields = dict(fields)
    name, plan = fields.pop("preset", None), fields.pop("plan", None)
    if plan is not None:
        if name is not None:
            raise ValueError(f"routing takes a preset or a plan, got {name!r} and {plan!r}")
        return RoutingConfig.from_plan(Plan.load(plan), **fields)
    return RoutingConfig.from_dict(fields) if name is None else preset(name, **fields)


def resolve_method(fields: Mapping[str, Any] | None) -> methods.Method | None:
    """Make a method from its kind and fields; None for none.

    Args:
        fields: `kind`, and fields of a class in `mmod.methods`.
    """
    if fields is None:
        return None
    # A command line that asks for help only is answered without torch.
    from mmod.methods import read_method

    return read_method(fields)


@dataclass(frozen=True, kw_only=True)
class LoopConfig(RunConfig):
    """What a run of the training loop is told; other keys are those of `RunConfig`.

    Args:
        model: The model and its starting weights.
        data: The data.
        routing: How the model is routed; None trains the dense one.
        distill: The teacher, if any.
        epochs: Passes over the training data.
        epoch_steps: Optimiser steps after which an epoch ends, before the data does; None takes all data.
        optim: The optimiser.
        schedule: The learning-rate schedule.
        ema: Moving average of the weights; None for none.
        precision: "fp32", "bf16" (autocast) or "fp16" (autocast with loss scaling, CUDA only).
        accumulate: Batches per optimiser step.
        grad_clip: Largest norm of the gradient; None for no clipping.
        grad_checkpointing: Recompute activations in the backward pass to save memory.
        compile: Compile the model.
        device: "auto" takes the GPU when there is one; otherwise "cpu", "cuda" or another torch device.
        checkpoint_every: Optimiser steps between checkpoints, besides the one after each epoch; None
            for the latter only.
        eval_every: Epochs between evaluations; the last epoch is always evaluated.
        log_every: Optimiser steps between updates of the figures shown.
        tensorboard: Also write TensorBoard logs into the run folder.
    """

    model: StartConfig
    data: Any
    routing: Any = None
    distill: TeacherConfig = field(default_factory=TeacherConfig)
    epochs: int = 10
    epoch_steps: int | None = None
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ema: EmaConfig | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    accumulate: int = 1
    grad_clip: float | None = None
    grad_checkpointing: bool = False
    compile: bool = False
    device: str = "auto"
    checkpoint_every: int | None = None
    eval_every: int = 1
    log_every: int = 20
    tensorboard: bool = False

    def __post_init__(self) -> None:
        self.check(
            epochs="[1, inf)",
            epoch_steps="[1, inf)",
            accumulate="[1, inf)",
            eval_every="[1, inf)",
            log_every="[1, inf)",
            checkpoint_every="[1, inf)",
            grad_clip="(0, inf)",
        )
        if self.optim.lr_per is None:
            self.schedule.check_rate(self.optim.lr)
        if self.distill.teacher == "dense" and not self.model.has_weights:
            raise ValueError("distill.teacher='dense' needs trained weights: set model.checkpoint or model.pretrained")
        self.routing_configs()

    @property
    def free_keys(self) -> frozenset[str]:
        """Keys in which a continued run may differ; see `RunConfig.free_keys`."""
        watching = {"data.workers", "data.pin_memory", "log_every", "checkpoint_every", "tensorboard"}
        return super().free_keys | watching

    def routing_configs(self) -> dict[str, RoutingConfig]:
        """Return the arguments of `mmod.route_`, presets resolved; empty for a dense model."""
        raise NotImplementedError

    def method_config(self) -> methods.Method | None:
        """Return by what other way than routing the model spends less; None for none."""
        return None

    def teacher(self) -> str | None:
        """Return the teacher with "auto" resolved; None for no distillation."""
        if self.distill.teacher == "auto":
            is_dense = self.routing is None and self.method_config() is None
            return "dense" if not is_dense and self.model.has_weights else None
        return None if self.distill.teacher == "none" else self.distill.teacher
