"""Studies with baselines of routing: what is compared, at which learning rate, and what may be said of it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmod import preset
from mmod.analysis.table import Measured
from mmod.io.jobs import Runner
from mmod.io.store import Store
from mmod.studies.candidates import comparison_of
from mmod.studies.kind_configs import ImageStudyConfig
from mmod.studies.rates import Rates, best_rates
from mmod.studies.report import epochs_of
from mmod.studies.runs import Run
from mmod.studies.study import run_study
from tests.kit.fitted import count_candidates_once
from tests.kit.image_study import DENSE
from tests.kit.sets import SETS

BASELINES: dict[str, dict[float, dict[str, Any]]] = {
    "prune": {0.5: {"kind": "prune", "keep": 0.5, "blocks": [1], "fuse": False}},
    "merge": {0.5: {"kind": "merge", "r": 3}},
    "exit": {0.5: {"kind": "exit", "confidence": 0.105, "blocks": [0, 1]}},
    "resolution": {0.5: {"kind": "resolution", "image_size": 24}},
    "narrow": {0.5: {"kind": "smaller", "args": {"embed_dim": 12}}},
    "recursions": {0.5: {"kind": "recursions", "recursions": 2}},
}
# Trained from scratch, for as long as the others in all.
ANEW = ("narrow-0.5", "recursions-0.5")


@pytest.fixture(autouse=True)
def counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count_candidates_once(monkeypatch)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> ImageStudyConfig:
    folder = tmp_path_factory.mktemp("study")
    (folder / "dense.yaml").write_text(yaml.safe_dump(DENSE))
    return ImageStudyConfig(
        output=str(folder / "out"),
        dense=str(folder / "dense.yaml"),
        finetune={"epochs": 1},
        maps=0,
        changes={"epoch_steps": 1, "data": {"root": str(SETS / "digits"), "val_split": "test"}},
        baselines=BASELINES,
        routers={"random": {"router": "random"}},
        latency_batch=16,
        latency_batches=[1, 8],
        latency_rounds=2,
    )


def test_baselines_are_tuned_costed_timed_and_compared(study: ImageStudyConfig) -> None:
    result = run_study(study, progress=False)
    rows = {point.name: point.row() for point in result.points}
    assert list(rows) == ["dense", "random-0.5", *(f"{name}-0.5" for name in BASELINES)]
    for name, row in rows.items():
        assert min(row[key] for key in ("latency_ms", "latency_ms_b1", "latency_ms_b8", "speedup_b8", "peak_mb")) > 0
        assert name == "dense" or 0 < row["gflops"] < rows["dense"]["gflops"]
        assert ("before" in row) == (name not in ANEW)
        for size, ms in ((8, "latency_ms_b8"), (16, "latency_ms")):
            baseline = row[f"baseline_b{size}"]
            if baseline is not None:
                assert baseline not in (name, "random-0.5", "recursions-0.5")
                assert rows[baseline][ms] <= 1.02 * row[ms]
                assert row[f"to_baseline_b{size}"].value == pytest.approx(row["top1"] - rows[baseline]["top1"])
    # Baselines are named as equal to the routed model, and some are not.
    least = 0.95 * rows["random-0.5"]["gflops"]
    told = result.table.partition("Cheaper than the routed models that they are matched to: ")[2].partition(". They")[0]
    cheaper = {f"{name}-0.5" for name in BASELINES if rows[f"{name}-0.5"]["gflops"] < least} - {"recursions-0.5"}
    assert {text.split(" (")[0] for text in told.split("), ")} == cheaper
    assert cheaper
    assert "of FLOPs; of baselines, those of the routed models that they are matched to" in result.table
    assert 0 < rows["exit-0.5"]["kept"] < 1
    assert "ms / image b1" in result.table
    assert result.table.count(" 1 + 1 |") == len(rows) - len(ANEW)
    # Said once, and not of each size of batch.
    assert result.table.count("Nothing is advised: the dense model is hardly better than chance") == 1
    assert re.search(
        r"Images: digits:tiny, split '\w+', 32 px; \d+ % of patches are flat.*One seed: ", result.table, re.DOTALL
    )


def test_a_missing_checkpoint_of_a_baseline_ends_the_study_before_its_first_run(study: ImageStudyConfig) -> None:
    small = {0.5: {"kind": "smaller", "args": {"depth": 2}, "checkpoint": "runs/none"}}
    config = dataclasses.replace(study, output=f"{study.output}-missing", baselines={"small": small})
    with pytest.raises(FileNotFoundError, match="no checkpoint at 'runs/none'"):
        run_study(config, progress=False)
    assert not Path(config.output).exists()


def test_a_smaller_model_without_a_checkpoint_is_trained_from_scratch(study: ImageStudyConfig) -> None:
    settings = {"kind": "smaller", "args": {"depth": 2}}
    found = []
    for checkpoint in ({}, {"checkpoint": None}):
        config = dataclasses.replace(study, baselines={"small": {0.5: {**settings, **checkpoint}}})
        found.append(comparison_of(config).candidates[-1])
    # As many epochs as the dense model and its fine-tuning, and not those of fine-tuning random weights.
    assert found[0] == found[1]
    assert found[0].from_scratch


def test_series_say_what_differs_in_their_runs(study: ImageStudyConfig) -> None:
    tuned = {"preset": "mindskip", "depth": 4, "changes": {"trained": "routers", "optim": {"lr": 0.5}}}
    config = dataclasses.replace(
        study,
        routers={"tuned": tuned, "still": {"router": "coin", "select": "threshold", "tune": False}},
        baselines={
            "small": {0.5: {"kind": "smaller", "args": {"img_size": 24}, "changes": {"data": {"image_size": 24}}}},
            **BASELINES,
            "merge": {0.5: {**BASELINES["merge"][0.5], "tune": False}},
        },
        controls={"tuned": "still", "still": False, "small": "recursions"},
        tune="others",
    )
    comparison = comparison_of(config)
    candidates = comparison.candidates
    jobs = comparison.runs()
    runs = {job.name: job.training for job in jobs}
    assert {candidate.name: candidate.control for candidate in candidates if candidate.control} == {
        "tuned-0.5": "still-0.5",
        "small-0.5": "recursions-0.5",
    }
    trained = ("tuned-0.5", "still-0.5", "small-0.5", "recursions-0.5", "merge-0.5")
    epochs = {job.name: epochs_of(job, 1) for job in jobs}
    assert [epochs[name] for name in trained] == ["1 + 1 (routers)", "1", "2", "2", "1"]
    assert [job.name for job in jobs if not job.is_trained] == ["still-0.5", "merge-0.5"]
    assert (runs["tuned-0.5"].trained, runs["tuned-0.5"].optim.lr) == ("routers", 0.5)
    assert runs["merge-0.5"].optim == runs["dense"].optim != runs["tuned-0.5"].optim
    assert (runs["small-0.5"].data.image_size, runs["dense"].data.image_size) == (24, 32)
    assert runs["small-0.5"].model.args == {**runs["dense"].model.args, "img_size": 24}
    assert {name: run.model.has_weights for name, run in runs.items() if name in ANEW} == dict.fromkeys(ANEW, False)


def test_a_study_of_what_starts_from_scratch_alone_trains_all_as_long(study: ImageStudyConfig) -> None:
    baselines = {name: BASELINES[name] for name in ("narrow", "recursions")}
    scratch: dict[str, Any] = {"routers": {}, "tune": False, "baselines": baselines}
    jobs = comparison_of(dataclasses.replace(study, **scratch)).runs()
    assert [job.name for job in jobs] == ["dense", *ANEW]
    assert all(job.is_trained and not job.is_tuned for job in jobs)
    assert {epochs_of(job, 1) for job in jobs} == {"1"}


def test_each_model_gets_the_rate_that_was_best_on_the_validation_split(study: ImageStudyConfig) -> None:
    few = {name: BASELINES[name] for name in ("merge", "narrow")}
    searched = dataclasses.replace(
        study,
        output=f"{study.output}-rates",
        baselines=few,
        routers={},
        rates=[1.0, 2.0],
        seeds=2,
        before=False,
        latency_batches=[8],
    )
    result = run_study(searched, progress=False)
    rates = json.loads((result.folder / "tradeoff.json").read_text())["rates"]
    assert list(rates) == [point.name for point in result.points]
    for name, rate in rates.items():
        tried = {factor: _result(result.folder / f"rates/{name}-{factor:g}") for factor in (1.0, 2.0)}
        assert tried[rate] == max(tried.values())
        run, trial = (
            yaml.safe_load((result.folder / place / "config.yaml").read_text())
            for place in (f"seed1/{name}", f"rates/{name}-2")
        )
        assert run["optim"]["lr"] == pytest.approx(rate * 1e-3)
        assert (run["data"]["val_split"], trial["data"]["val_split"]) == ("test", "val")

    finished = {path: path.stat().st_mtime_ns for path in result.folder.rglob("result.json")}
    again = run_study(searched, progress=False)
    assert [point.figures for point in again.points] == [point.figures for point in result.points]
    assert {path: path.stat().st_mtime_ns for path in result.folder.rglob("result.json")} == finished


_FIT = {"preset": "a-mod", "budgets": {0.7: {"capacity": "fit"}}}
_FEATURES = {"distill": {"features": 1.0}}


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        # Shallow models are as near as possible to routed ones whose numbers are fitted.
        ({"routers": {"a": _FIT}, "isoflop": "scratch"}, ["a-0.7", "shallow-3-blocks"]),
        # A model of one block is no model at the budget 1.
        (
            {
                "routers": {"a": {"router": "norm", "blocks": "all", "budgets": {0.3: {"capacity": 0.1}}}},
                "isoflop": "scratch",
            },
            ["a-0.11", "shallow-1-blocks"],
        ),
        # What only trained weights can have is counted before there are any.
        (
            {"routers": {"a": {**_FIT, "changes": {"trained": "routers"}}}, "isoflop": "scratch"},
            ["a-0.7", "shallow-3-blocks"],
        ),
        ({"routers": {"a": {**_FIT, "changes": {"distill": {"teacher": "dense"}}}}}, ["a-0.7"]),
        ({"routers": {"a": {**_FIT, "changes": _FEATURES}}}, ["a-0.7"]),
        ({"routers": {"a": {"router": "norm"}}, "finetune": {"distill": {"teacher": "dense"}}}, ["a-0.5"]),
        # Evaluated it is the dense model, and no other is as cheap.
        (
            {
                "routers": {"a": {"router": "random", "blocks": "all", "capacity": 0.1, "training_only": True}},
                "isoflop": "scratch",
            },
            ["a"],
        ),
        # A series has a name at each of its budgets, whether or not they share a capacity.
        (
            {
                "routers": {
                    "a": {"router": "norm", "capacity": 0.5, "budgets": {0.8: {"blocks": [3]}, 0.7: {"blocks": [2, 3]}}}
                }
            },
            ["a-0.87", "a-0.73"],
        ),
        ({"routers": {"a": {"router": "norm", "capacity": "fit", "budgets": {0.7: {}}}}}, ["a-0.7"]),
    ],
)
def test_models_are_counted_as_they_will_be_trained(
    study: ImageStudyConfig, changes: dict[str, Any], names: list[str]
) -> None:
    changes = {"baselines": {}, "controls": dict.fromkeys(changes["routers"], False), **changes}
    runs = comparison_of(dataclasses.replace(study, **changes)).checked_runs()
    assert [run.name for run in runs if run.name not in ("base", "dense")] == names


def test_a_smaller_baseline_starts_from_its_own_checkpoint_alone(study: ImageStudyConfig, tmp_path: Path) -> None:
    small = {0.5: {"kind": "smaller", "args": {"depth": 2}, "checkpoint": "small.safetensors"}}
    for start in ({"pretrained": True}, {"checkpoint": "dense.safetensors", "head": "fresh"}):
        dense = {**DENSE, "model": {**DENSE["model"], **start}}
        config = dataclasses.replace(study, dense=dense, train_dense=False, routers={}, baselines={"small": small})
        model = comparison_of(config).runs()[-1].training.model
        assert (model.checkpoint, model.pretrained, model.head) == ("small.safetensors", False, None)
    # That of a run says itself what it is.
    run = tmp_path / "run"
    run.mkdir()
    shape = {"name": "vit_tiny_patch16_224", "args": {**DENSE["model"]["args"], "depth": 3}}
    (run / "config.yaml").write_text(yaml.safe_dump({**DENSE, "model": {**DENSE["model"], **shape}}))
    for args, depth in (({}, 3), ({"args": {"depth": 2}}, 2)):
        trained: Any = {0.5: {"kind": "smaller", "checkpoint": str(run), **args}}
        model = comparison_of(dataclasses.replace(config, baselines={"small": trained})).runs()[-1].training.model
        assert (model.checkpoint, model.name) == (str(run), shape["name"])
        assert model.args == {**shape["args"], "depth": depth}


def test_a_preset_chooses_its_blocks_by_the_depth_that_changes_set(study: ImageStudyConfig) -> None:
    deep = {"model": {"args": {"depth": 8}}}
    config = dataclasses.replace(
        study, routers={"a": {"preset": "p-mod", "changes": deep}}, baselines={}, capacities=[None]
    )
    runs = {run.name: run.training for run in comparison_of(config).runs()}
    run = runs["a"]
    assert run.routings["image"] == preset("p-mod", depth=8)


def test_a_dense_model_that_diverges_is_no_trial(study: ImageStudyConfig, tmp_path: Path) -> None:
    def diverge(run: Run, callback: object, measurer: object) -> Measured:
        raise FloatingPointError(f"{run.name} diverged")

    runs = comparison_of(study).runs()
    with pytest.raises(FloatingPointError, match="base diverged"):
        best_rates(runs, Rates([1.0, 2.0], "top1", diverge, tmp_path), Store(), Runner(1, False))


def _result(folder: Path) -> float:
    return float(json.loads((folder / "result.json").read_text())["evaluation"]["top1"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"baselines": {"a": {0.5: {"kind": "halve"}}}}, "'recursions', 'resize', 'resolution', 'smaller'"),
        ({"baselines": {"a": {0.5: {"kind": "prune", "keeps": 1}}}}, "keep, blocks, fuse, by"),
        ({"baselines": {"a": {0.5: {"kind": "smaller", "depth": 1}}}}, "depth; valid ones are kind, args"),
        ({"baselines": {"a": {0.5: {"kind": "smaller"}}}}, "baselines.a-0.5 needs args, or the folder of a run"),
        ({"baselines": {"a": {0.5: {"kind": "resolution"}}}}, "baselines.a-0.5 needs image_size"),
        ({"baselines": {"a": {"kind": "merge"}}}, "baselines must be"),
        (
            {"baselines": {"a": {0.5: {"kind": "recursions", "routing": {}}}}},
            "unknown field of method 'recursions': routing",
        ),
        ({"baselines": {"a": {0.5: {**BASELINES["merge"][0.5], "changes": {"seed": 1}}}}}, "changes must not set seed"),
        ({"routers": {"a": {"router": "random", "changes": {"routing": {}}}}}, "changes must not set routing"),
        (
            {"baselines": {"a": {0.5: {"kind": "smaller", "args": {"num_heads": 3}}}}},
            "model 'a-0.5' of the study: timm",
        ),
        ({"routers": {"a": {"search": None}}}, r"routers\.a\.search must be a mapping of names, got None"),
        ({"routers": {"a": {"budgets": [0.5]}}}, r"routers\.a\.budgets must be a mapping of numbers to"),
        ({"routers": {"a": {"budgets": {"half": {}}}}}, r"routers\.a\.budgets must be a mapping of numbers to"),
        ({"budgets": [0.3], "baselines": BASELINES}, r"no series has the budgets \[0.3\]; those .* are \[0.5\]"),
        ({"rates": [1.0, 2.0], "rate_split": "test"}, "rates would be chosen on the images of the evaluation"),
        ({"rates": [1.0]}, "rates must name two"),
        ({"rates": [1.0, 2.0, 1.0]}, r"rates must name two factors or more, each once, .* got \[1\.0, 2\.0, 1\.0\]"),
        ({"rates": [1.0, 0.0]}, "rates must be"),
    ],
)
def test_wrong_baselines_fail_before_the_first_run(
    study: ImageStudyConfig, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        run_study(dataclasses.replace(study, output=f"{study.output}-wrong", **changes), progress=False)
    assert not Path(f"{study.output}-wrong").exists()
