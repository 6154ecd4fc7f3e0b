"""Command lines of runs: that of `mmod train KIND CONFIG`, and others that name a config, a run or a saved model."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mmod.config.parse import Check, check_output, named_kind, parse_config
from mmod.io.yaml import parse_option
from mmod.opening.runs import RUN_CONFIG, find_run, holds_work, is_described, read_run_config
from mmod.training.kinds import KINDS, config_class, estimate, fit, kind_of
from mmod.values import check_value, one_of

if TYPE_CHECKING:
    from mmod.training.engine.config import RunConfig
    from mmod.training.engine.evaluate import RoutedResult
    from mmod.training.engine.run_folder import FitResult

_DRY = "--dry-run"


def main(arguments: Sequence[str], kind: str) -> None:
    """Train as the command line says and print the result, or what the run would cost.

    Args:
        arguments: `CONFIG [--key value] [--dry-run[=RATE]]`; with a rate, in TFLOP/s of each process, hours too.
    """
    dry = [word for word in arguments if word.partition("=")[0] == _DRY]
    config = config_class(kind).parse([word for word in arguments if word not in dry], check=check_output)
    # Before torch is imported. A run that has begun has weights of its own.
    if not holds_work(config.output):
        config.check_weights()
    # Its images are prepared as the model wants them, which what follows need not find out again.
    config = kind_of(config).config
    if not dry:
        result = fit(config)
        # It imports torch, which `--help` answers without.
        from mmod.training.engine.distributed import is_first_process

        if is_first_process():
            print(f"{result}\n{next_commands(config, result)}")
        return
    rate = parse_option(dry[-1].partition("=")[2])
    # Before the model is made.
    if rate is not None:
        check_value(_DRY, rate, float, "(0, inf)")
    counted = estimate(config)
    print(counted)
    if rate is not None:
        print(f"{counted.hours(rate):.4g} hours at {rate:g} TFLOP/s in each process")
    # It imports torch, which `--help` answers without.
    from mmod.training.engine.run_folder import told_start

    print(told_start(config, counted.processes))


def next_commands(config: RunConfig, result: FitResult[RoutedResult | None]) -> str:
    """Return the commands that may follow a finished run, and where its model is."""
    from mmod.adapters import has_blocks
    from mmod.methods.route import is_routed, unreplaceable
    from mmod.training.engine.start import sketch

    folder = shlex.quote(result.folder)
    saved = "final model"
    if result.average is not None:
        saved += ", the moving average of the weights,"
    commands = {}
    if result.evaluation is not None:
        commands[f"mmod evaluate {folder}"] = "score, FLOPs and time of the final model"
        model = sketch(kind_of(config))
        # Methods for training alone leave the final model dense.
        if is_routed(model):
            if not unreplaceable(model):
                commands[f"mmod audit {folder}"] = "which tokens it keeps"
        elif config.routing is None and not config.methods and has_blocks(model):
            commands[f"mmod plan {folder}"] = "which tokens may miss which operator, without training"
            row = KINDS[config.kind]
            if row.advised:
                commands[f"mmod advise {folder} {row.advised}"] = "what makes it faster, without training"
            if row.study:
                commands[f"mmod tradeoff {row.study} --dense {folder}"] = "the same, on all evaluation samples"
    width = max(map(len, commands), default=0)
    lines = [f"  {command:<{width}}  # {purpose}" for command, purpose in commands.items()]
    return "\n".join([f"next: the {saved} is in {folder}/model", *lines])


def parse_run(
    arguments: Sequence[str], configs: Mapping[str, type[RunConfig]], check: Check[RunConfig] | None = None
) -> RunConfig:
    """Return the config of a command line as `RunConfig.parse` does, of the kind that it names.

    In place of the config, a run folder stands for its final model, and its `model`, `last` or a checkpoint, or a file
    in these, for the weights there; see `finished_run`. The folder of a saved model stands for that model, and options
    name its data.

    Args:
        configs: The class of the config by kind.
        check: See `parse_config`.
    """
    if arguments and find_run(arguments[0]) is None and is_described(arguments[0]):
        folder, *options = arguments
        if (Path(folder) / "mmod.json").is_file():
            # Imports torch, which `--help` of a config leaves alone.
            from mmod.pretrained import refuse_own

            refuse_own(folder)
        kind = named_kind(options) or "image"
        one_of("kind", kind, tuple(configs))
        model = configs[kind].model_in(folder)
        return configs[kind].parse(options, {"output": folder, "model": model}, check)
    run = None
    if arguments:
        run = find_run(arguments[0])
    if run is None:
        return _parse_config(arguments, configs, check)
    read_run_config(run)
    file = str(run / RUN_CONFIG)
    named = named_kind([file, *arguments[1:]])
    # The run's own config first, whatever the words change of it besides its kind.
    words = [file]
    if named is not None:
        words += ["--kind", named]
    config = _parse_config(words, configs)
    finished = finished_run(config, run, arguments[0])
    # The words once more, now on top of what the run's final model is.
    return type(finished).parse(arguments[1:], finished.to_dict(), check)


def _parse_config(
    arguments: Sequence[str], configs: Mapping[str, type[RunConfig]], check: Check[RunConfig] | None = None
) -> RunConfig:
    # What cannot be read is refused here, and once.
    named = named_kind(arguments)
    try:
        return parse_config(arguments, configs, check=check)
    except SystemExit as end:
        # The exit already printed the error; this adds what may explain it.
        if end.code and named is None:
            first, *_ = configs
            print(f"without a key `kind`, a config is read as {first}; valid are {', '.join(configs)}", file=sys.stderr)
        raise


def finished_run(config: RunConfig, run: Path, weights: str | Path) -> RunConfig:
    """Return the config in a run folder, changed to start from the weights there."""
    return dataclasses.replace(config, output=str(run)).finished(str(weights))
