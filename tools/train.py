"""Train a model: `python tools/train.py CONFIG [--key value] [--group.key value]`.

`python tools/train.py configs/digits/dense.yaml --epochs 1` trains one epoch; `--help` lists every key and
`--print_config` shows the resolved config. The same command started again goes on where it was interrupted.
Under `torchrun --nproc-per-node N tools/train.py CONFIG` several processes train together.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from mmod.training.engine.command import one_line_errors
from mmod.training.engine.parse import parse_config

if TYPE_CHECKING:
    from mmod.training import EvalResult, FitResult


def main(arguments: list[str]) -> None:
    """Train as the command line says and print what came out."""
    config = parse_config(arguments)
    # A command line that asks for help only is answered without torch.
    from mmod.training import fit

    print(summary(fit(config)))


def summary(result: FitResult[EvalResult]) -> str:
    """Return the outcome in a few lines."""
    state = "had finished before" if result.reused else "finished"
    lines = [f"{result.folder}: {state} after {result.epochs} epochs, {result.steps} steps"]
    for name, found in (("weights", result.evaluation), ("moving average", result.average)):
        if found is not None:
            lines.append(
                f"{name}: top-1 {found.top1:.2f} %, top-5 {found.top5:.2f} %, loss {found.loss:.4f}, "
                f"kept {found.mean_kept:.3f} ({found.samples} images)"
            )
    for split, counts in result.skipped.items():
        lines += [f"{split} data, unreadable and passed over: {count} in {file}" for file, count in counts.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
