"""Small runs on pairs, for the tests and for the processes they start and kill.

Run as a module, it trains the configs in a JSON file one after the other and prints the number of each optimiser step
when it is done.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mmod.training import FitResult
from mmod.training.pairs.config import TrainConfig
from mmod.training.pairs.evaluate import EvalResult
from mmod.training.pairs.recipe import fit
from mmod.training.pairs.task import PairsTask

MODEL = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 2, "width": 16, "head_width": 8, "patch_size": 8},
    "text_cfg": {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2},
}


def write_model(folder: Path, name: str = "test-clip", **changes: Any) -> dict[str, str]:
    """Write a model config and return the fields that name it."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(MODEL | changes))
    return {"name": name, "config": str(path)}


def clip_config(folder: Path, output: str, **changes: Any) -> dict[str, Any]:
    """Return the fields of a config for the shards in `folder`, with some fields changed."""
    data = {"train": f"{folder}/train-*.tar", "val": f"{folder}/val-*.tar", "batch_size": 8}
    fields: dict[str, Any] = {
        "output": str(folder / output),
        "model": write_model(folder) | changes.pop("model", {}),
        "data": data | changes.pop("data", {}),
        "augment": None,
        "epochs": 1,
        "device": "cpu",
        "optim": {"opt": "sgd", "lr": 0.1},
    }
    return fields | changes


def run(fields: dict[str, Any]) -> FitResult[EvalResult]:
    """Train as the fields say."""
    return fit(TrainConfig.from_dict(fields), progress=False)


def main(path: str) -> None:
    steps = itertools.count(1)
    real = PairsTask.after_step

    def loud(self: PairsTask) -> None:
        real(self)
        print(f"step {next(steps)}", flush=True)

    PairsTask.after_step = loud  # type: ignore[method-assign]
    if "WORLD_SIZE" in os.environ:
        # One group for all runs, because a second one would need another port.
        dist.init_process_group("gloo")
    for fields in json.loads(Path(path).read_text()):
        run(fields)


if __name__ == "__main__":
    main(sys.argv[1])
