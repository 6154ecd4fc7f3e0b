"""Checks of a machine with a GPU, as parts of the suite `configs/benchmark/gpu.yaml`.

    python -m scripts.gpu_checks machine     # driver, clocks, versions, and the implementation that each op takes
    python -m scripts.gpu_checks attention   # which fused attention torch picks, and how much longer the others take
    python -m scripts.gpu_checks training    # dense, A-MoD, MoD and merging, a minute each, on digits among fragments

`--rehearse` runs small models on a CPU. Axes: B images.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmod.analysis.flop_count import flops
from mmod.analysis.memory import peak_bytes
from mmod.analysis.timing import Spread, interleave, ratios
from mmod.config import Gate
from mmod.data.synthetic.digits import DIFFICULTIES, compose_scenes
from mmod.io.environment import environment
from mmod.model import apply_
from mmod.ops import attention_with_importance, choices
from mmod.planning import preset

PACKAGES = ("triton", "timm", "transformers", "open_clip_torch", "numpy")
QUERIES = (
    "driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu",
    "memory.total", "ecc.mode.current",
)  # fmt: skip
FORCED = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


class AttentionShape(NamedTuple):
    """Shape of attention: images, heads, tokens, channels of a head, and whether it is causal."""

    images: int
    heads: int
    tokens: int
    channels: int
    causal: bool = False


SHAPES = {
    "ViT-B at 224": AttentionShape(256, 12, 197, 64),
    "ViT-B at 224, half of the tokens": AttentionShape(256, 12, 99, 64),
    "ViT-L at 224": AttentionShape(256, 16, 197, 64),
    "ViT-L at 518": AttentionShape(32, 16, 1370, 64),
    "LLaVA, prefill of 576 image tokens": AttentionShape(4, 32, 624, 128, True),
    "LLaVA, prefill of 2,880 image tokens": AttentionShape(1, 32, 2928, 128, True),
}
REHEARSED_SHAPES = {"ViT": AttentionShape(2, 2, 17, 16), "LLaVA, prefill": AttentionShape(1, 2, 33, 16, True)}


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
REHEARSED = Size(64, 4, 16, 8, 0.1, {"embed_dim": 48, "depth": 3, "num_heads": 3})


class Figures(NamedTuple):
    """What was checked, and its figures."""

    what: str
    figures: Mapping[str, Any]

    def __str__(self) -> str:
        texts = {name: f"{v:.4g}" if isinstance(v, float) else str(v) for name, v in self.figures.items()}
        return f"{self.what}: {', '.join(f'{name} {text}' for name, text in texts.items())}"


def describe_machine(device: torch.device, rehearses: bool) -> Iterator[Figures]:
    """Yield device, driver, clocks and versions, and the implementation that each op takes."""
    facts: dict[str, Any] = environment(str(device))
    facts |= {name: _version(name) for name in PACKAGES}
    facts["cuDNN"] = torch.backends.cudnn.version()
    facts["SDPA priority"] = ", ".join(SDPBackend(number).name for number in torch._C._get_sdp_priority_order())
    if not rehearses:
        facts["capability"] = torch.cuda.get_device_capability()
        facts["multiprocessors"] = torch.cuda.get_device_properties(0).multi_processor_count
    yield Figures("machine", facts | device_state())
    for line in choices(str(device), torch.bfloat16).splitlines():
        op, _, how = line.partition(": ")
        yield Figures(op, {"runs": how})


def device_state() -> dict[str, str]:
    """Return driver, clocks, power and temperature of the first device by nvidia-smi; empty without it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, "--id=0", f"--query-gpu={','.join(QUERIES)}", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    return dict(zip(QUERIES, answer.strip().split(", ")))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@torch.no_grad()
def compare_attention(device: torch.device, rehearses: bool) -> Iterator[Figures]:
    """Yield which fused attention SDPA picks at the shapes of known models, and how much longer the others take."""
    for name, shape in (REHEARSED_SHAPES if rehearses else SHAPES).items():
        yield _attend(device, name, shape, *((2, 0.0) if rehearses else (20, 0.2)))


def _attend(device: torch.device, name: str, shape: AttentionShape, rounds: int, seconds: float) -> Figures:
    images, heads, tokens, channels, causal = shape
    generator = torch.Generator(device).manual_seed(0)
    # As from a host's projection: views that are not contiguous.
    q_BHNE, k_BHNE, v_BHNE = (
        torch.randn(images, tokens, heads, channels, generator=generator, device=device).bfloat16().transpose(1, 2)
        for _ in range(3)
    )
    picked = SDPBackend(torch._fused_sdp_choice(q_BHNE, k_BHNE, v_BHNE, is_causal=causal)).name
    plain = functools.partial(F.scaled_dot_product_attention, q_BHNE, k_BHNE, v_BHNE, is_causal=causal)
    calls: dict[str, Callable[[], Any]] = {
        "SDPA": plain,
        "with importance": functools.partial(attention_with_importance, q_BHNE, k_BHNE, v_BHNE, is_causal=causal),
    }
    forced = {label: functools.partial(_forced, plain, backend) for label, backend in FORCED.items()}
    calls |= {label: call for label, call in forced.items() if _serves(call)}
    times = interleave(calls, seconds=seconds, rounds=rounds, device=device)
    base = times.pop("SDPA")
    relative = {f"{label} / SDPA": ratios(ms, base).median for label, ms in times.items()}
    size = " x ".join(map(str, shape[:4])) + ", causal" * causal
    return Figures(f"{name} ({size})", {"picked": picked, "ms": Spread.of(base).median, **relative})


def _forced(call: Callable[[], Any], backend: SDPBackend) -> Any:
    with sdpa_kernel(backend):
        return call()


def _serves(call: Callable[[], Any]) -> bool:
    try:
        call()
    except RuntimeError as error:
        # Torch's messages on a GPU and on a CPU.
        if "No available kernel" in str(error) or "No viable backend" in str(error):
            return False
        raise
    return True


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


def compare_training(device: torch.device, rehearses: bool) -> Iterator[Figures]:
    """Train all models for the same number of seconds, in bfloat16 autocast, and yield how they do on new images."""
    size = REHEARSED if rehearses else FULL
    train, test = _load(size, device)
    for name in METHODS:
        yield _train(name, size, device, train, test)


def _load(size: Size, device: torch.device) -> tuple[Scenes, Scenes]:
    """Compose training and test images without common handwriting."""

    def scenes(split: str, count: int) -> Scenes:
        drawn = list(itertools.islice(compose_scenes(DIFFICULTIES["64"], split), count))
        images = torch.from_numpy(np.stack([scene.image for scene in drawn]))
        return Scenes(images.to(device), torch.tensor([scene.label for scene in drawn], device=device))

    return scenes("train", size.train), scenes("test", size.test)


def _train(name: str, size: Size, device: torch.device, train: Scenes, test: Scenes) -> Figures:
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
    return Figures(name, figures)


@torch.no_grad()
def _accuracy(model: torch.nn.Module, test: Scenes, size: Size, device: torch.device) -> float:
    correct = 0
    for index_B in torch.arange(size.test, device=device).split(size.batch):
        images, labels = test.batch(index_B, size.side)
        with torch.autocast(device.type, torch.bfloat16):
            correct += int((model(images).argmax(1) == labels).sum())
    return correct / size.test


CHECKS: Mapping[str, Callable[[torch.device, bool], Iterator[Figures]]] = {
    "machine": describe_machine,
    "attention": compare_attention,
    "training": compare_training,
}


def main() -> None:
    """Run a check and print a line for each of its subjects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--rehearse", action="store_true", help="small models on a CPU")
    options = parser.parse_args()
    device = torch.device("cpu" if options.rehearse else "cuda")
    # A suite takes the last paragraph for the result: warnings come before it.
    print("", *CHECKS[options.check](device, options.rehearse), sep="\n", flush=True)


if __name__ == "__main__":
    main()
