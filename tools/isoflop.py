"""Compare sizes of dense and routed language models at equal training FLOPs: `python tools/isoflop.py CONFIG`.

`python tools/isoflop.py configs/isoflop/text.yaml --processes 2` does two runs side by side, each in a process of one
thread; `--dry-run` says what the study would do, and `--help` lists every key. Started again, the same command goes on
where it was interrupted.
"""

import sys

from mmod.cli import run

if __name__ == "__main__":
    run("isoflop CONFIG", sys.argv[1:])
