"""What the configs of all kinds of training share: the run, its methods, its starting weights; and the loop."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, TypeVar

from typing_extensions import Self

from mmod.config import RoutingConfig
from mmod.data.config import SourceConfig, StreamConfig
from mmod.io.yaml import merged
from mmod.methods.resolve import resolve_methods
from mmod.opening.runs import check_at_rest, check_holds_work, find_run, find_weights, read_run_config
from mmod.plain import from_plain, without_none
from mmod.training.engine.groups import (
    DistributedConfig,
    EmaConfig,
    OptimConfig,
    ScheduleConfig,
    TeacherConfig,
    check_warmup,
)
from mmod.values import Checked, check_fields, check_value, refuse_unknown

if TYPE_CHECKING:
    from mmod.methods.base import Method

Config = TypeVar("Config")

_SIZES = {"hidden_size", "intermediate_size", "head_dim"} | {
    f"num_{name}" for name in ("hidden_layers", "attention_heads", "key_value_heads")
}


def check_described(fields: Mapping[str, object]) -> None:
    """Raise unless fields of a transformers config name a model type, and sizes that are integers of at least 1."""
    _check_sizes(fields, "model.config")
    if not isinstance(fields.get("model_type"), str):
        raise ValueError(f"model.config needs a model_type, got {', '.join(fields) or 'nothing'}")


def _check_sizes(fields: Mapping[str, object], name: str) -> None:
    for key, value in fields.items():
        if isinstance(value, Mapping):
            _check_sizes(value, f"{name}.{key}")
        elif key in _SIZES:
            check_value(f"{name}.{key}", value, int | None, "[1, inf)")


TRAINING = frozenset(
    {
        "accumulate",
        "checkpoint_every",
        "distributed",
        "ema",
        "epoch_steps",
        "epochs",
        "eval_every",
        "grad_checkpointing",
        "grad_clip",
        "mixup",
        "optim",
        "schedule",
        "trained",
        "training_only_epochs",
    }
)
"""Keys of a training config that say how a model is trained, and nothing of one that is evaluated as it is."""


class Start(Protocol):
    """What a run of any kind starts from, the key `model` of its config."""

    @property
    def checkpoint(self) -> str | None:
        """Starting weights: a file or a folder; None for others."""

    @property
    def has_weights(self) -> bool:
        """Whether training starts from trained weights."""

    @property
    def weights(self) -> dict[str, str]:
        """Files and folders that the model is read from, by key; see `StartConfig.weights`."""

    def started_from(self, checkpoint: str | None, /) -> Self:
        """Return the same model with the weights of a checkpoint; see `RunConfig.started_from`."""


@dataclass(frozen=True, kw_only=True)
class StartConfig(Checked, group="model"):
    """The weights that training starts from.

    Args:
        checkpoint: Starting weights, dense or routed: a file or a run folder. None starts from `pretrained` or from
            scratch.
        pretrained: Start from published weights.
    """

    checkpoint: str | None = None
    pretrained: bool | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pretrained not in (None, False) and self.checkpoint is not None:
            none = json.dumps(type(self).pretrained)
            raise ValueError(
                f"model.pretrained={self.pretrained!r} and model.checkpoint={self.checkpoint!r} exclude each other: "
                f"set model.pretrained to {none}, or model.checkpoint to null"
            )

    @property
    def has_weights(self) -> bool:
        """Whether training starts from trained weights."""
        return self.pretrained not in (None, False) or self.checkpoint is not None

    @property
    def weights(self) -> dict[str, str]:
        """What the model starts from that may be another one tomorrow, by key: files, folders, and checkpoints."""
        return {} if self.checkpoint is None else {"checkpoint": self.checkpoint}

    def started_from(self, checkpoint: str | None) -> Self:
        """Return the same model with the weights of a checkpoint, a file or a run folder; None for random ones."""
        return dataclasses.replace(self, checkpoint=checkpoint, pretrained=type(self).pretrained)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The config of every run.

    Args:
        kind: The kind of training, which commands for all kinds read; "image" where a file has none.
        output: The run folder, created if missing.
        seed: Together with step and process, it determines every random draw.
        model: The model and its starting weights.
        data: The data.
        routing: How the model is routed; None trains the dense model.
        methods: Methods that make the model cheaper, in order: the `kind` and fields of each, as
            `mmod.methods.read_method` takes them. `routing` is the short form of the last one.
    """

    kind: str
    output: str
    seed: Annotated[int, "[0, inf)"] = 0
    model: Start
    data: StreamConfig | SourceConfig
    routing: Mapping[str, object] | None = None
    methods: list[dict[str, object]] = field(default_factory=list)

    engine: ClassVar[str]
    """The package that trains such a run by `start.create`, `loop.fit` and `estimate.estimate`."""
    converted_kinds: ClassVar[tuple[str, ...]] = ()
    """Other kinds of runs whose weights such a run may start from, as they are converted."""
    part: ClassVar[str] = ""
    """The only part of a model, which `routing` is about; empty where it is a mapping of parts."""

    @classmethod
    def model_in(cls, folder: str) -> dict[str, object]:
        """Return the fields of `model` that stand for a saved model in a folder."""
        return {"checkpoint": folder}

    @property
    def epochs(self) -> int | None:
        """Passes over the training data; None where a trainer's arguments say how long it trains."""
        return None

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of a model that can be routed; a plan is searched for the first, where a search names no other."""
        if self.part:
            return (self.part,)
        return type(self).__dataclass_fields__["routing"].metadata["names"]

    @property
    def image_shape(self) -> tuple[int, int, int] | None:
        """Channels, height and width of a sample, where it is an image; None where costs follow from the data."""
        return None

    @cached_property
    def applied(self) -> tuple[Method, ...]:
        """The methods that the run applies to its model, in order."""
        return resolve_methods(self.methods, self.routing_parts(), self.depths())

    def routing_parts(self) -> Mapping[str, object]:
        """Return the fields of `routing` by part of the model."""
        if self.part:
            return without_none({self.part: self.routing})
        return self.routing or {}

    def depths(self) -> Mapping[str, int]:
        """Return the known numbers of blocks by part of the model."""
        return {}

    @property
    def evaluated_folders(self) -> tuple[str, ...]:
        """Folders of images that evaluation reads beside the data."""
        return ()

    def check_weights(self) -> None:
        """Raise if the weights that the run starts from are missing, or those of a run that trains; no hub is asked."""

    def check_kind(self, other: str) -> None:
        """Raise a ValueError if the weights that the run starts from are of a run whose kind cannot fit.

        A file of weights that is named itself may be of any kind: whether it fits shows when it is loaded.

        Args:
            other: What else may be named.
        """
        checkpoint = self.model.checkpoint
        if checkpoint is None:
            return
        run = find_run(checkpoint)
        if run is None or Path(checkpoint).is_file():
            return
        kind = read_run_config(run).get("kind", "image")
        kinds = (self.kind, *self.converted_kinds)
        if kind not in kinds:
            fitting = " or ".join(map(repr, kinds))
            raise ValueError(
                f"model.checkpoint={checkpoint!r} is a run of kind {kind!r}: name one of kind {fitting}, or {other}"
            )
        check_at_rest(checkpoint)
        check_holds_work(checkpoint)

    def check_schedule(self, world: int = 1) -> None:
        """Raise a ValueError if so many processes would train in vain, as far as is known before data are read."""

    def sketched_by(self, other: Self) -> Self:
        """Return the config of a run whose weights are not there yet, as far as another one has its architecture."""
        return self

    def check(self) -> None:
        """Raise unless every field has a valid value; see `mmod.values.check_fields`."""
        check_fields(self)
        if not self.output:
            raise ValueError("output must name a folder, got ''")
        if not self.part:
            refuse_unknown("part in routing", self.routing or (), self.parts)
            # A part of null is dense, as one that is not named. A frozen dataclass refuses assignments.
            object.__setattr__(self, "routing", without_none(self.routing or {}) or None)

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether a run that is stopped goes on from a checkpoint of its folder."""
        return True

    @property
    def free_keys(self) -> frozenset[str]:
        """Keys that a resumed run may change, because they do not affect its result."""
        return frozenset({"kind", "output"})

    def started_from(self, folder: str | None) -> Self:
        """Return the config of the same run, started from the final weights in a run folder, or None: from random ones.

        Raises:
            ValueError: Only weights say which model it is.
        """
        return dataclasses.replace(self, model=self.model.started_from(folder))

    def at_size(self, side: int) -> Self:
        """Return the config of the same run on images of `side` pixels: positions are resampled."""
        return type(self).from_dict(merged(self.as_written(), self.keys_of_size(side)))

    def keys_of_size(self, side: int) -> dict[str, object]:
        """Return the keys that say the size of images in a training config of this kind."""
        raise ValueError(f"a run of kind {self.kind!r} has images of one size: leave image_size={side} out")

    def finished(self, folder: str) -> Self:
        """Return the config of the final model in a run folder of this kind and these settings."""
        return self.started_from(folder)

    def plain(self) -> Self:
        """Return the config without what training alone needs: a teacher, adapters, gradient checkpointing."""
        return self

    def teacher(self) -> str | None:
        """Return the teacher: "dense", the name of a model, or a checkpoint; None for no distillation."""
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as the run folder keeps them."""
        return self.as_written()

    def as_written(self) -> dict[str, object]:
        """Return plain values as the config was written: a preset is its name, whatever depth the model will have."""
        # Through JSON, because tuples become lists when the file is read again.
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, fields: Mapping[str, object]) -> Self:
        """Create a config from plain nested values; errors name an unknown key, or a value of another type or range.

        Example:
            >>> from mmod.training import TrainConfig
            >>> fields = {"output": "run", "model": {"name": "deit_tiny_patch16_224"}, "data": {"source": "digits"}}
            >>> TrainConfig.from_dict({**fields, "optim": {"lr": 2e-4}}).optim.lr
            0.0002
        """
        return from_plain(cls, fields)

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Self:
        """Read a config file and apply command-line overrides.

        Args:
            path: A YAML file with the fields of this class.
            overrides: Arguments such as `["--epochs", "1", "--optim.lr=1e-4"]`.
        """
        from mmod.config.parse import read_config

        return read_config([str(path), *overrides], cls)

    @classmethod
    def parse(
        cls,
        arguments: Sequence[str],
        start: Mapping[str, object] | None = None,
        check: Callable[[type[Self], Mapping[str, object]], None] | None = None,
    ) -> Self:
        """Read a command line on top of plain fields; a mistake or `--help` ends the program. See `parse_config`."""
        from mmod.config.parse import parse_config

        return parse_config(arguments, cls, start, check)


def config_as(config: RunConfig, cls: type[Config]) -> Config:
    """Return a run's config as one of a class: of its kind, or with the keys that a command adds.

    Raises:
        TypeError: It is of another kind, or has no such keys.
    """
    if not isinstance(config, cls):
        raise TypeError(f"the config must be a {cls.__module__}.{cls.__name__}, got one of kind {config.kind!r}")
    return config


@dataclass(frozen=True, kw_only=True)
class LoopConfig(RunConfig):
    """The config of a run of the training loop; further keys are those of `RunConfig`.

    Args:
        distill: The teacher, if any.
        epochs: Passes over the training data.
        epoch_steps: Optimiser steps per epoch, if it ends before the data does; None uses all data.
        optim: The optimiser.
        schedule: The learning-rate schedule.
        ema: Moving average of the weights; None for none.
        precision: "fp32", "bf16" (autocast) or "fp16" (autocast with loss scaling, CUDA only).
        accumulate: Batches per optimiser step.
        grad_clip: Largest norm of the gradient; None for no clipping.
        grad_checkpointing: Recompute activations in the backward pass to save memory.
        compile: Compile the model; with `distributed.kind: fsdp`, block by block.
        distributed: How several processes share the run.
        device: "auto" is the GPU if there is one; otherwise "cpu", "cuda" or another torch device.
        checkpoint_every: Optimiser steps between checkpoints, besides the one after each epoch; None for the latter
            only.
        eval_every: Epochs between evaluations; the last epoch is always evaluated.
        log_every: Optimiser steps between updates of the displayed figures; the last step of an epoch updates them too.
        tensorboard: Also write TensorBoard logs into the run folder.
        trained: "routers" trains routers alone (Router-Tuning); None trains all weights.
        training_only_epochs: Number of first epochs with the methods for training alone, see
            `mmod.RoutingConfig.training_only`; None for all.
    """

    model: StartConfig
    data: StreamConfig
    distill: TeacherConfig = field(default_factory=TeacherConfig)
    epochs: Annotated[int, "[1, inf)"] = 10
    epoch_steps: Annotated[int | None, "[1, inf)"] = None
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ema: EmaConfig | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    accumulate: Annotated[int, "[1, inf)"] = 1
    grad_clip: Annotated[float | None, "(0, inf)"] = None
    grad_checkpointing: bool = False
    compile: bool = False
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    device: str = "auto"
    checkpoint_every: Annotated[int | None, "[1, inf)"] = None
    eval_every: Annotated[int, "[1, inf)"] = 1
    log_every: Annotated[int, "[1, inf)"] = 20
    tensorboard: bool = False
    trained: Literal["routers"] | None = None
    training_only_epochs: Annotated[int | None, "[1, inf)"] = None

    engine = "mmod.training.engine"

    def __post_init__(self) -> None:
        self.check()
        if self.distill.teacher == "dense" and not self.model.has_weights:
            raise ValueError("distill.teacher='dense' needs trained weights: set model.checkpoint or model.pretrained")
        others = [method.kind for method in self.applied if not method.recomputes]
        if self.grad_checkpointing and others:
            changed = ", ".join(map(repr, others))
            raise ValueError(f"a model changed by {changed} cannot be trained with grad_checkpointing")
        if self.distributed.sharded and (self.precision == "fp16" or self.optim.opt.startswith("lookahead")):
            raise ValueError(
                "distributed.kind 'fsdp' takes neither precision 'fp16', for which use 'bf16', nor optimisers of "
                f"lookahead, got {self.precision!r} and {self.optim.opt!r}"
            )
        if self.trained is not None and (not self.routings or not self.model.has_weights):
            raise ValueError("trained='routers' needs routing, and trained weights to be frozen: set model.checkpoint")
        if self.training_only_epochs is not None:
            check_value("training_only_epochs", self.training_only_epochs, int, f"[1, {self.epochs}]")
            if not any(method.training_only for method in self.applied):
                raise ValueError(
                    "training_only_epochs needs methods for training alone: set routing.training_only or that of a "
                    "method to true, or training_only_epochs to null"
                )
        reading = any(config.wants_importance(training=True) for config in self.routings.values())
        if self.distributed.sharded and self.compile and self.grad_checkpointing and reading:
            raise ValueError(
                "distributed.kind 'fsdp' compiles by blocks, and grad_checkpointing then loses the importance that "
                "routers read: leave out compile or grad_checkpointing"
            )

    def check_weights(self) -> None:
        """Raise if the checkpoint is missing, or a run that trains, or a teacher is; see `RunConfig.check_weights`."""
        if self.model.checkpoint is not None:
            find_weights(self.model.checkpoint)
        self.check_kind("a file of weights")
        teacher = self.teacher()
        # The dense one has the weights that were looked at.
        if teacher is not None and teacher != "dense":
            check_at_rest(teacher)

    def check_schedule(self, world: int = 1) -> None:
        """Refuse a run that would end in its warm-up, or whose learning rate is below the schedule's bounds."""
        check_warmup("schedule.warmup_epochs", self.schedule.warmup_epochs, "epochs", self.epochs)
        self.schedule.check_rate(self.optim, self.step_samples(world))

    def step_samples(self, world: int) -> int:
        """Return the samples of an optimiser step over so many processes."""
        return self.data.batch_size * self.accumulate * world

    def steps_of_epoch(self, batches: int) -> int:
        """Return the number of optimiser steps in an epoch of so many batches."""
        # Rounded up, because the last group of an epoch may have fewer batches.
        steps = -(-batches // self.accumulate)
        if self.epoch_steps is not None:
            steps = min(steps, self.epoch_steps)
        return steps

    @property
    def routings(self) -> dict[str, RoutingConfig]:
        """The routing of each routed part; empty for a dense model."""
        routings: dict[str, RoutingConfig] = {}
        for method in self.applied:
            routings |= getattr(method, "parts", {})
        return routings

    @property
    def free_keys(self) -> frozenset[str]:
        """Keys that a resumed run may change; see `RunConfig.free_keys`."""
        return super().free_keys | {
            "data.root",
            "data.on_corrupt",
            "data.max_corrupt",
            *(f"data.remote.{name}" for name in ("timeout", "retries", "backoff", "copy")),
            "data.workers",
            "data.pin_memory",
            "distributed.timeout",
            "log_every",
            "checkpoint_every",
            "tensorboard",
        }

    def refuse_training_only(self, reason: str) -> None:
        """Raise a ValueError if methods for training alone leave nothing to what needs a changed model."""
        kinds = [method.kind for method in self.applied if method.training_only]
        if kinds:
            raise ValueError(f"{reason}, and {', '.join(kinds)} has training_only: true: leave one of them out")

    def plain(self) -> Self:
        """Return the config without teacher and gradient checkpointing; see `RunConfig.plain`."""
        teacher = type(self.distill)(teacher="none")
        return dataclasses.replace(self, distill=teacher, grad_checkpointing=False)

    def teacher(self) -> str | None:
        """Return the teacher, with "auto" resolved; see `RunConfig.teacher`."""
        teacher = self.distill.teacher
        if teacher == "none":
            return None
        if teacher != "auto":
            return teacher
        changed = any(not method.training_only for method in self.applied)
        # A model without weights has nothing to teach, and one that no method changes nothing to learn.
        if changed and self.model.has_weights:
            return "dense"
        return None

    def named_teacher(self, name: str) -> Self | None:
        """Return the config of a teacher that has a model of its own; None for a checkpoint of the run's model."""
        return None

    def to_dict(self) -> dict[str, object]:
        """Return plain values with resolved methods, as the run folder keeps them."""
        parts = self.routing_parts()
        routing = {name: config.to_dict() for name, config in self.routings.items() if name in parts}
        # Behind the listed methods stand those that `routing` means, which has a key of its own.
        listed = [method.to_dict() for method in self.applied[: len(self.methods)]]
        return {**super().to_dict(), "routing": routing.get(self.part, routing or None), "methods": listed}
