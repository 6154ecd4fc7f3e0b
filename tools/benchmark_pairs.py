"""Time how pairs are read, beside open_clip's own reader: `python tools/benchmark_pairs.py SHARDS [--key value]`.

`python tools/benchmark_pairs.py "runs/data/captioned-scenes-default/train-{00000..00015}.tar" --image_size 48` reads
the embedded set; `--help` lists every key.
"""

from __future__ import annotations

import sys

from jsonargparse import ArgumentParser

from mmod.io.yaml import STRICT
from mmod.training.engine.command import one_line_errors
from mmod.training.engine.optional_dependency import extra


def main(arguments: list[str]) -> None:
    """Benchmark as the command line says and print the table."""
    with extra("clip"):
        from mmod.training.pairs.benchmark import benchmark_pairs
    parser = ArgumentParser(
        usage="%(prog)s SHARDS [--key value]",
        description="Time how pairs are read, beside open_clip's own reader.",
        allow_abbrev=False,
        parser_mode=STRICT,
    )
    parser.add_function_arguments(benchmark_pairs)
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--shards", *arguments]
    print(benchmark_pairs(**parser.parse_args(arguments).as_dict()).table())


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
