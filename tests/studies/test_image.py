from __future__ import annotations

import dataclasses
import html
import itertools
import json
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from matplotlib.figure import Figure
from PIL import Image
from safetensors.torch import save_file

import mmod
from mmod.analysis import timing
from mmod.analysis.fronts import draw_tradeoff
from mmod.analysis.statistics import Estimate
from mmod.analysis.table import Measured, Table, gap
from mmod.config.parse import read_config
from mmod.data.loader import image_stream
from mmod.io import jobs
from mmod.io.tables import MarkdownTable
from mmod.io.yaml import merged, read_yaml
from mmod.methods import methods_of
from mmod.plain import from_plain
from mmod.planning import Candidate, budgets, untrained
from mmod.planning import advice as advice_page
from mmod.planning.verdict import say_guessing, verdict_of
from mmod.report.page import write_report
from mmod.studies import image as image_studies
from mmod.studies.candidates import baselines_of, comparison_of, fitted, training_configs
from mmod.studies.image import code_of, recommendations
from mmod.studies.kind import Lines, Study, Told
from mmod.studies.kind_configs import FeaturesStudyConfig, ImageStudyConfig, PairsStudyConfig
from mmod.studies.measure import Measurer
from mmod.studies.rates import Rates, trials_of
from mmod.studies.report import Point, StudyResult, epochs_of, harm, significance, without_interval
from mmod.studies.runs import Comparison, Run
from mmod.studies.study import check_following, compared_models, run_study, training_ahead
from mmod.training.engine.kind import load
from mmod.training.engine.run_folder import epochs_and_seconds
from mmod.training.engine.start import sketch
from mmod.training.image.config import TrainConfig
from mmod.training.kinds import kind_of
from tests.kit.fitted import count_candidates_once, fit_by_budget, fit_once, make_models
from tests.kit.folders import save_image_model
from tests.kit.image_study import DENSE
from tests.kit.processes import FORKING, run_processes
from tests.kit.sets import SETS


def text_of(told: Told) -> str:
    return "\n\n".join(map(str, [*told.verdict, *told.parts]))


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
        changes={"epoch_steps": 1, "data": {"root": str(SETS / "digits"), "val_split": "test"}},
        finetune={"optim": {"lr": 1e-4}},
        isoflop="scratch",
        routers={
            "a-mod": {"preset": "a-mod"},
            "threshold": {"router": "linear", "select": "threshold"},
            "random": {"router": "random"},
        },
        capacities=[0.5],
        seeds=2,
        latency_batch=2,
        latency_batches=[],
        latency_rounds=2,
        maps=2,
    )


@pytest.fixture(scope="module")
def compared(study: ImageStudyConfig) -> StudyResult:
    return run_study(study, progress=False)


def test_a_study_compares_and_can_be_continued(
    study: ImageStudyConfig, compared: StudyResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = compared
    points = {point.name: point for point in result.points}
    assert list(points) == ["dense", "a-mod-0.5", "threshold-0.5", "random-0.5", "shallow-3-blocks"]
    assert points["dense"].cost["gflops"] > points["shallow-3-blocks"].cost["gflops"] > 0
    assert points["dense"].cost["gflops"] > points["a-mod-0.5"].cost["gflops"]
    assert points["a-mod-0.5"].row()["kept"] == pytest.approx(8 / 17)
    assert "before" not in points["shallow-3-blocks"].row()
    assert {"before", "top1"} <= set(points["dense"].row()) & set(points["a-mod-0.5"].row())
    assert all(len(point.figures) == 2 and point.row()["top1_std"] is not None for point in result.points)
    for name, point in points.items():
        gaps = [point.figures[seed]["top1"] - points["dense"].figures[seed]["top1"] for seed in (0, 1)]
        assert point.to_dense is None if name == "dense" else point.to_dense.value == pytest.approx(mean(gaps))
        assert (point.to_control is not None) == (name == "a-mod-0.5")
        assert point.cost["latency_ms"] > 0
        assert point.cost["speedup"] > 0
    assert result.cpu_seconds > 0
    folder = Path(result.folder)
    runs = {path: path.stat().st_mtime_ns for path in folder.rglob("result.json")}
    assert len(runs) == 12
    for name in (
        "tradeoff.csv",
        "tradeoff.md",
        "tradeoff.png",
        "tradeoff.svg",
        "maps-a-mod-0.5.png",
        "maps-threshold-0.5.png",
    ):
        assert (folder / name).stat().st_size
    assert len(json.loads((folder / "tradeoff.json").read_text())["points"]) == 5

    # Wherever the study is named from, or moved to, it is the same, and no run of it is done again.
    monkeypatch.chdir(folder.parent)
    folder.rename("moved")
    moved = run_study(dataclasses.replace(study, output="moved"), progress=False)
    assert [point.figures for point in moved.points] == [point.figures for point in result.points]
    Path("moved").rename(folder)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("result.json")} == runs

    # Runs in processes of their own come to the same, and other studies can take this one's dense models.
    apart = dataclasses.replace(study, output=f"{study.output}-apart", bases=study.output, seeds=1, processes=2)
    apart = dataclasses.replace(apart, routers={"a-mod": study.routers["a-mod"]}, isoflop="none")
    assert run_processes(run_apart, apart, folder.parent / "apart.pickle") == [0]
    points_apart = pickle.loads((folder.parent / "apart.pickle").read_bytes())
    assert points_apart["a-mod-0.5"].figures[0] == points["a-mod-0.5"].figures[0]
    assert not (Path(apart.output) / "seed0" / "base").exists()
    plain = dataclasses.replace(apart, output=f"{study.output}-plain", tune=False, processes=1, maps=0)
    untrained = {point.name: point for point in run_study(plain, progress=False).points}
    assert list(untrained) == ["dense", "a-mod-0.5"]
    assert untrained["dense"].row()["top1"] == pytest.approx(points_apart["dense"].row()["before"])
    assert untrained["a-mod-0.5"].row()["top1"] == pytest.approx(points_apart["a-mod-0.5"].row()["before"])
    assert not list(Path(plain.output).rglob("result.json"))


def run_apart(study: ImageStudyConfig, path: Path) -> None:
    """Run a study whose processes are forked instead of started anew, and save its points by name."""
    jobs.multiprocessing = FORKING
    path.write_bytes(pickle.dumps({point.name: point for point in run_study(study, progress=False).points}))


def test_table_and_pictures_come_with_the_first_pair_and_one_seed_is_paired_by_sample(
    study: ImageStudyConfig,
    compared: StudyResult,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stages: list[list[dict[str, object]]] = []

    def draw(points: list[dict[str, object]], *of: Any) -> Figure:
        stages.append(points)
        assert (tmp_path / "out" / "maps-a-mod-0.5.png").exists()
        return draw_tradeoff(points, *of)

    def measurer(*given: Any, progress: bool) -> Measurer:
        assert progress
        return Measurer(*given, progress=progress)

    monkeypatch.setattr("mmod.studies.study.Measurer", measurer)
    monkeypatch.setattr("mmod.studies.report.draw_tradeoff", draw)
    one = dataclasses.replace(study, output=str(tmp_path / "out"), bases=str(compared.folder), seeds=1, isoflop="none")
    result = run_study(one)
    names = ["dense", "a-mod-0.5", "threshold-0.5", "random-0.5"]
    assert [[point["name"] for point in stage] for stage in stages] == [names[:2], names[:3], names, names]
    assert all(("latency_ms" in point) == (stage is stages[-1]) for stage in stages for point in stage)
    assert str(stages[-1][1]["note"]).startswith("to dense: ")
    assert "preset: a-mod, capacity: 0.5" in str(stages[-1][1]["note"])
    assert stages[-1][0]["note"] == ""
    printed = capsys.readouterr()
    assert printed.out.count("table and picture, from now on") == 1
    # The table says that all runs are done.
    assert "100 %" not in printed.err
    dense, *_, routed = result.points
    assert routed.to_dense is not None
    assert routed.to_dense.has_interval
    assert routed.to_dense.value == pytest.approx(routed.figures[0]["top1"] - dense.figures[0]["top1"])
    assert "One seed: intervals are over samples, not over training runs" in result.table
    assert "Models were trained here: without training, as `mmod advise MODEL --images FOLDER`" in result.table
    assert "before tuning" in result.table


@pytest.mark.parametrize(("tuned", "worse"), [((0.2, 0.9), 1), ((0.9, 0.2), 1), ((0.9, 0.88), 0), ((0.2, 0.2), 2)])
@pytest.mark.parametrize("seeds", [1, 3])
def test_harm_by_fine_tuning_is_told(tuned: tuple[float, float], worse: int, seeds: int) -> None:
    right_N = np.arange(200) / 200
    table = Table()
    for name, share in zip(("dense", "a"), tuned):
        for seed in range(seeds):
            outcomes = {"top1": (right_N < share).astype(float), "before": (right_N < 0.9).astype(float)}
            figures = {"top1": 100 * share + 0.1 * seed, "before": 90.0}
            table.add(name, seed, Measured(figures, samples=200, outcomes=outcomes if seeds == 1 else {}))
    # What equals a dense model that clearly fell is worse than the user's, however fast.
    table.times = {("image", 8): {"dense": [3.0], "a": [2.0]}}
    (choice,) = recommendations(table, "top1", "accuracy", {name: Candidate(name) for name in table.runs})
    is_harmed = tuned[0] < 0.5
    assert choice.sentence.startswith("Nothing is advised: fine-tuning harmed the dense model (-") == is_harmed
    assert (choice.used, len(verdict_of([choice]).parts)) == (None, 1) or not is_harmed
    # Half of the models are no reason without the dense one.
    told = harm(table, "top1", ["dense", "a"])
    fallen = 100 * tuned[1] - 90
    if tuned[0] < 0.5:
        how = "by more than 2 points" if worse == 2 else "by more than chance explains"
        assert f"{worse} of 2 models fell {how}: dense (" in told[0]
    elif worse == 0 and seeds == 1:
        # Every second model falls by less than the tolerance by chance.
        assert told == []
    else:
        assert told[0].startswith(
            "Fine-tuning may have done harm: 1 of 2 models fell by more than chance explains: a ("
        )
        if seeds == 1:
            assert f"explains: a ({fallen:+.1f} [" in told[0]
    assert harm(Table({"dense": {0: Measured({"top1": 90.0})}}), "top1", ["dense"]) == []
    # One image of 200 is what chance changes.
    near = Table(times=table.times)
    for name in ("dense", "a"):
        outcomes = {"top1": (right_N < 0.895).astype(float), "before": (right_N < 0.9).astype(float)}
        near.add(name, 0, Measured({"top1": 89.5, "before": 90.0}, samples=200, outcomes=outcomes))
    (choice,) = recommendations(near, "top1", "accuracy", {name: Candidate(name) for name in near.runs})
    assert choice.harm == ""
    # Two images of 40 are 5 points, which chance takes from one model of several, and hardly from most of them.
    few = Table()
    for name, right in (("dense", 36), ("a", 34), ("b", 36), ("c", 34)):
        outcomes = {"top1": (right_N[:40] < right / 200).astype(float), "before": (right_N[:40] < 0.18).astype(float)}
        few.add(name, 0, Measured({"top1": 2.5 * right, "before": 90.0}, samples=40, outcomes=outcomes))
    assert harm(few, "top1", ["dense", "a"]) == []
    assert "2 of 3 models fell by more than 2 points: a (-5.0 [" in harm(few, "top1", ["dense", "a", "c"])[0]
    # A fall that chance may explain is told beside what is advised: 20 of 200 images are lost, and 12 won.
    outcomes = {"top1": ((right_N >= 0.1) & (right_N < 0.56)).astype(float), "before": (right_N < 0.5).astype(float)}
    fell = Table(times=table.times)
    for name in ("dense", "a"):
        fell.add(name, 0, Measured({"top1": 46.0, "before": 50.0}, samples=200, outcomes=outcomes))
    (choice,) = recommendations(fell, "top1", "accuracy", {name: Candidate(name) for name in fell.runs})
    assert choice.sentence.startswith("Use a for batches of 8: 1.50 times as fast, +0.0 [")
    assert re.search(r"; the dense model changed by -4\.0 \[-.*, \+.*\] points in fine-tuning\.$", choice.sentence)
    # Without intervals, the fall alone tells.
    bare = Table()
    for name, right in (("dense", 90.0), ("a", 87.0), ("b", 91.0)):
        bare.add(name, 0, Measured({"top1": right, "before": 90.0}))
    assert "1 of 3 models fell by more than 2 points: a (-3.0 points)" in harm(bare, "top1", ["dense", "a", "b"])[0]


def test_a_clear_fall_of_the_dense_model_is_told_beside_unclear_ones_of_most(monkeypatch: pytest.MonkeyPatch) -> None:
    gains = {name: Estimate(-3.0, -6.5, 0.5) for name in "abc"} | {"d": Estimate(0.0, -2.0, 2.0)}
    gains["dense"] = Estimate(-1.5, -2.5, -0.5)
    monkeypatch.setattr("mmod.studies.report.gain", lambda table, score, before, name: gains[name])
    (told,) = harm(Table(), "top1", list(gains))
    how = "by more than 2 points or by more than chance explains"
    assert told.startswith(f"Fine-tuning may have done harm: 4 of 5 models fell {how}: dense (")


def test_models_that_fell_by_as_much_as_a_fallen_dense_one_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    equal, better = Estimate(-2.5, -4.8, -0.2), Estimate(-1.0, -4.0, 2.0)
    gains = {"dense": equal, **dict.fromkeys("abcd", equal), "worse": Estimate(-3.5, -9.0, 2.0)}
    gains |= dict.fromkeys("efghij", better)
    monkeypatch.setattr("mmod.studies.report.gain", lambda table, score, before, name: gains[name])
    (told,) = harm(Table(), "top1", list(gains))
    assert told.startswith(
        "Fine-tuning may have done harm: 1 of 12 models fell by more than chance explains: dense (-2.5 [-4.8, "
        "-0.2] points). worse, a, b and 2 more fell by at least as much as dense. A lower rate"
    )
    # They are no harm beside a dense model that kept what it had.
    gains["dense"] = better
    assert harm(Table(), "top1", list(gains)) == []


def test_one_model_of_many_that_falls_by_chance_is_no_harm() -> None:
    rng = np.random.default_rng(0)
    warned = 0
    for _ in range(40):
        table = Table()
        for number in range(19):
            # Training changes the answers to 15 % of 200 images, as often for the better as for the worse.
            before_N = (rng.random(200) < 0.5).astype(float)
            after_N = np.where(rng.random(200) < 0.15, 1 - before_N, before_N)
            figures = {"top1": 100 * after_N.mean(), "before": 100 * before_N.mean()}
            outcomes = {"top1": after_N, "before": before_N}
            table.add("dense" if not number else str(number), 0, Measured(figures, samples=200, outcomes=outcomes))
        warned += bool(harm(table, "top1", list(table.runs)))
    # In nearly each, one is beyond its own interval, or lower by more than the tolerance.
    assert warned <= 4


def test_differences_that_are_the_same_in_every_seed_are_said_to_be() -> None:
    table = Table()
    for name, values in {"dense": [95.0, 94.0], "a": [94.0, 93.0], "b": [95.0, 94.0], "c": [95.0, 93.8]}.items():
        for seed, value in enumerate(values):
            table.add(name, seed, Measured({"top1": value}))
    points = [Point(name, name, None, {}, {}, gap(table, "top1", name, "dense"), None, {}) for name in table.runs]
    assert f"{points[1].to_dense:+.1f}" == "-1.0"
    assert without_interval(points) == [
        "Without an interval: a and b differ from the dense model by as much in every seed."
    ]
    assert without_interval([points[0], points[3]]) == []
    # By images of one seed, which weigh alike in both models.
    seed = Table(weigh={"top1": lambda outcomes, weight_SN: weight_SN @ outcomes["right"]})
    for name in ("dense", "a"):
        seed.add(name, 0, Measured({"top1": 50.0}, outcomes={"right": np.eye(8)[0]}, samples=8))
    to_dense = gap(seed, "top1", "a", "dense")
    assert to_dense.has_interval
    assert not to_dense.has_width
    assert without_interval([dataclasses.replace(points[1], to_dense=to_dense)]) == []


def test_an_evaluation_of_another_routing_is_not_taken(
    study: ImageStudyConfig, compared: StudyResult, tmp_path: Path
) -> None:
    plain = dataclasses.replace(study, output=str(tmp_path / "out"), bases=str(compared.folder), seeds=1, maps=0)
    plain = dataclasses.replace(plain, isoflop="none", tune=False)
    kept = []
    for min_tokens in (2, 12):
        routing = {"router": "norm", "select": {"name": "threshold", "threshold": 0.99, "min_tokens": min_tokens}}
        changed = dataclasses.replace(plain, routers={"norm": routing})
        table = tmp_path / "out/tradeoff.json"
        if kept:
            written = table.read_bytes()
            with pytest.raises(FileExistsError, match=r"model 'norm-0.5': routing.select.min_tokens: 2 there, 12 now"):
                run_study(changed, progress=False)
            assert table.read_bytes() == written
            table.unlink()
        result = run_study(changed, progress=False)
        kept.append(result.points[1].row()["kept"])
    assert kept[0] < kept[1]


BUDGETS = {"a-mod": {"preset": "a-mod", "budgets": {0.7: {"capacity": 0.6}, 0.5: {"capacity": 0.3}}}}
PRUNE = {
    "prune": {0.7: {"kind": "prune", "keep": "fit", "blocks": [1]}, 0.2: {"kind": "prune", "keep": 0.3, "blocks": [1]}}
}


def test_models_have_the_fields_of_their_budget_and_the_name_of_their_share(study: ImageStudyConfig) -> None:
    plain = dataclasses.replace(
        study, routers=BUDGETS, controls={"a-mod": False}, baselines=PRUNE, isoflop="none", seeds=1
    )
    comparison = comparison_of(plain)
    assert comparison.notes[-1] == "Numbers in names are shares of the dense model's FLOPs"
    jobs = comparison.runs()
    # Two blocks of four on 0.6 or 0.3 of the tokens, and pruning to more tokens than its budget says.
    assert [job.name for job in jobs[2:]] == ["a-mod-0.83", "a-mod-0.69", "prune-0.7", "prune-0.63"]
    assert [job.training.image_routing.capacity for job in jobs[2:4]] == [0.6, 0.3]
    jobs = comparison_of(dataclasses.replace(plain, budgets=[0.5])).runs()
    assert [job.name for job in jobs[2:]] == ["a-mod-0.69"]


@pytest.mark.parametrize(
    ("routing", "named", "control"),
    [
        # The series at random is the same, written otherwise.
        ({"preset": "a-mod"}, {}, "random-0.5"),
        ({"preset": "mod"}, {}, "random-0.5"),
        ({"preset": "distilled"}, {}, "random-0.5"),
        ({"preset": "a-mod", "blocks": "late"}, {}, "random-mine-0.5"),
        ({"router": "redundancy", "skipped": "merge"}, {}, "random-mine-0.5"),
        ({"preset": "p-mod"}, {}, "random-mine-0.5"),
        ({"preset": "a-mod", "blocks": "late"}, {"mine": "random", "as mine": "random"}, "random-0.5"),
        ({"preset": "a-mod", "blocks": "late"}, {"mine": False, "as mine": False}, None),
        # The data say how much it keeps.
        ({"router": "linear", "select": "threshold"}, {}, None),
    ],
)
def test_a_control_keeps_random_tokens_by_the_same_routing(
    study: ImageStudyConfig, routing: dict[str, Any], named: dict[str, Any], control: str | None
) -> None:
    routers = {"mine": routing, "as mine": routing, "random": {"router": "random"}}
    comparison = comparison_of(dataclasses.replace(study, routers=routers, controls=named, isoflop="none"))
    candidates = {candidate.name: candidate for candidate in comparison.candidates}
    controls = {name: candidate.control for name, candidate in candidates.items() if candidate.control}
    assert controls == ({"mine-0.5": control, "as mine-0.5": control} if control else {})
    added = {name: candidate for name, candidate in candidates.items() if not candidate.series}
    assert list(added) == [control] * (control == "random-mine-0.5")
    for name, drawn in added.items():
        assert drawn.at_random
        mine = candidates["mine-0.5"]
        assert drawn == dataclasses.replace(mine, name=name, series="", control=None, routing=drawn.routing)
    *told, numbers = comparison.notes
    assert numbers.endswith("are capacities: shares of the tokens that routed blocks keep, and not of FLOPs")
    is_untested = control is None and not named
    assert any("at random: random-mine-0.5" in note for note in told) == bool(added)
    assert any("Without a control" in note and ": mine-0.5" in note for note in told) == is_untested


def test_seeds_repeat_no_study_that_trains_nothing(study: ImageStudyConfig) -> None:
    plain = dataclasses.replace(
        study,
        dense={**DENSE, "model": {**DENSE["model"], "checkpoint": "dense.safetensors"}},
        seeds=3,
        train_dense=False,
        tune=False,
        isoflop="none",
        baselines=PRUNE,
        then={"output": "tuned", "tune": True, "seeds": 2},
    )
    with pytest.raises(ValueError, match="seeds=3 repeats training, and this study trains nothing: leave seeds out"):
        comparison_of(plain)
    assert {job.seed for job in comparison_of(dataclasses.replace(plain, seeds=1)).runs()} == {0}
    following = plain.following()
    assert isinstance(following, ImageStudyConfig)
    assert (following.output, following.following()) == (str(Path(study.output) / "tuned"), None)
    assert {job.seed for job in comparison_of(following).runs()} == {0, 1}


def image_study(config: ImageStudyConfig) -> Study:
    """Return a study without its candidates, which are counted to be made."""
    dense, tuned = training_configs(config)
    comparison = Comparison(
        candidates=[Candidate("dense", is_trained=config.tune is True)],
        dense=dense,
        train=tuned if config.tune else None,
        seeds=config.seeds,
        train_dense=config.train_dense,
    )
    return Study(image_studies.STUDY, comparison, config)


def tell(
    study: Study, table: Table, candidates: Iterable[Candidate], rows: Lines = (), images: Sequence[str] = ()
) -> Told:
    """Say what follows from a table of models that were not trained."""
    runs = {one.name: Run(name=one.name, seed=0, training=None, candidate=one) for one in candidates}
    return study.kind.tell(study, table, runs, rows, {"images": images})


def measured(right_N: Any, before: float | None = None) -> Measured:
    """Return the accuracy on images that are right or not, and perhaps that before fine-tuning."""
    figures = {"top1": 100 * right_N.mean()} if before is None else {"top1": 100 * right_N.mean(), "before": before}
    return Measured(figures, samples=len(right_N), outcomes={"top1": right_N.astype(float)})


def test_advice_is_no_winner_of_noise_and_says_how_wide_the_widest_interval_is(study: ImageStudyConfig) -> None:
    config = dataclasses.replace(study, latency_batch=16, seeds=1, tune=False)
    right_N = np.arange(80) < 56
    # More right than dense by two of 80, on images that differ from those that dense has right.
    lucky_N = (right_N & (np.arange(80) >= 6)) | (np.arange(80) >= 72)
    table = Table()
    for name, outcome_N in (("dense", right_N), ("lucky", lucky_N), ("same", right_N), ("chance", lucky_N)):
        table.add(name, 0, measured(outcome_N))
    table.times = {
        ("image", size): {"dense": [3.0], "lucky": [2.0], "same": [2.1 if size > 1 else 3.1], "chance": [1.9]}
        for size in (1, 16)
    }
    # What chance keeps is never advised, however fast.
    routings = {"chance": {"router": "random"}}
    controls = {"same": "chance"}
    candidates = [Candidate(one, routing=routings.get(one), control=controls.get(one)) for one in table.runs]
    told = tell(image_study(config), table, candidates)
    assert text_of(told).startswith(
        "Keep the dense model for batches of 16 for now. lucky is probably within 2 points: 1.50 times as fast, "
        "+2.5 [-7.1, +12.0] points of accuracy. 270 more images would tell."
    )
    # Where the others alone are fine-tuned, differences to the dense model are also those of training.
    assert "not fine-tuned as" not in text_of(told)
    unequal = tell(image_study(dataclasses.replace(config, tune="others")), table, candidates)
    assert "The dense model was not fine-tuned as the others were: `--tune true`" in text_of(unequal)
    # What another control than chance is compared with, and single images, have rows.
    named = {one.name: one for one in candidates}
    rows = verdict_of(recommendations(table, "top1", "accuracy", named)).table.rows
    lucky = ("lucky", "1.50", "+2.5 [-7.1, +12.0]", "probably: 270 more images would tell")
    assert rows[1:] == [
        ("batches of 16, 1.25 times", "same", "1.43", "+0.0 [-3.4, +3.4]", "probably: 57 more images would tell"),
        ("batches of 16, 1.5 times", *lucky),
        ("batches of 16, 2 times", "none as fast", "", "", ""),
        ("single images, 1.25 to 1.5 times", *lucky),
        ("single images, 2 times", "none as fast", "", "", ""),
    ]
    # All that is named has its lines.
    assert told.recommended == ["lucky", "same"]
    (points,) = re.findall(r"the widest interval is ([0-9.]+) points", text_of(told))
    difference = gap(table, "top1", "lucky", "dense")
    assert difference.value < float(points) == pytest.approx((difference.high - difference.low) / 2, abs=0.05)


def test_a_table_stars_the_front(study: ImageStudyConfig) -> None:
    config = dataclasses.replace(study, latency_batch=16, seeds=1, tune=False)
    table = Table()
    rows = []
    # GFLOPs, speed-up in batches and alone, and samples that are right of 80.
    figures = {"dense": (1.0, 1.0, 1.0, 56), "cheap": (0.27, 1.29, 0.7, 56), "slow": (0.5, 1.2, 1.1, 50)}
    for name, (gflops, speedup, alone, right) in {**figures, "chance": (0.9, 1.4, 1.4, 58)}.items():
        table.add(name, 0, measured(np.arange(80) < right))
        rows.append({"name": name, "gflops": gflops, "speedup": speedup, "speedup_b1": alone, "top1": 100 * right / 80})
    for size, column in ((1, "speedup_b1"), (16, "speedup")):
        table.times["image", size] = {row["name"]: [3.0 / row[column]] for row in rows}
    controls = {"cheap": "chance"}
    candidates = [Candidate(name, control=controls.get(name)) for name in table.runs]
    told = tell(image_study(config), table, candidates, rows[:3])
    assert {row["name"] for row in told.rows if row["front"]} == {"cheap"}
    whole = tell(image_study(config), table, candidates, rows)
    assert {row["name"] for row in whole.rows if row["front"]} == {"chance"}
    # What is faster and better than all, and chooses at random, has no star, and takes none from others.
    candidates[-1] = Candidate("chance", routing={"router": "random"})
    whole = tell(image_study(config), table, candidates, rows)
    assert {row["name"] for row in whole.rows if row["front"]} == {"cheap"}
    assert (list(told.summary or {})[:2], "before" in (told.summary or {})) == (["name", "front"], False)
    tuned = tell(image_study(config), table, candidates, [{**row, "before": 9.0} for row in rows])
    assert "before" in (tuned.summary or {})


def test_what_the_text_says_to_use_is_marked_with_a_star_or_without(study: ImageStudyConfig) -> None:
    config = dataclasses.replace(study, latency_batch=16, seeds=1, tune=False)
    table = Table()
    rows = []
    # Beside what certainly loses nothing, a faster model is right on 12 of 800 more, and on many others.
    for name, speedup, lost in (("dense", 1.0, 0), ("certain", 1.3, 0), ("lucky", 1.4, 130)):
        outcome_N = np.arange(800) < 560
        outcome_N[:lost] = False
        outcome_N[658:] = lost > 0
        table.add(name, 0, measured(outcome_N))
        rows.append({"name": name, "gflops": 1.0, "speedup": speedup, "top1": 100 * outcome_N.mean()})
    table.times = {("image", 16): {row["name"]: [3.0 / row["speedup"]] for row in rows}}
    gradual = Candidate("gradual", routing={"preset": "gradual"}, is_trained=False)
    candidates = [dataclasses.replace(gradual, name=name) for name in table.runs]
    told = tell(image_study(config), table, candidates, rows)
    assert {row["name"]: row["front"] for row in told.rows} == {"dense": "", "certain": "<- use", "lucky": "*"}
    # The page has the lines of all that the table names, and those of the sentence are printed.
    assert told.recommended == ["certain", "lucky"]
    assert "# lucky\nmmod.route_" in told.code[0]
    (printed,) = told.printed
    assert printed.startswith("certain in Python:\n")
    assert printed.count("mmod.route_(model") == 1
    assert text_of(told).startswith("Use certain for batches of 16: ")
    assert "`*`, for batches of 16: no other is faster and loses less, by the means." in text_of(told)
    assert "precision" not in text_of(told)
    halved = image_study(config)
    dense = dataclasses.replace(halved.dense, precision="bf16")
    halved = halved._replace(comparison=dataclasses.replace(halved.comparison, dense=dense))
    assert "Scores are of precision bf16, and times of fp32." in text_of(tell(halved, table, candidates, rows))
    # What may be lost is the user's to say, and no part of what is measured.
    strict = dataclasses.replace(config, tolerance=0.002)
    told = tell(image_study(strict), table, candidates, rows)
    assert text_of(told).startswith("Keep the dense model for batches of 16")
    assert "within 0.2 points?" in text_of(told)
    assert strict.evaluation == config.evaluation
    # Larger batches are another question: the stars and the mark are of those that are drawn.
    larger = dataclasses.replace(table, times={**table.times, ("image", 64): {name: [3.0] for name in table.runs}})
    told = tell(image_study(config), larger, candidates, rows)
    assert text_of(told).startswith("Keep the dense model for batches of 64: ")
    assert {row["name"]: row["front"] for row in told.rows} == {"dense": "", "certain": "<- use", "lucky": "*"}
    del candidates[1], rows[1]
    undecided = tell(image_study(config), table, candidates, rows)
    assert not any("<- use" in text for text in (text_of(undecided), *(row["front"] for row in undecided.rows)))


@pytest.mark.parametrize(("before", "told"), [(95.0, True), (93.75, False), (None, False)])
def test_a_model_that_fine_tuning_made_worse_is_named_with_the_lines_of_the_untuned_one(
    before: float | None, told: bool, study: ImageStudyConfig
) -> None:
    config = dataclasses.replace(study, latency_batch=16, seeds=1)
    table = Table()
    for name, right in (("dense", 752), ("gradual", 750)):
        table.add(name, 0, measured(np.arange(800) < right, before))
    table.times = {("image", 16): {"dense": [3.0], "gradual": [2.0]}}
    candidates = [Candidate("dense"), Candidate("gradual", routing={"preset": "gradual"})]
    text = text_of(tell(image_study(config), table, candidates))
    assert text.startswith("Use gradual for batches of 16: ")
    sentence = (
        "gradual scored higher before fine-tuning, 95.00 % against 93.75 %: untuned, it is your dense model with "
        '`mmod.route_(model, "gradual")`.'
    )
    # Behind what to use, before the table.
    assert (f".\n\n{sentence}\n\n| for " in text) == ("scored higher" in text) == told


@pytest.mark.parametrize(
    ("changes", "more", "told"),
    [
        (
            {"model": {"checkpoint": "runs/small"}},
            {},
            r': untuned, it is `model = mmod.open_model(.*, checkpoint="runs/small", .*).model`\.',
        ),
        (
            {"model": {"checkpoint": "runs/small"}},
            {"routing": {"preset": "gradual"}},
            r': untuned, it is `model = .*, checkpoint="runs/small", .*; mmod\.route_\(model, "gradual"\)`\.',
        ),
        ({"model": {"args": {"depth": 3}}}, {"from_scratch": True}, r"\."),
        ({"epochs": 3}, {}, r"\."),
    ],
)
def test_a_model_that_is_not_made_of_the_dense_one_is_named_without_lines_of_it(
    changes: dict[str, Any], more: dict[str, Any], told: str, study: ImageStudyConfig
) -> None:
    table = Table()
    for name, right in (("dense", 752), ("small", 750)):
        table.add(name, 0, measured(np.arange(800) < right, 95.0))
    table.times = {("image", 16): {"dense": [3.0], "small": [2.0]}}
    candidates = [Candidate("dense"), Candidate("small", changes=changes, **more)]
    text = text_of(tell(image_study(dataclasses.replace(study, latency_batch=16, seeds=1)), table, candidates))
    assert re.search(rf"\n\nsmall scored higher before fine-tuning, 95\.00 % against 93\.75 %{told}\n\n", text)


def test_what_intervals_over_seeds_leave_open_is_decided_by_seeds() -> None:
    table = Table()
    for name, values in {"dense": [95.0, 95.2], "near": [94.9, 93.2]}.items():
        for seed, value in enumerate(values):
            table.add(name, seed, Measured({"top1": value}, samples=10_000))
    table.times = {("image", 8): {"dense": [3.0], "near": [2.0]}}
    (told,) = recommendations(table, "top1", "accuracy", {name: Candidate(name) for name in table.runs})
    assert told.sentence == (
        "Keep the dense model for batches of 8: it is unclear whether anything clearly faster is within 2 points. More "
        "seeds would tell of near."
    )
    assert [told.outcome(model) for model in told.undecided] == ["unclear: more seeds would tell"]


def test_the_printed_lines_run_as_they_are(tmp_path: Path) -> None:
    gradual = Candidate("gradual", routing={"preset": "gradual"})
    text = code_of(image_study(read_config(["digits"], ImageStudyConfig)), [gradual])[0]
    (lines,) = re.findall(r"```python\n(.*?)\n```", text, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(lines, scope)
    assert mmod.is_routed(scope["model"])
    # Where a folder says which model it holds, its name suffices, as it was given.
    timm.models.save_for_hf(timm.create_model("test_vit"), str(tmp_path / "saved"), safe_serialization=True)
    words = ["my-model", "--dense.model.checkpoint", str(tmp_path / "saved")]
    (opened, *_) = code_of(image_study(read_config(words, ImageStudyConfig)), [gradual])
    assert f'model = mmod.open_model("{tmp_path}/saved", dense=True).model\nmmod.route_(model, "gradual")\n' in opened
    # What is made of another model opens that one.
    other = timm.create_model("test_vit", num_classes=7)
    timm.models.save_for_hf(other, str(tmp_path / "other"), safe_serialization=True)
    weights = str(tmp_path / "other" / "model.safetensors")
    shape = {"name": "test_vit", "args": {"num_classes": 7}}
    for model in ({"checkpoint": str(tmp_path / "other")}, {**shape, "checkpoint": weights}):
        untrained = dataclasses.replace(gradual, changes={"model": model}, is_trained=False)
        text = code_of(image_study(read_config(words, ImageStudyConfig)), [untrained])[0]
        (lines,) = re.findall(r"```python\n(.*?)\n```", text, re.DOTALL)
        exec(lines, scope)
        assert mmod.is_routed(scope["model"])
        assert torch.equal(scope["model"].head.weight, other.head.weight)
    # A smaller image of a model that its line would open for one size.
    fixed = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=7)
    timm.models.save_for_hf(fixed, str(tmp_path / "fixed"), safe_serialization=True)
    shape = ["--dense.model.args", "{img_size: 64, depth: 2, num_classes: 7}", "--dense.data.image_size", "64"]
    named = ["--dense.model.name", "vit_tiny_patch16_224", "--dense.model.checkpoint", str(tmp_path / "fixed")]
    small = Candidate("small", image_size=32, is_trained=False)
    mmod.save_pretrained(mmod.apply_(fixed, mmod.methods.Merge(r=1)), tmp_path / "changed")
    for folder in ("fixed", "changed"):
        words = ["my-model", *named[:-1], str(tmp_path / folder), *shape]
        text = code_of(image_study(read_config(words, ImageStudyConfig)), [gradual, small])[0]
        (lines,) = re.findall(r"```python\n(.*?)\n```", text, re.DOTALL)
        assert f'{folder}", dense=True' in lines
        exec(lines, scope)
        with torch.no_grad():
            assert scope["model"](torch.zeros(1, 3, 64, 64)).shape == (1, 7)
        assert [method.kind for method in methods_of(scope["model"])] == ["resize"]


def test_a_dense_model_that_guesses_is_said_to() -> None:
    config = read_config(["digits-smallest"], ImageStudyConfig)
    study = image_study(config)

    def told_of(top1: float, images: int, before: float | None = None) -> Told:
        table = Table()
        for name, right in (("dense", top1), ("fast", 2.0)):
            table.add(name, 0, measured(np.arange(images) < images * right / 100, before))
        table.times = {("image", config.latency_batch): {"dense": [3.0], "fast": [2.0]}}
        rows = [{"name": name, "gflops": 1.0, "speedup": 1.0, "top1": 9.0} for name in table.runs]
        told = tell(study, table, map(Candidate, table.runs), rows)
        assert told.began_by_chance == ((top1 if before is None else before) < 20)
        return told

    told = told_of(12.5, 64)
    guessed = "the dense model is hardly better than chance (10 %), so that differences to it say nothing."
    assert text_of(told).startswith(f"Nothing is advised: {guessed}")
    assert not any(isinstance(part, MarkdownTable) for part in (*told.verdict, *told.parts))
    assert "Use " not in text_of(told)
    assert "<- use" not in text_of(told)
    # A model that has learned guesses after a training that did harm, which is told.
    assert "hardly better" in text_of(told_of(12.5, 64, before=90.0))
    assert "hardly better" not in text_of(told_of(90.0, 64, before=12.5))
    assert "hardly better" not in text_of(told_of(25.0, 10_000))


def test_advice_names_the_best_model_at_each_speed_and_those_as_good(study: ImageStudyConfig) -> None:
    config = dataclasses.replace(study, latency_batch=16)
    prune = Candidate("prune", methods=({"kind": "prune", "keep": 0.5, "blocks": [1]},))
    table = Table()
    # With so many images, 2.0 points are the interval of a difference at 90 %.
    for name, top1 in (("dense", 90.0), ("a", 88.0), ("b", 89.0), ("c", 85.0)):
        table.add(name, 0, Measured({"top1": top1}, samples=1729))
    candidates = [dataclasses.replace(prune, name=name) for name in table.runs]
    ms = {"dense": 3.0, "a": 1.9, "b": 2.2, "c": 1.8}
    timed = dataclasses.replace(table, times={("image", 16): {name: [time] for name, time in ms.items()}})
    told = tell(image_study(config), timed, candidates, images=["Images: some"])
    lines = [re.sub("-{3,}", "-", re.sub(" +", " ", line)) for line in text_of(told).splitlines()]
    assert lines == [
        "No interval tells what is within 2 points for batches of 16: these lose least by their means.",
        "",
        "| for | recipe | times as fast | to dense [95 %] | within 2 points? |",
        "| :- | :- | -: | -: | :- |",
        "| batches of 16, 1.25 times | b | 1.36 | -1.0 | unclear: more seeds would tell |",
        "| batches of 16, 1.5 times | a | 1.58 | -2.0 | unclear: more seeds would tell |",
        "| batches of 16, 2 times | none as fast | | | |",
        "",
        "Images: some",
        "",
        "Models were trained here: without training, as `mmod advise MODEL --images FOLDER` compares them, another may "
        "pay. "
        "1,729 test images: differences below 2.0 points may be chance. About 7,000 are needed to tell one point from "
        "chance. One seed: "
        "`--seeds 5` gives confidence intervals over runs.",
    ]
    assert told.recommended == ["b", "a"]
    for score, dense, limit in (
        ("top1", 100.0, r" 20 test images: differences below 17\.1 points"),
        ("top1", 0.0, r" 20 test images: differences below 17\.1 points"),
        ("mean_iou", 60.0, " 20 test images: intervals come with further seeds"),
    ):
        few = dataclasses.replace(timed, runs={name: {0: Measured({score: dense}, samples=20)} for name in ms})
        scored = image_study(config)._replace(config=dataclasses.replace(config, score=score))
        few_told = tell(scored, few, candidates)
        assert re.search(limit, text_of(few_told))
    untold = tell(image_study(config), table, candidates)
    assert (text_of(untold), untold.recommended, untold.code) == (significance(table, "top1", list(ms)), (), ())
    # What is recommended can be copied.
    gradual = Candidate("gradual", routing={"preset": "gradual", "mean": 0.7}, is_trained=False)
    small = Candidate("small", image_size=24, changes={"model": {"args": {"depth": 3}}})
    text = "\n\n".join(code_of(image_study(config), [prune, gradual, small]))
    routed, keys = re.findall(r"```\w+\n(.*?)\n```", text, re.DOTALL)
    assert f'# prune\nmodel = mmod.open_model("{config.output}/seed0/prune").model\n# gradual' in routed
    # One of the keys is copied, below the name of its model.
    by_name = dict(re.findall(r"# (.*)\n([^#]*)", keys))
    assert yaml.safe_load(by_name["prune"]) == {"methods": [{"kind": "prune", "keep": 0.5, "blocks": [1]}]}
    assert yaml.safe_load(by_name["gradual"]) == {"routing": {"preset": "gradual", "mean": 0.7}}
    small_keys = {"model": {"args": {"depth": 3, "img_size": 24}}, "data": {"image_size": 24}}
    assert yaml.safe_load(by_name["small"]) == small_keys
    # A study that trains its dense model opens the run.
    assert f'import mmod\n\nmodel = mmod.open_model("{config.output}/seed0/base").model\n# prune' in routed
    # The weights of a smaller image that is not trained are the dense ones.
    (untrained, _) = code_of(image_study(config), [dataclasses.replace(small, is_trained=False)])
    assert "mmod.apply_(model, mmod.methods.Resize(size=24))" in untrained
    # Seeds say nothing where nothing is trained, nor of other dense models.
    loaded = dataclasses.replace(image_study(config).comparison, train_dense=False, train=None)
    fixed = image_study(config)._replace(comparison=loaded)
    assert text_of(tell(fixed, timed, candidates)).endswith("are needed to tell one point from chance.")
    assert "--seeds" not in text_of(tell(fixed, table, candidates))


UNTUNED = {"tune": False}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"routers": {}}, ValueError, "at least one entry in routers or baselines, and in capacities"),
        ({"processes": 0}, ValueError, "processes must be an integer of at least 1, got 0"),
        ({"tune": "all"}, ValueError, "tune must be true or false or 'others', got 'all'"),
        (
            {"controls": {"a-mod": "rand"}},
            ValueError,
            "unknown series in controls rand; near ones: random; valid ones are a-mod, threshold, random",
        ),
        ({"seeds": 0}, ValueError, "seeds must be an integer of at least 1, got 0"),
        ({"then": {"seeds": 2}}, ValueError, "then must name its output, a folder in this study's"),
        ({"then": {"output": "/b"}}, ValueError, "then must name its output, a folder in this study's"),
        ({"then": {"output": "../b"}}, ValueError, "then must name its output, a folder in this study's"),
        ({"then": {"output": 5}}, TypeError, "then.output must be a text, got 5"),
        ({"routers": {"x": {"router": "random", "budgets": {}}}}, ValueError, "routers.x.budgets must name a budget"),
        ({"baselines": {"x": {}}}, ValueError, "baselines.x must name a budget"),
        ({"controls": {"mod": None}}, TypeError, r"controls must be a mapping of names to \(a text or False\)"),
        ({"then": {"output": "b", "sedes": 2}}, ValueError, "unknown config key 'then.sedes'; near ones: seeds"),
        ({"then": {"output": "b", "seeds": 0}}, ValueError, "seeds must be an integer of at least 1, got 0"),
        ({"then": {"output": "b", "dense": "nowhere.yaml"}}, FileNotFoundError, "no config file at 'nowhere.yaml'"),
        ({"then": {"output": "b", "finetune": {"epoch": 1}}}, ValueError, "unknown config key 'finetune.epoch'"),
        ({"changes": {"seed": 3}}, ValueError, "changes must not set seed: the study sets them"),
        ({"finetune": {"model": {"checkpoint": "a"}}}, ValueError, "finetune.model must not set checkpoint: the study"),
        ({"dense": "nowhere.yaml"}, FileNotFoundError, "no config file at 'nowhere.yaml'"),
        ({"dense": {**DENSE, "routing": {"preset": "a-mod"}}}, ValueError, "has no .* no routing, got routing: leave"),
        ({"train_dense": False, **UNTUNED}, ValueError, "dense config starts from no weights, .* does not train it"),
        ({"changes": {"methods": [{"kind": "merge", "r": 2}]}}, ValueError, "has no methods and .*, got merge: leave"),
        ({"finetune": {"methods": [{"kind": "merge", "r": 2}]}}, ValueError, "has no methods and .*, got merge: leave"),
        ({"routers": {"x": {"router": "atention"}}}, ValueError, "router 'atention' is unknown"),
        ({"routers": {"x": {"budget": {0.5: {}}}}}, ValueError, "unknown key routers.x.budget; near ones: budgets"),
        ({"routers": {"x": {"presets": "mod"}}}, ValueError, "unknown key routers.x.presets; near ones: preset"),
        (
            {"routers": {"x": {"router": "norm", "tune": "no"}}},
            TypeError,
            "routers.x.tune must be true or false",
        ),
        ({"finetune": {"epoch": 1}}, ValueError, "unknown config key 'finetune.epoch'"),
        ({"finetune": {"trained": "routers"}}, ValueError, "dense model too: trained='routers' needs .* `changes` of"),
        ({"finetune": {"distill": {"features": 1.0}}}, ValueError, "dense model too: distill.* `changes` of each"),
        # The keys of another kind are no further mistakes.
        ({"dense": {"kind": "chat", "lora": {}}}, ValueError, "^dense.kind must be 'image', got 'chat'"),
        # Of all models, or of the dense one that the others start from.
        (
            {"tune": "others", "finetune": {"epochs": 1, "data": {"val_limit": 8}}},
            ValueError,
            "the dense model would be evaluated on other images than the fine-tuned ones",
        ),
        ({"changes": {"data": {"train_split": "val"}}}, ValueError, "on the images of the evaluation: .* both 'val'"),
        (
            {"changes": {"data": {"train_split": "val"}}, "finetune": {"data": {"train_split": "train"}}},
            ValueError,
            "on the images of the evaluation: .* both 'val'",
        ),
        (
            {"changes": {"data": {"train_split": "val"}}, "finetune": {"data": {"train_split": "train"}}, **UNTUNED},
            ValueError,
            "on the images of the evaluation: .* both 'val'",
        ),
        ({"capacities": [0.5, 0.5]}, ValueError, "several models of the study have the name 'a-mod-0.5'"),
        (
            {"finetune": {"epochs": 2, "schedule": {"warmup_epochs": 2}}},
            ValueError,
            "study: finetune.schedule.warmup_epochs=2 is as long .*, epochs=2: .* Set finetune.schedule.warmup_epochs",
        ),
        (
            {"routers": {"deep": {"router": "random", "blocks": [1, 99]}}},
            ValueError,
            # Its FLOPs are counted before, for a dense model as cheap.
            "blocks must be ascending numbers from 0 to 3, each once, got",
        ),
        (
            {"baselines": {"exit": {0.5: {"kind": "prune", "blocks": [99]}}}},
            ValueError,
            "model 'exit-0.5' of the study: .*blocks must be ascending numbers from 0 to",
        ),
    ],
)
def test_wrong_studies_fail_before_the_first_run(
    study: ImageStudyConfig, tmp_path: Path, changes: dict[str, object], error: type[Exception], message: str
) -> None:
    fields = {**vars(study), "output": str(tmp_path / "out"), **changes}
    with pytest.raises(error, match=message):
        run_study(ImageStudyConfig(**fields), progress=False)
    assert not (tmp_path / "out").exists()


def test_a_key_of_a_series_is_not_offered_in_the_dense_model(study: ImageStudyConfig) -> None:
    with pytest.raises(ValueError, match=r"unknown config key 'routing'; near ones: routers(; valid|$)"):
        from_plain(ImageStudyConfig, {**vars(study), "routing": {"preset": "mod"}})


@pytest.mark.parametrize(
    ("named", "is_output"),
    [("{}/seed0/dense", True), ("./{}", True), ("{}-other/nowhere.yaml", False), ("x{}/nowhere.yaml", False)],
)
@pytest.mark.parametrize("is_absolute", [False, True])
def test_what_this_study_writes_is_not_asked_of_the_one_that_follows(
    study: ImageStudyConfig,
    named: str,
    is_output: bool,
    is_absolute: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    # The path of a file, beside keys that are no paths.
    then = {"output": "b", "dense": {"base": named.format("out"), "optim": {"betas": [0.9, 0.99]}}}
    output = str(tmp_path / "out") if is_absolute else "out"
    config = dataclasses.replace(study, output=output, then=then)
    if is_output:
        check_following(config)
    else:
        with pytest.raises(FileNotFoundError, match=f"no config file at '{named.format('out')}'"):
            check_following(config)


def test_a_study_that_follows_is_read_as_a_file(study: ImageStudyConfig) -> None:
    then = {"output": "b", "capacities": [1], "rates": [1, 2], "finetune": {"epochs": 2}, "routers": {"random": None}}
    following = dataclasses.replace(study, finetune={"optim": {"lr": 0.1}}, then=then).following()
    # As a file is merged over its base: key by key, and null removes one.
    assert following == dataclasses.replace(
        study,
        output=f"{study.output}/b",
        routers={name: fields for name, fields in study.routers.items() if name != "random"},
        capacities=[1.0],
        rates=[1.0, 2.0],
        finetune={"optim": {"lr": 0.1}, "epochs": 2},
        then=None,
    )
    assert isinstance(following, ImageStudyConfig)
    assert [type(value) for value in (*following.capacities, *(following.rates or []))] == [float] * 3


@pytest.mark.parametrize("tune", [True, False])
def test_what_is_set_for_fine_tuning_counts_in_tuned_models_alone(study: ImageStudyConfig, tune: bool) -> None:
    changes = {"finetune": {"precision": "bf16"}, "isoflop": "none", "tune": tune}
    first, *others = comparison_of(dataclasses.replace(study, seeds=1, **changes)).runs()
    assert first.training.precision == "fp32"
    assert {run.training.precision for run in others} == {"bf16" if tune else "fp32"}


# `tests/studies/test_chat.py` and `test_features.py` read the others.
PLANNED = {"image": ImageStudyConfig, "pairs": PairsStudyConfig}
STUDIES = sorted(Path("configs/tradeoff").glob("*.yaml"))
# Those of studies that choose something else.
CONTROLS = {
    "my-model": {"random"},
    "cifar": {"random"},
    "cifar-dinov2": {"random"},
    "cifar-dinov2-tuned": {"random"},
    "cifar-tuned": {"random"},
    "clip-scenes": {"random"},
    "clip-scenes-smallest": {"random"},
    "fashion": {"random"},
    "fashion-tuned": {"random"},
    "digits": {"random"},
    "digits-capacities": {"uniform"},
    "digits-cnn": {"random", "random, own"},
    "digits-mindskip": {"coin"},
}


def kind_of_study(path: Path) -> str:
    """Return the kind that a file names, which a process that collects tests need not parse."""
    named = re.search(r"^kind: (\w+)", path.read_text(), re.MULTILINE)
    return named[1] if named else "image"


@pytest.mark.parametrize(
    "path", [path for path in STUDIES if kind_of_study(path) in PLANNED], ids=lambda path: path.stem
)
def test_study_configs_plan_their_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit_by_budget(monkeypatch)
    fields = read_yaml(path)
    config = PLANNED[fields.get("kind", "image")](**fields)
    comparison = comparison_of(config)
    planned = comparison.runs()
    assert planned[0].name == ("base" if config.tune is True and config.train_dense else "dense")
    # No method stands without its controls: where tokens are chosen, those at random and evenly spread ones.
    controls = {series for series in map(config.controls.get, config.series) if series}
    controls |= {*config.routers, *(fields.get("router") for fields in config.routers.values())}
    assert CONTROLS.get(path.stem, {"random", "stride"}) <= controls
    routed = [job for job in planned if job.training.routing is not None and not job.training.methods]
    chosen = [model for model in config.routed() if model.search is None]
    added = [model for model in comparison.candidates if not model.series]
    assert len(routed) == config.seeds * (len(chosen) + len(added))
    assert all(job.training.model.has_weights and job.training.routings for job in routed)
    assert len({job.training.output for job in planned}) == len(planned)
    for job in planned:
        # Every run reaches its learning rate; the runner would refuse it only after hours of other runs.
        job.training.check_schedule()
    make_models(comparison, monkeypatch)
    assert re.search(rf"mmod tradeoff ({path}|{path.stem})\b", path.read_text())


@pytest.mark.parametrize("model", ["6 blocks, 64 patches", "12 blocks, 576 patches", "transformers"])
def test_a_name_tells_the_share_of_the_dense_flops(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # How near to its budget a number is fitted, planning/test_budgets.py finds: names tell what it costs.
    monkeypatch.setattr(
        budgets, "_nearest", lambda values, _, budget: min(round(budget * len(values)), len(values) - 1)
    )
    depth, side, patch = (12, 384, 16) if model.startswith("12 ") else (6, 64, 8)
    size = {"embed_dim": 24, "num_heads": 2, "img_size": side, "patch_size": patch, "depth": depth, "num_classes": 4}
    dense: dict[str, Any] = {"name": SMALL, "args": size, "checkpoint": "runs/mine"}
    if model == "transformers":
        save_image_model("vit", tmp_path / "vit")
        dense = {"name": str(tmp_path / "vit"), "args": {}, "pretrained": True}
        side = 32
    config = ImageStudyConfig(**read_yaml("my-model"))
    # Two budgets of some series on one, one of the others on another, and what depends on depth and grid on the third.
    shares, series = ([0.7], FITTED - FREE) if model == "transformers" else ([0.7, 0.55], FREE)
    if depth == 12:
        shares, series = [0.7], {"gradual", "smaller-image", "tome"}
    tables = (
        {name: one for name, one in table.items() if name in series} for table in (config.routers, config.baselines)
    )
    routers, baselines = tables
    config = dataclasses.replace(config, budgets=shares, routers=routers, baselines=baselines, controls={})
    fields = merged(dense_of(config), {"data": {"image_size": side}})
    comparison = comparison_of(dataclasses.replace(config, dense={**fields, "model": dense}))
    candidates = comparison.candidates
    jobs = comparison.runs()
    flops = {}
    for job in jobs:
        # How many patches are equal, no name tells.
        if job.name != "pixelprune" and job.candidate.series:
            kind = sketch(kind_of(job.training))
            flops[job.name] = mmod.flops(kind, job.training.data.image_size).routed
    assert {candidate.series for candidate in candidates} - {""} == {"dense", *series}
    for name, count in flops.items():
        budget = float(name.rpartition("-")[2]) if name != "dense" else 1.0
        assert count < flops["dense"] or name == "dense"
        assert count / flops["dense"] == pytest.approx(budget, rel=0.031), name
    # No model stands there twice, and controls are those of the same names.
    runs = [{**job.training.to_dict(), "output": ""} for job in jobs]
    assert all(run not in runs[:place] for place, run in enumerate(runs))
    assert {candidate.control for candidate in candidates} <= {None, *(job.name for job in jobs)}


# Some of each kind: plans, random tokens, sizes of images, and whole numbers of tokens.
FREE = {"gradual", "random", "smaller-image", "tome", "pixelprune"}
FITTED = {"gradual", "merge-late", "a-mod", "random", "smaller-image", "tome", "prune"}
SMALL = "vit_small_patch16_224"


def dense_of(config: ImageStudyConfig) -> dict[str, Any]:
    assert isinstance(config.dense, dict)
    return config.dense


def test_the_smallest_study_compares_at_the_budgets_of_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[Candidate] = []

    def unfitted(candidates: list[Candidate], *_: Any, **__: Any) -> tuple[list[Candidate], dict[str, str]]:
        advised.extend(candidates)
        return [], {}

    monkeypatch.setattr(untrained, "at_budgets", unfitted)
    untrained.image_candidates(timm.create_model("test_vit"), "image", 6, torch.empty(1, 3, 160, 160), (16, 16))
    config = ImageStudyConfig(**read_yaml("my-model"))
    studied = [one for one in (*config.routed(), *baselines_of(config)) if one.series != "pixelprune"]
    assert {one.name: (one.series, one.budget, one.routing) for one in studied} == {
        one.name: (one.series, one.budget, one.routing) for one in advised
    }


def test_a_shallow_model_merges_more_tokens_than_its_grid_is_high() -> None:
    """Of two blocks, 0.7 of the FLOPs takes more than the eight of a row in each."""
    size = {"embed_dim": 24, "num_heads": 2, "img_size": 64, "patch_size": 8, "depth": 2, "num_classes": 4}
    words = ["my-model", "--dense.model.name", SMALL, "--dense.model.args", json.dumps(size)]
    config = read_config([*words, "--dense.data.image_size", "64"], ImageStudyConfig)
    (dense, _) = training_configs(config)
    merging = Candidate("tome-0.7", methods=({"kind": "merge", "r": "fit"},), series="tome", budget=0.7)
    (tome,), left_out = fitted([merging], dense)
    assert left_out == {}
    assert tome.budget == pytest.approx(0.7, rel=0.03)
    assert tome.methods[0]["r"] > 8
    # Advice leaves out what cannot be fitted; a study was asked for it.
    with pytest.raises(ValueError, match="one value 'fit'"):
        fitted([dataclasses.replace(merging, image_size="fit")], dense)


def test_a_study_of_weights_of_another_size_is_told_both_keys_at_once(tmp_path: Path) -> None:
    torch.save(timm.create_model("vit_tiny_patch16_224", img_size=64).state_dict(), tmp_path / "own.pt")
    words = ["my-model", "--dense.model.name", "vit_tiny_patch16_384", "--dense.model.args", "{num_classes: 1000}"]
    config = read_config([*words, "--dense.model.checkpoint", str(tmp_path / "own.pt")], ImageStudyConfig)
    told = r"is of images of 64 px, and the model of 384 px: set model\.args\.img_size and data\.image_size to 64, or"
    with pytest.raises(ValueError, match=told):
        comparison_of(config)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dense": {"model": {"args": {"num_classes": 4}}}}, "it has 3 classes, the model 4: "),
        ({"dense": {"model": {"args": {"img_size": 30}}, "data": {"image_size": 30}}}, "a multiple, such as 32$"),
        ({"dense": {"data": {"val_split": "few"}}}, "the data names 2 classes, .*, and the model has 3 outputs"),
        ({"dense": {"data": {"val_split": "broken"}}}, "image of 1 bytes cannot be decoded"),
        ({"dense": {"data": {"root": "nowhere"}}}, "data.root='nowhere' is no folder"),
        ({"tune": True}, "has no folder for the split 'train'; it has: broken, few, val"),
    ],
)
def test_what_does_not_fit_the_dense_model_is_refused_before_others_are_made(
    changes: dict[str, Any],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for split, labels in {"val": 3, "few": 2, "broken": 3}.items():
        for label in range(labels):
            folder = tmp_path / f"images/{split}/{label}"
            folder.mkdir(parents=True)
            Image.effect_noise((32, 32), 80).save(folder / "0.png")
    (tmp_path / "images/broken/0/0.png").write_text("x")
    size = {"img_size": 32, "patch_size": 4, "embed_dim": 24, "depth": 4, "num_heads": 2}
    args = {**size, "num_classes": 3}
    save_file(timm.create_model(SMALL, **args).state_dict(), tmp_path / "weights.safetensors")
    model = {"args": args, "checkpoint": str(tmp_path / "weights.safetensors")}
    own = {"dense": {"model": model, "data": {"root": str(tmp_path / "images"), "image_size": 32}}}
    fields = merged({**read_yaml("my-model"), "output": str(tmp_path / "study")}, merged(own, changes))
    monkeypatch.setattr("mmod.studies.study.comparison_from", lambda *_: pytest.fail("models were made"))
    with pytest.raises(ValueError, match=told):
        run_study(from_plain(ImageStudyConfig, fields))
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "study").exists()


def test_data_that_another_key_replaces_are_not_asked_for() -> None:
    missing = {"dense": {"data": {"source": "folder", "root": "nowhere"}}}
    with pytest.raises(ValueError, match="nowhere"):
        FeaturesStudyConfig.check_dense(missing)
    ImageStudyConfig.check_dense({**missing, "changes": {"data": {"root": "docs"}}})
    FeaturesStudyConfig.check_dense({**missing, "images": "docs"})


def test_the_smallest_study_marks_what_differs_from_model_to_model() -> None:
    text = Path("configs/tradeoff/my-model.yaml").read_text()
    marked = re.findall(r"^ +(\w+): .*# change: ", text, re.MULTILINE)
    assert marked == ["name", "args", "checkpoint", "root", "image_size"]


def test_the_smallest_study_runs_on_ones_own_weights_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit_once(monkeypatch, whole=())
    for label in range(3):
        (tmp_path / f"images/val/{label}").mkdir(parents=True)
        for number in range(4):
            Image.effect_noise((40, 40), 80 * label + number).save(tmp_path / f"images/val/{label}/{number}.png")
    size = {"img_size": 32, "patch_size": 4, "in_chans": 1, "embed_dim": 24, "depth": 4, "num_heads": 2}
    args = {**size, "num_classes": 3}
    save_file(timm.create_model(SMALL, **args).state_dict(), tmp_path / "weights.safetensors")
    options = {
        "output": tmp_path / "study",
        "dense.model.args": args,
        "dense.model.checkpoint": tmp_path / "weights.safetensors",
        "dense.data.root": tmp_path / "images",
        "dense.data.image_size": 32,
        "dense.data.channels": 1,
        "latency_rounds": 1,
        "maps": 0,
        # One model of each series, as `fit_once` leaves to advice.
        "budgets": "[0.7]",
    }
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    # What draws its tokens, or reads files at another size, is never fast enough to be named.
    speeds = {"gradual": 1.3, "merge-late": 1.6, "a-mod": 1.8, "tome": 2.1, "prune": 2.2, "pixelprune": 1.1}

    timed: list[set[str]] = []

    def interleave(calls: Mapping[tuple[str, Any], Any], **_: Any) -> dict[tuple[str, Any], list[float]]:
        timed.append({name for name, _ in calls})
        series = {key: key[0].rpartition("-")[0] or key[0] for key in calls}
        return {key: [10.0 / speeds.get(name, 1.0 if name == "dense" else 0.9)] * 3 for key, name in series.items()}

    monkeypatch.setattr(timing, "interleave", interleave)
    # The model is untrained, and nothing is advised for one that guesses, which is compared below.
    for module in (image_studies, advice_page):
        monkeypatch.setattr(module, "say_guessing", lambda *_: "")
    result = run_study(read_config(["my-model", *words], ImageStudyConfig), progress=False)
    assert {point.series for point in result.points} == {"dense", "pixelprune", *FITTED}
    assert "12 test images: the widest interval is" in result.table
    assert "\n\nPreprocessing of this study: 32 x 32 px, bicubic, crop_pct 0.875, mean (0.5), " in result.summary
    # Each of the 9 models that the config names is compared, or said to be left out.
    assert len(result.points) + result.summary.count("Left out: smaller-image-") == 9
    # The lines of Python of what the sentences name are printed last, and the page has those of all that is named.
    code = json.loads((tmp_path / "study/tradeoff.json").read_text())["code"]
    assert code in result.table
    printed = result.printed[-1].splitlines()
    assert set(printed[2:]) <= set(code.splitlines())
    assert all(point.to_dense is None or point.to_dense.has_interval for point in result.points)
    assert timed == [{point.name for point in result.points}]
    # What an uncertain text names is timed further.
    with monkeypatch.context() as busy:
        busy.setattr("mmod.analysis.table.timing_caution", lambda *_: "Speeds are uncertain.")
        uncertain = run_study(read_config(["my-model", *words], ImageStudyConfig), progress=False)
    assert timed[1:] == [{"dense", *uncertain.recommended}]
    assert len(timed[1]) > 1
    # So is what scatters alone.
    scattering = uncertain.recommended[-1]
    with monkeypatch.context() as calm:
        # The first further round is kept.
        calm.setattr(timing, "_FURTHER", 2)
        calm.setattr(Table, "scatters", lambda _, name: name == scattering)
        run_study(read_config(["my-model", *words], ImageStudyConfig), progress=False)
    assert timed[2:] == [{"dense", scattering}]
    # Advice on the same images says the same of the models that do not draw and read the same pixels.
    config = read_config(["my-model", *words, "--dense.model.args.dynamic_img_size", "true"], ImageStudyConfig)
    kind: Any = kind_of(training_configs(config)[0])
    batches = list(image_stream(kind.config.data).batches(0))
    advice = mmod.advise(load(kind), batches, images=12, page=advice_page.Page(run="runs/my dense"), progress=False)
    rows = {row.name: row.accuracy for row in advice.rows}
    assert advice.accuracy == pytest.approx(result.points[0].figures[0]["top1"] / 100)
    assert set(rows) == {point.name for point in result.points} - {"dense"}
    assert "Nothing was trained" in result.table
    assert "Nothing was trained" in str(advice)
    # Advice says what a study is for.
    assert "`mmod tradeoff my-model --dense 'runs/my dense' --tune true` fine-tunes the same candidates" in str(advice)
    # The same answer in the same words, for batches and for single images, also in the report.
    assert len(advice.recommendations) == 2
    # Advice alone also says how to ask for more images: by the number of all.
    asks = r" \(`--number (\d+)`, in Python `images=(\d+)`\)"
    assert all(
        int(all_) == int(again) == 12 + int(more)
        for more, all_, again in re.findall(rf"(\d+) more images{asks}", str(advice))
    )
    assert all(least == all_ == again for least, all_, again in re.findall(rf"from (\d+) images on{asks}", str(advice)))
    verdict, sentence = (re.sub(asks, "", told) for told in (str(advice.verdict), advice.sentence))
    assert verdict in result.summary, (result.summary, str(advice))
    assert str(advice.verdict.table) in str(advice)
    page = write_report([tmp_path / "study"]).read_text()
    assert html.escape(sentence) in page
    for row in advice.verdict.table.rows[1:]:
        assert "".join(f"<td>{html.escape(cell)}</td>" for cell in row[1:]) in page
    codes = {row.name: row.code for row in advice.rows}
    for candidate in comparison_of(config).candidates[1:]:
        assert candidate.series in ("", "smaller-image") or candidate.code("image", True) == codes[candidate.name]
    for point in result.points[1:]:
        if point.series not in ("random", "smaller-image"):
            change, difference = rows[point.name], point.to_dense
            assert change is not None
            assert difference is not None
            assert 100 * change.value == pytest.approx(difference.value)
            assert 100 * change.high == pytest.approx(difference.high)
    # Both know a model that guesses by its classes, which need not stand in its config.
    for module in (image_studies, advice_page):
        monkeypatch.setattr(module, "say_guessing", say_guessing)
    assert str(advice.verdict).startswith("Nothing is advised: the dense model is hardly better than chance (33.3 %)")
    assert str(advice.verdict) in run_study(read_config(["my-model", *words], ImageStudyConfig), progress=False).summary


def test_models_are_not_trained_on_the_images_of_the_evaluation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fit_by_budget(monkeypatch)
    words = ["my-model", "--tune", "true"]
    with pytest.raises(ValueError, match=r"on the images of the evaluation: .* both 'val'"):
        comparison_of(read_config([*words, "--dense.data.train_split", "val"], ImageStudyConfig)).runs()
    # One key fine-tunes all models alike and shortly, the dense one too.
    runs = comparison_of(read_config(words, ImageStudyConfig)).runs()
    assert all(run.is_trained for run in runs)
    assert {run.training.epochs for run in runs} == {1}


def test_the_runs_of_a_study_are_counted_by_what_is_said_of_its_models() -> None:
    comparison = comparison_of(read_config(["digits-smallest"], ImageStudyConfig))
    runs = comparison.runs()
    told = "6 models, 2 controls and the dense model before fine-tuning, each with 2 seeds"
    assert compared_models(comparison, runs) == told
    assert len(runs) == (6 + 2 + 1) * 2
    once = comparison_of(read_config(["digits-smallest", "--seeds", "1", "--tune", "false"], ImageStudyConfig))
    assert compared_models(once, once.runs()) == "6 models and 2 controls"


def test_what_is_left_to_train_is_said_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fit_by_budget(monkeypatch)
    monkeypatch.chdir(tmp_path)
    runs = comparison_of(read_config(["my-model", "--tune", "true"], ImageStudyConfig)).runs()
    rates = Rates([1.0, 2.0], "top1", lambda *_: Measured({}), Path("rates"))
    trials = list(itertools.chain.from_iterable(trials_of(runs, rates).values()))
    assert len(trials) == 2 * len(runs)
    assert training_ahead([*runs, *trials]) == f", {3 * len(runs)} runs to train, of {3 * len(runs)} epochs in all"
    # A folder is timed as the dense model's run where it is one, and the directory of the command is no run.
    told = f", {len(runs)} runs to train, of {len(runs)} epochs in all"
    in_time = (
        f": about {len(runs)}:00 by the dense model's run, and besides that models are loaded, evaluated before "
        "training, and timed"
    )
    for name, result, is_run, time in [
        ("dense", '{"epochs": 4, "usage": {"wall_seconds": 240}}', True, in_time),
        ("untimed", '{"epochs": 4, "usage": null}', True, ""),
        ("other", "[]", False, ""),
        (".", "[]", False, ""),
    ]:
        Path(name).mkdir(exist_ok=True)
        Path(name, "result.json").write_text(result)
        if is_run:
            Path(name, "config.yaml").write_text("model: {name: a}")
        model = dataclasses.replace(runs[0].training.model, checkpoint=None if name == "." else name)
        first = dataclasses.replace(runs[0], training=dataclasses.replace(runs[0].training, model=model))
        assert training_ahead([first, *runs[1:]]) == told + time
        if time:
            # Epochs that end early take their share of one of the dense model's, which had 20 steps of 64 samples.
            Path(name, "result.json").write_text(result.replace("{", '{"steps": 80, ', 1))
            Path(name, "config.yaml").write_text("{output: run, model: {name: a}, data: {batch_size: 64}}")
            of_images = {"batch_size": 64}
            limited = {**of_images, "train_limit": 128}
            for data, changes, share in ((of_images, {"epoch_steps": 5}, 1 / 4), (limited, {}, 1 / 10)):
                short = []
                for one in [first, *runs[1:]]:
                    training = dataclasses.replace(
                        one.training, data=dataclasses.replace(one.training.data, **data), **changes
                    )
                    short.append(dataclasses.replace(one, training=training))
                seconds = round(60 * share * len(runs))
                assert f": about {seconds // 60:02}:{seconds % 60:02} by" in training_ahead(short)
            Path(name, "result.json").write_text(result)
        # The column of epochs has those of that run before a model's own.
        epochs, _ = epochs_and_seconds(model.checkpoint)
        assert epochs_of(first, epochs) == ("4 + 1" if is_run else "+ 1")
    # What has finished is not trained again, and what is loaded is not trained.
    for number, run in enumerate(runs, 1):
        Path(run.training.output).mkdir(parents=True)
        Path(run.training.output, "config.yaml").write_text("model: {name: a}")
        Path(run.training.output, "result.json").write_text("{}")
        assert training_ahead(runs).startswith(f", {len(runs) - number} run" if number < len(runs) else "")
    assert training_ahead(runs) == ""
    assert training_ahead([dataclasses.replace(run, is_trained=False) for run in trials]) == ""


def test_a_base_of_the_dense_model_in_a_file_is_that_of_the_command(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text("base: my-model\ndense: {base: run, seed: 3, data: {root: images}}\n")
    changes = ["--dense.seed", "3", "--dense.data.root", "images"]
    lines = [[str(file)], ["my-model", "--dense", "run", *changes], ["my-model", *changes, "--dense.base", "run"]]
    configs = [read_config(words, ImageStudyConfig) for words in lines]
    assert configs[0].dense == {"base": "run", "seed": 3, "data": {"root": "images"}}
    assert configs[1] == configs[0]
    assert configs[2] == configs[0]
    # Without a base, keys are those of my-model's own dense model.
    file.write_text("base: my-model\ndense: {data: {root: images}}\nbaselines: {base: {0.5: {kind: merge, r: 8}}}\n")
    kept = read_config([str(file)], ImageStudyConfig)
    assert kept == read_config(
        ["my-model", "--dense.data.root", "images", "--baselines.base", "{0.5: {kind: merge, r: 8}}"], ImageStudyConfig
    )


def test_mappings_of_the_command_line_merge_as_those_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    # The line of docs/own_study.md: the schedule without warm-up is that of my-model.
    finetune = "{epochs: 3, optim: {lr: 1.0e-4}}"
    file.write_text(f"base: my-model\nfinetune: {finetune}\n")
    config = read_config(["my-model", "--finetune", finetune], ImageStudyConfig)
    assert config == read_config([str(file)], ImageStudyConfig)
    assert config.finetune == {"epochs": 3, "optim": {"lr": 1e-4}, "schedule": {"warmup_epochs": 0}}
    # What is emptied first is replaced.
    alone = read_config(["my-model", "--finetune", "{}", "--finetune", finetune], ImageStudyConfig)
    assert alone.finetune == {"epochs": 3, "optim": {"lr": 1e-4}}


@pytest.mark.parametrize("file", ["", "config.yaml"])
def test_a_run_is_its_final_model_on_its_data(file: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    trained = TrainConfig.from_dict({**DENSE, "output": str(run)})
    (run / "config.yaml").write_text(yaml.safe_dump({**trained.to_dict(), "world_size": 1}))
    fields = {"train_dense": False, "tune": False, "capacities": [0.5]}
    routers: dict[str, Any] = {"random": {"router": "random"}}
    study = ImageStudyConfig(output=str(tmp_path / "out"), dense=str(run / file), routers=routers, **fields)
    dense, _ = training_configs(study)
    assert (dense.model.checkpoint, dense.data) == (str(run), kind_of(trained).config.data)
    changed, _ = training_configs(dataclasses.replace(study, dense={"base": study.dense, "data": {"batch_size": 3}}))
    assert changed == dataclasses.replace(dense, data=dataclasses.replace(dense.data, batch_size=3))
    (run / "config.yaml").write_text("kind: chat\noutput: run\nmodel: {name: a}\ndata: {train: b}\nlora: {}\n")
    with pytest.raises(ValueError, match=r"of another kind: kind must be 'image', got 'chat'$"):
        training_configs(study)
