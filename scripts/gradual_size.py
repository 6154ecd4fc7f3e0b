"""From which size of a model on does `gradual` pay? `taskset -c 0 python -m scripts.gradual_size RESULT`.

ViTs of 12 blocks with random weights run on images of noise on one thread, dense and with `route_(model, "gradual")` in
turns, by CPU time. `--late` merges in late blocks instead. RESULT takes the rows of the table in
`docs/notebook/benchmarks.md`. It takes about two minutes.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn

import mmod

WIDTHS = (64, 192, 384)
SIDES = (128, 224, 384)
BATCHES = (1, 8)
PATCH = 16
ROUNDS = 7
# CPU seconds of a dense reading.
SECONDS = 0.1
LATE = mmod.RoutingConfig(router="attention", blocks="late", capacity=0.35, skipped="merge")


def cpu_seconds(call: Callable[[], object], times: int) -> float:
    """Return the CPU time of some calls."""
    start = time.process_time()
    for _ in range(times):
        call()
    return time.process_time() - start


def make(width: int, side: int) -> nn.Module:
    """Return a dense ViT with heads of 64 channels."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"embed_dim": width, "num_heads": width // 64, "img_size": side, "num_classes": 10}
    return timm.create_model("vit_tiny_patch16_224", **options).eval()


def row_of(routing: str | mmod.RoutingConfig, width: int, side: int, x_BCHW: Tensor) -> list[object]:
    """Return width, tokens, batch, dense CPU milliseconds, speed-up with quartiles, and the speed-up by FLOPs."""
    dense = make(width, side)
    changed = mmod.route_(make(width, side), routing)
    calls = [partial(dense, x_BCHW), partial(changed, x_BCHW)]
    for call in 2 * calls:
        call()
    times = max(1, round(SECONDS / cpu_seconds(calls[0], 1)))
    seconds = np.array([[cpu_seconds(call, times) for call in calls] for _ in range(ROUNDS)])
    ratio = seconds[:, 0] / seconds[:, 1]
    low, median, high = np.quantile(ratio, (0.25, 0.5, 0.75)).round(3).tolist()
    milliseconds = round(1000 * float(np.median(seconds[:, 0])) / times, 1)
    speedup = round(1 / mmod.flops(changed, side).share, 3)
    return [width, (side // PATCH) ** 2, len(x_BCHW), milliseconds, [median, low, high], speedup]


def main() -> None:
    """Time all sizes and write their rows."""
    parser = argparse.ArgumentParser(description="Time gradual merging on models of several sizes.")
    parser.add_argument("result", metavar="RESULT", help="file of the rows")
    parser.add_argument("--late", action="store_true", help="merge in late blocks, by attention")
    options = parser.parse_args()
    routing = LATE if options.late else "gradual"
    torch.set_num_threads(1)
    rows = []
    with torch.inference_mode():
        for width, side, batch in itertools.product(WIDTHS, SIDES, BATCHES):
            rows.append(row_of(routing, width, side, torch.randn(batch, 3, side, side)))
            print(rows[-1], flush=True)
    Path(options.result).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
