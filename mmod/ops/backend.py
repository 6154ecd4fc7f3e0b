"""Dispatch: which implementation of an op runs, how to force one, and why it was taken.

Ops register their versions with `register`, and a call asks `choose`. Installed packages are detected on the first call
and cached.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from enum import Enum
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor


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


Result = TypeVar("Result")
HALF = (torch.float16, torch.bfloat16)
FLOAT = (torch.float32, *HALF)


class Version(NamedTuple):
    """One implementation of an op, and the inputs that it supports.

    Args:
        run: Computes the op; all versions of an op take the same arguments.
        how: What it does, in words.
        backend: The backend that it needs.
        dtypes: Supported dtypes; None means all.
        limits: Upper bounds of facts that `choose` receives, such as a head dimension; 0 excludes a feature.
        devices: Supported device types; None means all, or those that Triton supports for a Triton kernel.
        when: Further condition on the op's main input and facts, or None.
        where: That condition in words.
        auto: Dtypes for which AUTO takes it; None means all supported ones.
        compiled: Whether AUTO takes it inside compiled graphs too.
        why: The measurement or the reason why AUTO prefers it.
    """

    run: Callable[..., Any]
    how: str
    backend: Backend = Backend.TORCH
    dtypes: tuple[torch.dtype, ...] | None = None
    limits: Mapping[str, int] = {}
    devices: tuple[str, ...] | None = None
    when: Callable[[Tensor, Mapping[str, int]], bool] | None = None
    where: str = ""
    auto: tuple[torch.dtype, ...] | None = None
    compiled: bool = True
    why: str = ""


class Op(NamedTuple):
    """The versions of an op; within a backend, the first one that supports the inputs runs.

    Args:
        kernels: Versions that need another backend than torch.
        plain: Versions in torch operations; the last one supports every input.
    """

    kernels: tuple[Version, ...]
    plain: tuple[Version, ...]

    def of(self, backend: Backend) -> tuple[Version, ...]:
        """Return the versions of one backend."""
        return self.plain if backend is Backend.TORCH else tuple(v for v in self.kernels if v.backend is backend)

    @property
    def backends(self) -> list[Backend]:
        """Backends that have a version of the op."""
        return [*dict.fromkeys([Backend.TORCH, *(version.backend for version in self.kernels)])]


OPS: dict[str, Op] = {}
_forced: Mapping[str, Backend] = {}


def register(name: str, *versions: Version) -> None:
    """Register an op for `use`, `choose` and `choices`.

    Args:
        name: Name of the op.
        versions: Its versions in order of preference; the last one uses torch operations and supports every input.

    Raises:
        ValueError: The name is taken, or the last version has a restriction.
    """
    if name in OPS:
        raise ValueError(f"op {name!r} is already registered: choose another name")
    plain = tuple(version for version in versions if version.backend is Backend.TORCH)
    last = plain[-1] if plain else None
    if last is None or last.limits or (last.dtypes, last.devices, last.when) != (None, None, None):
        raise ValueError(f"the last version of {name!r} must use torch operations and support every input")
    OPS[name] = Op(tuple(version for version in versions if version.backend is not Backend.TORCH), plain)


class use:
    """Context manager that forces a backend for all ops that support it, or for the named ops.

    A call that the forced backend does not support raises; there is no fallback. The setting is global to the process,
    not local to a thread.

    Args:
        backend: A `Backend` or its value; "auto" restores automatic dispatch.
        ops: Names of ops; none means all that support the backend.

    Raises:
        ValueError: Unknown backend or op, a backend that is not available, or an op without a version for it.

    Example:
        >>> x, index = torch.zeros(1, 4, 2), torch.tensor([[0, 3]])
        >>> with use("torch", "gather_rows"):
        ...     choose("gather_rows", x).backend
        <Backend.TORCH: 'torch'>
    """

    def __init__(self, backend: Backend | str, *ops: str) -> None:
        names = [member.value for member in Backend]
        if not isinstance(backend, Backend) and backend not in names:
            raise ValueError(f"unknown backend {backend!r}; valid are {', '.join(names)}")
        self.backend = Backend(backend)
        unknown = [op for op in ops if op not in OPS]
        if unknown:
            raise ValueError(f"unknown ops {unknown}; valid are {', '.join(OPS)}")
        problem = _problem(self.backend.value)
        if problem is not None:
            raise ValueError(f"{problem}; {_alternatives([Backend.TORCH])}")
        supported = [name for name, op in OPS.items() if self.backend in (Backend.AUTO, *op.backends)]
        unsupported = [op for op in ops if op not in supported]
        if unsupported:
            raise ValueError(f"{self.backend.value} has no version of {unsupported}; it has {', '.join(supported)}")
        self.ops = ops or tuple(supported)

    def __enter__(self) -> use:
        global _forced
        self._previous = _forced
        chosen = {**_forced, **dict.fromkeys(self.ops, self.backend)}
        _forced = {op: backend for op, backend in chosen.items() if backend is not Backend.AUTO}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _forced
        _forced = self._previous


def choose(name: str, tensor: Tensor, backend: Backend = Backend.AUTO, **facts: int) -> Version:
    """Return the version of an op that runs.

    Args:
        name: Name of the op.
        tensor: Its main input, for device and dtype.
        backend: Takes precedence over `use`; AUTO follows `use`, then the order of the versions.
        facts: Other properties of the inputs, by the names in `Version.limits`.

    Returns:
        The first version of the backend that supports the inputs. With AUTO, kernels come first on CUDA devices, and
        torch operations run everywhere else.

    Raises:
        ValueError: The forced backend does not support these inputs; the message says why and which backends do.

    Example:
        >>> choose("gather_rows", torch.zeros(1, 4, 2)).how
        'copies of rows'
    """
    op = OPS[name]
    if backend is Backend.AUTO:
        backend = _forced.get(name, Backend.AUTO)
    # Exported programs must run without this library, and kernels have no rules for torch.func transforms.
    if backend is Backend.AUTO and tensor.device.type == "cuda" and not exporting() and not transforming():
        for version in op.kernels:
            if _preferred(version, tensor.dtype) and _refusal(version, tensor, facts) is None:
                return version
    if backend in (Backend.AUTO, Backend.TORCH):
        for version in op.plain[:-1]:
            if _supports(version, tensor, facts):
                return version
        return op.plain[-1]
    reasons = []
    for version in op.of(backend):
        reason = _refusal(version, tensor, facts)
        if reason is None:
            return version
        reasons.append(reason)
    able = [b for b in op.backends if any(_refusal(version, tensor, facts) is None for version in op.of(b))]
    raise ValueError(f"{name} cannot run on {backend.value}: {reasons[-1]}; {_alternatives(able)}")


def _preferred(version: Version, dtype: torch.dtype) -> bool:
    """Return whether AUTO takes a kernel for a dtype, in eager mode or in a compiled graph."""
    return (version.auto is None or dtype in version.auto) and (version.compiled or not torch.compiler.is_compiling())


def _supports(version: Version, tensor: Tensor, facts: Mapping[str, int]) -> bool:
    """Return whether a version in torch operations supports these inputs."""
    if version.devices is not None and tensor.device.type not in version.devices:
        return False
    if version.dtypes is not None and tensor.dtype not in version.dtypes:
        return False
    for fact, limit in version.limits.items():
        if facts.get(fact, 0) > limit:
            return False
    return version.when is None or version.when(tensor, facts)


def _refusal(version: Version, tensor: Tensor, facts: Mapping[str, int]) -> str | None:
    """Return why a version does not support these inputs, or None if it does."""
    if version.backend is Backend.TORCH:
        return None if _supports(version, tensor, facts) else "it does not support these inputs"
    reason = _machine_refusal(version, tensor.device, tensor.dtype)
    if reason is not None:
        return reason
    for fact, limit in version.limits.items():
        if facts.get(fact, 0) > limit:
            return f"it takes {fact} up to {limit}, not {facts[fact]}"
    return None if version.when is None or version.when(tensor, facts) else f"it needs {version.where}"


def _machine_refusal(version: Version, device: torch.device, dtype: torch.dtype) -> str | None:
    problem = _problem(version.backend.value)
    if problem is not None:
        return problem
    if version.dtypes is not None and dtype not in version.dtypes:
        return f"it takes {', '.join(str(t) for t in version.dtypes)}, not {dtype}"
    if device.type == "cpu" and version.backend is Backend.TRITON and version.devices is None:
        if not _interprets(version.backend.value):
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


def choices(device: torch.device | str, dtype: torch.dtype = torch.float32) -> str:
    """Return as text which versions of each op AUTO takes on a device, in order, and why.

    Example:
        >>> print(choices("cpu").splitlines()[-1])
        select_topk: torch (the definition, in torch operations)
    """
    device = torch.device(device)
    lines = []
    for name, op in OPS.items():
        for version in op.kernels if device.type == "cuda" else ():
            if dtype in ((version.dtypes or ()) if version.auto is None else version.auto):
                refusal = _machine_refusal(version, device, dtype)
                why = f"{version.how}; {version.why}" if refusal is None else f"not taken: {refusal}"
                lines.append(_line(name, version, why))
        for version in op.plain:
            if version.devices in (None, (device.type,)) and (version.dtypes is None or dtype in version.dtypes):
                lines.append(_line(name, version, version.how))
    return "\n".join(lines)


def _line(name: str, version: Version, why: str) -> str:
    conditions = _conditions(version)
    return f"{name}: {version.backend.value}{' where ' * bool(conditions)}{', '.join(conditions)} ({why})"


def _conditions(version: Version) -> list[str]:
    bounds = [f"{fact} <= {limit}" if limit else f"no {fact}" for fact, limit in version.limits.items()]
    return [*bounds, *([version.where] if version.when else []), *([] if version.compiled else ["not compiled"])]


def _alternatives(backends: list[Backend]) -> str:
    return f"{', '.join(backend.value for backend in backends)} can run it"


def _constant(query: Callable[[Any], Result]) -> Callable[[Any], Result]:
    """Cache a query about the machine for the process, and make its result a constant of compiled graphs."""
    results: dict[Any, Result] = {}

    @functools.wraps(query)
    def cached(subject: Any) -> Result:
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
    if torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(index) < (8, 0)
