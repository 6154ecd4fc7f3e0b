"""Case of an op: sizes, inputs, definition, baselines, and the roofline, a lower bound of its time on this machine.

Axes: B images, N tokens, K slots per image, D channels, H heads, E channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from mmod.config import rational
from mmod.ops.select import kept_count
from mmod.values import Checked, one_of

Result = Tensor | tuple[Tensor, ...]
COPY = "copy"
PRODUCT = "matmul"
# Far beyond any cache, so that a copy runs at the speed of memory.
COPIED_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}
# Large enough that a matrix product runs at the speed of the arithmetic units.
PRODUCT_SIDE = {"cpu": 1024, "cuda": 8192}
# Written before each timed call: more than the caches hold, and on a GPU longer than the launches of the call take.
FLUSHED_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}


@dataclass(frozen=True)
class Work:
    """Work that every implementation must do: bytes read and written, and FLOPs, two for a multiply-add."""

    bytes: int
    flops: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)


@dataclass(frozen=True)
class Rates:
    """Rates of a machine per millisecond: bytes of a large copy, and FLOPs of a large matrix product."""

    bytes: float
    flops: float

    @classmethod
    def of(cls, device: torch.device, copy_ms: float, product_ms: float) -> Rates:
        """Return the rates that follow from the times of `rate_probes`."""
        return cls(2 * COPIED_BYTES[device.type] / copy_ms, 2 * PRODUCT_SIDE[device.type] ** 3 / product_ms)

    def bound_ms(self, work: Work) -> float:
        """Return the least time that some work takes: memory and arithmetic in parallel, both at full rate."""
        return max(work.bytes / self.bytes, work.flops / self.flops)

    def limit(self, work: Work) -> str:
        """Return the probe that sets the bound: `COPY` or `PRODUCT`."""
        return COPY if work.bytes / self.bytes >= work.flops / self.flops else PRODUCT


@dataclass(frozen=True, kw_only=True)
class OpSize(Checked):
    """Sizes that an op is timed at.

    Args:
        images: Images in the batch (B).
        tokens: Tokens of an image (N).
        heads: Heads of attention (H).
        head_channels: Channels of a head (E); a token has `heads * head_channels` (D).
    """

    images: Annotated[int, "[1, inf)"]
    tokens: Annotated[int, "[1, inf)"]
    heads: Annotated[int, "[1, inf)"] = 6
    head_channels: Annotated[int, "[1, inf)"] = 64
    capacity: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        rational(self.capacity)

    @property
    def channels(self) -> int:
        """Channels of a token (D)."""
        return self.heads * self.head_channels

    @property
    def kept(self) -> int:
        """Tokens kept of an image (K)."""
        return kept_count(self.tokens, rational(self.capacity))


@dataclass(frozen=True, kw_only=True)
class OpCase:
    """One op at one size.

    Args:
        learns: Names of the arguments that get a gradient in a training step, beside the parameters of modules.
        exact: The definition, called with the same arguments in float64.
        baselines: Other implementations with the same arguments; they may return the first results only.
        forward: Work of the call; `backward` that of its gradients.
        moves: Results are moved, not computed: they must equal torch's bitwise.
        choice: The name by which backends are chosen, if it is not the op's.
    """

    op: Callable[..., Result]
    inputs: Mapping[str, object]
    learns: tuple[str, ...]
    exact: Callable[..., Result]
    baselines: Mapping[str, Callable[..., Result]]
    forward: Work
    backward: Work = field(default_factory=lambda: Work(0))
    moves: bool = False
    choice: str | None = None


class Maker:
    """Draws the inputs of a case."""

    def __init__(self, size: OpSize, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.size = size
        self.dtype = dtype
        self.device = device
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return normal numbers of a shape."""
        return torch.randn(shape, generator=self.generator, device=self.device).to(dtype or self.dtype)

    def rows(self, tokens: int) -> Tensor:
        """Return rows of some tokens of each image (B, tokens, D)."""
        return self.normal(self.size.images, tokens, self.size.channels)

    def heads(self, tokens: int) -> Tensor:
        """Return the output of a host's projection (B, H, tokens, E): a view that is not contiguous."""
        shape = (self.size.images, tokens, self.size.heads, self.size.head_channels)
        return self.normal(*shape).transpose(1, 2)

    def index(self) -> Tensor:
        """Return kept tokens, ascending (B, K)."""
        order_BN = torch.rand(self.size.images, self.size.tokens, generator=self.generator, device=self.device)
        return order_BN.argsort(dim=1)[:, : self.size.kept].sort(dim=1).values

    def row_bytes(self, tokens: int) -> int:
        """Return the bytes of rows of some tokens of each image."""
        return self.size.images * tokens * self.size.channels * self.dtype.itemsize

    @property
    def index_bytes(self) -> int:
        """Bytes of kept tokens' indices."""
        return self.size.images * self.size.kept * 8


MakesCase = Callable[[Maker], OpCase]
CASES: dict[str, MakesCase] = {}


def register_case(op: str) -> Callable[[MakesCase], MakesCase]:
    """Register a case by the name of its op, for `OpBenchmarkConfig.ops`; a ValueError if the name is taken."""

    def register(function: MakesCase) -> MakesCase:
        if op in CASES:
            raise ValueError(f"the case {op!r} is registered already")
        CASES[op] = function
        return function

    return register


def make_case(op: str, size: OpSize, dtype: torch.dtype, device: torch.device, seed: int = 0) -> OpCase:
    """Return a registered op with inputs of a size.

    Example:
        >>> import tools.benchmarks.ops.cases
        >>> case = make_case("gather_rows", OpSize(images=2, tokens=8), torch.float32, torch.device("cpu"))
        >>> case.op(**case.inputs).shape
        torch.Size([2, 4, 384])
    """
    one_of("op", op, tuple(CASES))
    return CASES[op](Maker(size, dtype, device, seed))


def rate_probes(device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """Return a large copy and a large matrix product, timed in turns with the implementations of a run."""
    side = PRODUCT_SIDE[device.type]
    # Random bits: a GPU runs faster on constants, which cost it less power.
    source = torch.randint(256, (COPIED_BYTES[device.type],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    left = torch.randn(side, side, dtype=dtype, device=device)
    right = torch.randn(side, side, dtype=dtype, device=device)
    return {COPY: lambda: target.copy_(source), PRODUCT: lambda: torch.mm(left, right)}


def cache_flush(device: torch.device) -> Callable[[], Tensor]:
    """Return a function that empties the caches, so that a timed call reads its inputs from memory."""
    buffer = torch.empty(FLUSHED_BYTES[device.type], dtype=torch.uint8, device=device)
    return buffer.zero_
