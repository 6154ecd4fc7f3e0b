"""Fine-tune a vision-language model: `python tools/finetune_vlm.py CONFIG [--dry-run] [--key value]`.

`python tools/finetune_vlm.py configs/vlm/tiny-llava.yaml` trains a small model from random weights; `--dry-run` prints
what a run would cost and trains nothing, `--help` lists every key. The same command started again goes on where it was
interrupted. Under `torchrun --nproc-per-node N tools/finetune_vlm.py CONFIG` several processes train together.
"""

import sys

from mmod.cli import run

if __name__ == "__main__":
    run("train chat CONFIG", sys.argv[1:])
