"""Draw the accuracy/FLOPs/latency trade-off: `python tools/tradeoff.py CONFIG [--key value]`.

`python tools/tradeoff.py configs/tradeoff/digits.yaml --seeds 3` repeats the study for three seeds and draws error
bars; `--help` lists every key. Started again, the same command goes on where it was interrupted.
"""

from __future__ import annotations

import sys

from jsonargparse import ArgumentParser

from mmod.training.tradeoff import TradeoffConfig, run_tradeoff


def main(arguments: list[str]) -> None:
    """Run the study that the command line names, print its table and say where the pictures are."""
    parser = ArgumentParser(
        usage="%(prog)s CONFIG [--key value]",
        description="Draw the accuracy/FLOPs/latency trade-off.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="The config file; its place is the first argument.")
    parser.add_class_arguments(TradeoffConfig)
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--config", *arguments]
    options = parser.parse_args(arguments)
    options.pop("config", None)
    result = run_tradeoff(TradeoffConfig(**options.as_dict()))
    print(f"\n{result.table()}\n\nTable and pictures: {result.folder}")


if __name__ == "__main__":
    main(sys.argv[1:])
