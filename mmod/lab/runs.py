"""Runs of image classifiers that learn the capacities of their blocks in the first steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch

from mmod.io.processes import process_rank
from mmod.lab.capacity import learn_capacity_, settle_capacity_
from mmod.model import set_capacity_
from mmod.training.engine.distributed import sum_over_processes
from mmod.training.engine.kind import Step
from mmod.training.engine.run_folder import FitResult
from mmod.training.image.config import TrainConfig
from mmod.training.image.evaluate import EvalResult
from mmod.training.image.kind import ImageKind
from mmod.values import check_value

PLAN = "plan.json"
"""The learned plan in the folder of a run."""


def fit_capacity(
    config: TrainConfig, budget: float, steps: int, *, rate: float = 100.0, **options: Any
) -> FitResult[EvalResult]:
    """Train an image classifier as `mmod.training.fit` does, and learn its capacities in the first steps.

    The first step trains the capacities of `config.routing`. Those up to the last of `steps` train learned ones, by
    Adam at the run's learning rate, and all others the plan that was learned. It is written to `plan.json` in the run's
    folder. A run that was interrupted while it learned cannot resume.

    Args:
        config: A run with routing, in fp32 or bf16, not compiled and without gradient checkpointing, FSDP or `elastic`.
        budget: See `learn_capacity_`, and for `rate` too.
        steps: Number of optimiser steps that end the learning, below that of the run.
        options: Further arguments of `mmod.training.fit`.

    Raises:
        ValueError: The config has one of these, or the run is too short, or it resumes.

    Example:
        >>> import tempfile, mmod
        >>> from mmod.data.config import DataConfig
        >>> from mmod.training import ModelConfig
        >>> folder = tempfile.mkdtemp()
        >>> args = {"img_size": 32, "patch_size": 8, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2}
        >>> model = ModelConfig("vit_tiny_patch16_224", {**args, "num_classes": 10})
        >>> data = DataConfig("digits:tiny", root=f"{folder}/digits")
        >>> routing = {"router": "linear", "blocks": "all"}
        >>> config = TrainConfig(output=f"{folder}/run", model=model, data=data, routing=routing, epochs=1)
        >>> result = fit_capacity(config, 0.7, steps=3, progress=False)
        >>> mmod.RoutingConfig.load(f"{folder}/run/plan.json").blocks
        (0, 1)
    """
    check_value("steps", steps, int, "[2, inf)")
    if not config.routings:
        raise ValueError("capacities are learned of routed blocks: set routing")
    taken = [name for name in ("compile", "grad_checkpointing", "elastic") if getattr(config, name)]
    taken += ["distributed.kind='fsdp'"] if config.distributed.sharded else []
    taken += ["precision='fp16'"] if config.precision == "fp16" else []
    if taken:
        raise ValueError(f"learned capacities cannot be combined with {', '.join(taken)}")
    optimizer: torch.optim.Optimizer | None = None

    def learn(step: Step) -> None:
        nonlocal optimizer
        if optimizer is None:
            optimizer = _begin(config, step, steps, budget, rate)
        elif step.done <= steps:
            _update(optimizer, step)
        if step.done == steps:
            plan = settle_capacity_(step.model)
            if step.average is not None:
                set_capacity_(step.average, plan.capacity)
            if process_rank() == 0:
                plan.save(Path(config.output) / PLAN, overwrite=True)

    return cast(FitResult[EvalResult], ImageKind(config).fit(after_step=learn, **options))


def _begin(config: TrainConfig, step: Step, steps: int, budget: float, rate: float) -> torch.optim.Optimizer:
    """Begin to learn after the first step of a run; return the optimiser of the offsets."""
    if step.done > 1:
        raise ValueError(
            f"capacities are learned from the first step on, and {config.output!r} goes on after step "
            f"{step.done - 1}: choose another output"
        )
    if steps >= step.total:
        raise ValueError(f"steps must be below {step.total}, those of the run, got {steps}")
    data = config.data
    device = next(step.model.parameters()).device
    example = torch.zeros(data.batch_size, data.channels, data.image_size, data.image_size, device=device)
    return torch.optim.Adam(learn_capacity_(step.model, budget, example, rate=rate).parameters())


def _update(optimizer: torch.optim.Optimizer, step: Step) -> None:
    (group,) = optimizer.param_groups
    group["lr"] = max(other["lr"] for other in step.optimizer.param_groups)
    for offsets in group["params"]:
        # The sum serves as well as the mean: Adam's updates do not depend on the scale of gradients.
        offsets.grad = sum_over_processes(offsets.grad)
    optimizer.step()
    optimizer.zero_grad()
