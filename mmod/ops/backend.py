"""Which backend runs an op: the one place where that is decided, forced and explained.

Where it is torch, an op may still choose among torch's operations by device, type and size; `choices` says how.
Nothing is looked for at import. Each op asks `choose` when it is called; what is installed is found out then, once.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from enum import Enum
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Backend(Enum):
    """An implementation of an op.

    Attributes:
        AUTO: What the table of this module picks for device, dtype and size.
        TORCH: Torch's own operations, which take everything and define what the others compute.
        TRITON: Kernels for CUDA devices; on a CPU they run in Triton's interpreter, for tests.
        XFORMERS: The attention of xformers, on CUDA devices.
    """

    AUTO = "auto"
    TORCH = "torch"
    TRITON = "triton"
    XFORMERS = "xformers"


class Reach(NamedTuple):
    """What a backend takes for one op; TORCH takes everything.

    Args:
        dtypes: Types of the tensors.
        most: Largest value of facts that the op tells, such as a head dimension; 0 rules a feature out.
    """

    dtypes: tuple[torch.dtype, ...]
    most: Mapping[str, int]


class Rule(NamedTuple):
    """A row of the table: when AUTO picks a backend, and why.

    Args:
        op: Name of the op.
        backend: What is picked.
        dtypes: For which types.
        why: The measurement or the reason.
        compiled: Only inside (True) or outside (False) compiled graphs; None means both.
        most: Only up to these values of facts.
    """

    op: str
    backend: Backend
    dtypes: tuple[torch.dtype, ...]
    why: str
    compiled: bool | None = None
    most: Mapping[str, int] = {}


_HALF = (torch.float16, torch.bfloat16)
_FLOAT = (torch.float32, *_HALF)
# Longest sequence whose sort keys one program of the kernel holds.
SELECT_TOKENS = 8192

REACH: dict[tuple[str, Backend], Reach] = {
    ("gather_rows", Backend.TRITON): Reach(_FLOAT, {}),
    ("scatter_rows", Backend.TRITON): Reach(_FLOAT, {}),
    ("gather_norm", Backend.TRITON): Reach(_FLOAT, {"channels": 16384}),
    ("merge_rows", Backend.TRITON): Reach(_FLOAT, {}),
    ("select_topk", Backend.TRITON): Reach(_FLOAT, {"tokens": SELECT_TOKENS}),
    ("attention_with_importance", Backend.TRITON): Reach(_FLOAT, {"head_dim": 128, "dropout": 0, "mask_of_pairs": 0}),
    ("packed_attention", Backend.TRITON): Reach(_FLOAT, {"head_dim": 128, "dropout": 0}),
    ("packed_attention", Backend.XFORMERS): Reach(_FLOAT, {"head_dim": 256, "dropout": 0}),
}
OPS = tuple(dict.fromkeys(op for op, _ in REACH))

_FUSES = "inductor fuses this with its neighbours, which a kernel it cannot see into would prevent"
_MOVES = "not yet measured; reason: one launch that moves rows, where torch moves elements by an index each"
# For CUDA devices, first match wins; TORCH where none matches. On every other device AUTO is TORCH.
RULES: tuple[Rule, ...] = (
    *(Rule(op, Backend.TORCH, _FLOAT, _FUSES, compiled=True) for op in OPS if op.endswith(("_rows", "_norm"))),
    Rule("gather_rows", Backend.TRITON, _FLOAT, _MOVES),
    Rule("scatter_rows", Backend.TRITON, _FLOAT, _MOVES),
    Rule("gather_norm", Backend.TRITON, _FLOAT, "not yet measured; reason: rows are read once, not three times"),
    Rule("merge_rows", Backend.TRITON, _FLOAT, "not yet measured; reason: one pass over the rows instead of three"),
    Rule(
        "select_topk",
        Backend.TRITON,
        _FLOAT,
        "not yet measured; reason: one launch instead of six, which small batches outside graphs may not repay",
    ),
    Rule(
        "attention_with_importance",
        Backend.TRITON,
        _FLOAT,
        "not yet measured; reason: probabilities stay on chip; torch's fused attention, where it returns log-sum-exps",
    ),
    Rule("packed_attention", Backend.TRITON, (torch.float32,), "torch's kernel for lengths takes half precision only"),
)

_ROWS = "rows copied whole where they lie in order, else torch's gather and scatter, as in compiled graphs"
_PADDED = "padding and a mask of keys"
# What torch's operations do for an op, by type of device ("" for all others); the definition where nothing is said.
FORMS: Mapping[str, Mapping[str, str]] = {
    **{op: {"cpu": _ROWS} for op in ("gather_rows", "scatter_rows", "gather_norm", "merge_rows")},
    "attention_with_importance": {
        "cpu": "in fp32, without mask, padding and dropout, one map in pieces for output and importance; else fused "
        "attention, and the map again in pieces",
        "": "fused attention, and the map again in pieces",
    },
    "packed_attention": {
        "cpu": f"a call of fused attention for each image, or {_PADDED} for short images and in compiled graphs",
        "cuda": "in half precision without dropout, varlen_attn for as many heads of keys as of queries and a head "
        f"dimension divisible by 8; else {_PADDED}",
        "": _PADDED,
    },
}

_forced: Mapping[str, Backend] = {}


class use:
    """Context manager that forces a backend for all ops that have it, or for the named ones.

    An op that cannot be served by the forced backend raises instead of falling back. The setting belongs to the
    process, not to a thread.

    Args:
        backend: A `Backend` or its value; "auto" gives the choice back.
        ops: Names of ops; none means all that have the backend.

    Raises:
        ValueError: Unknown backend or op, a backend that is not installed, or an op that it has no version of.

    Example:
        >>> x, index = torch.zeros(1, 4, 2), torch.tensor([[0, 3]])
        >>> with use("torch", "gather_rows"):
        ...     choose("gather_rows", x)
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
        if not _installed(self.backend.value):
            raise ValueError(f"{self.backend.value} is not installed; {_instead([Backend.TORCH])}")
        having = [op for op in OPS if self.backend in _versions(op)]
        without = [op for op in ops if op not in having]
        if without:
            raise ValueError(f"{self.backend.value} has no version of {without}; it has {', '.join(having)}")
        self.ops = ops or tuple(having)

    def __enter__(self) -> use:
        global _forced
        self._before = _forced
        chosen = {**_forced, **dict.fromkeys(self.ops, self.backend)}
        _forced = {op: backend for op, backend in chosen.items() if backend is not Backend.AUTO}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _forced
        _forced = self._before


def choose(op: str, tensor: Tensor, **facts: int) -> Backend:
    """Return the backend that runs an op.

    Args:
        op: Name of the op.
        tensor: Its main input, for device and dtype.
        facts: What else decides, by the names that the op's rows in `REACH` and `RULES` use.

    Returns:
        The forced backend where one is forced, else the first row of the table that serves; never AUTO.

    Raises:
        ValueError: The forced backend cannot serve these inputs; the message says why and what can.

    Example:
        >>> choose("gather_rows", torch.zeros(1, 4, 2))
        <Backend.TORCH: 'torch'>
    """
    if op in _forced:
        reason = _refusal(op, _forced[op], tensor.device, tensor.dtype, facts)
        if reason is None:
            return _forced[op]
        able = [b for b in _versions(op) if _refusal(op, b, tensor.device, tensor.dtype, facts) is None]
        raise ValueError(f"{op} cannot run on {_forced[op].value}: {reason}; {_instead(able)}")
    # Exported programs are to run where this library is not, and kernels have no rules for transforms.
    if tensor.device.type != "cuda" or exporting() or transforming():
        return Backend.TORCH
    for rule in RULES:
        if (
            rule.op == op
            and tensor.dtype in rule.dtypes
            and rule.compiled in (None, torch.compiler.is_compiling())
            and all(facts.get(fact, 0) <= most for fact, most in rule.most.items())
            and _refusal(op, rule.backend, tensor.device, tensor.dtype, facts) is None
        ):
            return rule.backend
    return Backend.TORCH


def exporting() -> bool:
    """Return whether a program is being exported."""
    # In graphs compiled by torch 2.11, `torch.compiler.is_exporting` is always true; what it reads is right.
    return torch.compiler._is_exporting_flag


def transforming() -> bool:
    """Return whether a transform of torch.func is at work: `vmap`, `grad` and what is made of them."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def choices(device: torch.device | str, dtype: torch.dtype = torch.float32) -> str:
    """Return as text what AUTO picks for each op on a device, and why.

    Args:
        device: Where the tensors are.
        dtype: Their type.

    Example:
        >>> print(choices("cpu").splitlines()[4])
        select_topk: torch (on cpu: the definition, in torch's own operations)
    """
    device = torch.device(device)
    lines = []
    for op in OPS:
        rules = [rule for rule in RULES if rule.op == op and dtype in rule.dtypes and device.type == "cuda"]
        for rule in rules:
            limits = [f"{fact} <= {most}" for fact, most in {**_reach(op, rule.backend).most, **rule.most}.items()]
            if rule.compiled is not None:
                limits.append("compiled" if rule.compiled else "not compiled")
            refusal = _refusal(op, rule.backend, device, dtype, {})
            why = rule.why if refusal is None else f"not taken: {refusal}"
            lines.append(f"{op}: {rule.backend.value}{' where ' * bool(limits)}{', '.join(limits)} ({why})")
        if not any(rule.compiled is None and not {**_reach(op, rule.backend).most, **rule.most} for rule in rules):
            forms = FORMS.get(op, {})
            form = forms.get(device.type, forms.get("", "the definition, in torch's own operations"))
            lines.append(f"{op}: torch (on {device.type}: {form})")
    return "\n".join(lines)


def _versions(op: str) -> list[Backend]:
    return [Backend.AUTO, Backend.TORCH, *(backend for name, backend in REACH if name == op)]


def _reach(op: str, backend: Backend) -> Reach:
    return REACH.get((op, backend), Reach((), {}))


def _instead(able: list[Backend]) -> str:
    return f"{', '.join(b.value for b in able if b is not Backend.AUTO)} can serve"


def _refusal(
    op: str, backend: Backend, device: torch.device, dtype: torch.dtype, facts: Mapping[str, int]
) -> str | None:
    """Return why a backend cannot serve these inputs, or None where it can."""
    if backend in (Backend.TORCH, Backend.AUTO):
        return None
    if not _installed(backend.value):
        return f"{backend.value} is not installed"
    reach = _reach(op, backend)
    if dtype not in reach.dtypes:
        return f"it takes {', '.join(str(t) for t in reach.dtypes)}, not {dtype}"
    if device.type == "cpu" and backend is Backend.TRITON:
        if not _interprets(backend.value):
            return "it takes CUDA tensors, and those of a CPU only if TRITON_INTERPRET=1 was set from the start"
        if dtype == torch.bfloat16:
            return "Triton's interpreter computes wrongly in bfloat16"
    elif device.type != "cuda":
        return f"it takes CUDA tensors, not those of {device.type}"
    elif _too_old(device.index):
        return "it needs a device of compute capability 8.0 or later"
    for fact, most in reach.most.items():
        if facts.get(fact, 0) > most:
            return f"it takes {fact} up to {most}, not {facts[fact]}"
    return None


def _constant(question: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Ask a question about the machine once in a process; its answer is a constant of compiled graphs."""
    answers: dict[Any, bool] = {}

    @functools.wraps(question)
    def answer(subject: Any) -> bool:
        if subject not in answers:
            answers[subject] = question(subject)
        return answers[subject]

    # `torch.compiler.assume_constant_result` sets the same mark, but loads the compiler for it, which would nearly
    # double the time this package takes to import.
    answer._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return answer


@_constant
def _installed(name: str) -> bool:
    return name in ("torch", "auto") or importlib.util.find_spec(name) is not None


@_constant
def _interprets(backend: str) -> bool:
    from mmod.ops.triton.compat import INTERPRET

    return INTERPRET


@_constant
def _too_old(index: int | None) -> bool:
    if torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(index) < (8, 0)
