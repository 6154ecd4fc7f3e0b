"""Train on image-text pairs: `python tools/train_clip.py CONFIG [--key value] [--group.key value]`.

`python tools/train_clip.py configs/clip/scenes.yaml --epochs 1` trains one epoch; `--help` lists every key and
`--print_config` shows the resolved config. The same command started again goes on where it was interrupted.
Under `torchrun --nproc-per-node N tools/train_clip.py CONFIG` several processes train together.
"""

import sys

from mmod.cli import run

if __name__ == "__main__":
    run("train pairs CONFIG", sys.argv[1:])
