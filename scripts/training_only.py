"""What do methods for training alone cost and give at 1,024 tokens?

`taskset -c 0 python -m scripts.training_only times RESULT` trains a ViT on pictures of 512 pixels, dense and with three
methods, a step of each in turns, by CPU time on one thread. RESULT takes the rows of the table in
`docs/notebook/cheaper_training.md`.

`python -m scripts.training_only arms FOLDER` trains diffusion transformers on 1,024 tokens for equal times, dense, as
TREAD and merged, in about 15 minutes of one GPU. FOLDER keeps the state of each; the same command goes on there.
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
import torch.nn.functional as F
from scipy.linalg import sqrtm
from sklearn.datasets import load_digits
from torch import Tensor, nn

import mmod
from examples.train_dit import DiT, loss_of
from mmod.analysis.memory import ActivationMemory
from mmod.io.files import write_atomically

MERGED = mmod.RoutingConfig(
    router="attention", blocks="all", skipped=mmod.Merged("mlp"), capacity=0.35, training_only=True
)
METHODS: dict[str, mmod.RoutingConfig | None] = {
    "dense": None,
    "random tokens skip the middle blocks (`tread`)": mmod.preset("tread"),
    "`gradual`": mmod.preset("gradual", training_only=True),
    "merged inside the first block": MERGED,
}
ARMS: dict[str, mmod.RoutingConfig | None] = {"dense": None, "tread": mmod.preset("tread"), "merged": MERGED}
DIGIT = 8
# Parts of the time of an arm, between which the arms take turns and are saved.
TURNS = 8


def seconds_of(call: Callable[[], object]) -> float:
    """Return the CPU time of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def scenes(count: int, side: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return pictures (B, 3, side, side) with a digit on half of their height, and the digits (B,)."""
    draw = np.random.default_rng(seed)
    pictures = torch.zeros(count, 3, side, side)
    digits = load_digits()
    chosen = draw.integers(len(digits.images), size=count)
    for picture, number in zip(pictures, chosen):
        top, left = draw.integers(side // 2 + 1, size=2)
        digit = torch.from_numpy(digits.images[number]).float()[None, None] / 16
        picture[:, top : top + side // 2, left : left + side // 2] = F.interpolate(digit, side // 2)[0]
    return pictures, torch.from_numpy(digits.target[chosen])


def time_methods(options: argparse.Namespace) -> list[list[object]]:
    """Return a row for each method: CPU time of a step, its ratio to dense, activations, and losses."""
    models: dict[str, nn.Module] = {}
    memory = {}
    pictures, _ = scenes(options.batch, options.side, seed=0)
    for name, method in METHODS.items():
        torch.manual_seed(0)
        model = timm.create_model(
            "vit_tiny_patch16_224", img_size=options.side, depth=options.depth, num_classes=10
        ).train()
        models[name] = model if method is None else mmod.route_(model, method)
        with ActivationMemory([pictures, *model.parameters(), *model.buffers()]) as held:
            output = model(pictures)
        memory[name] = held.live / options.batch / 2**20
        del output
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=5e-4) for name, model in models.items()}
    losses: dict[str, list[float]] = {name: [] for name in models}

    def step(name: str, batch: tuple[Tensor, Tensor]) -> None:
        loss = F.cross_entropy(models[name](batch[0]), batch[1])
        loss.backward()
        optimizers[name].step()
        optimizers[name].zero_grad()
        losses[name].append(loss.item())

    seconds = []
    for turn in range(options.rounds):
        batch = scenes(options.batch, options.side, seed=turn + 1)
        # Each begins as often.
        order = np.roll(list(METHODS), turn).tolist()
        taken = {name: seconds_of(partial(step, name, batch)) for name in order}
        seconds.append([taken[name] for name in METHODS])
    # The first round warms up.
    seconds_RM = np.array(seconds[1:])
    ratios = seconds_RM / seconds_RM[:, :1]
    test = scenes(options.test, options.side, seed=-1 % 2**32)
    rows: list[list[object]] = []
    for number, (name, model) in enumerate(models.items()):
        low, median, high = np.quantile(ratios[:, number], (0.25, 0.5, 0.75)).round(2).tolist()
        with torch.no_grad():
            answers = torch.cat([model.eval()(part) for part in test[0].split(options.batch)])
        trained = float(np.mean(losses[name][-options.rounds // 4 :]))
        milliseconds = round(1000 * float(np.median(seconds_RM[:, number])))
        evaluated = F.cross_entropy(answers, test[1]).item()
        rows.append(
            [name, milliseconds, [median, low, high], round(memory[name]), round(trained, 2), round(evaluated, 2)]
        )
    return rows


def mosaics(count: int, side: int, images_NHW: np.ndarray, draw: np.random.Generator) -> Tensor:
    """Return pictures (B, 1, side, side) in [-1, 1] of four digits each."""
    chosen = torch.from_numpy(images_NHW[draw.integers(len(images_NHW), size=(count, 2, 2))]).float()
    tiles_BHW = chosen.permute(0, 1, 3, 2, 4).reshape(count, 2 * DIGIT, 2 * DIGIT)
    return F.interpolate(tiles_BHW[:, None] / 8 - 1, side, mode="bilinear")


def features(pictures_BCHW: Tensor) -> np.ndarray:
    """Return the digits in pictures as rows of 64 means."""
    tiles = F.adaptive_avg_pool2d(pictures_BCHW, 2 * DIGIT).unfold(2, DIGIT, DIGIT).unfold(3, DIGIT, DIGIT)
    return tiles.reshape(-1, DIGIT * DIGIT).double().cpu().numpy()


def frechet(one_NF: np.ndarray, other_NF: np.ndarray) -> float:
    """Return the Fréchet distance of two sets of features, as Gaussians."""
    mean = one_NF.mean(0) - other_NF.mean(0)
    one, other = np.cov(one_NF.T), np.cov(other_NF.T)
    return float(mean @ mean + np.trace(one + other - 2 * sqrtm(one @ other).real))


@torch.no_grad()
def sample(model: nn.Module, noise_BCHW: Tensor, steps: int) -> Tensor:
    """Return pictures (B, 1, H, W) that a model in evaluation makes of noise."""
    x = noise_BCHW
    for step in range(steps, 0, -1):
        x = x - model(x, x.new_full((len(x),), step / steps)).float() / steps
    return x


class Arm:
    """A diffusion transformer with one method, its optimiser, and how long it has trained.

    Args:
        name: A key of `ARMS`.
        options: Sizes of model and training, and the folder of its state.
    """

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.options = options
        self.path = options.result / f"{name}.pt"
        self.model = DiT(options.side, options.patch, options.width, options.depth)
        method = ARMS[name]
        if method is not None:
            example = (torch.randn(2, 1, options.side, options.side), torch.rand(2))
            mmod.route_(self.model, method, tokens=mmod.Tokens(example=example))
        self.model.to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.seconds = 0.0
        self.steps = 0
        if self.path.exists():
            state = torch.load(self.path, map_location=self.device)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.seconds, self.steps = state["seconds"], state["steps"]

    def train(self, until: float, images_NHW: np.ndarray) -> None:
        """Train until so many seconds have been spent in all, and save the state."""
        self.model.train()
        while self.seconds < until:
            start = time.perf_counter()
            # By step, so that all arms and resumed ones see the same pictures.
            torch.manual_seed(self.steps)
            pictures = mosaics(self.options.batch, self.options.side, images_NHW, np.random.default_rng(self.steps))
            with self.autocast():
                loss = loss_of(self.model, pictures.to(self.device))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            # Waits for the device.
            loss.item()
            self.seconds += time.perf_counter() - start
            self.steps += 1
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        partial_path = self.path.with_suffix(".part")
        torch.save({**state, "seconds": self.seconds, "steps": self.steps}, partial_path)
        partial_path.replace(self.path)

    def autocast(self) -> torch.autocast:
        """Return a context of bf16 on a GPU."""
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")

    def figures(self, images_NHW: np.ndarray) -> dict[str, float]:
        """Return steps, the loss of the dense model, and the Fréchet distance of its samples."""
        count, side = self.options.test, self.options.side
        pictures = mosaics(count, side, images_NHW, np.random.default_rng(0))
        self.model.eval()
        torch.manual_seed(0)
        losses, made = [], []
        with torch.no_grad(), self.autocast():
            for part in pictures.split(self.options.batch):
                losses += [loss_of(self.model, part.to(self.device)).item()]
                noise = torch.randn_like(part).to(self.device)
                made.append(sample(self.model, noise, self.options.sampling))
        distance = frechet(features(torch.cat(made)), features(pictures))
        return {"steps": self.steps, "loss": float(np.mean(losses)), "frechet": distance}


def train_arms(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Train the arms in turns for equal times, and return the figures of each."""
    options.result.mkdir(parents=True, exist_ok=True)
    images = load_digits().images
    arms = {name: Arm(name, options) for name in ARMS}
    for turn, arm in itertools.product(range(1, TURNS + 1), arms.values()):
        arm.train(options.seconds * turn / TURNS, images[:1500])
    return {name: arm.figures(images[1500:]) for name, arm in arms.items()}


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("times", "arms"))
    parser.add_argument("result", type=Path)
    numbers: dict[str, tuple[Any, Any]] = {
        "side": (512, 64),
        "patch": (16, 2),
        "width": (192, 384),
        "depth": (12, 12),
        "batch": (2, 64),
        "rounds": (30, 0),
        "seconds": (0.0, 240.0),
        "sampling": (0, 50),
        "test": (64, 2048),
    }
    for name, defaults in numbers.items():
        parser.add_argument(
            f"--{name}", type=type(defaults[0]), help=f"{defaults[0]} for times, {defaults[1]} for arms"
        )
    options = parser.parse_args()
    for name, defaults in numbers.items():
        if getattr(options, name) is None:
            setattr(options, name, defaults[options.what == "arms"])
    if options.what == "times":
        torch.set_num_threads(1)
        write_atomically(options.result, json.dumps(time_methods(options), indent=1) + "\n")
    else:
        figures = train_arms(options)
        write_atomically(options.result / "arms.json", json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
