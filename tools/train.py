"""Train a model: `python tools/train.py CONFIG [--key value] [--group.key value]`.

`python tools/train.py configs/digits/dense.yaml --epochs 1` trains one epoch; `--help` lists every key and
`--print_config` shows the resolved config. The same command started again goes on where it was interrupted.
Under `torchrun --nproc-per-node N tools/train.py CONFIG` several processes train together.
"""

import sys

from mmod.training.engine.command import one_line_errors
from mmod.training.kinds import main

if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:], "image")
