"""Every op is checked against float64 before it is timed, bounds count what must be moved, and killed runs go on."""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from mmod.io.store import STORE
from tools.benchmarks import suite
from tools.benchmarks.checks import WrongOutputError
from tools.benchmarks.command import main
from tools.benchmarks.models.benchmark import BenchmarkConfig, _Bench
from tools.benchmarks.ops import benchmark as op_benchmark
from tools.benchmarks.ops import case as op_case
from tools.benchmarks.ops.benchmark import OpBenchmarkConfig, _calls, check_case
from tools.benchmarks.ops.case import OpSize, Rates, Work
from tools.benchmarks.ops.cases import CASES, make_case
from tools.benchmarks.ops.cases.attention import packed_baselines
from tools.benchmarks.report import benchmark
from tools.benchmarks.suite import Criterion, State, SuiteConfig, SuiteFailedError, benchmark_suite

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TINY = OpSize(images=3, tokens=11, heads=2, head_channels=8, capacity=0.3)
SUITES = sorted((ROOT / "configs" / "benchmark").glob("*.yaml"))


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of suites run here, where tests change what they do; `test_gpu.py` has those in processes."""

    def run_part(member: Any, seconds: float, before: State, progress: bool) -> State:
        try:
            benchmark(member, progress)
        except Exception as error:
            return State("failed", f"{type(error).__name__}: {error}", 0.0, before.tries + 1)
        return State("done", "", 0.0, before.tries + 1)

    monkeypatch.setattr(suite, "_run_part", run_part)


@pytest.fixture
def small_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates mean nothing here, so their measurement may be quick."""
    for sizes in (op_case.COPIED_BYTES, op_case.FLUSHED_BYTES):
        monkeypatch.setitem(sizes, "cpu", 1 << 16)
    monkeypatch.setitem(op_case.PRODUCT_SIDE, "cpu", 16)


def config(tmp_path: Path, **options: Any) -> OpBenchmarkConfig:
    quick: dict[str, Any] = {"sizes": [TINY], "backends": ["auto", "torch"], "seconds": 0.0, "rounds": 2}
    return OpBenchmarkConfig(**{**quick, "out": str(tmp_path / "out"), **options})


def check(op: str, size: OpSize, dtype: torch.dtype, train: bool, backends: list[Any], compiled: bool = False) -> None:
    case = make_case(op, size, dtype, CPU)
    options = OpBenchmarkConfig(backends=backends, compiled=compiled)
    calls, left_out = _calls(options, op, case, case.learns if train else ())
    assert not left_out
    assert len(calls) == (len(backends) + len(case.baselines)) if not compiled else len(calls) > len(backends)
    check_case(op, case, calls, dtype, train)


@pytest.mark.parametrize("train", [False, True], ids=["forward", "train"])
@pytest.mark.parametrize("op", CASES)
def test_every_implementation_is_right(op: str, train: bool) -> None:
    sizes = [
        TINY,
        OpSize(images=1, tokens=1, heads=1, head_channels=4),
        OpSize(images=2, tokens=9, heads=3, head_channels=5, capacity=1.0),
    ]
    for size in sizes:
        check(op, size, torch.float32, train, ["auto", "torch"])
    check(op, TINY, torch.bfloat16, train, ["auto"])


@pytest.mark.parametrize("op", ["gather_rows", "merge_rows"])
def test_forced_kernels_are_checked_too(op: str) -> None:
    check(op, OpSize(images=1, tokens=5, heads=1, head_channels=8), torch.float32, True, ["triton"])


def test_compiled_forms_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    check("gather_rows", TINY, torch.float32, False, ["torch"], compiled=True)


@pytest.mark.parametrize(
    ("op", "target", "message"),
    [
        ("gather_rows", "tools.benchmarks.ops.cases.rows.gather_rows", "gather_rows by auto, result 0"),
        ("merge_rows", "mmod.ops.rows.lerp_rows", "merge_rows by torch, result 0|merge_rows by auto, result 0"),
    ],
)
@pytest.mark.usefixtures("small_probes")
def test_a_wrong_op_is_never_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, op: str, target: str, message: str
) -> None:
    right = pkgutil.resolve_name(target)
    monkeypatch.setattr(target, lambda *args, **inputs: right(*args, **inputs) * 1.001)
    monkeypatch.setattr(op_benchmark, "interleave", lambda *_, **__: pytest.fail("timed"))
    with pytest.raises(WrongOutputError, match=message):
        benchmark(config(tmp_path, ops=[op]), progress=False)
    assert not (tmp_path / "out").exists()


def test_wrong_gradients_are_found() -> None:
    case = make_case("gather_norm", TINY, torch.float32, CPU)
    calls, _ = _calls(OpBenchmarkConfig(backends=["torch"]), "gather_norm", case, case.learns)
    right = calls["torch"]
    off: dict[str, Any] = {"half": lambda: (*right()[:2], *(0.5 * gradient for gradient in right()[2:]))}
    with pytest.raises(WrongOutputError, match="gather_norm by half, result 2"):
        check_case("gather_norm", case, off, torch.float32, True)


@pytest.mark.usefixtures("small_probes")
def test_a_killed_benchmark_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = config(tmp_path, ops=["gather_rows", "merge_rows"], step=["forward"])
    run, measured = op_benchmark._run, []

    def killed_at_the_second(config: Any, op: str, *args: Any) -> Any:
        measured.append(op)
        if measured == ["gather_rows", "merge_rows"]:
            raise KeyboardInterrupt
        return run(config, op, *args)

    monkeypatch.setattr(op_benchmark, "_run", killed_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        benchmark(options, progress=False)
    unfinished = tmp_path / "out" / STORE
    unfinished.write_text(unfinished.read_text() + '{"run": "cut of')
    measured.clear()
    with pytest.raises(KeyboardInterrupt):
        benchmark(replace(options, rounds=3), progress=False)
    assert measured == ["gather_rows", "merge_rows"], "rows of other options are not its own"
    report = benchmark(options, progress=False)
    assert measured == ["gather_rows", "merge_rows", "merge_rows"], "the first run is not repeated"
    assert {row["op"] for row in report.rows} == {"gather_rows", "merge_rows"}
    assert not unfinished.exists()
    assert benchmark(options, progress=False).rows == report.rows
    assert len(measured) == 3, "a finished benchmark is read"


@pytest.mark.usefixtures("small_probes")
def test_rows_hold_bound_baseline_and_what_was_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    main(
        [
            "ops",
            "--ops=[packed_attention, attention_with_importance]",
            "--step=[forward]",
            "--dtypes=[bfloat16]",
            "--sizes=[{images: 2, tokens: 9, heads: 2, head_channels: 8}]",
            "--backends=[auto, triton]",
            "--seconds=0",
            "--rounds=2",
            f"--out={out}",
        ]
    )
    assert (out / "benchmark.md").read_text() in capsys.readouterr().out
    saved = json.loads((out / "benchmark.json").read_text())
    rows = {(row["op"], row["path"]): row for row in saved["rows"]}
    kernel = rows["packed_attention", "triton"]
    assert kernel["ms"] is None
    assert "bfloat16" in kernel["left_out"]
    assert any(note.startswith("Left out: packed_attention") for note in saved["notes"])
    timed = rows["packed_attention", "auto"]
    assert timed["baseline"] in packed_baselines([1], CPU, torch.float32)
    assert rows["attention_with_importance", "auto"]["baseline"] in ("attention alone", "map of all pairs")
    assert rows["packed_attention", "padded"]["baseline"] is None
    assert timed["of_bound"]["median"] > 0
    assert timed["extra_bytes"] >= 0


def test_bounds_count_what_must_be_moved_and_computed() -> None:
    size = OpSize(images=2, tokens=10, heads=2, head_channels=8, capacity=0.5)
    row, index = 16 * 2, 2 * 5 * 8
    works = {op: make_case(op, size, torch.bfloat16, CPU) for op in CASES}
    assert works["gather_rows"].forward == Work(2 * 2 * 5 * row + index)
    assert works["merge_rows"].forward == Work(2 * (2 * 10 + 5) * row + index + 2 * 5 * 4)
    assert works["attention_with_importance"].forward.flops == 4 * 2 * 2 * 10 * 10 * 8
    for op, case in works.items():
        tensors = [value for value in case.inputs.values() if isinstance(value, torch.Tensor)]
        assert 0 < case.forward.bytes <= 2 * (sum(t.nbytes for t in tensors) + 2 * 10 * row + 2 * 10 * 4), op
    rates = Rates(bytes=100.0, flops=1000.0)
    assert rates.bound_ms(Work(bytes=200, flops=1000)) == 2.0
    assert rates.limit(Work(bytes=200, flops=1000)) == "copy"
    assert rates.limit(Work(bytes=200, flops=3000)) == "matmul"


PART = OpBenchmarkConfig(out="a")
# What a config says, and what the message does.
REFUSED: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    (OpBenchmarkConfig, {"ops": ["gather"]}, r"unknown ops \['gather'\]; valid are attention_with_importance"),
    (OpBenchmarkConfig, {"sizes": []}, "sizes must name at least one value"),
    (OpSize, {"images": 1, "tokens": 0}, "tokens must be an integer of at least 1, got 0"),
    (
        Criterion,
        {"name": "both", "parts": ["a"], "column": "ms", "at_least": 1, "at_most": 2},
        "needs either at_least or at_most",
    ),
    (
        SuiteConfig,
        {"ops": [PART], "thresholds": [Criterion(name="b", parts=["a"], column="of_free", at_least=1)]},
        r"names columns \['of_free'\]; a has",
    ),
    (
        SuiteConfig,
        {"ops": [PART], "thresholds": [Criterion(name="b", parts=["b"], column="of_bound", at_least=1)]},
        "is set for 'b'; parts are a",
    ),
    (SuiteConfig, {"ops": [PART], "models": [BenchmarkConfig(out="a")]}, "each with an out folder of its own"),
]


@pytest.mark.parametrize(("config_class", "fields", "message"), REFUSED)
def test_config_names_what_is_wrong(config_class: Callable[..., object], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_class(**fields)


@pytest.mark.usefixtures("small_probes")
def test_a_suite_checks_thresholds_and_measures_no_part_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny_ops = config(tmp_path, ops=["gather_rows"], step=["forward"], out="ops")
    tiny_models = BenchmarkConfig(
        model="test_vit",
        model_args={"img_size": 64},
        routers=["linear"],
        capacities=[0.25],
        batch_sizes=[2],
        execution=["eager"],
        step=["train"],
        seconds=0,
        rounds=2,
        out="models",
    )
    thresholds = [
        Criterion(name="easy", parts=["ops"], where={"path": ["auto", "torch"]}, column="of_bound", at_least=0),
        Criterion(name="hard", parts=["models"], column="of_free", at_least=1000),
        Criterion(name="memory", parts=["models"], column="peak_of_bound", at_most=10),
        Criterion(name="elsewhere", parts=["ops"], where={"op": "merge_rows"}, column="of_bound", at_least=0),
    ]
    suite_config = SuiteConfig(ops=[tiny_ops], models=[tiny_models], thresholds=thresholds, out=str(tmp_path / "suite"))
    with monkeypatch.context() as patch:
        patch.setattr(_Bench, "run", mock.Mock(side_effect=RuntimeError("killed")))
        with pytest.raises(SuiteFailedError, match="models: RuntimeError: killed"):
            benchmark_suite(suite_config, progress=False)
    monkeypatch.setattr(op_benchmark, "interleave", lambda *_, **__: pytest.fail("measured twice"))
    report = benchmark_suite(suite_config, progress=False)
    verdicts = [(row["name"], row["verdict"]) for row in report.rows]
    assert verdicts[0] == ("easy", "met")
    assert verdicts[1][1].startswith("missed by ")
    assert verdicts[2:] == [("memory", "met"), ("elsewhere", "not measured")]
    assert (tmp_path / "suite" / "models" / "benchmark.md").exists()
    assert benchmark_suite(suite_config, progress=False).rows == report.rows
    with pytest.raises(ValueError, match="another config"):
        benchmark_suite(replace(suite_config, thresholds=thresholds[1:]), progress=False)


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_suites_are_read_strictly_and_name_their_command(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    suites: list[SuiteConfig] = []

    class Printed:
        def markdown(self) -> str:
            return ""

    monkeypatch.setattr("tools.benchmarks.suite.benchmark_suite", lambda config: suites.append(config) or Printed())
    main(["suite", "--config", str(path)])
    relative = path.relative_to(ROOT)
    assert f"python tools/benchmark.py suite --config {relative}" in path.read_text()
    assert [threshold.name for threshold in suites[0].thresholds] == [
        threshold["name"] for threshold in yaml.safe_load(path.read_text()).get("thresholds", [])
    ]
    assert suites[0].out == f"runs/benchmark/{path.stem}"
