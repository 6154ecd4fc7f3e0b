"""Free routing is what it says, wrong paths are refused before anything is timed, and the tool runs."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import mmod
from mmod.measuring import BenchmarkConfig, WrongOutputError, benchmark, check_dense, check_reference, free_routing
from mmod.measuring.free import sharing_copy
from mmod.measuring.latency import Spread, interleave, ratios
from mmod.measuring.report import markdown_table
from mmod.measuring.steps import Step, check_compiled
from mmod.measuring.verify import clear_images

TOOL = Path(__file__).parents[2] / "tools" / "benchmark.py"
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


@pytest.mark.parametrize("router", ["linear", "attention", "norm", "random", "stride"])
@pytest.mark.parametrize("name", ["test_vit", "vit_small_patch16_dinov3"])
def test_right_models_pass(name: str, router: str) -> None:
    model = routed(name, router, **({} if name == "test_vit" else {"depth": 4}))
    images = clear_images(model, lambda count: torch.randn(count, 3, 64, 64), 2)
    check_dense(model, images)
    check_reference(model, images)


def _shift_rows(x_BND: torch.Tensor, index_BK: torch.Tensor, y_BKD: torch.Tensor) -> torch.Tensor:
    return x_BND.scatter(1, index_BK.unsqueeze(-1).expand_as(y_BKD), y_BKD.roll(1, dims=1))


def _off_by_one(score_BN: torch.Tensor, *args: Any) -> tuple[torch.Tensor, None]:
    order = score_BN.argsort(dim=1, descending=True)[:, 1:9]
    return order.sort(dim=1).values, None


@pytest.mark.parametrize(
    ("target", "wrong", "message"),
    [
        ("mmod.blocks.routed.scatter_rows", _shift_rows, "capacity 1 and gate 1 against dense"),
        ("mmod.routing.router.select_topk", _off_by_one, "against dense|by its scores it must keep"),
        ("mmod.blocks.routed.lerp_rows", lambda z, y, gate: y, "against a loop over images|against a single image's"),
    ],
)
def test_a_wrong_path_is_never_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str, wrong: Any, message: str
) -> None:
    monkeypatch.setattr(target, wrong)
    monkeypatch.setattr("mmod.measuring.latency._time_on_cpu", lambda *_: pytest.fail("timed"))
    # A gate far from 1, so that leaving it out shows.
    monkeypatch.setattr("mmod.routing.router.near_dense_std", lambda dim, scale: 0.5)
    with pytest.raises(WrongOutputError, match=message):
        benchmark(BenchmarkConfig(**TINY, routers=["linear"], out=str(tmp_path)), progress=False)
    assert not list(tmp_path.iterdir())


def test_wrong_importance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = routed(router="attention")
    images = clear_images(model, lambda count: torch.randn(count, 3, 64, 64), 2)
    check_reference(model, images)
    from mmod.ops import importance

    right = importance._shared_probabilities
    monkeypatch.setattr(
        importance, "_shared_probabilities", lambda q, k, v, scale: (right(q, k, v, scale)[0], right(k, q, v, scale)[1])
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


def test_unclear_images_are_left_out() -> None:
    model = timm.create_model("test_vit", img_size=64).eval()
    mmod.route_(model, mmod.RoutingConfig(router=lambda x: torch.ones(x.shape[:2]), gate="identity"))
    with pytest.raises(ValueError, match="only 0 of 4 random images are routed clearly"):
        clear_images(model, lambda count: torch.randn(count, 3, 64, 64), 2, attempts=2)


def test_the_tool_prints_a_table_and_overwrites_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(TOOL))["main"]
    out = tmp_path / "out"
    arguments = [
        "--model=test_vit", "--model_args={img_size: 64}", "--batch_sizes=[1, 2]", "--capacities=[0.5]",
        "--execution=[eager]", "--seconds=0", "--rounds=2", f"--out={out}",
    ]  # fmt: skip
    main(arguments)
    printed = capsys.readouterr()
    assert "run/s" in printed.err or "s/run" in printed.err
    assert (out / "benchmark.md").read_text() in printed.out
    saved = json.loads((out / "benchmark.json").read_text())
    assert saved["config"]["batch_sizes"] == [1, 2]
    assert saved["environment"]["torch"] == torch.__version__
    runs = {(row["batch_size"], row["step"], row["router"]) for row in saved["rows"]}
    assert runs == {(b, s, r) for b in (1, 2) for s in ("forward", "train") for r in ("linear", "attention")}
    for row in saved["rows"]:
        assert row["of_flops"] == pytest.approx(row["speedup"]["median"] / row["flop_speedup"])
    with pytest.raises(FileExistsError, match=r"benchmark\.json exists"):
        main(arguments)


def test_half_precision_runs(tmp_path: Path) -> None:
    report = benchmark(BenchmarkConfig(**TINY, dtype="bfloat16", out=str(tmp_path)), progress=False)
    assert len(report.rows) == 2


def test_config_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="routers must name at least one value"):
        BenchmarkConfig(routers=[])
    with pytest.raises(ValueError, match="batch_sizes must be positive, got \\[0\\]"):
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
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        interleave(functions, seconds=0.0, rounds=0, device=torch.device("cpu"))


def test_tables_line_up() -> None:
    lines = markdown_table(["name", "ms"], [["dense", "12.0"], ["a", "3.0"]]).splitlines()
    assert lines[0] == "| name  |   ms |"
    assert len({len(line) for line in lines}) == 1
