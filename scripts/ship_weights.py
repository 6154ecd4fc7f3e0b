"""Write the final weights of a run as half-precision weights of the package: `scripts/ship_weights.py RUN NAME`.

`python scripts/ship_weights.py runs/digits/filled digits-dense` makes `mmod:digits-dense`. The header of the file holds
the run's config, its seed and the accuracy of the rounded weights, which a test checks.
"""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path

import mmod
from mmod.io.tensors import write_tensors
from mmod.opening.weights import read_weights
from mmod.training import TrainConfig
from mmod.training.engine.kind import load
from mmod.training.image.kind import ImageKind

FOLDER = Path(mmod.__file__).parent / "data" / "weights"


def main(run: str, name: str) -> None:
    """Round the weights of a run, evaluate them, and write both."""
    config = TrainConfig.load(Path(run) / "config.yaml")
    weights = {key: value.half() for key, value in read_weights(run).items()}
    with tempfile.TemporaryDirectory() as folder:
        write_tensors(Path(folder) / "model.safetensors", weights, {})
        model = dataclasses.replace(config.model, checkpoint=folder)
        recipe = ImageKind(dataclasses.replace(config, model=model))
        top1 = recipe.score(load(recipe), progress=True).result.top1
    recipe_of_run = {key: value for key, value in config.to_dict().items() if key != "output"}
    FOLDER.mkdir(exist_ok=True)
    write_tensors(FOLDER / f"{name}.safetensors", weights, {"config": json.dumps(recipe_of_run), "top1": f"{top1:g}"})
    print(f"mmod:{name}: {top1:.2f} % of {config.data.source}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="run folder")
    parser.add_argument("name", help="name of the weights")
    main(**vars(parser.parse_args()))
