"""Kill small runs and studies at random moments, resume them, and compare them with undisturbed ones.

python -m scripts.kills [runs|studies ...] [--kills 20] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from mmod.data.config import DataConfig
from mmod.data.synthetic.digits import DIGITS
from mmod.io.tensors import read_tensors
from mmod.studies.kind_configs import ImageStudyConfig
from mmod.studies.study import run_study
from mmod.training import EmaConfig, ModelConfig, TrainConfig, fit

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["mmod.training.image.kind", "mmod.studies.study", "mmod.studies.image"])


def main(arguments: list[str] | None = None) -> None:
    """Print the number of kills; end with code 1 at the first run or study whose outcome differs."""
    parser = argparse.ArgumentParser(description="Kill small runs and studies at random moments, and resume them.")
    parser.add_argument("names", nargs="*", choices=[*WORK, []], metavar="NAME", help=", ".join(WORK))
    parser.add_argument("--kills", type=int, default=20, help="of each")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args(arguments)
    for name in options.names or WORK:
        counts = count_kills(name, options.kills, options.seed)
        text = "{kills} kills, {saving} of them while saving: {equal} of {resumed} resumed {name} equal the undisturbed"
        print(text.format(**counts))
        if counts["equal"] < counts["resumed"]:
            sys.exit(1)


def count_kills(name: str, total: int = 20, seed: int = 0) -> dict[str, Any]:
    """Kill runs or studies so many times, and count those that came to the undisturbed outcome after all."""
    draws, work = random.Random(seed), WORK[name]
    counts = {"kills": 0, "saving": 0, "resumed": 0, "equal": 0}
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = Path(folder, "undisturbed")
        # Before the clock: kills that come after the end of a start do not count, and take a start each.
        DIGITS.build(digits_beside(undisturbed), "tiny")
        begin = time.perf_counter()
        start(work, undisturbed).join()
        seconds = time.perf_counter() - begin
        expected = outcome(undisturbed)
        while counts["kills"] < total:
            output = Path(folder, f"killed-{counts['resumed']}")
            before, finished = counts["kills"], False
            while not finished and counts["kills"] < total:
                # Half of the kills come while a file is written.
                in_save = draws.random() < 0.5
                finished = not killed(start(work, output), output, draws.random() * seconds, in_save=in_save)
                counts["kills"] += not finished
                counts["saving"] += in_save and not finished
            process = start(work, output)
            process.join()
            counts["resumed"] += counts["kills"] > before
            counts["equal"] += counts["kills"] > before and process.exitcode == 0 and outcome(output) == expected
    return {"name": name, **counts}


def run(output: Path) -> None:
    """Train for half a second with a router, dropout and a moving average, and save after each step."""
    fit(config(output, routing={"router": "linear", "gate": "tanh", "capacity": 0.5}, epochs=3), progress=False)


def study(output: Path) -> None:
    """Train a dense model, fine-tune it with and without a router, evaluate both, and save after each step."""
    dense = output.parent / "dense.yaml"
    dense.write_text(yaml.safe_dump(config(output).to_dict()))
    config_of_study = ImageStudyConfig(
        output=str(output),
        dense=str(dense),
        routers={"random": {"router": "random"}},
        finetune={"epochs": 1},
        latency_batches=[],
        latency_batch=2,
        latency_rounds=1,
        maps=0,
    )
    run_study(config_of_study, progress=False)


WORK = {"runs": run, "studies": study}


def config(output: Path, **changes: Any) -> TrainConfig:
    """Return the config of a run on a few digits."""
    size = {"img_size": 32, "patch_size": 8, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return TrainConfig(
        output=str(output),
        model=ModelConfig("vit_tiny_patch16_224", {**size, "num_classes": 10, "drop_path_rate": 0.2}),
        data=DataConfig("digits:tiny", root=str(digits_beside(output)), workers=0, val_split="test"),
        ema=EmaConfig(0.9),
        device="cpu",
        checkpoint_every=1,
        **{"epochs": 1, **changes},
    )


def digits_beside(output: Path) -> Path:
    """Return the folder of the set that runs in one folder share."""
    return output.parent / "digits"


def start(work: Any, output: Path) -> multiprocessing.process.BaseProcess:
    """Start a run or study in a process."""
    process = _CONTEXT.Process(target=work, args=(output,))
    process.start()
    return process


def killed(process: Any, output: Path, seconds: float, *, in_save: bool) -> bool:
    """Kill a process after so many seconds, or at the first save after them; return whether it still ran."""
    process.join(seconds)
    while in_save and process.is_alive() and not any(partial(output)):
        time.sleep(0.0005)
    process.kill()
    process.join()
    return bool(process.exitcode != 0)


def partial(output: Path) -> Iterator[Path]:
    """Yield the files and folders that are being written."""
    yield from output.rglob(".*.partial")


def outcome(output: Path) -> dict[str, Any]:
    """Return all final weights by file and name, and what a study says of its models' accuracy."""
    files = {str(path.relative_to(output)): read_tensors(path)[0] for path in output.rglob("*/model.safetensors")}
    results: dict[str, Any] = {
        f"{file}: {name}": value.numpy().tobytes() for file, state in files.items() for name, value in state.items()
    }
    if (table := output / "tradeoff.json").exists():
        results["points"] = [(point["name"], point["figures"]) for point in json.loads(table.read_text())["points"]]
    return results


if __name__ == "__main__":
    main()
