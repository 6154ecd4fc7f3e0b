"""Train on image-text pairs: `python tools/train_clip.py CONFIG [--key value] [--group.key value]`.

`python tools/train_clip.py configs/clip/scenes.yaml --epochs 1` trains one epoch; `--help` lists every key and
`--print_config` shows the resolved config. The same command started again goes on where it was interrupted.
Under `torchrun --nproc-per-node N tools/train_clip.py CONFIG` several processes train together.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from mmod.training.engine.command import one_line_errors
from mmod.training.engine.optional_dependency import extra
from mmod.training.engine.parse import parse_config
from mmod.training.pairs.config import ClipConfig

if TYPE_CHECKING:
    from mmod.training import FitResult
    from mmod.training.pairs.evaluate import ClipResult


def main(arguments: list[str]) -> None:
    """Train as the command line says and print what came out."""
    config = parse_config(arguments, ClipConfig)
    # A command line that asks for help only is answered without torch.
    with extra("clip"):
        from mmod.training.pairs.recipe import fit_clip
    print(summary(fit_clip(config)))


def summary(result: FitResult[ClipResult]) -> str:
    """Return the outcome in a few lines."""
    state = "had finished before" if result.reused else "finished"
    lines = [f"{result.folder}: {state} after {result.epochs} epochs, {result.steps} steps"]
    for name, found in (("weights", result.evaluation), ("moving average", result.average)):
        if found is not None:
            zero = "" if found.zero_shot_top1 is None else f"zero-shot top-1 {found.zero_shot_top1:.2f} %, "
            lines.append(
                f"{name}: image to text R@1 {found.image_to_text_r1:.2f} %, R@5 {found.image_to_text_r5:.2f} %, "
                f"text to image R@1 {found.text_to_image_r1:.2f} %, R@5 {found.text_to_image_r5:.2f} %, {zero}"
                f"kept {found.mean_kept:.3f} ({found.samples} pairs)"
            )
    for split, counts in result.skipped.items():
        lines += [f"{split} data, unreadable and passed over: {count} in {file}" for file, count in counts.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
