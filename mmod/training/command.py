"""The commands `mmod train KIND`: train, or estimate what training would cost."""

from __future__ import annotations

from collections.abc import Sequence

from mmod.training.engine.parse import parse_config
from mmod.training.kinds import CONFIGS, recipe_of
from mmod.values import check_value

_DRY = "--dry-run"


def main(arguments: Sequence[str], kind: str) -> None:
    """Train as the command line says and print the result, or what the run would cost.

    Args:
        arguments: `CONFIG [--key value] [--dry-run[=RATE]]`; with a rate, in TFLOP/s of each process, hours too.
        kind: A key of `CONFIGS`.
    """
    dry = [word for word in arguments if word.partition("=")[0] == _DRY]
    config = parse_config([word for word in arguments if word not in dry], CONFIGS[kind])
    if not dry:
        print(recipe_of(config).fit())
        return
    rate, speed = dry[-1].partition("=")[2], 0.0
    if rate:
        # Before the model is made.
        speed = float(rate) if rate.replace(".", "", 1).isdecimal() else 0.0
        check_value(_DRY, speed or rate, float, "(0, inf)")
    estimate = recipe_of(config).estimate()
    print(estimate)
    if rate:
        print(f"{estimate.hours(speed):.4g} hours at {speed:g} TFLOP/s in each process")
