"""Time models, ops, generation, drafts, or a suite: `python tools/benchmark.py MODE [--key value]`."""

import sys
from pathlib import Path

CLONE = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    # The benchmarks, and the definition in `tests/kit` that they check models with, are not in the package.
    sys.path.insert(0, str(CLONE))
    from mmod.cli import wait_passively
    from mmod.io.refusals import one_line_errors

    wait_passively()
    with one_line_errors(CLONE / "tools"):
        from tools.benchmarks.command import main

        main(sys.argv[1:])
