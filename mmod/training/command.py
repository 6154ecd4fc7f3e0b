"""The commands `mmod train KIND CONFIG [--key value] [--dry-run[=RATE]]`."""

from __future__ import annotations

from collections.abc import Sequence

from mmod.io.yaml import parse_option
from mmod.training.kinds import config_class, kind_of
from mmod.values import check_value

_DRY = "--dry-run"


def main(arguments: Sequence[str], kind: str) -> None:
    """Train as the command line says and print the result, or what the run would cost.

    Args:
        arguments: `CONFIG [--key value] [--dry-run[=RATE]]`; with a rate, in TFLOP/s of each process, hours too.
    """
    dry = [word for word in arguments if word.partition("=")[0] == _DRY]
    config = config_class(kind).parse([word for word in arguments if word not in dry])
    if not dry:
        run = kind_of(config)
        result = run.fit()
        # They import torch, which `--help` answers without.
        from mmod.training.engine.distributed import is_first_process
        from mmod.training.engine.following import next_commands

        if is_first_process():
            print(f"{result}\n{next_commands(run, result)}")
        return
    rate = parse_option(dry[-1].partition("=")[2])
    # Before the model is made.
    check_value(_DRY, rate, float | None, "(0, inf)")
    estimate = kind_of(config).estimate()
    print(estimate)
    if rate is not None:
        print(f"{estimate.hours(rate):.4g} hours at {rate:g} TFLOP/s in each process")
