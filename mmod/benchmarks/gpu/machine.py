"""The machine: device, driver, clocks and versions, and which fused attention torch picks on it."""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mmod.analysis.timing import Spread, environment, interleave, ratios
from mmod.benchmarks.gpu.config import FIGURES, GpuOptions, figures_row
from mmod.benchmarks.report import Row, Runs
from mmod.ops import attention_with_importance, choices

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
REHEARSED = {"ViT": AttentionShape(2, 2, 17, 16), "LLaVA, prefill": AttentionShape(1, 2, 33, 16, True)}


def describe_machine(config: GpuOptions) -> Runs:
    """Record device, driver, clocks, versions, and the implementation that each op takes."""
    return Runs("machine", FIGURES, {"machine": functools.partial(_facts, config)})


def _facts(config: GpuOptions) -> list[Row]:
    facts: dict[str, Any] = environment(config.device)
    facts |= {name: _version(name) for name in PACKAGES}
    facts["cuDNN"] = torch.backends.cudnn.version()
    facts["SDPA priority"] = ", ".join(SDPBackend(number).name for number in torch._C._get_sdp_priority_order())
    if not config.rehearses:
        facts["capability"] = torch.cuda.get_device_capability()
        facts["multiprocessors"] = torch.cuda.get_device_properties(0).multi_processor_count
    lines = (line.partition(": ") for line in choices(config.device, torch.bfloat16).splitlines())
    return [figures_row("machine", facts | device_state()), *(figures_row(op, {"runs": how}) for op, _, how in lines)]


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


def benchmark_attention(config: GpuOptions) -> Runs:
    """Record which fused attention SDPA picks at the shapes of known models, and how much longer the others take."""
    shapes = REHEARSED if config.rehearses else SHAPES
    runs = {name: functools.partial(_attend, config, name, shape) for name, shape in shapes.items()}
    return Runs("fused attention, bfloat16", FIGURES, runs)


@torch.no_grad()
def _attend(config: GpuOptions, name: str, shape: AttentionShape) -> list[Row]:
    device, (images, heads, tokens, channels, causal) = torch.device(config.device), shape
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
    times = interleave(calls, seconds=0.2, rounds=2 if config.rehearses else 20, device=device)
    base = times.pop("SDPA")
    relative = {f"{label} / SDPA": asdict(ratios(ms, base)) for label, ms in times.items()}
    size = " x ".join(map(str, shape[:4])) + ", causal" * causal
    return [figures_row(f"{name} ({size})", {"picked": picked, "ms": asdict(Spread.of(base)), **relative})]


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
