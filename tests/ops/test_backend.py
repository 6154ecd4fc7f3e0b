from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mmod.ops import Backend, attention_with_importance, choices, gather_rows, packed_attention, use
from mmod.ops import backend as backend_module
from mmod.ops.backend import OPS, Version, choose, register
from tests.ops.kernels import INTERPRETED

ROOT = Path(__file__).parents[2]


def on_gpu(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a tensor that says it is on a GPU, whether there is one or not."""
    with FakeTensorMode():
        return torch.empty(2, 9, 8, dtype=dtype, device="cuda")


@pytest.mark.parametrize("op", OPS)
def test_a_cpu_runs_torch(op: str) -> None:
    assert choose(op, torch.zeros(1, 2, 3), rows=1, images=1).backend is Backend.TORCH


@pytest.mark.parametrize("op", OPS)
def test_every_choice_is_one_that_can_serve(op: str) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        chosen = choose(op, on_gpu(dtype), tokens=9, channels=8, head_dim=8, rows=9, images=1)
        assert chosen in (*OPS[op].kernels, *OPS[op].plain)
        assert chosen.dtypes is None or dtype in chosen.dtypes


def test_a_gpu_runs_kernels_up_to_their_limits() -> None:
    assert choose("select_topk", on_gpu(), tokens=8192).backend is Backend.TRITON
    assert choose("select_topk", on_gpu(), tokens=8193).backend is Backend.TORCH
    assert choose("gather_norm", on_gpu(torch.float64), channels=8).backend is Backend.TORCH


def test_rows_are_left_to_the_compiler_and_exported_programs_to_torch() -> None:
    def move(x: torch.Tensor) -> torch.Tensor:
        return x + (1 if choose("merge_rows", x).backend is Backend.TRITON else 2)

    with FakeTensorMode():
        x = torch.empty(2, 9, 8, device="cuda")
        assert choose("merge_rows", x).backend is Backend.TRITON
        graphs: list[torch.fx.GraphModule] = []

        def keep(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> torch.fx.GraphModule:
            graphs.append(graph)
            return graph

        torch.compile(move, backend=keep, fullgraph=True)(x)
    assert [node.args[1] for node in graphs[0].graph.nodes if node.op == "call_function"] == [2]


def test_every_version_says_how_and_every_preferred_kernel_why() -> None:
    for op in OPS.values():
        assert all(version.how for version in (*op.kernels, *op.plain))
        assert all(version.why for version in op.kernels if version.auto != ())


def test_an_op_registers_once_and_serves_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_module, "OPS", {})
    kernel = Version(torch.neg, "a kernel", Backend.TRITON, (torch.float32,), why="it is quicker")
    with pytest.raises(ValueError, match="must use torch operations and support every input"):
        register("negate", kernel, Version(torch.neg, "torch's neg", dtypes=(torch.float32,)))
    register("negate", kernel, Version(torch.neg, "torch's neg"))
    assert choices("cpu") == "negate: torch (torch's neg)"
    assert choose("negate", torch.ones(1)).run(torch.ones(1)).item() == -1
    with pytest.raises(ValueError, match="'negate' is already registered"):
        register("negate", Version(torch.neg, "torch's neg"))


def test_a_forced_backend_holds_for_the_named_ops_only_and_ends_with_its_context() -> None:
    x = torch.zeros(1, 4, 2)
    with use("triton", "select_topk"):
        assert choose("gather_rows", x).backend is Backend.TORCH
        with use(Backend.TORCH):
            assert choose("select_topk", x).backend is Backend.TORCH
        if INTERPRETED:
            assert choose("select_topk", x).backend is Backend.TRITON
        with use("auto"):
            assert choose("select_topk", x).backend is Backend.TORCH
    assert choose("select_topk", x).backend is Backend.TORCH


def test_an_error_inside_ends_the_forcing_too() -> None:
    with pytest.raises(KeyError), use("triton"):
        raise KeyError
    assert choose("gather_rows", torch.zeros(1, 4, 2)).backend is Backend.TORCH


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cuda",), "valid are auto, torch, triton, xformers"),
        (("torch", "gather"), "valid are size_groups"),
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


def test_a_cpu_without_the_interpreter_refuses_kernels() -> None:
    code = (
        "import torch, mmod\n"
        "from mmod.ops import gather_rows, use\n"
        "with use('triton'): gather_rows(torch.zeros(1, 2, 3), torch.tensor([[0]]))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert "ValueError: gather_rows cannot run on triton" in done.stderr
    assert "TRITON_INTERPRET=1" in done.stderr


def test_machines_without_triton_import_and_run() -> None:
    code = (
        "import importlib.util, sys\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'triton' else real(name, *rest)\n"
        "sys.modules['triton'] = None\n"
        "import torch, mmod\n"
        "from mmod.ops import gather_rows, use\n"
        "print(gather_rows(torch.ones(1, 2, 3), torch.tensor([[0]])).sum().item())\n"
        "use('triton')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "3.0\n"
    assert "ValueError: triton is not installed; torch can run it" in done.stderr


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_the_choices_can_be_printed(device: str) -> None:
    text = choices(device, torch.bfloat16)
    assert all(any(line.startswith(op + ":") for line in text.splitlines()) for op in OPS)
    assert ("triton" in text) == (device == "cuda")


def test_what_is_printed_as_the_choice_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def noted(version: Version) -> Version:
        return version._replace(run=lambda *args: ran.append(version.how) or version.run(*args))

    for name, op in OPS.items():
        monkeypatch.setitem(OPS, name, op._replace(plain=tuple(map(noted, op.plain))))
    q, rows, ends = torch.randn(1, 2, 40, 8), torch.randn(40, 2, 8), torch.tensor([0, 40])
    for run, how in (
        (lambda: attention_with_importance(q, q, q), "one map in tiles for output and importance"),
        (lambda: attention_with_importance(q, q, q, dropout=0.1), "fused attention, and the map again in tiles"),
        (
            lambda: packed_attention(rows, rows, rows, ends, 40),
            "a call of fused attention for each image",
        ),
        (lambda: gather_rows(rows, torch.tensor([[0]] * 40)), "copies of rows"),
        (lambda: gather_rows(rows.transpose(1, 2), torch.tensor([[0]] * 40)), "torch's gather"),
    ):
        run()
        assert ran.pop() == how
        assert f"({how})" in choices("cpu")


def test_a_choice_under_the_compiler_follows_what_is_forced() -> None:
    def branch(x: torch.Tensor) -> torch.Tensor:
        return x + (1 if choose("gather_rows", x).backend is Backend.TRITON else 2)

    compiled = torch.compile(branch, backend="eager", fullgraph=True)
    x = torch.zeros(1)
    assert compiled(x).item() == 2
    if INTERPRETED:
        with use("triton"):
            assert compiled(x).item() == 1
    assert compiled(x).item() == 2
