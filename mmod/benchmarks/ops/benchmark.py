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
from mmod.benchmarks.ops.case import Result
from mmod.benchmarks.ops.cases import CASES, OpCase, OpSize, make_case
from mmod.benchmarks.ops.roofline import Probes, cache_flush
from mmod.benchmarks.options import TimedOptions
from mmod.benchmarks.oracle import PLAIN_TOLERANCE, check_close, check_error_rule
from mmod.benchmarks.report import BenchmarkReport, ReportRow, spread_cell
from mmod.benchmarks.resume import run_all
from mmod.ops import use
from mmod.values import check_distinct

COMPILED = "{}, compiled"


@dataclass(frozen=True, kw_only=True)
class OpBenchmarkConfig(TimedOptions):
    """Every op, size, dtype and step is one interleaved run of all implementations.

    Other options are those of `TimedOptions`.

    Args:
        ops: Names of ops.
        sizes: Sizes, each with every op.
        dtypes: Types of the inputs.
        step: "forward", "train" (forward and backward together), or both.
        backends: Backends to force, those that cannot serve are left out and named; "auto" is what users get.
        compiled: Time torch's own operations and the other implementations compiled, too.

    Raises:
        ValueError: Nothing to time, or an unknown op.
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


@dataclass(frozen=True)
class OpRow(ReportRow):
    """One implementation of one op at one size. All ratios are taken round by round.

    Args:
        op: Name of the op.
        images: Images in the batch.
        tokens: Tokens of an image.
        kept: Tokens kept of it.
        heads: Heads of attention.
        channels: Channels of a token.
        dtype: Type of the inputs.
        step: "forward" or "train".
        path: A backend's name, "torch, compiled", or another implementation's name.
        rounds: Rounds timed.
        ms: Milliseconds per call.
        limit: What bounds it: the "copy" of its bytes or the "matmul" of its FLOPs.
        bound_ms: The time that its bytes and FLOPs take at the rates measured in the same run.
        of_bound: Speed as a share of the bound's. It can exceed 1 where the data stays in a cache.
        extra_bytes: Most memory held at once during the call beyond inputs and results.
        baseline: The fastest implementation in the run that is not this library's (for compiled ones, the fastest of
            those); None where it is itself one of them.
        of_baseline: Speed as a share of the baseline's.
        left_out: Why this backend was not timed; None where it was.
    """

    HEADER = (
        "op", "images", "tokens", "kept", "heads x channels", "dtype", "step", "by", "ms", "bound ms", "bound by",
        "speed / bound", "extra MiB", "baseline", "speed / baseline",
    )  # fmt: skip

    op: str
    images: int
    tokens: int
    kept: int
    heads: int
    channels: int
    dtype: str
    step: str
    path: str
    rounds: int = 0
    ms: Spread | None = None
    limit: str | None = None
    bound_ms: float | None = None
    of_bound: Spread | None = None
    extra_bytes: int | None = None
    baseline: str | None = None
    of_baseline: Spread | None = None
    left_out: str | None = None

    def cells(self) -> tuple[str, ...]:
        """Return the line as text, without text where the backend was left out."""
        if self.ms is None or self.bound_ms is None or self.extra_bytes is None:
            return ("",) * len(self.HEADER)
        return (
            self.op, str(self.images), str(self.tokens), str(self.kept), f"{self.heads} x {self.channels}", self.dtype,
            self.step, self.path, f"{self.ms.median:.4f}", f"{self.bound_ms:.4f}", self.limit or "",
            spread_cell(self.of_bound), f"{self.extra_bytes / 2**20:.2f}", self.baseline or "",
            spread_cell(self.of_baseline),
        )  # fmt: skip


def benchmark_ops(config: OpBenchmarkConfig, progress: bool = True) -> BenchmarkReport:
    """Check and time every implementation of the ops side by side, and write the results.

    Args:
        config: What to time.
        progress: Show a progress bar on stderr.

    Returns:
        The rows, with the environment they were measured in.

    Raises:
        FileExistsError: The output folder holds a benchmark already.
        ValueError: The output folder holds an unfinished benchmark with other options or of another machine.
        WrongOutputError: An implementation computes something wrong; it is not timed then.
    """
    runs = {
        f"{op}, {size}, {dtype}, {step}": partial(_run, config, op, size, dtype, step)
        for op, size, dtype, step in itertools.product(config.ops, config.sizes, config.dtypes, config.step)
    }
    return run_all(config, "ops", OpRow, runs, progress, _reasons)


def _reasons(rows: Sequence[OpRow]) -> list[str]:
    """Return a sentence for each reason why backends were left out."""
    ops: dict[str, list[str]] = {}
    for row in rows:
        if row.left_out is not None:
            ops.setdefault(row.left_out.removeprefix(row.op).strip(), []).append(row.op)
    return [f"Left out: {', '.join(dict.fromkeys(names))} {reason}." for reason, names in ops.items()]


class _Call:
    """One implementation, called on the inputs of its case: its results, and in training their gradients."""

    def __init__(
        self, function: Callable[..., Result], inputs: Mapping[str, object], learns: tuple[str, ...],
        backend: str | None = None, op: str = "",
    ) -> None:  # fmt: skip
        self.function = function
        self.inputs = {
            name: value.detach().requires_grad_(name in learns) if isinstance(value, Tensor) else value
            for name, value in inputs.items()
        }
        modules = [value for value in self.inputs.values() if isinstance(value, nn.Module)]
        self.learned = [v for name, v in self.inputs.items() if name in learns and isinstance(v, Tensor)]
        self.learned += [parameter for module in modules if learns for parameter in module.parameters()]
        self.forced = None if backend in (None, "auto") else (backend, op)
        self.upstream: dict[tuple[int, ...], Tensor] = {}

    def __call__(self) -> tuple[Tensor, ...]:
        if self.forced is None:
            return self._call()
        with use(*self.forced):
            return self._call()

    def _call(self) -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(bool(self.learned)):
            results = _as_tuple(self.function(**self.inputs))
            if not self.learned:
                return results
            led = [result for result in results if result.requires_grad]
            gradients = torch.autograd.grad(led, self.learned, [self._gradient_of(result) for result in led])
        return (*results, *gradients)

    def _gradient_of(self, result: Tensor) -> Tensor:
        """Return what would come from above: the same for every implementation, and made once."""
        shape = tuple(result.shape)
        if shape not in self.upstream:
            generator = torch.Generator(result.device).manual_seed(len(shape))
            # Numbers that every type holds exactly, so that float64 gets no other gradient than the others.
            drawn = torch.randint(-96, 97, shape, generator=generator, device=result.device) / 32
            self.upstream[shape] = drawn.to(result.dtype)
        return self.upstream[shape]


def _as_tuple(result: Result) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


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
        for name, function, forced in [("torch", case.op, "torch"), *((n, r, None) for n, r in case.baselines.items())]:
            compiled = torch.compile(function, dynamic=False)
            calls[COMPILED.format(name)] = _Call(compiled, case.inputs, learns, forced, choice)
    return calls, left_out


def check_case(
    op: str, case: OpCase, calls: Mapping[str, Callable[[], tuple[Tensor, ...]]], dtype: torch.dtype, trains: bool
) -> None:
    """Raise unless every implementation of an op is right: moved bits equal, own results as near as torch's.

    Other implementations are held to torch's tolerance only.

    Args:
        op: Names the op in the error.
        case: The op.
        calls: Implementations by name; each returns its results and, in training, the gradients.
        dtype: Type of the inputs.
        trains: Whether gradients are returned.

    Raises:
        WrongOutputError: One is wrong.
    """
    learns = case.learns if trains else ()
    exact_call = _Call(case.exact, {name: _double(value) for name, value in case.inputs.items()}, learns)
    exact, gradients = exact_call(), len(exact_call.learned)
    plain = _Call(case.op, case.inputs, learns, "torch", case.choice or op)()
    for name, call in calls.items():
        found = call()
        results = len(found) - gradients
        # A baseline may leave the last results out; the gradients come after what it has.
        places = [*range(results), *range(len(exact) - gradients, len(exact))]
        for place, value in zip(places, found):
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
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _run(config: OpBenchmarkConfig, op: str, size: OpSize, dtype: str, step: str) -> list[OpRow]:
    """Check and time one op at one size."""
    device = torch.device(config.device)
    torch.manual_seed(config.seed)
    case = make_case(op, size, getattr(torch, dtype), device, config.seed)
    trains = step == "train"
    calls, left_out = _calls(config, op, case, case.learns if trains else ())
    check_case(op, case, calls, getattr(torch, dtype), trains)
    probes = Probes(device, getattr(torch, dtype))
    functions: dict[str, Callable[[], object]] = {**calls, **probes.functions()}
    times = interleave(
        functions, seconds=config.seconds, rounds=config.rounds, device=device, seed=config.seed,
        prepare=cache_flush(device),
    )  # fmt: skip
    rates = [probes.rates(*pair) for pair in zip(times[Probes.COPY], times[Probes.PRODUCT])]
    work = case.forward + case.backward if trains else case.forward
    bounds = [rate.bound_ms(work) for rate in rates]
    baseline_of = _baselines(case, times)
    about: dict[str, Any] = {
        "op": op, "images": size.images, "tokens": size.tokens, "kept": size.kept, "heads": size.heads,
        "channels": size.channels, "dtype": dtype, "step": step,
    }  # fmt: skip
    rows = [OpRow(**about, path=path, left_out=reason) for path, reason in left_out.items()]
    for path, call in calls.items():
        against = baseline_of.get(path)
        rows.append(
            OpRow(
                **about,
                path=path,
                rounds=len(times[path]),
                ms=Spread.of(times[path]),
                limit=rates[0].limit(work),
                bound_ms=Spread.of(bounds).median,
                of_bound=ratios(bounds, times[path]),
                extra_bytes=_extra_bytes(call, device),
                baseline=against,
                of_baseline=None if against is None else ratios(times[against], times[path]),
            )
        )
    torch.compiler.reset()
    return rows


def _baselines(case: OpCase, times: Mapping[str, list[float]]) -> dict[str, str]:
    """Return the fastest other implementation for each of this library's."""
    found = {}
    for form in ("{}", COMPILED):
        others = [form.format(name) for name in case.baselines]
        own = [form.format(backend) for backend in ("auto", "torch", "triton", "xformers")]
        if all(name in times for name in others):
            fastest = min(others, key=lambda name: Spread.of(times[name]).median)
            found.update(dict.fromkeys([name for name in own if name in times], fastest))
    return found


def _extra_bytes(call: _Call, device: torch.device) -> int:
    results = sum({r.untyped_storage().data_ptr(): r.untyped_storage().nbytes() for r in call()}.values())
    return max(0, peak_bytes(call, device) - results)
