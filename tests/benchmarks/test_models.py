"""Free routing is what it says, wrong paths are refused before anything is timed, and the tool runs."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st

import mmod
from mmod.analysis.memory import peak_bytes
from mmod.analysis.timing import Spread, interleave, ratios
from mmod.lab.thresholds import SLACK, match_topk_, threshold_between
from mmod.ops.select import Kept
from tests.kit.cover import in_turn
from tools.benchmarks.checks import WrongOutputError, check_dense, check_reference, clear_images
from tools.benchmarks.command import main
from tools.benchmarks.models.benchmark import BenchmarkConfig, _Bench
from tools.benchmarks.models.held import held_by_blocks
from tools.benchmarks.models.paths import control, free_routing, sharing_copy
from tools.benchmarks.models.variants import Step, check_compiled
from tools.benchmarks.report import benchmark

TINY: dict[str, Any] = {
    "model": "test_vit",
    "model_args": {"img_size": 64},
    "capacities": [0.25],
    "batch_sizes": [2],
    "execution": ["eager"],
    "step": ["forward"],
    "seconds": 0.0,
    "rounds": 2,
}


def routed(name: str = "test_vit", router: str = "linear", **arguments: Any) -> torch.nn.Module:
    model = timm.create_model(name, img_size=64, **arguments).eval()
    return mmod.route_(model, mmod.RoutingConfig(router=router, capacity=0.5))


@pytest.mark.parametrize("router", ["linear", "attention"])
def test_free_routing_runs_the_first_tokens_of_the_same_blocks(router: str) -> None:
    model = routed(router=router)
    free = free_routing(model)
    x = torch.randn(2, 17, 64)
    y = free.blocks[1](x)
    assert torch.equal(y[:, 8:], x[:, 8:])
    dense = mmod.unroute_(sharing_copy(model))
    assert torch.equal(y[:, :8], dense.blocks[1](x[:, :8]))
    assert type(free.blocks[0]) is type(dense.blocks[0]), "no importance is computed"
    assert all(a is b for a, b in zip(free.blocks[1].mlp.parameters(), model.blocks[1].mlp.parameters()))
    assert list(free.state_dict()) == list(dense.state_dict())
    assert mmod.is_routed(model)


def test_free_routing_cuts_rotary_embeddings() -> None:
    model = routed("vit_small_patch16_dinov3", depth=2)
    with torch.no_grad():
        assert free_routing(model)(torch.rand(1, 3, 64, 64)).isfinite().all()
        # Routing by a score that falls with the position keeps the first tokens, so it must agree with the slice.
        first = mmod.unroute_(sharing_copy(model))
        config = mmod.RoutingConfig(router=lambda x: -torch.arange(x.shape[1]).expand(x.shape[:2]), gate="identity")
        images = torch.rand(1, 3, 64, 64)
        assert torch.allclose(mmod.route_(first, config)(images), free_routing(model)(images), atol=1e-5)


def test_free_routing_refuses_thresholds() -> None:
    model = timm.create_model("test_vit")
    mmod.route_(model, mmod.RoutingConfig(router="norm", select="threshold"))
    with pytest.raises(ValueError, match="free routing needs a fixed number of tokens"):
        free_routing(model)


@pytest.mark.parametrize(
    ("router", "name"),
    in_turn(["linear", "attention", "norm", "random", "stride"], ["test_vit", "vit_small_patch16_dinov3"]),
)
def test_right_models_pass(router: str, name: str) -> None:
    model = routed(name, router, **({} if name == "test_vit" else {"depth": 4}))
    images = clear_images(model, lambda count: torch.randn(count, 3, 64, 64), 2)
    check_dense(model, images)
    check_reference(model, images)


def test_models_that_scale_skipped_tokens_pass() -> None:
    model = timm.create_model("test_vit", img_size=64).eval()
    mmod.route_(model, mmod.RoutingConfig(router="linear", gate="tanh", skipped="scale"))
    check_dense(model, torch.randn(2, 3, 64, 64))


def _shift_rows(x_BND: torch.Tensor, index_BK: torch.Tensor, y_BKD: torch.Tensor, *_: Any) -> torch.Tensor:
    return x_BND.scatter(1, index_BK.unsqueeze(-1).expand_as(y_BKD), y_BKD.roll(1, dims=1))


def _off_by_one(score_BN: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[Kept, None]:
    order = score_BN.argsort(dim=1, descending=True)[:, 1:9]
    return Kept(order.sort(dim=1).values), None


@pytest.mark.parametrize(
    ("target", "wrong", "message"),
    [
        ("mmod.blocks.rows.put_rows", _shift_rows, "capacity 1 and gate 1 against dense"),
        ("mmod.routing.router.sort_topk", _off_by_one, "against dense|by its scores it must keep"),
        ("mmod.blocks.rows.lerp_rows", lambda z, y, gate: y, "against a loop over images|against a single image's"),
    ],
)
def test_a_wrong_path_is_never_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str, wrong: Any, message: str
) -> None:
    monkeypatch.setattr(target, wrong)
    monkeypatch.setattr("mmod.analysis.timing._time_on_cpu", lambda *_: pytest.fail("timed"))
    # A gate far from 1, so that leaving it out shows.
    monkeypatch.setattr("mmod.routing.score.linear.near_dense_std", lambda dim, scale: 0.5)
    with pytest.raises(WrongOutputError, match=message):
        benchmark(BenchmarkConfig(**TINY, routers=["linear"], out=str(tmp_path)), progress=False)
    assert not list(tmp_path.iterdir())


def test_wrong_importance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = routed(router="attention")
    images = clear_images(model, lambda count: torch.randn(count, 3, 64, 64), 2)
    check_reference(model, images)
    from mmod.ops import importance

    right = importance.attend_and_sum
    monkeypatch.setattr(
        importance, "attend_and_sum", lambda q, k, *args: (right(q, k, *args)[0], right(k, q, *args)[1])
    )
    with pytest.raises(WrongOutputError, match=r"the scores of blocks\.1"):
        check_reference(model, images)


@pytest.mark.parametrize("step", ["forward", "train"])
def test_wrong_compilation_is_refused(step: str) -> None:
    model, images = routed(), torch.randn(2, 3, 64, 64)
    eager, compiled = Step(model, step, "eager"), Step(model, step, "eager")
    check_compiled("linear", compiled, eager, images)
    compiled.forward = lambda x: model(x) * 1.01
    with pytest.raises(WrongOutputError, match="linear, compiled against eager"):
        check_compiled("linear", compiled, eager, images)
    if step == "train":
        compiled.forward = lambda x: model(x).lerp(model(x).detach(), 0.5)
        with pytest.raises(WrongOutputError, match="the gradient of"):
            check_compiled("linear", compiled, eager, images)


def test_an_exported_step_is_the_eager_one() -> None:
    model, images = routed(), torch.randn(2, 3, 64, 64)
    exported = Step(model, "forward", "exported")
    check_compiled("linear", exported, Step(model, "forward", "eager"), images)
    assert isinstance(exported.forward.program, torch.fx.GraphModule)  # type: ignore[attr-defined]


def test_unclear_images_are_left_out() -> None:
    model = timm.create_model("test_vit", img_size=64).eval()
    mmod.route_(model, mmod.RoutingConfig(router=lambda x: torch.ones(x.shape[:2]), gate="identity"))
    with pytest.raises(ValueError, match="only 0 of 4 random images are routed clearly"):
        clear_images(model, lambda count: torch.randn(count, 3, 64, 64), 2, attempts=2)


def test_the_command_prints_a_table_and_overwrites_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = [
        "models",
        "--model=test_vit",
        "--model_args={img_size: 64}",
        "--batch_sizes=[2]",
        "--capacities=[0.5]",
        "--execution=[eager]",
        "--seconds=0",
        "--rounds=2",
        f"--out={out}",
    ]
    main(arguments)
    printed = capsys.readouterr()
    assert (out / "benchmark.md").read_text() in printed.out
    saved = json.loads((out / "benchmark.json").read_text())
    assert saved["config"]["batch_sizes"] == [2]
    assert saved["environment"]["torch"] == torch.__version__
    runs = {(row["batch_size"], row["step"], row["router"]) for row in saved["rows"]}
    assert runs == {(b, s, r) for b in (2,) for s in ("forward", "train") for r in ("linear", "attention")}
    for row in saved["rows"]:
        assert row["of_flops"] == pytest.approx(row["speedup"]["median"] / row["flop_speedup"])
    monkeypatch.setattr(_Bench, "run", mock.Mock(side_effect=AssertionError("timed again")))
    main(arguments)
    assert capsys.readouterr().out == printed.out
    with pytest.raises(ValueError, match=r"config\.seed: 0 there, 1 now"):
        main([*arguments, "--seed=1"])


def test_half_precision_runs(tmp_path: Path) -> None:
    report = benchmark(BenchmarkConfig(**TINY, routers=["linear"], dtype="bfloat16", out=str(tmp_path)), progress=False)
    assert len(report.rows) == 1


def test_every_selection_and_context_is_timed_against_its_own_ceiling(tmp_path: Path) -> None:
    config = BenchmarkConfig(
        **{**TINY, "step": ["train"]},
        routers=["attention"],
        select=["topk", "threshold"],
        context=["kept", "all"],
        out=str(tmp_path),
    )
    rows = {(row["select"], row["context"]): row for row in benchmark(config, progress=False).rows}
    assert len(rows) == 4
    for (select, context), row in rows.items():
        assert row["kept"] == 4.0, "the threshold keeps as many tokens as top-k"
        assert (row["of_topk"] is None) == (select == "topk")
        assert (row["peak_bound"] is None) == (context == "all")
        assert row["flop_speedup"] == rows["topk", context]["flop_speedup"]
    assert rows["topk", "all"]["flop_speedup"] < rows["topk", "kept"]["flop_speedup"]
    assert rows["topk", "all"]["free_ms"] != rows["topk", "kept"]["free_ms"]


def test_routings_by_name_are_timed_against_free_routing_of_as_many_rows(tmp_path: Path) -> None:
    routings: dict[str, dict[str, Any]] = {
        "gradual": {"preset": "gradual", "mean": 0.6},
        "late": {"router": "redundancy", "skipped": "merge", "blocks": "late", "capacity": 0.5},
        "late attention": {"router": "attention", "blocks": "late", "capacity": 0.5},
    }
    model = {"model": "vit_tiny_patch16_224", "model_args": {"img_size": 64, "depth": 4}}
    config = BenchmarkConfig(**{**TINY, **model}, routers=[], routings=routings, out=str(tmp_path))
    rows = {row["router"]: row for row in benchmark(config, progress=False).rows}
    assert list(rows) == list(routings)
    assert rows["late"]["free_ms"] == rows["late attention"]["free_ms"] != rows["gradual"]["free_ms"]
    assert rows["gradual"]["flop_speedup"] > 1


def test_free_blocks_of_a_span_slice_once_and_return_all_tokens() -> None:
    x = torch.randn(2, 17, 64)
    model = timm.create_model("test_vit", img_size=64).eval()
    mmod.route_(model, mmod.RoutingConfig(router="attention", capacity=(0.5, 0.25), blocks=(3, 4)))
    free = free_routing(model)
    first = free.blocks[3](x)
    assert first.shape == (2, 8, 64)
    out = free.blocks[4](first)
    dense = mmod.unroute_(sharing_copy(model))
    assert torch.equal(out[:, 8:], x[:, 8:])
    assert torch.equal(out[:, 4:8], first[:, 4:])
    assert torch.equal(out[:, :4], dense.blocks[4](first[:, :4]))


def test_controls_apply_the_same_decisions(tmp_path: Path) -> None:
    model = routed("vit_tiny_patch16_224", depth=2)
    images = clear_images(model, lambda count: torch.randn(count, 3, 64, 64), 2)
    with torch.no_grad():
        for path in ("loop", "masked"):
            assert torch.allclose(control(model, path)(images), model(images), atol=1e-5)
        dense = mmod.unroute_(sharing_copy(model))
        dense.blocks = dense.blocks[:1]
        assert torch.equal(control(model, "removed")(images), dense(images))
    with pytest.raises(ValueError, match="path must be one of 'loop', 'masked', 'removed', got 'skip'"):
        control(model, "skip")
    report = benchmark(
        BenchmarkConfig(**TINY, routers=["linear"], controls=["loop", "masked", "removed"], out=str(tmp_path)), False
    )
    speedups = {row["path"]: row["flop_speedup"] for row in report.rows}
    assert speedups["masked"] < 1.01 < speedups["routed"] == speedups["loop"] < speedups["removed"]


@given(
    level=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=60, unique=True),
    share=st.floats(0, 1),
)
def test_a_threshold_lies_between_levels_and_keeps_the_count(level: list[float], share: float) -> None:
    count = round(share * len(level))
    threshold = threshold_between(torch.tensor(level), count)
    assert abs(sum(value >= threshold for value in level) - count) <= int(count * SLACK)


def test_calibration_sets_a_static_maximum_that_loses_nothing() -> None:
    model = timm.create_model("test_vit", img_size=64).eval()
    mmod.route_(model, mmod.RoutingConfig(router="norm", select="threshold", capacity=0.4))
    images = torch.randn(8, 3, 64, 64)
    counts = []
    for static in (False, True):
        match_topk_(model, images, static)
        with torch.no_grad(), mmod.trace(model) as decisions:
            model(images)
        counts.append(torch.stack([routing.keep_BN.sum(dim=1) for routing in decisions.values()]))
    assert torch.equal(*counts)
    assert bool((counts[0].double().mean(dim=1) == 6).all()), "floor(0.4 * 17) tokens of an image"
    most = [block.router.config.select.max_tokens for block in mmod.routed_blocks(model).values()]
    assert most == counts[1].amax(dim=1).tolist()


def test_memory_is_watched_inside_ops_and_held_by_blocks() -> None:
    x = torch.zeros(1 << 10)
    assert peak_bytes(lambda: ((x + 1) * 2).sum(), torch.device("cpu")) == pytest.approx(8192, abs=64)
    collects: list[bool] = []
    gc.enable()
    # What Python frees of others would be taken for freed by the function.
    peak_bytes(lambda: collects.append(gc.isenabled()), torch.device("cpu"))
    collects.append(gc.isenabled())
    gc.disable()
    assert collects == [False, True]
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2)
    tokens = 2 * 17 * 192 * 4
    held = held_by_blocks(model, torch.randn(2, 3, 64, 64))
    assert list(held) == ["blocks.0", "blocks.1"]
    for block in held.values():
        assert block.stream == tokens
        # Norms 2, queries, keys and values 3, attention, projection and its sum 3, MLP 8; statistics are small.
        assert block.block == pytest.approx(16 * tokens, rel=0.02)
    assert model.training


def test_config_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="'cudagraphs' needs device 'cuda', got 'cpu'"):
        BenchmarkConfig(execution=["eager", "cudagraphs"])
    with pytest.raises(ValueError, match="'exported' is inference alone: set step to \\['forward'\\]"):
        BenchmarkConfig(execution=["exported"])
    with pytest.raises(ValueError, match="routers must name at least one value"):
        BenchmarkConfig(routers=[])
    with pytest.raises(ValueError, match=r"batch_sizes .* of at least 1, got \[0\]"):
        BenchmarkConfig(batch_sizes=[0])


def test_rounds_are_interleaved_and_ratios_paired() -> None:
    calls: list[str] = []
    functions = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    times = interleave(functions, seconds=0.0, rounds=8, device=torch.device("cpu"), warmup=1)
    rounds = [calls[i : i + 2] for i in range(0, len(calls), 2)]
    assert all(sorted(pair) == ["a", "b"] for pair in rounds)
    assert len({tuple(pair) for pair in rounds}) == 2, "the order changes"
    assert len(times["a"]) == len(times["b"]) == 8
    assert ratios([2.0, 4.0, 9.0], [1.0, 1.0, 3.0]) == Spread(3.0, 2.5, 3.5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a GPU that is not there")
def test_a_gpu_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'cuda' was asked for and torch sees no GPU"):
        benchmark(BenchmarkConfig(device="cuda", out=str(tmp_path)))
