"""Benchmark of single ops on each backend, beside their bounds and baselines."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mmod.analysis.memory import peak_bytes
from mmod.analysis.timing import Spread, interleave, ratios
from mmod.io.tables import Column
from mmod.ops import use
from mmod.values import check_distinct
from tools.benchmarks.checks import PLAIN_TOLERANCE, check_close, check_error_rule
from tools.benchmarks.ops.case import COPY, PRODUCT, Rates, Result, cache_flush, rate_probes
from tools.benchmarks.ops.cases import CASES, OpCase, OpSize, make_case
from tools.benchmarks.report import HIDDEN, Row, Runs, TimedOptions

COMPILED = "{}, compiled"


@dataclass(frozen=True, kw_only=True)
class OpBenchmarkConfig(TimedOptions):
    """Every op, size, dtype and step is one interleaved run of all implementations.

    Args:
        ops: Names of ops.
        sizes: Sizes, each with every op.
        dtypes: Types of the inputs.
        step: "forward", "train" (forward and backward together), or both.
        backends: Backends to force; those that do not support a case are left out and named. "auto" is the default of
            users.
        compiled: Also time torch's operations and the other implementations compiled.
    """

    ops: list[str] = field(default_factory=lambda: list(CASES))
    sizes: list[OpSize] = field(default_factory=lambda: [OpSize(images=8, tokens=197), OpSize(images=1, tokens=1025)])
    dtypes: list[Literal["float32", "bfloat16", "float16"]] = field(default_factory=lambda: ["float32"])
    step: list[Literal["forward", "train"]] = field(default_factory=lambda: ["forward", "train"])
    backends: list[Literal["auto", "torch", "triton", "xformers"]] = field(
        default_factory=lambda: ["auto", "torch", "triton", "xformers"]
    )
    compiled: bool = False
    seconds: float = 1.0
    rounds: int = 10
    out: str = "runs/benchmark_ops"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_distinct(self, "ops", "sizes", "dtypes", "step", "backends")
        unknown = [op for op in self.ops if op not in CASES]
        if unknown:
            raise ValueError(f"unknown ops {unknown}; valid are {', '.join(CASES)}")

    def runs(self) -> Runs:
        """Return a run for every op, size, dtype and step."""
        calls: dict[str, Callable[[], list[Row]]] = {}
        for op, size, dtype, step in itertools.product(self.ops, self.sizes, self.dtypes, self.step):
            calls[f"{op}, {size}, {dtype}, {step}"] = partial(_run, self, op, size, dtype, step)
        return Runs("ops", COLUMNS, calls, _reasons)


COLUMNS: dict[str, Column] = {
    "op": ("op", ""),
    "images": ("images", ""),
    "tokens": ("tokens", ""),
    "kept": ("kept", ""),
    "heads_channels": ("heads x channels", ""),
    "dtype": ("dtype", ""),
    "step": ("step", ""),
    "path": ("by", ""),
    "ms": ("ms", ".4f"),
    "bound_ms": ("bound ms", ".4f"),
    "limit": ("bound by", ""),
    "of_bound": ("speed / bound", "[.3f"),
    "extra_mib": ("extra MiB", ".2f"),
    "baseline": ("baseline", ""),
    "of_baseline": ("speed / baseline", "[.3f"),
    **dict.fromkeys(("heads", "channels", "rounds", "extra_bytes", "left_out"), HIDDEN),
}
"""Columns of one implementation of one op at one size. Ratios are taken round by round.

`of_bound` is above 1 where the data stays in a cache. `left_out` says why a backend was not timed."""


def _reasons(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each reason why backends were left out."""
    ops: dict[str, list[str]] = {}
    for row in rows:
        if row["left_out"] is not None:
            ops.setdefault(row["left_out"].removeprefix(row["op"]).strip(), []).append(row["op"])
    return [f"Left out: {', '.join(dict.fromkeys(names))} {reason}." for reason, names in ops.items()]


class _Call:
    """One implementation, called on the inputs of its case: its results, and in training their gradients."""

    def __init__(
        self,
        function: Callable[..., Result],
        inputs: Mapping[str, object],
        learns: tuple[str, ...],
        backend: str | None = None,
        op: str = "",
    ) -> None:
        self.function = function
        self.inputs: dict[str, object] = {}
        self.learned: list[Tensor] = []
        parameters: list[Tensor] = []
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                value = value.detach().requires_grad_(name in learns)
                if name in learns:
                    self.learned.append(value)
            elif isinstance(value, nn.Module) and learns:
                parameters += value.parameters()
            self.inputs[name] = value
        self.learned += parameters
        self.forced = None if backend in (None, "auto") else (backend, op)
        self.upstream: dict[tuple[int, ...], Tensor] = {}

    def __call__(self) -> tuple[Tensor, ...]:
        if self.forced is None:
            return self._call()
        with use(*self.forced):
            return self._call()

    def _call(self) -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(bool(self.learned)):
            result = self.function(**self.inputs)
            results = (result,) if isinstance(result, Tensor) else result
            if not self.learned:
                return results
            outputs = [result for result in results if result.requires_grad]
            gradients = torch.autograd.grad(outputs, self.learned, [self._gradient_of(result) for result in outputs])
        return (*results, *gradients)

    def _gradient_of(self, result: Tensor) -> Tensor:
        """Return the upstream gradient of a result, the same for every implementation."""
        shape = tuple(result.shape)
        if shape not in self.upstream:
            generator = torch.Generator(result.device).manual_seed(len(shape))
            # Numbers that every dtype holds exactly, so that float64 gets the same gradient.
            drawn = torch.randint(-96, 97, shape, generator=generator, device=result.device) / 32
            self.upstream[shape] = drawn.to(result.dtype)
        return self.upstream[shape]


def _calls(
    config: OpBenchmarkConfig, op: str, case: OpCase, learns: tuple[str, ...]
) -> tuple[dict[str, _Call], dict[str, str]]:
    """Return the implementations to time, by name, and why backends were left out."""
    calls: dict[str, _Call] = {}
    left_out: dict[str, str] = {}
    choice = case.choice or op
    for backend in config.backends:
        try:
            call = _Call(case.op, case.inputs, learns, backend, choice)
            call()
        except ValueError as error:
            left_out[backend] = str(error)
        else:
            calls[backend] = call
    calls |= {name: _Call(baseline, case.inputs, learns) for name, baseline in case.baselines.items()}
    if config.compiled:
        # Kernels of ours stay out: torch's operations are what the compiler is compared with.
        compiled = torch.compile(case.op, dynamic=False)
        calls[COMPILED.format("torch")] = _Call(compiled, case.inputs, learns, "torch", choice)
        for name, baseline in case.baselines.items():
            compiled = torch.compile(baseline, dynamic=False)
            calls[COMPILED.format(name)] = _Call(compiled, case.inputs, learns)
    return calls, left_out


def check_case(
    op: str, case: OpCase, calls: Mapping[str, Callable[[], tuple[Tensor, ...]]], dtype: torch.dtype, trains: bool
) -> None:
    """Raise a WrongOutputError unless every implementation of an op is correct.

    Moved rows must be bitwise equal, computed results at most twice as far from float64 as torch's. Baselines may be
    within torch's tolerance. With `trains`, calls return gradients after their results.
    """
    learns = case.learns if trains else ()
    exact_call = _Call(case.exact, {name: _double(value) for name, value in case.inputs.items()}, learns)
    exact = exact_call()
    gradients = len(exact_call.learned)
    plain = _Call(case.op, case.inputs, learns, "torch", case.choice or op)()
    for name, call in calls.items():
        outputs = call()
        results = len(outputs) - gradients
        # A baseline may leave the last results out; gradients follow the results that it has.
        places = [*range(results), *range(len(exact) - gradients, len(exact))]
        for place, value in zip(places, outputs):
            what = f"{op} by {name}, result {place}"
            if case.moves or not value.is_floating_point():
                check_close(what, value, plain[place], 0.0)
                check_close(what, value, exact[place].to(value.dtype), 0.0)
            elif name.removesuffix(COMPILED.format("")) in case.baselines:
                check_close(what, value, exact[place], PLAIN_TOLERANCE[dtype])
            else:
                check_error_rule(what, value, plain[place], exact[place], dtype)


def _double(value: object) -> object:
    if isinstance(value, nn.Module):
        return copy.deepcopy(value).double()
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return value


def _run(config: OpBenchmarkConfig, op: str, size: OpSize, dtype: str, step: str) -> list[Row]:
    """Check and time one op at one size."""
    device = torch.device(config.device)
    torch.manual_seed(config.seed)
    case = make_case(op, size, getattr(torch, dtype), device, config.seed)
    trains = step == "train"
    calls, left_out = _calls(config, op, case, case.learns if trains else ())
    check_case(op, case, calls, getattr(torch, dtype), trains)
    functions: dict[str, Callable[[], object]] = {**calls, **rate_probes(device, getattr(torch, dtype))}
    times = interleave(
        functions,
        seconds=config.seconds,
        rounds=config.rounds,
        device=device,
        seed=config.seed,
        prepare=cache_flush(device),
    )
    rates = [Rates.of(device, *pair) for pair in zip(times[COPY], times[PRODUCT])]
    work = case.forward + case.backward if trains else case.forward
    bounds = [rate.bound_ms(work) for rate in rates]
    baseline_of = _baselines(case, times)
    about: dict[str, Any] = {
        "op": op,
        "images": size.images,
        "tokens": size.tokens,
        "kept": size.kept,
        "heads": size.heads,
        "channels": size.channels,
        "heads_channels": f"{size.heads} x {size.channels}",
        "dtype": dtype,
        "step": step,
    }
    rows = [{**dict.fromkeys(COLUMNS), **about, "path": path, "left_out": why} for path, why in left_out.items()]
    for path, call in calls.items():
        against = baseline_of.get(path)
        extra = _extra_bytes(call, device)
        row = {
            **about,
            "path": path,
            "rounds": len(times[path]),
            "ms": Spread.of(times[path]),
            "limit": rates[0].limit(work),
            "bound_ms": Spread.of(bounds).median,
            "of_bound": ratios(bounds, times[path]),
            "extra_bytes": extra,
            "extra_mib": extra / 2**20,
            "baseline": against,
            "left_out": None,
            "of_baseline": None if against is None else ratios(times[against], times[path]),
        }
        rows.append(row)
    torch.compiler.reset()
    return rows


def _baselines(case: OpCase, times: Mapping[str, list[float]]) -> dict[str, str]:
    """Return the fastest other implementation for every backend of this library."""
    baselines: dict[str, str] = {}
    for form in ("{}", COMPILED):
        others = [form.format(name) for name in case.baselines]
        backends = [form.format(backend) for backend in ("auto", "torch", "triton", "xformers")]
        if all(name in times for name in others):
            fastest = min(others, key=lambda name: Spread.of(times[name]).median)
            baselines |= dict.fromkeys([name for name in backends if name in times], fastest)
    return baselines


def _extra_bytes(call: _Call, device: torch.device) -> int:
    """Return the peak memory of a call beyond its results, which may share memory."""
    storages = [result.untyped_storage() for result in call()]
    results = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return max(0, peak_bytes(call, device) - sum(results.values()))
