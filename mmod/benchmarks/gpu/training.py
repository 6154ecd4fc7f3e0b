"""One training comparison at equal wall time: dense, A-MoD, MoD and merging, on digits among fragments of others.

Axes: B images.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmod.analysis.flops import flops
from mmod.analysis.memory import peak_bytes
from mmod.benchmarks.gpu.config import FIGURES, GpuOptions, figures_row
from mmod.benchmarks.report import Row, Runs
from mmod.config import Gate
from mmod.model import apply_
from mmod.planning import preset

LEARNING_RATE, WARMUP_STEPS = 5e-4, 200
# Steps between two looks at the clock, which wait for the GPU.
STRIDE = 10
METHODS = {
    "dense": None,
    "a-mod": preset("a-mod", blocks="late", capacity=0.25),
    # From scratch, the raw gate of MoD is known to diverge.
    "mod": preset("mod", blocks="late", capacity=0.25, gate=Gate("sigmoid", scale=0.1)),
    "merging": {"kind": "merge", "r": 13},
}


class Size(NamedTuple):
    """Size of the comparison: side of the images, batch size, training and test images, seconds per model."""

    side: int
    batch: int
    train: int
    test: int
    seconds: float
    model_args: dict[str, Any]


FULL = Size(224, 256, 8192, 2000, 60.0, {})
REHEARSED = Size(64, 16, 64, 32, 0.5, {"embed_dim": 48, "depth": 3, "num_heads": 3})


class Scenes(NamedTuple):
    """Grey images in uint8 (images, height, width), and their digits."""

    images: Tensor
    labels: Tensor

    def batch(self, index_B: Tensor, side: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return some images (B, 3, side, side) and their labels; with a generator, shifted and scaled at random."""
        images, labels = self.images[index_B, None].float() / 255, self.labels[index_B]
        drawn = torch.zeros(len(images), 3, device=images.device)
        if generator is not None:
            drawn = torch.rand(drawn.shape, generator=generator, device=images.device) * 0.3 - 0.15
        theta = torch.eye(2, 3, device=images.device) * (1 + drawn[:, :1, None])
        theta[:, :, 2] = drawn[:, 1:]
        grid = F.affine_grid(theta, [len(images), 1, side, side], align_corners=False)
        views = F.grid_sample(images, grid, align_corners=False)
        return ((views - 0.1) / 0.3).expand(-1, 3, -1, -1), labels


def compare_training(config: GpuOptions) -> Runs:
    """Train all models for the same number of seconds, in bfloat16 autocast, and test them on new images."""
    size, device = REHEARSED if config.rehearses else FULL, torch.device(config.device)
    load = functools.cache(functools.partial(_load, size, device))
    runs = {name: functools.partial(_run, name, size, device, load) for name in METHODS}
    title = f"ViT-S/16 at {size.side} px from scratch, {size.seconds:g} s each"
    return Runs(title, FIGURES, runs)


def _load(size: Size, device: torch.device) -> tuple[Scenes, Scenes]:
    """Compose training and test images without common handwriting."""
    from mmod.data.synthetic.digits import DIFFICULTIES, compose_scenes

    def scenes(split: str, count: int) -> Scenes:
        drawn = list(itertools.islice(compose_scenes(DIFFICULTIES["64"], split), count))
        images = torch.from_numpy(np.stack([scene.image for scene in drawn]))
        return Scenes(images.to(device), torch.tensor([scene.label for scene in drawn], device=device))

    return scenes("train", size.train), scenes("test", size.test)


def _run(name: str, size: Size, device: torch.device, load: Callable[[], tuple[Scenes, Scenes]]) -> list[Row]:
    import timm

    train, test = load()
    torch.manual_seed(0)
    model = timm.create_model("vit_small_patch16_224", num_classes=10, img_size=size.side, **size.model_args)
    method = METHODS[name]
    model = (model if method is None else apply_(model, method)).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
    generator = torch.Generator(device).manual_seed(0)

    def step() -> Tensor:
        index_B = torch.randint(size.train, (size.batch,), generator=generator, device=device)
        images, labels = train.batch(index_B, size.side, generator)
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(images).float(), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses: list[float] = []
    begun, seconds, steps = time.perf_counter(), 0.0, 0
    while seconds < size.seconds:
        done = seconds / size.seconds
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1, (steps + 1) / WARMUP_STEPS) * 0.5 * (1 + math.cos(math.pi * done))
        losses.append(float(torch.stack([step() for _ in range(STRIDE)]).mean()))
        steps += STRIDE
        seconds = time.perf_counter() - begun
    peak = peak_bytes(step, device)
    last = losses[-max(1, len(losses) // 10) :]
    figures = {
        "top-1": _accuracy(model.eval(), test, size, device),
        "loss": sum(last) / len(last),
        "seconds": seconds,
        "steps": steps,
        "images/s": steps * size.batch / seconds,
        "GFLOPs": flops(model, size.side).routed / 1e9,
        "peak MiB": peak / 2**20,
    }
    return [figures_row(name, figures)]


@torch.no_grad()
def _accuracy(model: torch.nn.Module, test: Scenes, size: Size, device: torch.device) -> float:
    correct = 0
    for index_B in torch.arange(size.test, device=device).split(size.batch):
        images, labels = test.batch(index_B, size.side)
        with torch.autocast(device.type, torch.bfloat16):
            correct += int((model(images).argmax(1) == labels).sum())
    return correct / size.test
