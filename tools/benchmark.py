"""Time models, ops, generation, drafts, or a suite: `python tools/benchmark.py MODE [--key value]`."""

import sys

from mmod.cli import run

if __name__ == "__main__":
    run("benchmark MODE", sys.argv[1:])
