"""Every kernel compiles for GPUs, on machines without one: the interpreter accepts what the compiler does not."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "mmod" / "ops" / "triton"
# What every device of compute capability 8.0 and later has, in bytes: 8.6 and 8.9 give the least.
SHARED_MEMORY = 99 * 1024

# Kernel -> the ways to compile it: types of its pointers, then values of its constants. Other arguments are sizes or
# strides (i32) unless their type is given with the pointers.
Case = tuple[dict[str, str], dict[str, Any]]


def row_case(kind: str, pointers: str, others: dict[str, str], **constants: Any) -> Case:
    """Return a case whose named pointers are of one type."""
    return {**dict.fromkeys(pointers.split(), "*" + kind), **others}, constants


def attention_cases(pointers: str, others: dict[str, str], *, backward: bool, swapped: bool = False) -> list[Case]:
    """Return cases with the tiles that attention runs with: whatever is optional, once absent and once there.

    Args:
        pointers: Names of the pointers to queries and their like.
        others: Types of the other pointers; those of masks are optional.
        backward: The kernel computes gradients.
        swapped: The kernel streams queries past keys.
    """
    from mmod.ops.triton.attention import choose_tiles

    cases = []
    for width, dtype, kind, full in [(64, torch.bfloat16, "*bf16", True), (128, torch.float32, "*fp32", False)]:
        options: dict[str, Any] = choose_tiles(width, dtype, backward=backward).options()
        if swapped:
            options["BLOCK_M"], options["BLOCK_N"] = options["BLOCK_N"], options["BLOCK_M"]
        optional = [name for name in others if name.startswith("valid")]
        absent = {} if full else dict.fromkeys(optional)
        types = {**dict.fromkeys(pointers.split(), kind), **others, "scale": "fp32"}
        present = {name: value for name, value in types.items() if name not in absent}
        cases.append((present, {"width": width, "CAUSAL": full, **options, **absent}))
    return cases


def has(names: str, given: bool = True) -> dict[str, bool]:
    """Return constants that say whether optional arguments are given."""
    return {f"HAS_{name}": given for name in names.split()}


_INDEX = {"index": "*i64"}
_STATISTICS = {"mean": "*fp32", "scale": "*fp32"}
_MERGE = {"gate": "*fp32", "valid": "*u8"}
_MERGED = {"inverse": "*i32", **_MERGE}
_NORM = {**_INDEX, **_STATISTICS, "eps": "fp32"}
_ROWS = {"start": "*i32", "valid": "*i1"}
_MASKS = {"valid": "*u8", "protect": "*u8", "filled": "*u8", "index": "*i64", "inverse": "*i32"}
_MEAN = {"slot": "*i64", "size": "*fp32", "weight": "*fp32"}
_WIDE = {"ROWS": 1, "CHANNELS": 16384, "num_warps": 16}
_SELECT = {**_MASKS, "factor": "fp32"}
_ALIKE = {"ROWS": 32, "COLUMNS": 64, "CHANNELS": 32}
CASES: dict[str, list[Case]] = {
    "alike.unit_kernel": [
        row_case("bf16", "x", {"out": "*fp32"}, SIGNED=True, ROWS=32, CHANNELS=64),
        row_case("fp32", "x out", {}, SIGNED=False, ROWS=1, CHANNELS=4096),
    ],
    "alike.redundancy_kernel": [
        row_case("fp32", "x out", {"position": "*i32", "valid": "*u8"}, HAS_VALID=valid, **_ALIKE)
        for valid in (True, False)
    ],
    "alike.nearest_kernel": [
        row_case("fp32", "x", {"index": "*i64", "valid": "*u8", "out": "*i64"}, HAS_VALID=valid, **_ALIKE)
        for valid in (True, False)
    ],
    "hashing.random_kernel": [
        row_case(kind, "x", {"out": "*fp32", "valid": "*u8", "salt": "*i64"}, HAS_VALID=valid, BLOCK=256, CHANNELS=8)
        for kind, valid in (("bf16", True), ("fp32", False))
    ],
    "attention.forward_kernel": attention_cases("q k v out", {"lse": "*fp32", **_ROWS}, backward=False),
    "attention.query_gradient_kernel": attention_cases(
        "q k v out grad_out grad_q", {"lse": "*fp32", "delta": "*fp32", **_ROWS}, backward=True
    ),
    "attention.key_gradient_kernel": attention_cases(
        "q k v grad_out grad_k grad_v", {"lse": "*fp32", "delta": "*fp32", **_ROWS}, backward=True
    ),
    "importance.column_kernel": attention_cases(
        "q k", {"lse": "*fp32", "sums": "*fp32", "valid_q": "*i1", "valid_k": "*i1"}, backward=False, swapped=True
    ),
    "merging.size_kernel": [
        row_case(kind, "bias", {"slot": "*i64", "size": "*fp32"}, SLOTS=32, TOKENS=128) for kind in ("bf16", "fp32")
    ],
    "merging.mean_kernel": [
        row_case(kind, "x out", _MEAN, **has("SIZE WEIGHT", weighted), SLOTS=32, TOKENS=32, CHANNELS=64)
        for kind, weighted in (("bf16", True), ("fp32", False))
    ],
    "merging.add_kernel": [
        row_case(kind, "x update out", {"slot": "*i64"}, ROWS=16, CHANNELS=128) for kind in ("bf16", "fp32")
    ],
    "rows.gather_kernel": [
        row_case("bf16", "x out", _INDEX, ROWS=16, CHANNELS=128),
        row_case("fp32", "x out", {"index": "*i32"}, ROWS=8, CHANNELS=256),
    ],
    "rows.merge_kernel": [
        row_case("bf16", "x z y out", _MERGED, **has("X Y GATE VALID"), ROWS=16, CHANNELS=128),
        row_case("fp32", "x z y out", _MERGED, **has("X GATE VALID", False), HAS_Y=True, ROWS=8, CHANNELS=256),
    ],
    "rows.merge_grad_kernel": [
        row_case(
            "bf16",
            "grad z y grad_z grad_y",
            {**_INDEX, **_MERGE, "grad_gate": "*fp32"},
            HAS_VALID=True,
            ROWS=16,
            CHANNELS=128,
        ),
    ],
    "rows.gather_norm_kernel": [
        row_case("bf16", "x weight bias out normed", _NORM, CENTRED=True, **has("WEIGHT BIAS"), ROWS=2, CHANNELS=1024),
        row_case("fp32", "x weight bias out normed", _NORM, CENTRED=False, **has("WEIGHT BIAS", False), **_WIDE),
    ],
    "rows.gather_norm_grad_kernel": [
        row_case(
            "bf16",
            "grad_z grad_normed z weight grad_x",
            {**_INDEX, **_STATISTICS, "grad_weight": "*fp32", "grad_bias": "*fp32"},
            CENTRED=True,
            HAS_WEIGHT=True,
            CHUNK=32,
            ROWS=2,
            CHANNELS=1024,
        ),
    ],
    "select.gate_grad_kernel": [
        row_case("fp32", "grad score out", {"inverse": "*i32", "factor": "fp32"}, GATE=3, BLOCK=1024),
    ],
    "select.select_kernel": [
        row_case("fp32", "score gate", _SELECT, **has("VALID PROTECT"), GATE=3, BLOCK=256, num_warps=1),
        row_case("fp32", "score gate", _SELECT, **has("VALID PROTECT", False), GATE=0, BLOCK=8192, num_warps=8),
    ],
}

COMPILE = """
import importlib, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
def compile_case(capability, name, pointers, constants):
    module, _, kernel = name.rpartition(".")
    function = getattr(importlib.import_module("mmod.ops.triton." + module), kernel)
    names = function.arg_names
    options = {key: constants.pop(key) for key in OPTIONS if key in constants}
    signature = {arg: "constexpr" if arg in constants else pointers.get(arg, "i32") for arg in names}
    wrong = (set(pointers) | set(constants)) - set(names)
    wrong |= {p.name for p in function.params if p.is_constexpr} - set(constants)
    assert not wrong, f"{name}: arguments {wrong}"
    # Memory and strides are aligned in use, which lets loads be pipelined through shared memory.
    aligned = [n for n, arg in enumerate(names) if signature[arg][0] == "*" or "_" in arg and arg not in constants]
    attributes = {(n,): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)

for capability, cases_of in json.load(sys.stdin):
    for name, cases in cases_of.items():
        for case in cases:
            print(json.dumps([capability, name, compile_case(capability, name, *case).metadata.shared]), flush=True)
"""


def kernels() -> list[str]:
    """Return the names of all kernels, read off the source: a function that the host launches ends in `_kernel`."""
    names = []
    for path in KERNELS.glob("*.py"):
        tree = ast.parse(path.read_text())
        names += [
            f"{path.stem}.{node.name}"
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
        ]
    return sorted(names)


def test_every_kernel_is_listed() -> None:
    assert sorted(CASES) == kernels()


# Products of half precision alone are compiled differently: those in fp32 are exact, without tensor cores.
PRODUCTS = {
    name: [case for case in cases if "*bf16" in case[0].values()]
    for name, cases in CASES.items()
    if name.startswith(("attention", "importance"))
}


def test_every_kernel_compiles_ahead_of_time() -> None:
    pytest.importorskip("triton")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    jobs = [(80, PRODUCTS), (90, CASES)]
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shared = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(shared) == sum(len(cases) for _, cases_of in jobs for cases in cases_of.values())
    assert all(amount <= SHARED_MEMORY for *_, amount in shared), shared
