"""Dispatch: which implementation of an op runs, how to force one, and why it was taken.

The definition of an op, in torch operations, takes every input; `op` registers it with its kernels.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.library import CustomOpDef

from mmod.values import one_of, refuse_unknown


class Backend(Enum):
    """Implementation technique of an op.

    Attributes:
        AUTO: The preferred version for the input's device, dtype and size.
        TORCH: Torch operations: they take every input and define the result.
        TRITON: Kernels for CUDA devices; on a CPU they run in Triton's interpreter, for tests.
        XFORMERS: The attention of xformers, on CUDA devices.
    """

    AUTO = "auto"
    TORCH = "torch"
    TRITON = "triton"
    XFORMERS = "xformers"


P = ParamSpec("P")
Result = TypeVar("Result")
Subject = TypeVar("Subject")
HALF = (torch.float16, torch.bfloat16)
FLOAT = (torch.float32, *HALF)


class Kernel(NamedTuple):
    """An implementation of an op that needs another backend than torch, and the inputs that it supports.

    Args:
        run: Computes the op, with the arguments of its definition.
        how: What it does, in words.
        why: The measurement or the reason why AUTO prefers it.
        backend: The backend that it needs.
        dtypes: Supported dtypes; None means all.
        takes: Returns whether it supports the arguments of a call; None for all arguments.
        where: That condition in words.
        auto: Dtypes for which AUTO takes it; None means all supported ones.
        compiled: Whether AUTO takes it inside compiled graphs too.
    """

    run: Callable[..., Any]
    how: str
    why: str = ""
    backend: Backend = Backend.TRITON
    dtypes: tuple[torch.dtype, ...] | None = FLOAT
    takes: Callable[..., bool] | None = None
    where: str = ""
    auto: tuple[torch.dtype, ...] | None = None
    compiled: bool = True


class Op(NamedTuple):
    """An op: how its definition computes it, and its kernels in order of preference."""

    how: str
    kernels: tuple[Kernel, ...]

    def of(self, backend: Backend) -> tuple[Kernel, ...]:
        """Return the kernels of one backend."""
        return tuple(kernel for kernel in self.kernels if kernel.backend is backend)

    @property
    def backends(self) -> list[Backend]:
        """Backends that have a version of the op."""
        return [*dict.fromkeys([Backend.TORCH, *(kernel.backend for kernel in self.kernels)])]


OPS: dict[str, Op] = {}
# FLOPs of this package's torch operations, from their arguments, by name; operations that are not listed have none.
FLOPS: dict[str, Callable[..., int]] = {}
forced: Mapping[str, Backend] = {}


def op(*kernels: Kernel, how: str, name: str = "") -> Callable[[Callable[P, Result]], Callable[P, Result]]:
    """Decorate the definition of an op, so that a kernel runs instead where one is chosen.

    Args:
        kernels: In order of preference.
        how: How the definition computes the op, in words.
        name: Name of the op; by default that of the function.

    Raises:
        ValueError: The name is taken.
    """

    def register(definition: Callable[P, Result]) -> Callable[P, Result]:
        key = name or definition.__name__
        if key in OPS:
            raise ValueError(f"op {key!r} is already registered: choose another name")
        OPS[key] = Op(how, kernels)

        @functools.wraps(definition)
        def run(*args: P.args, **kwargs: P.kwargs) -> Result:
            # The common case on a CPU, where a small op takes less time than a choice among kernels.
            if args and not forced and args[0].is_cpu:  # type: ignore[attr-defined]
                return definition(*args, **kwargs)
            kernel = choose(key, *args, **kwargs)
            if kernel is None:
                return definition(*args, **kwargs)
            return kernel.run(*args, **kwargs)

        return run

    return register


def torch_op(
    name: str,
    schema: str,
    run: Callable[..., object],
    fake: Callable[..., object],
    save: Callable[..., None] | None = None,
    backward: Callable[..., object] | None = None,
    flops: Callable[..., int] | None = None,
) -> CustomOpDef:
    """Register a torch operation `mmod::name`, which graphs hold as one node.

    Args:
        schema: Arguments and results, as torch declares them.
        fake: Returns empty results, from the operation's arguments.
        save: Saves what the gradient needs, from a context, the arguments and the results.
        backward: Returns a gradient for each argument, from the context and the gradients of the results.
        flops: Returns the FLOPs, from the operation's arguments and the keyword `out_val`, its results.
    """

    def trace(*args: object) -> object:
        # FLOPs may be counted in a trace, before any operation has run.
        if flops is not None:
            register_flops()
        return fake(*args)

    if flops is not None:
        FLOPS[name] = flops
    made = torch.library.custom_op(f"mmod::{name}", run, mutates_args=(), schema=schema)
    made.register_fake(trace)
    if backward is not None:
        made.register_autograd(backward, setup_context=save)
    return made


def kernel_op(
    path: str,
    schema: str,
    fake: Callable[..., object],
    save: Callable[..., None] | None = None,
    backward: Callable[..., object] | None = None,
    flops: Callable[..., int] | None = None,
) -> CustomOpDef:
    """Register a torch operation that launches a kernel; other arguments are those of `torch_op`.

    Args:
        path: Its launcher in `mmod.ops.triton`, "module.function", imported when it first runs. It gets the empty
            results and the operation's arguments, and fills the results. The operation is `mmod::function`.
    """
    module, _, name = path.partition(".")

    def launch(*args: object) -> object:
        if name in FLOPS:
            register_flops()
        results = fake(*args)
        getattr(importlib.import_module(f"mmod.ops.triton.{module}"), name)(results, *args)
        return results

    return torch_op(name, schema, launch, fake, save, backward, flops)


@functools.cache
def register_flops() -> None:
    """Register all `FLOPS` with torch; delayed until an operation runs or is traced, because it imports Triton."""
    from torch.utils.flop_counter import register_flop_formula

    for name, formula in FLOPS.items():
        register_flop_formula(getattr(torch.ops.mmod, name), get_raw=True)(formula)


def use(backend: Backend | str, *ops: str) -> AbstractContextManager[None]:
    """Return a context manager that forces a backend for all ops that support it, or for the named ops.

    A call that the forced backend does not support raises; there is no fallback. The setting is global to the process,
    not local to a thread.

    Args:
        backend: A `Backend` or its value; "auto" restores automatic dispatch.
        ops: Names of ops; none means all that support the backend.

    Raises:
        ValueError: Unknown backend or op, a backend that is not available, or an op without a version for it.

    Example:
        >>> import mmod
        >>> with use("torch", "gather_rows"):
        ...     mmod.ops.gather_rows(torch.ones(1, 4, 2), torch.tensor([[0, 3]])).shape
        torch.Size([1, 2, 2])
    """

    if not isinstance(backend, Backend):
        one_of("backend", backend, [member.value for member in Backend])
    backend = Backend(backend)
    refuse_unknown("op", ops, list(OPS))
    problem = _problem(backend.value)
    if problem is not None:
        raise ValueError(f"{problem}; {_alternatives([Backend.TORCH])}")
    supported = [name for name, entry in OPS.items() if backend in (Backend.AUTO, *entry.backends)]
    unsupported = [name for name in ops if name not in supported]
    if unsupported:
        raise ValueError(f"{backend.value} has no version of {unsupported}; it has {', '.join(supported)}")
    return _forcing(dict.fromkeys(ops or supported, backend))


@contextmanager
def _forcing(backends: Mapping[str, Backend]) -> Iterator[None]:
    global forced
    previous = forced
    chosen = {**previous, **backends}
    forced = {name: backend for name, backend in chosen.items() if backend is not Backend.AUTO}
    try:
        yield
    finally:
        forced = previous


def choose(name: str, /, *args: object, **kwargs: object) -> Kernel | None:
    """Return the kernel of an op that runs, or None for its definition in torch operations.

    Args:
        name: Name of the op.
        args: Its arguments, of which the first is the tensor whose device and dtype decide.
        kwargs: Its arguments by name.

    Returns:
        The first kernel of the forced backend, see `use`, that supports the inputs; without one, the first on CUDA
        devices that AUTO takes, and None everywhere else.

    Raises:
        ValueError: The forced backend does not support these inputs; the message says why and which backends do.

    Example:
        >>> choose("gather_rows", torch.zeros(1, 4, 2))
    """
    entry = OPS[name]
    backend = forced.get(name, Backend.AUTO)
    if backend is Backend.TORCH:
        return None
    if backend is Backend.AUTO:
        return _automatic(entry, args, kwargs)
    reasons = []
    for kernel in entry.of(backend):
        reason = _refusal(kernel, args, kwargs)
        if reason is None:
            return kernel
        reasons.append(reason)
    able = []
    for other in entry.backends[1:]:
        if any(_refusal(kernel, args, kwargs) is None for kernel in entry.of(other)):
            able.append(other)
    others = _alternatives([Backend.TORCH, *able])
    raise ValueError(f"{name} cannot run on {backend.value}: {reasons[-1]}; {others}")


def _main(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
    """Return the first argument of an op: the tensor whose device and dtype decide."""
    if args:
        return args[0]
    return next(iter(kwargs.values()))


def _automatic(entry: Op, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Kernel | None:
    """Return the kernel that AUTO takes, or None for the definition."""
    tensor = _main(args, kwargs)
    # Exported programs must run without this library, and kernels have no rules for torch.func transforms.
    if not tensor.is_cuda or exporting() or transforming():
        return None
    for kernel in entry.kernels:
        if _preferred(kernel, tensor.dtype) and _refusal(kernel, args, kwargs) is None:
            return kernel
    return None


def _preferred(kernel: Kernel, dtype: torch.dtype) -> bool:
    """Return whether AUTO takes a kernel for a dtype, in eager mode or in a compiled graph."""
    if kernel.auto is not None and dtype not in kernel.auto:
        return False
    return kernel.compiled or not torch.compiler.is_compiling()


def _refusal(kernel: Kernel, args: tuple[object, ...], kwargs: Mapping[str, object]) -> str | None:
    """Return why a kernel does not support these inputs, or None if it does."""
    tensor = _main(args, kwargs)
    reason = _machine_refusal(kernel, tensor.device, tensor.dtype)
    if reason is not None:
        return reason
    if kernel.takes is not None and not kernel.takes(*args, **kwargs):
        got = [tuple(value.shape) if isinstance(value, torch.Tensor) else value for value in (*args, *kwargs.values())]
        return f"it needs {kernel.where}, got {', '.join(map(str, got))}"
    return None


def _machine_refusal(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> str | None:
    problem = _problem(kernel.backend.value)
    if problem is not None:
        return problem
    if kernel.dtypes is not None and dtype not in kernel.dtypes:
        return f"it takes {', '.join(str(t) for t in kernel.dtypes)}, not {dtype}"
    # Kernels for a CPU are interpreted, for tests.
    if device.type == "cpu" and kernel.backend is Backend.TRITON:
        if not _interprets(kernel.backend.value):
            return "it takes CUDA tensors, and those of a CPU only if TRITON_INTERPRET=1 was set from the start"
        if dtype == torch.bfloat16:
            return "Triton's interpreter computes wrongly in bfloat16"
    elif device.type != "cuda":
        return f"it takes CUDA tensors, not those of {device.type}"
    elif _too_old(device.index):
        return "it needs a device of compute capability 8.0 or later"
    return None


def exporting() -> bool:
    """Return whether `torch.export` is tracing."""
    # In graphs compiled by torch 2.11, `torch.compiler.is_exporting` is always true; the flag behind it is correct.
    return torch.compiler._is_exporting_flag


def transforming() -> bool:
    """Return whether a torch.func transform such as `vmap` or `grad` is active."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def batching() -> bool:
    """Return whether `torch.func.vmap` is active, under which no value can be read."""
    if not transforming():
        return False
    return any(level.key() == _VMAP for level in torch._C._functorch.get_interpreter_stack() or ())


_VMAP = torch._C._functorch.TransformType.Vmap


def check_counts(what: str, count: str) -> None:
    """Raise a ValueError where a count that depends on the data cannot be read: in an export and under vmap.

    Args:
        what: What reads the count, in the plural.
        count: The count.
    """
    if exporting() or batching():
        raise ValueError(
            f"{what} cannot be exported or run under torch.func.vmap: {count} depends on the data. In place of vmap, "
            "call the model in a loop"
        )


def choices(device: torch.device | str, dtype: torch.dtype = torch.float32) -> str:
    """Return as text which kernels of each op AUTO takes on a device, in order, and why; last what torch does.

    Example:
        >>> print(choices("cpu").splitlines()[-1])
        select_topk: torch (a stable sort by score, and a sort of the kept indices)
    """
    device = torch.device(device)
    lines = []
    for name, entry in OPS.items():
        # AUTO takes kernels on a GPU alone.
        kernels = entry.kernels if device.type == "cuda" else ()
        for kernel in kernels:
            dtypes = kernel.dtypes if kernel.auto is None else kernel.auto
            if dtypes is not None and dtype not in dtypes:
                continue
            why = f"{kernel.how}; {kernel.why}"
            refusal = _machine_refusal(kernel, device, dtype)
            if refusal is not None:
                why = f"not taken: {refusal}"
            conditions = [kernel.where] if kernel.where else []
            if not kernel.compiled:
                conditions.append("not compiled")
            where = ""
            if conditions:
                where = f" where {', '.join(conditions)}"
            lines.append(f"{name}: {kernel.backend.value}{where} ({why})")
        lines.append(f"{name}: torch ({entry.how})")
    return "\n".join(lines)


def _alternatives(backends: list[Backend]) -> str:
    return f"{', '.join(backend.value for backend in backends)} can run it"


def _constant(query: Callable[[Subject], Result]) -> Callable[[Subject], Result]:
    """Cache a query about the machine for the process, and make its result a constant of compiled graphs."""
    results: dict[Subject, Result] = {}

    @functools.wraps(query)
    def cached(subject: Subject) -> Result:
        if subject not in results:
            results[subject] = query(subject)
        return results[subject]

    # `torch.compiler.assume_constant_result` sets the same mark, but importing the compiler nearly doubles the import
    # time of this package.
    cached._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return cached


# Importing these modules shows whether a backend works.
_PACKAGES = {"triton": "triton", "xformers": "xformers.ops.fmha"}


@_constant
def _problem(backend: str) -> str | None:
    """Return why a backend is not available on this machine, or None if it is."""
    if backend not in _PACKAGES:
        return None
    try:
        importlib.import_module(backend)
        importlib.import_module(_PACKAGES[backend])
    # A broken installation raises anything, such as an OSError for a library that does not load.
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == backend:
            return f"{backend} is not installed"
        return f"{backend} is installed but cannot be used: {type(error).__name__}: {error}"
    return None


@_constant
def _interprets(backend: str) -> bool:
    from mmod.ops.triton.compat import INTERPRET

    return INTERPRET


@_constant
def _too_old(index: int | None) -> bool:
    # ROCm numbers its devices in another way.
    if torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(index) < (8, 0)
