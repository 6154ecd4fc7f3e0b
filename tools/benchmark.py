"""Time models, ops, generation, drafts, or a suite: `python tools/benchmark.py MODE [--key value]`."""

import sys

from mmod.benchmarks.command import main
from mmod.training.engine.command import one_line_errors

if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
