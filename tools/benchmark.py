"""Time models, ops, generation, or a suite: `python tools/benchmark.py models|ops|generation|suite [--key value]`."""

import sys

from mmod.benchmarks.command import main
from mmod.training.engine.command import one_line_errors

if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
