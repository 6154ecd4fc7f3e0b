"""The commands `mmod train KIND CONFIG [--key value] [--dry-run[=RATE]]`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmod.config.parse import parse_config
from mmod.io.yaml import parse_option
from mmod.training.engine.config import RunConfig
from mmod.training.kinds import config_class, kind_of
from mmod.values import check_value

if TYPE_CHECKING:
    from torch import nn

    from mmod.training.engine.evaluate import RoutedResult
    from mmod.training.engine.run_folder import FitResult

_DRY = "--dry-run"
# What advice reads besides the model.
ADVISED = {"image": "--images FOLDER", "chat": "--prompts FILE"}


def is_first_process() -> bool:
    """Return whether this process is the first, or the only one, that `torchrun` or Slurm started."""
    from timm.utils.distributed import world_info_from_env

    return world_info_from_env()[1] == 0


def next_commands(config: RunConfig, result: FitResult[RoutedResult | None]) -> str:
    """Return the commands that a finished run may be followed by, and where its model is."""
    from mmod.methods.route import is_routed

    folder = shlex.quote(result.folder)
    saved = "final model" if result.average is None else "final model, the moving average of the weights,"
    lines = [f"next: the {saved} is in {folder}/model"]
    commands = {}
    if result.evaluation is not None:
        commands[f"mmod evaluate {folder}"] = "score, FLOPs and time of the final model"
        kind = kind_of(config)
        # Methods for training alone leave the final model dense.
        model = kind.sketch().eval()
        if is_routed(model):
            commands[f"mmod audit {folder}"] = "what its routers learned"
        elif config.routing is None and not config.methods and _is_routable(model, kind.planned_part):
            commands[f"mmod plan {folder}"] = "which tokens may miss which operator, without training"
            if config.kind in ADVISED:
                commands[f"mmod advise {folder} {ADVISED[config.kind]}"] = "what makes it faster, without training"
    width = max(map(len, commands), default=0)
    lines += [f"  {command:<{width}}  # {purpose}" for command, purpose in commands.items()]
    return "\n".join(lines)


def _is_routable(model: nn.Module, planned_part: str) -> bool:
    """Return whether the part of a dense model on meta that plans are searched for can be routed; change the model."""
    from mmod.adapters import find_part
    from mmod.config import RoutingConfig
    from mmod.methods.route import Route
    from mmod.model import apply_

    try:
        part, _ = find_part(model, planned_part)
        apply_(model, Route({part: RoutingConfig(router="random")}))
    except ValueError:
        return False
    return True


def main(arguments: Sequence[str], kind: str) -> None:
    """Train as the command line says and print the result, or what the run would cost.

    Args:
        arguments: `CONFIG [--key value] [--dry-run[=RATE]]`; with a rate, in TFLOP/s of each process, hours too.
    """
    dry = [word for word in arguments if word.partition("=")[0] == _DRY]
    config = parse_config([word for word in arguments if word not in dry], config_class(kind))
    if not dry:
        result = kind_of(config).fit()
        if is_first_process():
            print(f"{result}\n{next_commands(config, result)}")
        return
    rate = parse_option(dry[-1].partition("=")[2])
    # Before the model is made.
    check_value(_DRY, rate, float | None, "(0, inf)")
    estimate = kind_of(config).estimate()
    print(estimate)
    if rate is not None:
        print(f"{estimate.hours(rate):.4g} hours at {rate:g} TFLOP/s in each process")
