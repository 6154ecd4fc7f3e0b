"""The commands `mmod train KIND CONFIG [--key value] [--dry-run[=RATE]]`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmod.io.yaml import parse_option
from mmod.opening.runs import RUN_CONFIG
from mmod.training.kinds import KINDS, config_class, estimate, fit, kind_of
from mmod.values import check_value

if TYPE_CHECKING:
    from torch import nn

    from mmod.training.engine.config import RunConfig
    from mmod.training.engine.run_folder import FitResult

_DRY = "--dry-run"


def main(arguments: Sequence[str], kind: str) -> None:
    """Train as the command line says and print the result, or what the run would cost.

    Args:
        arguments: `CONFIG [--key value] [--dry-run[=RATE]]`; with a rate, in TFLOP/s of each process, hours too.
    """
    dry = [word for word in arguments if word.partition("=")[0] == _DRY]
    config = config_class(kind).parse([word for word in arguments if word not in dry])
    # Before torch is imported. A run that has begun has weights of its own.
    if not (Path(config.output) / RUN_CONFIG).exists():
        config.check_weights()
    if not dry:
        result = fit(config)
        # It imports torch, which `--help` answers without.
        from mmod.training.engine.distributed import is_first_process

        if is_first_process():
            print(f"{result}\n{next_commands(config, result)}")
        return
    rate = parse_option(dry[-1].partition("=")[2])
    # Before the model is made.
    check_value(_DRY, rate, float | None, "(0, inf)")
    counted = estimate(config)
    print(counted)
    if rate is not None:
        print(f"{counted.hours(rate):.4g} hours at {rate:g} TFLOP/s in each process")
    # It imports torch, which `--help` answers without.
    from mmod.training.engine.run_folder import told_start

    print(told_start(config, counted.processes))


def next_commands(config: RunConfig, result: FitResult[Any]) -> str:
    """Return the commands that may follow a finished run, and where its model is."""
    from mmod.methods.route import is_routed
    from mmod.training.engine.start import sketch

    folder = shlex.quote(result.folder)
    saved = "final model" if result.average is None else "final model, the moving average of the weights,"
    commands = {}
    if result.evaluation is not None:
        commands[f"mmod evaluate {folder}"] = "score, FLOPs and time of the final model"
        model = sketch(kind_of(config))
        # Methods for training alone leave the final model dense.
        if is_routed(model):
            commands[f"mmod audit {folder}"] = "what its routers learned"
        elif config.routing is None and not config.methods and _has_blocks(model):
            commands[f"mmod plan {folder}"] = "which tokens may miss which operator, without training"
            row = KINDS[config.kind]
            if row.advised:
                commands[f"mmod advise {folder} {row.advised}"] = "what makes it faster, without training"
            if row.study:
                commands[f"mmod tradeoff {row.study} --dense {folder}"] = "the same, on all evaluation samples"
    width = max(map(len, commands), default=0)
    lines = [f"  {command:<{width}}  # {purpose}" for command, purpose in commands.items()]
    return "\n".join([f"next: the {saved} is in {folder}/model", *lines])


def _has_blocks(model: nn.Module) -> bool:
    """Return whether a dense model has blocks that can be routed, unlike one of convolutions."""
    from mmod.adapters import find_stacks

    try:
        return bool(find_stacks(model))
    except ValueError:
        return False
