"""Groups of keys in the configs of the training loop: optimiser, schedule, moving average, processes and teacher."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from mmod.values import Checked

SCHEDULES = ("cosine", "tanh", "step", "multistep", "poly", "wsd", "rsqrt", "constant", "none")
"""Learning-rate schedules that are functions of the step."""

# Share of the start in a moving average from which on it is refused.
_START_IN_AVERAGE = 0.05


@dataclass(frozen=True)
class OptimConfig(Checked, group="optim"):
    """The optimiser: arguments of `timm.optim.create_optimizer_v2`.

    Args:
        opt: A name of `timm.optim.list_optimizers`.
        lr: Learning rate.
        lr_per: Number of samples per optimiser step that `lr` refers to; the rate is scaled linearly to the actual
            number, over all processes and accumulated batches. None uses `lr` as it is.
        weight_decay: Weight decay; biases and norms are exempt.
        layer_decay: Factor on the learning rate per layer, from the head down. None for no decay.
        args: Further arguments of the optimiser, such as `momentum`, `betas` or `eps`.
    """

    opt: str = "adamw"
    lr: Annotated[float, "[0, inf)"] = 1e-3
    lr_per: Annotated[int | None, "[1, inf)"] = None
    weight_decay: Annotated[float, "[0, inf)"] = 0.05
    layer_decay: Annotated[float | None, "(0, 1]"] = None
    args: dict[str, Any] = field(default_factory=dict)

    def rate(self, step_samples: int) -> float:
        """Return the learning rate for so many samples per optimiser step."""
        if self.lr_per is None:
            return self.lr
        return self.lr * step_samples / self.lr_per


@dataclass(frozen=True)
class ScheduleConfig(Checked, group="schedule"):
    """The learning-rate schedule, updated at each optimiser step: arguments of timm's `create_scheduler_v2`.

    Args:
        sched: "cosine", "tanh", "step", "multistep", "poly", "wsd", "rsqrt", "constant" or "none".
        warmup_epochs: Epochs of linear warm-up.
        warmup_lr: Learning rate at the start of the warm-up.
        min_lr: Learning rate at the end.
        args: Further arguments of `create_scheduler_v2`.
    """

    sched: Annotated[str, SCHEDULES] = "cosine"
    warmup_epochs: Annotated[int, "[0, inf)"] = 0
    warmup_lr: Annotated[float, "[0, inf)"] = 1e-6
    min_lr: Annotated[float, "[0, inf)"] = 0.0
    args: dict[str, Any] = field(default_factory=dict)

    def check_rate(self, optim: OptimConfig, step_samples: int) -> None:
        """Raise a ValueError if the learning rate for so many samples per step is below that of warm-up or end."""
        rate = optim.rate(step_samples)
        bounds = {} if self.sched in ("constant", "none") else {"min_lr": self.min_lr}
        if self.warmup_epochs:
            bounds["warmup_lr"] = self.warmup_lr
        for name, bound in bounds.items():
            if bound <= rate:
                continue
            scaled = ""
            advice = f"schedule.{name} to 0"
            if optim.lr_per is not None:
                # The user never wrote the rate that is compared, so the message says where it comes from.
                scaled = f": optim.lr={optim.lr:g} is for optim.lr_per={optim.lr_per} samples a step, and a step has "
                scaled += f"{step_samples}"
                if bound <= optim.lr:
                    advice = f"optim.lr_per to null to train at optim.lr={optim.lr:g}, or {advice}"
            raise ValueError(
                f"schedule.{name} must be at most the learning rate, {rate:g}, got {bound:g}{scaled}. Set {advice}"
            )


def check_warmup(key: str, warmup: float, length_key: str, length: float) -> None:
    """Raise a ValueError if the warm-up of the learning rate is as long as the run.

    Example:
        >>> check_warmup("schedule.warmup_epochs", 5, "epochs", 3)
        Traceback (most recent call last):
        ValueError: schedule.warmup_epochs=5 is as long as the run, epochs=3: training would end before the learning \
rate is reached. Set schedule.warmup_epochs to 0, or at most 2
    """
    if not warmup or warmup < length:
        return
    most = math.ceil(length) - 1
    advice = "0"
    if most:
        advice = f"0, or at most {most}"
    raise ValueError(
        f"{key}={warmup:g} is as long as the run, {length_key}={length:g}: training would end before the learning rate "
        f"is reached. Set {key} to {advice}"
    )


@dataclass(frozen=True)
class EmaConfig(Checked, group="ema"):
    """Moving average of the weights, which is the final model of a run: arguments of `timm.utils.ModelEmaV3`.

    Args:
        decay: Share of the old average kept at each optimiser step.
        use_warmup: Start with a small decay that grows with the steps, so that a run of any length forgets its start.
    """

    decay: Annotated[float, "[0, 1)"] = 0.9999
    use_warmup: bool = True

    def check_steps(self, steps: int) -> None:
        """Raise a ValueError if the average after this many steps would consist largely of the first weights."""
        # The first step sets the average.
        updates = steps - 1
        # With warm-up the decay starts small, so that the first weights are forgotten at once.
        start = self.decay**updates
        if self.use_warmup or updates < 1 or start <= _START_IN_AVERAGE:
            return
        # Rounded down, so that the advised value passes this check.
        most = math.floor(_START_IN_AVERAGE ** (1 / updates) * 10**6) / 10**6
        raise ValueError(
            f"ema.decay={self.decay} averages over {1 / (1 - self.decay):,.0f} steps, and the run has {steps:,}: the "
            f"weights after its first step would be {start:.0%} of its final model. Set ema.use_warmup to true, or "
            f"ema.decay to at most {most}"
        )


@dataclass(frozen=True)
class DistributedConfig(Checked, group="distributed"):
    """How the processes of `torchrun` share a run.

    Args:
        kind: "ddp" holds the whole model in each process. "fsdp" splits weights, moving average, gradients and moments
            over them, block by block (FSDP2), and so the checkpoints; evaluations gather whole weights.
        timeout: Seconds after which a process that waits for another ends; None for torch's limit.
    """

    kind: Literal["ddp", "fsdp"] = "ddp"
    timeout: Annotated[float | None, "(0, inf)"] = None

    @property
    def sharded(self) -> bool:
        """Whether a process holds a share of the model alone."""
        return self.kind == "fsdp"


@dataclass(frozen=True)
class TeacherConfig(Checked, group="distill"):
    """Distillation: the model imitates a teacher's outputs on the same samples.

    Args:
        teacher: "dense" is an unrouted copy of the starting weights; a path is a checkpoint of the same architecture;
            "none" is no teacher. "auto" is "dense" if methods are applied to trained weights, and "none" otherwise. For
            image classifiers it is also a folder of transformers, or a name of timm's registry, with its published
            weights.
        weight: Weight of the term.
    """

    teacher: str = "auto"
    weight: Annotated[float, "(0, inf)"] = 1.0
