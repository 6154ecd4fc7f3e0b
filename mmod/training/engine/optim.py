"""The optimiser and the learning-rate schedule of a run, both timm's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
from timm.optim import Muon, create_optimizer_v2, list_optimizers
from timm.optim import muon as timm_muon
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn

from mmod.names import near_names
from mmod.training.engine.config import LoopConfig
from mmod.training.engine.groups import OptimConfig


def check_optimizer(name: str) -> None:
    """Raise a ValueError for an optimiser that timm does not know."""
    names = [str(known) for known in list_optimizers()]
    # The part before an underscore names a wrapper of timm's, such as lookahead.
    if name.lower().split("_")[-1] not in names:
        hint = near_names(name, names, "timm.optim.list_optimizers()")
        raise ValueError(f"timm knows no optimiser {name!r}; {hint}")


def create_optimizer(config: OptimConfig, model: nn.Module, samples_per_step: int = 1) -> torch.optim.Optimizer:
    """Create timm's optimiser with its parameter groups."""
    check_optimizer(config.opt)
    try:
        optimizer: torch.optim.Optimizer = create_optimizer_v2(
            model,
            opt=config.opt,
            lr=config.rate(samples_per_step),
            weight_decay=config.weight_decay,
            layer_decay=config.layer_decay,
            **config.args,
        )
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"timm cannot make the optimiser {config.opt!r} with optim.args {config.args}: {error}"
        ) from error
    # timm scales layers by groups: one scale for all means that it found no layers.
    scales = {group.get("lr_scale", 1.0) for group in optimizer.param_groups}
    if config.layer_decay not in (None, 1.0) and len(scales) == 1:
        raise ValueError(
            f"optim.layer_decay={config.layer_decay} would change nothing: timm finds no layers in "
            f"{type(model).__name__}, which has no group_matcher; leave it out"
        )
    return orthogonalise_in_fp32(optimizer)


def create_schedule(
    config: LoopConfig, optimizer: torch.optim.Optimizer, steps_per_epoch: int
) -> tuple[Scheduler | None, int]:
    """Create timm's schedule (None for "none"); also return the epochs to train, those of a cool-down included.

    Raises:
        ValueError: The run is too short for its moving average.
    """
    schedule = config.schedule
    scheduler, epochs = create_scheduler_v2(
        optimizer,
        sched=schedule.sched,
        num_epochs=config.epochs,
        warmup_epochs=schedule.warmup_epochs,
        warmup_lr=schedule.warmup_lr,
        min_lr=schedule.min_lr,
        step_on_epochs=False,
        updates_per_epoch=steps_per_epoch,
        **schedule.args,
    )
    if config.ema is not None:
        config.ema.check_steps(int(epochs) * steps_per_epoch)
    return scheduler, int(epochs)


def complete_states(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters without a gradient so far an empty state: a sharded state is loaded only if it is complete."""
    for group in optimizer.param_groups:
        weights = [weight for weight in group["params"] if weight.requires_grad]
        reached = next((weight for weight in weights if optimizer.state.get(weight)), None)
        if reached is None:
            continue
        for weight in weights:
            if optimizer.state.get(weight):
                continue
            state = dict(optimizer.state[reached])
            for key, value in state.items():
                if not isinstance(value, Tensor):
                    continue
                # A moment has the shape of its weight; a step counter has its own.
                like = weight if value.shape == reached.shape else value
                state[key] = torch.zeros_like(like)
            optimizer.state[weight] = state


def orthogonalise_in_fp32(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let timm's Muon orthogonalise updates in fp32 on a CPU, in place; return other optimisers unchanged.

    timm uses bf16, which takes ten times as long on CPUs without bf16 instructions.
    """
    weights = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    on_cpu = all(weight.device.type == "cpu" for weight in weights)
    if type(optimizer) is Muon and on_cpu:
        optimizer.__class__ = _SingleMuon
    return optimizer


class _SingleMuon(Muon):
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        plain = timm_muon.zeropower_via_newtonschulz
        timm_muon.zeropower_via_newtonschulz = partial(plain, dtype=torch.float32)
        try:
            return super().step(closure)
        finally:
            timm_muon.zeropower_via_newtonschulz = plain
