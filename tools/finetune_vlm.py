"""Fine-tune a vision-language model: `python tools/finetune_vlm.py CONFIG [--dry-run] [--key value]`.

`python tools/finetune_vlm.py configs/vlm/tiny-llava.yaml` trains a small model from random weights; `--dry-run` prints
what a run would cost and trains nothing, `--help` lists every key. The same command started again goes on where it was
interrupted. Under `torchrun --nproc-per-node N tools/finetune_vlm.py CONFIG` several processes train together.
"""

from __future__ import annotations

import sys

from mmod.training.chat.config import VlmConfig
from mmod.training.engine.command import one_line_errors
from mmod.training.engine.optional_dependency import extra
from mmod.training.engine.parse import parse_config

DRY = "--dry-run"


def main(arguments: list[str]) -> None:
    """Fine-tune as the command line says and print what came out, or what it would cost."""
    config = parse_config([word for word in arguments if word != DRY], VlmConfig)
    # A command line that asks for help only is answered without torch.
    with extra("vlm"):
        from mmod.training.chat.estimate import plan_run
        from mmod.training.chat.recipe import finetune
    print(plan_run(config) if DRY in arguments else finetune(config))


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
