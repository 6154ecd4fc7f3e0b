from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mmod.ops import Backend, choices, gather_rows, use
from mmod.ops import backend as backend_module
from mmod.ops.backend import OPS, Kernel, choose, op
from tests.kit.kernels import INTERPRETED

ROOT = Path(__file__).parents[2]


def on_gpu(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a tensor that says it is on a GPU, whether there is one or not."""
    with FakeTensorMode():
        return torch.empty(2, 9, 8, dtype=dtype, device="cuda")


def arguments_of(name: str, x: torch.Tensor) -> tuple[object, ...]:
    """Return as many arguments of an op as the choice among its kernels reads."""
    others = {
        "attention_with_importance": (x, x, None, 0.0),
        "packed_attention": (x, x, None, 9, 0.0),
        "unit_rows": (8,),
    }
    return (x, *others.get(name, ()))


def backend_of(name: str, tensor: torch.Tensor) -> Backend:
    kernel = choose(name, tensor)
    return Backend.TORCH if kernel is None else kernel.backend


@pytest.mark.parametrize("name", OPS)
def test_a_cpu_runs_torch(name: str) -> None:
    assert choose(name, torch.zeros(1, 2, 3)) is None


@pytest.mark.parametrize("name", OPS)
def test_every_choice_is_one_that_can_serve(name: str) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        chosen = choose(name, *arguments_of(name, on_gpu(dtype)))
        assert chosen is None or chosen in OPS[name].kernels
        assert chosen is None or chosen.dtypes is None or dtype in chosen.dtypes


def test_a_gpu_runs_kernels_up_to_their_limits() -> None:
    with FakeTensorMode():
        most = torch.empty(2, 8192, device="cuda")
        more = torch.empty(2, 8193, device="cuda")
    assert backend_of("select_topk", most) is Backend.TRITON
    assert choose("select_topk", more) is None
    assert choose("gather_norm", on_gpu(torch.float64)) is None


def test_rows_are_left_to_the_compiler_and_exported_programs_to_torch() -> None:
    def move(x: torch.Tensor) -> torch.Tensor:
        return x + (2 if choose("merge_rows", x) is None else 1)

    with FakeTensorMode():
        x = torch.empty(2, 9, 8, device="cuda")
        assert backend_of("merge_rows", x) is Backend.TRITON
        graphs: list[torch.fx.GraphModule] = []

        def keep(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
            graphs.append(graph)
            return graph

        torch.compile(move, backend=keep, fullgraph=True)(x)
    assert [node.args[1] for node in graphs[0].graph.nodes if node.op == "call_function"] == [2]


def test_every_version_says_how_and_every_preferred_kernel_why() -> None:
    for entry in OPS.values():
        assert entry.how
        assert all(kernel.how for kernel in entry.kernels)
        assert all(kernel.why for kernel in entry.kernels if kernel.auto != ())


def test_an_op_registers_once_and_serves_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "OPS", {})
    kernel = Kernel(lambda x, by=1: -by * x - 1, "a kernel", "it is quicker")

    def negate(x: torch.Tensor, by: int = 1) -> torch.Tensor:
        return -by * x

    run = op(kernel, how="torch's product")(negate)
    assert choices("cpu") == "negate: torch (torch's product)"
    assert run(torch.ones(1)).item() == run(x=torch.ones(1), by=1).item() == -1
    monkeypatch.setattr(backend_module, "choose", lambda name, *args, **kwargs: kernel)
    assert run(torch.ones(1)).item() == -1
    monkeypatch.setattr(backend_module, "forced", {"negate": Backend.TRITON})
    assert run(torch.ones(1)).item() == run(x=torch.ones(1), by=1).item() == -2
    with pytest.raises(ValueError, match="'negate' is already registered"):
        op(how="torch's product")(negate)


def test_a_forced_backend_holds_for_the_named_ops_only_and_ends_with_its_context() -> None:
    x = torch.zeros(1, 4, 2)
    with use("triton", "select_topk"):
        assert choose("gather_rows", x) is None
        with use(Backend.TORCH):
            assert choose("select_topk", x) is None
        if INTERPRETED:
            assert backend_of("select_topk", x) is Backend.TRITON
        with use("auto"):
            assert choose("select_topk", x) is None
    assert choose("select_topk", x) is None


def test_an_error_inside_ends_the_forcing_too() -> None:
    with pytest.raises(KeyError), use("triton"):
        raise KeyError
    assert choose("gather_rows", torch.zeros(1, 4, 2)) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cuda",), "backend must be one of 'auto', 'torch', 'triton', 'xformers', got 'cuda'"),
        (("torch", "gather"), "unknown op gather; "),
        (("xformers", "gather_rows"), "xformers"),
    ],
)
def test_what_cannot_be_forced_is_refused_with_what_can(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        use(*arguments)


def test_a_forced_backend_that_cannot_serve_raises_and_says_what_can() -> None:
    index = torch.tensor([[0]])
    with use("triton"):
        with pytest.raises(ValueError, match=r"not torch.float64; torch can run it"):
            gather_rows(torch.zeros(1, 2, 3, dtype=torch.float64), index)
        if INTERPRETED:
            with pytest.raises(ValueError, match="interpreter computes wrongly in bfloat16"):
                gather_rows(torch.zeros(1, 2, 3, dtype=torch.bfloat16), index)


WITHOUT = """
import importlib.util, os, sys, torch

child = os.fork()
if child:
    os.waitpid(child, 0)
else:
    real = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if name == "triton" else real(name, *rest)
    sys.modules["triton"] = None
import mmod
from mmod.ops import gather_rows, use
print(gather_rows(torch.ones(1, 2, 3), torch.tensor([[0]])).sum().item(), flush=True)
try:
    with use("triton"):
        gather_rows(torch.zeros(1, 2, 3), torch.tensor([[0]]))
except ValueError as error:
    print(error, flush=True)
"""


def test_machines_without_triton_or_its_interpreter_run_and_refuse_kernels() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", WITHOUT]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    ran, no_triton, again, no_interpreter = done.stdout.splitlines()
    assert ran == again == "3.0"
    assert no_triton.startswith("triton is not installed; torch can run it")
    assert no_interpreter.startswith("gather_rows cannot run on triton")
    assert "TRITON_INTERPRET=1" in no_interpreter


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_the_choices_can_be_printed(device: str) -> None:
    text = choices(device, torch.bfloat16)
    assert all(any(line.startswith(op + ":") for line in text.splitlines()) for op in OPS)
    assert ("triton" in text) == (device == "cuda")


def test_a_choice_under_the_compiler_follows_what_is_forced() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return x + (2 if choose("gather_rows", x) is None else 1)

    compiled = torch.compile(branch, backend="eager", fullgraph=True)
    x = torch.zeros(1)
    assert compiled(x).item() == 2
    if INTERPRETED:
        with use("triton"):
            assert compiled(x).item() == 1
    assert compiled(x).item() == 2
