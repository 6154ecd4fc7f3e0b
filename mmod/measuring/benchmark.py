"""How fast is a routed model, against the dense one and against free routing, on this machine?"""

from __future__ import annotations

import copy
import functools
import itertools
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.config import RoutingConfig
from mmod.convert import route_
from mmod.measuring.flops import flops
from mmod.measuring.free import free_routing, sharing_copy
from mmod.measuring.latency import Spread, interleave, ratios
from mmod.measuring.report import BenchmarkReport, BenchmarkRow, environment, refuse_to_overwrite
from mmod.measuring.verify import WrongOutputError, check_close, check_dense, check_reference, clear_images

CHECKED_IMAGES = 2
# The compiler fuses and reorders; its error is a few units of the last place for outputs, more for summed gradients.
COMPILED_TOLERANCE = 1e-4
COMPILED_GRADIENT_TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    """What to time. Every combination of batch size, execution and step is one interleaved run of all models.

    Args:
        model: A name of timm's registry.
        model_args: Further arguments of `timm.create_model`.
        routers: Routers to time.
        capacities: Shares of tokens kept, each with every router.
        blocks: Which blocks are routed: "every_other", "all", or their indices.
        batch_sizes: Images per call.
        execution: "eager", "compiled" (`torch.compile` with `fullgraph=True`), or both.
        step: "forward" (inference), "train" (forward, loss and backward, without the optimiser), or both.
        image_size: Side of the image in pixels; None means the model's own.
        seconds: Each run goes on for at least this long,
        rounds: and for at least this many rounds, in which each model is called once.
        threads: CPU threads; None leaves torch's choice.
        device: "cpu" or "cuda".
        dtype: Type of weights and images. Outputs are checked in float32.
        seed: Seed of weights, images and order.
        out: Folder for `benchmark.json` and `benchmark.md`, which are never overwritten.

    Raises:
        ValueError: Nothing to time, or a model that is timed against itself.
    """

    model: str = "vit_small_patch16_224"
    model_args: dict[str, Any] = field(default_factory=dict)
    routers: list[str] = field(default_factory=lambda: ["linear", "attention"])
    capacities: list[float] = field(default_factory=lambda: [0.125, 0.5])
    blocks: str | list[int] = "every_other"
    batch_sizes: list[int] = field(default_factory=lambda: [1, 8, 32])
    execution: list[Literal["eager", "compiled"]] = field(default_factory=lambda: ["eager", "compiled"])
    step: list[Literal["forward", "train"]] = field(default_factory=lambda: ["forward", "train"])
    image_size: int | None = None
    seconds: float = 30.0
    rounds: int = 5
    threads: int | None = None
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    seed: int = 0
    out: str = "runs/benchmark"

    def __post_init__(self) -> None:
        for name in ("routers", "capacities", "batch_sizes", "execution", "step"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name} must name at least one value, and each once, got {values}")
        if min(self.batch_sizes) < 1:
            raise ValueError(f"batch_sizes must be positive, got {self.batch_sizes}")

    def routing(self, router: str, capacity: float) -> RoutingConfig:
        """Return the routing config of one of the timed models."""
        blocks = self.blocks if isinstance(self.blocks, str) else tuple(self.blocks)
        return RoutingConfig(router=router, capacity=capacity, blocks=blocks, seed=self.seed)


def benchmark(config: BenchmarkConfig, progress: bool = True) -> BenchmarkReport:
    """Check and time dense, routed and freely routed models side by side, and write the results.

    Args:
        config: What to time.
        progress: Show a progress bar on stderr.

    Returns:
        The rows, with the environment they were measured in.

    Raises:
        FileExistsError: The output folder holds a benchmark already.
        WrongOutputError: A path computes something wrong; nothing is timed then.
    """
    from tqdm import tqdm

    folder = Path(config.out)
    refuse_to_overwrite(folder)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    bench = _Bench(config)
    runs = list(itertools.product(config.batch_sizes, config.execution, config.step))
    rows: list[BenchmarkRow] = []
    with tqdm(total=len(runs) + 1, disable=not progress, unit="run") as bar:
        bar.set_description("checking outputs")
        bench.check()
        bar.update()
        for batch_size, execution, step in runs:
            bar.set_description(f"batch {batch_size}, {execution} {step}")
            rows += bench.run(batch_size, execution, step)
            bar.update()
    report = BenchmarkReport(asdict(config), environment(config.device), rows)
    report.save(folder)
    return report


Key = tuple[str, float]
DENSE: Key = ("dense", 1.0)


class _Bench:
    """The models of a benchmark, all on the same weights."""

    def __init__(self, config: BenchmarkConfig) -> None:
        import timm
        from timm.data import resolve_model_data_config

        self.config = config
        self.device = torch.device(config.device)
        arguments = dict(config.model_args)
        if config.image_size is not None:
            arguments["img_size"] = config.image_size
        dense = timm.create_model(config.model, **arguments).to(self.device).eval()
        channels, height, width = resolve_model_data_config(dense)["input_size"]
        side = arguments.get("img_size")
        self.size = (arguments.get("in_chans", channels), side or height, side or width)
        self.routed = {
            (router, capacity): route_(sharing_copy(dense), config.routing(router, capacity))
            for capacity, router in itertools.product(config.capacities, config.routers)
        }
        self.models: dict[Key, nn.Module] = {DENSE: dense, **self.routed}
        for (_, capacity), model in self.routed.items():
            self.models.setdefault(("free", capacity), free_routing(model))
        self.flop_speedup = {key: flops(model, self.size).speedup for key, model in self.routed.items()}

    def images(self, count: int) -> Tensor:
        """Return random images."""
        return torch.randn(count, *self.size, device=self.device)

    def check(self) -> None:
        """Raise unless every routed model computes what it must."""
        for model in self.routed.values():
            images = clear_images(model, self.images, CHECKED_IMAGES)
            check_dense(model, images)
            check_reference(model, images)

    def run(self, batch_size: int, execution: str, step: str) -> list[BenchmarkRow]:
        """Time all models at one batch size."""
        config, dtype = self.config, getattr(torch, self.config.dtype)
        calls: dict[Key, Callable[[], Tensor]] = {}
        for key, model in self.models.items():
            images = clear_images(model, self.images, batch_size) if key in self.routed else self.images(batch_size)
            call = _Step(model, step, execution)
            if execution == "compiled":
                check_compiled(f"{key[0]} at capacity {key[1]}", call, _Step(model, step, "eager"), images)
            if dtype != torch.float32:
                call = _Step(copy.deepcopy(model).to(dtype), step, execution)
            calls[key] = functools.partial(call, images.to(dtype))
        times = interleave(calls, seconds=config.seconds, rounds=config.rounds, device=self.device, seed=config.seed)
        torch.compiler.reset()
        return [self._row(times, key, batch_size, execution, step) for key in self.routed]

    def _row(self, times: dict[Key, list[float]], key: Key, batch_size: int, execution: str, step: str) -> BenchmarkRow:
        dense, free, routed = times[DENSE], times["free", key[1]], times[key]
        return BenchmarkRow(
            router=key[0],
            capacity=key[1],
            batch_size=batch_size,
            execution=execution,
            step=step,
            rounds=len(routed),
            dense_ms=Spread.of(dense),
            free_ms=Spread.of(free),
            routed_ms=Spread.of(routed),
            of_free=ratios(free, routed),
            speedup=ratios(dense, routed),
            flop_speedup=self.flop_speedup[key],
        )


class _Step:
    """One call that is timed: inference, or a training step up to the gradients."""

    def __init__(self, model: nn.Module, step: str, execution: str) -> None:
        self.model = model
        self.trains = step == "train"
        self.forward = _compiled(model) if execution == "compiled" else model

    def __call__(self, images: Tensor) -> Tensor:
        self.model.train(self.trains)
        if not self.trains:
            with torch.no_grad():
                return self.forward(images)
        self.model.zero_grad(set_to_none=True)
        output = self.forward(images)
        F.cross_entropy(output.float(), torch.zeros_like(output[:, 0], dtype=torch.long)).backward()
        return output.detach()

    def gradients(self) -> dict[str, Tensor]:
        """Return a copy of the gradients that the last call left."""
        found = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


def _compiled(model: nn.Module) -> Callable[[Tensor], Tensor]:
    def forward(images: Tensor) -> Tensor:
        return model(images)

    # Compiled code is kept by code object. One of its own keeps other models' guards out of this model's calls.
    own = types.FunctionType(forward.__code__.replace(), globals(), closure=forward.__closure__)
    return torch.compile(own, fullgraph=True, dynamic=False)


def check_compiled(name: str, compiled: _Step, eager: _Step, images: Tensor) -> None:
    """Raise unless a compiled step gives the outputs and gradients of the eager one.

    Args:
        name: Names the model in the error.
        compiled: The compiled step.
        eager: The same step of the same model, not compiled.
        images: Images (B, C, height, width).

    Raises:
        WrongOutputError: They differ.
    """
    expected = eager(images)
    gradients = eager.gradients() if eager.trains else {}
    check_close(f"{name}, compiled against eager", compiled(images), expected, COMPILED_TOLERANCE)
    if not eager.trains:
        return
    found = compiled.gradients()
    if set(found) != set(gradients):
        raise WrongOutputError(f"{name}: gradients reach {sorted(set(found) ^ set(gradients))} compiled or eager only")
    for parameter, gradient in gradients.items():
        check_close(
            f"{name}, the gradient of {parameter} compiled against eager",
            found[parameter],
            gradient,
            COMPILED_GRADIENT_TOLERANCE,
        )
