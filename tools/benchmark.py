"""Time dense, routed and freely routed models side by side: `python tools/benchmark.py [--key value]`.

`python tools/benchmark.py --batch_sizes "[1, 8]" --execution "[eager]" --threads 2` times two batch sizes on two
threads; `--config FILE` reads the same keys from YAML and `--help` lists them. The table goes to stdout and, with its
environment, to `benchmark.md` and `benchmark.json` in the folder `out`.
"""

from __future__ import annotations

import sys

from jsonargparse import ArgumentParser

from mmod.measuring import BenchmarkConfig, benchmark


def main(arguments: list[str]) -> None:
    """Benchmark as the command line says and print the table."""
    parser = ArgumentParser(description="Time dense, routed and freely routed models side by side.", allow_abbrev=False)
    parser.add_argument("--config", action="config", help="YAML file with the same keys")
    parser.add_class_arguments(BenchmarkConfig, None)
    options = parser.parse_args(arguments)
    options.pop("config", None)
    print(benchmark(BenchmarkConfig(**options.as_dict())).markdown())


if __name__ == "__main__":
    main(sys.argv[1:])
