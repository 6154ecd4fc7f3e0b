"""Run open_clip's training program on a routed model: `train_open_clip.py [ROUTING] -- OPEN_CLIP_ARGUMENTS`.

`python tools/train_open_clip.py --image "{capacity: 0.5}" --text "{capacity: 0.5}" -- --model ViT-B-32 --train-data
"shards/{00000..00127}.tar" --dataset-type webdataset` routes both towers by attention; everything after `--` is
open_clip's own. Works under torchrun.
"""

import sys

from mmod.cli import run

if __name__ == "__main__":
    run("train open-clip [ROUTING] -- ARGUMENTS", sys.argv[1:])
