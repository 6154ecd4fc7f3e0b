"""Kill small runs at random moments, resume them, and compare their weights with those of an undisturbed run.

python scripts/kill_runs.py [--kills 20] [--seed 0]
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from mmod.data.config import DataConfig
from mmod.io.tensors import read_tensors
from mmod.training import EmaConfig, ModelConfig, TrainConfig, fit

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["mmod.training.image.recipe"])


def main(arguments: list[str] | None = None) -> None:
    """Print the number of kills; end with code 1 at the first run whose weights differ."""
    parser = argparse.ArgumentParser(description="Kill small runs at random moments, resume them, compare the weights.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args(arguments)
    draws = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        undisturbed = config(folder / "undisturbed")
        start(undisturbed).join()
        begin = time.perf_counter()
        start(replace(undisturbed, output=str(folder / "timed"))).join()
        seconds = time.perf_counter() - begin
        kills = saving = runs = resumed = 0
        while kills < options.kills:
            run = replace(undisturbed, output=str(folder / f"killed-{runs}"))
            finished, before = False, kills
            while not finished:
                # Half of the kills come while a checkpoint is written.
                in_save = draws.random() < 0.5
                finished = kills == options.kills or not killed(run, draws.random() * seconds, in_save=in_save)
                kills += not finished
                saving += in_save and not finished
            process = start(run)
            process.join()
            if process.exitcode != 0 or weights(Path(run.output)) != weights(Path(undisturbed.output)):
                sys.exit(f"after {kills} kills: {run.output} ended with code {process.exitcode} or other weights")
            runs += 1
            resumed += kills > before
    print(f"{kills} kills, {saving} of them while saving: {resumed} resumed runs have the undisturbed weights")


def config(output: Path) -> TrainConfig:
    """Return a run of half a second with a router, dropout and a moving average, which saves after each step."""
    size = {"img_size": 32, "patch_size": 8, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2}
    return TrainConfig(
        output=str(output),
        model=ModelConfig("vit_tiny_patch16_224", {**size, "num_classes": 10, "drop_path_rate": 0.2}),
        data=DataConfig("digits:tiny", root=str(output.parent / "digits"), workers=0),
        routing={"router": "linear", "gate": "tanh", "capacity": 0.5},
        epochs=3,
        ema=EmaConfig(0.9),
        device="cpu",
        checkpoint_every=1,
    )


def start(run: TrainConfig) -> multiprocessing.process.BaseProcess:
    """Start a run in a process."""
    process = _CONTEXT.Process(target=fit, args=(run,), kwargs={"progress": False})
    process.start()
    return process


def killed(run: TrainConfig, seconds: float, *, in_save: bool) -> bool:
    """Start a run and kill it after so many seconds, or at the first save after them; return whether it still ran."""
    process = start(run)
    end = time.perf_counter() + seconds
    while process.is_alive() and (time.perf_counter() < end or (in_save and not any(partial(Path(run.output))))):
        time.sleep(0.0005)
    process.kill()
    process.join()
    return process.exitcode != 0


def partial(output: Path) -> Iterator[Path]:
    """Yield the checkpoints that a run is writing."""
    yield from (output / "checkpoints").glob(".*.partial")


def weights(output: Path) -> dict[str, bytes]:
    """Return the final weights and their moving average by name."""
    files = {name: read_tensors(output / name / "model.safetensors")[0] for name in ("model", "ema")}
    return {f"{file}.{name}": value.numpy().tobytes() for file, state in files.items() for name, value in state.items()}


if __name__ == "__main__":
    main()
