"""Advice: what is measured is exact, what is advised follows from it, and a killed call goes on where it stopped."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from itertools import count, groupby, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
import timm
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import mmod
from mmod.adapters import by_first_batch, find_stacks
from mmod.analysis import fronts, timing
from mmod.analysis.counting import by_data
from mmod.analysis.statistics import Estimate, change_of
from mmod.analysis.table import Measured, Table, rows_once
from mmod.analysis.timing import Spread
from mmod.blocks import MethodWarning
from mmod.io import progress
from mmod.io.files import write_json
from mmod.io.progress import Stages
from mmod.io.records import QUESTION, answered_by
from mmod.io.store import Store
from mmod.methods import methods_of, read_method
from mmod.methods.resolve import resolve_routing
from mmod.planning import entrants, samples, trials, untrained
from mmod.planning.advice import WRITTEN, Advice, Page
from mmod.planning.candidate import Candidate, PlanOptions
from mmod.planning.choice import AdviceRow
from mmod.planning.early import BATCH
from tests.kit.clip_zoo import make_clip, make_images
from tests.kit.fitted import count_once, few_series, fit_once
from tests.kit.own_vits import OwnBlock, OwnViT, make_own, make_own_images
from tests.kit.vlm_zoo import make_joint, make_language, prompt

SIDE = 160


@pytest.fixture(autouse=True)
def fitted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fit_once(monkeypatch)
    count_once(monkeypatch)


def make(**options: Any) -> nn.Module:
    """Return a model of half the width of timm's smallest: hundreds of images run through each of many candidates."""
    torch.manual_seed(0)
    options = {"embed_dim": 32, "depth": 4, "dynamic_img_size": True, "num_classes": 7, **options}
    return timm.create_model("test_vit", **options).eval()


def pictures(number: int, flat: bool = False) -> Tensor:
    """Return images of one colour each, or of noise."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(number, 3, *((1, 1) if flat else (SIDE, SIDE)), generator=generator).expand(-1, -1, SIDE, SIDE)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, float]], None]:
    """Let candidates take set milliseconds, 10 unless named, after running each once."""

    def set_times(of: Mapping[str, float]) -> None:
        def interleave(calls: Mapping[str, Callable[[], Any]], **_: Any) -> dict[str, list[float]]:
            for call in calls.values():
                call()
            return {(name, batch): [of.get(name, 10.0)] * 3 for name, batch in calls}

        monkeypatch.setattr(timing, "interleave", interleave)
        # Every round has the same times.
        monkeypatch.setattr(trials, "ROUNDS", 1)
        # Set times do not depend on how busy this machine is.
        monkeypatch.setattr(timing, "_SHORTEST", math.inf)

    return set_times


def test_a_smaller_image_wins_and_it_says_so(
    clock: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({"smaller-image-0.7": 5.0, "gradual-0.7": 8.0})
    few_series(monkeypatch, "gradual", "smaller-image")
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    advice = mmod.advise(model, [pictures(12, flat=True)], batch_size=3, folder=tmp_path, progress=False)
    assert advice.best is None
    assert advice.sentence == (
        "Keep the dense model for batches of 3: it is unclear whether anything clearly faster is within 2 points. 180 "
        "more images (`--number 192`, in Python `images=192`) would tell of smaller-image-0.7 (112 px)."
    )
    (row,) = [row for row in advice.verdict.table.rows if row[0].startswith("batches of 3, ")]
    change = ("+0.0 [-24.2, +0.0]", "unclear: 180 more images would tell")
    assert row == ("batches of 3, 1.25 to 2 times", "smaller-image-0.7", "2.00", *change)
    lenient = dataclasses.replace(advice, tolerance=0.2)
    assert lenient.sentence == (
        "Keep the dense model for batches of 3 for now. smaller-image-0.7 (112 px) is probably within 20 points: 2.00 "
        "times as fast, +0.0 [-24.2, +0.0] points of agreement. 4 more images (`--number 16`, in "
        "Python `images=16`) would tell."
    )
    assert lenient.code == "import mmod\n\nmmod.apply_(model, mmod.methods.Resize(size=112))"
    opened = dataclasses.replace(lenient, page=Page(opening='model = mmod.open_model("test_vit").model'))
    assert opened.code.startswith('import mmod\n\nmodel = mmod.open_model("test_vit").model\nmmod.apply_(model, ')
    assert str(opened).count(opened.page.opening) == 1
    assert "# model: the dense one" not in str(opened)
    # What a notebook's cell or a traceback shows is the sentence, and no row.
    assert repr(advice) == f"<Advice from 12 images on {len(advice.rows)} recipes: {advice.sentence} Print it for all.>"
    decided = dataclasses.replace(advice, tolerance=0.5)
    assert decided.best is not None
    assert decided.best.name == "smaller-image-0.7"
    assert decided.sentence.startswith("Use smaller-image-0.7 (112 px) for batches of 3: 2.00 times as fast, +0.0 [")
    # All that is named, whatever the sentence is about, has its lines once.
    for name in decided.verdict.named:
        (one,) = [one for one in advice.rows if one.name == name]
        assert str(decided).count(f"\n{one.code}\n") == 1
        assert str(decided).count(f"\n{one.config}\n") == 1
    assert "\nsmaller-image-0.7 (112 px) in Python:\n" in str(decided)
    assert advice.rows[0].on_front
    assert not methods_of(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    saved = json.loads((tmp_path / "advice.json").read_text())
    assert saved["sentence"] == advice.sentence
    assert [row["name"] for row in saved["rows"]] == [row.name for row in advice.rows]
    page = (tmp_path / "advice.md").read_text()
    assert page.startswith("# Advice for test_vit\n")
    assert advice.sentence in page
    assert (tmp_path / "advice.png").stat().st_size


def test_advice_on_another_question_is_not_replaced(
    clock: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({"smaller-image-0.7": 5.0})
    few_series(monkeypatch, "smaller-image")
    model, images = make(), pictures(4)
    options: dict[str, Any] = {
        "folder": tmp_path,
        "progress": False,
        "candidates": [Candidate("a", routing={"preset": "a-mod"})],
    }
    mmod.advise(model, [images], **options)
    page = (tmp_path / "advice.md").read_bytes()
    assert "10 points" in mmod.advise(model, [images], tolerance=0.1, **options).sentence
    mmod.advise(model, [images], **options)
    others: list[tuple[str, nn.Module, torch.Tensor, dict[str, Any]]] = [
        ("samples", model, pictures(4).flip(0) + 1, {}),
        ("model", make(num_classes=5), images, {}),
        ("batch_size", model, images, {"batch_size": 2}),
        ("candidates", model, images, {"candidates": None}),
        ("candidates, faster", model, images, {"candidates": None, "faster": 1.2}),
    ]
    for changed, other, other_images, settings in others:
        with pytest.raises(
            FileExistsError, match=f"differs in {changed}: remove it, or name another folder, .*--output FOLDER"
        ):
            mmod.advise(other, [other_images], **{**options, **settings})
    assert (tmp_path / "advice.md").read_bytes() == page
    # Nor is the question of a study, which would refuse its own folder after that.
    study = tmp_path / "study"
    study.mkdir()
    write_json(study / QUESTION, {"runs": {}, "code": "", "weights": {}})
    with pytest.raises(FileExistsError, match="study' has results of another command: name another folder"):
        mmod.advise(model, [images], **{**options, "folder": study})
    assert (answered_by(study) or {}).keys() == {"runs", "code", "weights"}


def test_routers_that_nobody_has_trained_are_named(clock: Callable[..., None]) -> None:
    clock({})
    learned = Candidate("mod", routing={"preset": "mod"})
    stride = Candidate("stride", routing={"router": "stride"})
    told = str(mmod.advise(make(), [pictures(4)], candidates=[learned, stride], progress=False))
    assert "Routers that must be trained chose with random weights here: mod." in told


def test_nothing_is_advised_where_nothing_pays(clock: Callable[..., None]) -> None:
    clock({"random": 5.0})
    random = Candidate("random", routing={"router": "random", "capacity": 0.1})
    stride = Candidate("stride", routing={"router": "stride"})
    # Of so many blocks that an answer changes.
    advice = mmod.advise(make(depth=6), [pictures(8)], tolerance=0.0, candidates=[random, stride], progress=False)
    assert advice.rows[0].loss.value > 0
    assert advice.best is None
    slow = mmod.advise(make(), [pictures(8)], candidates=[stride], progress=False)
    for where in ("batches of 8", "single images"):
        assert f"Keep the dense model for {where}: nothing tried is clearly faster and within 2 points." in str(slow)
    assert slow._repr_markdown_() == str(slow)
    assert slow.code == ""


def advice_of(rows: list[tuple[str, float, Estimate, Estimate | None]]) -> Advice:
    """Return advice by 64 images from names, speeds, agreement and change of accuracy."""
    results = tuple(
        AdviceRow(name, name, Spread(speed, speed, speed), score, change, 64, "", "", True)
        for name, speed, score, change in rows
    )
    accuracy = None if rows[0][3] is None else 0.9
    return Advice(results, {}, "agreement", accuracy, 10.0, 8, 64, 0.02)


def test_a_recipe_that_is_slower_on_prompts_of_different_lengths_says_so() -> None:
    change = Estimate(0.0, -0.01, 0.01)
    told = "- Of the recipes named above, these are slower than the dense model on the mix: named (0.80)."
    for mix, is_told in ((0.8, True), (1.0, False)):
        advice = advice_of([("named", 1.6, Estimate(0.95, 0.9, 0.98), change)])
        (row,) = advice.rows
        row = dataclasses.replace(row, speedups={"mix": Spread(mix, mix, mix)})
        assert (told in str(dataclasses.replace(advice, rows=(row,)))) == is_told


def test_a_recipe_whose_answers_often_differ_from_the_dense_models_says_so_beside_its_accuracy() -> None:
    change = Estimate(-0.01, -0.03, 0.01)
    other = ("other", 1.6, Estimate(0.74, 0.65, 0.82), change)
    alike = ("alike", 1.3, Estimate(0.95, 0.9, 0.98), Estimate(0.0, -0.01, 0.01))
    told = "- Of the recipes named above, fewer than 90 % of the answers equal the dense model's with other (74 %)."
    # One that is not named, since it loses more, has as unlike answers.
    worse = ("worse", 1.5, Estimate(0.7, 0.6, 0.8), Estimate(-0.2, -0.3, -0.1))
    assert told in str(advice_of([other, alike, worse]))
    # Without labels, the agreement is what the verdict shows.
    for rows in ([alike], [(*other[:3], None)]):
        assert "of the answers equal" not in str(advice_of(rows))


def test_the_front_of_the_picture_is_that_of_the_stars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither few samples nor a control lead, however good they look."""
    gain, same = Estimate(0.1, 0.0, 0.2), Estimate(0.0, -0.1, 0.1)
    rows = [(name, speed, same, change) for name, speed, change in (("few", 1.9, gain), ("all", 1.4, same))]
    advice = advice_of([*rows, ("drawn", 2.0, same, gain)])
    few, *others, drawn = advice.rows
    changed = (dataclasses.replace(few, images=8, on_front=False), *others)
    advice = dataclasses.replace(advice, rows=(*changed, dataclasses.replace(drawn, at_random=True, on_front=False)))
    drawings = []
    monkeypatch.setattr(fronts.Fronts, "name", lambda drawing, *_: drawings.append(drawing))
    advice.plot(tmp_path / "advice.png")
    (front,) = drawings[0].fronts
    assert {mark.name for mark in front} - {"dense"} == {row.name for row in advice.rows if row.on_front}


def test_times_are_those_of_a_sample_as_in_studies_and_of_the_batch() -> None:
    advice = advice_of([("a", 1.4, Estimate(1.0, 1.0, 1.0), None)])
    assert "- The dense model takes 1.25 ms per image in batches of 8 (10.0 ms a batch).\n" in str(advice)
    single = dataclasses.replace(advice, batch_size=1, cache=2**20, accuracy=0.5)
    assert (
        "- The dense model takes 10 ms per prompt, with a KV cache of 1 MiB on average, and has 50.0 % right answers.\n"
    ) in str(single)


def test_nothing_is_advised_where_the_dense_model_guesses() -> None:
    advice = advice_of([("gradual-0.7", 1.4, Estimate(1.0, 1.0, 1.0), Estimate(0.0, -0.01, 0.01))])
    assert advice.best is not None
    # 27 of 100 are within two deviations of the 20 that guesses among five classes get right.
    for faster in (None, 1.3):
        guessing = dataclasses.replace(advice, accuracy=0.27, images=100, classes=5, faster=faster)
        assert "Nothing is advised: the dense model is hardly better than chance (20 %)" in str(guessing)
        assert guessing.sentence in str(guessing)
        assert not any(text in str(guessing) for text in ("<-", "none as fast", "more is tried", "Use "))
        assert (guessing.best, guessing.undecided, guessing.code) == (None, (), "")
    better = dataclasses.replace(advice, accuracy=0.29, images=100, classes=5)
    assert better.best is not None
    assert "Nothing is advised" not in str(better)
    # Four of four are no guesses, though chance gets them right as well.
    assert dataclasses.replace(advice, accuracy=1.0, images=4, classes=2).best is not None
    # Answers of prompts are of no classes to guess, but where none is right, none can be lost.
    assert dataclasses.replace(advice, accuracy=0.01).best is not None
    silent = dataclasses.replace(advice, accuracy=0.0)
    assert (silent.best, silent.code) == (None, "")
    assert "Nothing is advised: the dense model has no answer right, so that differences to it say" in str(silent)


def test_a_dense_model_that_guesses_is_said_to_before_anything_else_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []

    def evaluate_once(*given: Any) -> Measured:
        told.append(capsys.readouterr().err)
        return measure(*given)

    measure = trials.evaluate_once
    monkeypatch.setattr(trials, "evaluate_once", evaluate_once)
    model, images = make(), pictures(12)
    with torch.no_grad():
        right = model(images).argmax(-1)
    wrong = (right + 1) % 7
    stride = [Candidate("stride", routing={"router": "stride"})]
    for labels, shown in ((wrong, True), (right, True), (wrong, False)):
        told.clear()
        advice = mmod.advise(model, [(images, labels)], candidates=stride, progress=shown)
        guessing = advice.recommendations[0].invalid
        assert bool(guessing) == (labels is wrong)
        # Of the dense model, of which it is not known before, and of what follows.
        before, behind, *further = told
        assert behind == (f"Nothing will be advised: {guessing}\n" if guessing and shown else "")
        assert not any([before, *further])


def test_the_recipe_that_a_wanted_speed_names_is_marked() -> None:
    lossy = ("lossy", 1.37, Estimate(0.97, 0.95, 0.99), None)
    slow = ("slow", 1.2, Estimate(1.0, 0.99, 1.0), None)
    for rows, speed, marked in (
        ([lossy, slow], 1.4, ["lossy <- named"]),
        ([lossy, slow], 3.0, ["lossy <- named"]),
        ([lossy, slow], 1.2, ["slow <- use"]),
        # Without a wanted speed, the dense model is kept.
        ([lossy], None, []),
    ):
        advice = dataclasses.replace(advice_of(rows), faster=speed)
        recipes = [row[0].removeprefix("* ") for row in advice.table().rows[1:]]
        assert [recipe for recipe in recipes if "<-" in recipe] == marked
        outcomes = [(row[1], row[4]) for row in advice.verdict.table.rows]
        assert [f"{name} <-{text.partition('<-')[2]}" for name, text in outcomes if "<-" in text] == marked


def test_a_routing_without_a_control_is_said_to_have_none() -> None:
    same = Estimate(1.0, 0.99, 1.0)
    # Each that the page names, and not what it leaves out.
    lossy = Estimate(0.9, 0.88, 0.92)
    advice = advice_of([("two", 2.0, lossy, None), ("one", 1.5, same, None), ("un", 1.1, same, None)])
    assert "random tokens" not in str(advice)
    rows = tuple(dataclasses.replace(row, chooses=True) for row in advice.rows)
    assert "Not compared with random tokens here: two, one.\n" in f"{dataclasses.replace(advice, rows=rows)}\n"
    rows = tuple(dataclasses.replace(row, control="random") for row in rows)
    assert "random tokens" not in str(dataclasses.replace(advice, rows=rows))


def test_random_tokens_that_are_within_the_tolerance_too_say_that_the_choice_hardly_matters() -> None:
    same = Estimate(1.0, 0.99, 1.0)
    told = (
        "random-0.55, with as many FLOPs, is within 2 points too: it hardly matters here which tokens prune-0.55 keeps."
    )
    without = "Not compared with random tokens here: prune-0.55."
    for drawn, flops, sentence in (
        (same, 0.56, told),
        (Estimate(0.98, 0.95, 1.0), 0.56, without),
        # Random tokens of more FLOPs say nothing.
        (same, 0.7, without),
    ):
        advice = advice_of([("prune-0.55", 2.0, same, None), ("random-0.55", 1.5, drawn, None)])
        prune, random = advice.rows
        rows = (
            dataclasses.replace(prune, chooses=True, flops=0.55),
            dataclasses.replace(random, chooses=True, at_random=True, flops=flops),
        )
        assert sentence in dataclasses.replace(advice, rows=rows).facts


def test_the_numbers_of_images_are_explained_where_they_differ() -> None:
    few = advice_of([("few", 1.5, Estimate(0.5, 0.4, 0.6), None), ("many", 1.5, Estimate(0.99996), None)])
    assert "clearly beaten" not in str(few)
    rows = (few.rows[0], dataclasses.replace(few.rows[1], images=256))
    told = dataclasses.replace(few, rows=rows, images=256, measure="cosine of features")
    assert "\n- 64 images: clearly beaten there by what is as fast; all others ran on 256." in str(told)
    # Cosines that differ in the fourth decimal are told apart.
    assert [row[2].strip() for row in told.table().rows[1:]] == ["0.5000 [0.4000, 0.6000]", "1.0000"]


def test_a_long_table_leaves_out_on_a_screen_what_is_slower_than_the_dense_model(tmp_path: Path) -> None:
    same = Estimate(1.0, 0.99, 1.0)
    names = [("fast", 1.5), *((f"slow {number}", 0.9) for number in range(10))]
    advice = advice_of([(name, speed, same, None) for name, speed in names])
    # Faster in another pass.
    row = dataclasses.replace(advice.rows[1], speedups={"batch 1": Spread(1.1, 1.1, 1.1)})
    advice = dataclasses.replace(advice, rows=(advice.rows[0], row, *advice.rows[2:]))
    shown = str(advice)
    assert all(f"* {name} " in shown for name in ("fast", "slow 0"))
    slow = ", ".join(f"slow {number}" for number in range(1, 10))
    assert f"\nSlower than the dense model by every speed-up, with rows in `advice.table()`: {slow}.\n" in shown
    assert not re.search(r"\* slow [1-9] ", shown)
    advice.save(tmp_path)
    page = (tmp_path / "advice.md").read_text()
    assert all(f"* {name} " in page and len(advice.table().rows) == 12 for name, _ in names)
    assert "Slower than the dense model" not in page
    # A short table has all, and so has one without a faster row.
    assert "| * slow 9 " in str(dataclasses.replace(advice, rows=advice.rows[-3:]))
    told = str(dataclasses.replace(advice, rows=advice.rows[-1:] * 11))
    assert told.count("| * slow 9 ") == 11
    assert "Slower than the dense model by" not in told
    # A row is as slow as the table shows it.
    nearly = dataclasses.replace(advice.rows[-1], speedup=Spread(0.996, 0.99, 1.0))
    assert "| * slow 9 " in str(dataclasses.replace(advice, rows=(*advice.rows[:-1], nearly)))


def test_prompts_say_what_their_intervals_and_flops_are_of() -> None:
    rows = [("a", 1.5, Estimate(1.0, 0.9, 1.0), None), ("b", 1.4, Estimate(0.97), None)]
    advice = advice_of(rows)
    prompts = dataclasses.replace(
        advice, cache=2**20, rows=tuple(dataclasses.replace(row, cache=2**19, flops=0.6) for row in advice.rows)
    )
    told = str(prompts)
    assert "- `*`: no other is faster and loses less, by the means. In brackets: quartiles of speeds, and 95" in told
    assert " % intervals over prompts.\n" in told
    assert "FLOPs, language model" in prompts.table().rows[0]


def test_the_number_of_prompts_that_would_tell_counts_those_of_the_plan_search() -> None:
    none_changed = change_of(np.zeros(64))
    advice = dataclasses.replace(advice_of([("a", 1.5, Estimate(1.0), none_changed)]), cache=1)
    told = "{} more prompts (`--number {}`, in Python `images={}`) would tell."
    for searched, more, number in ((0, 73, 137), (16, 92, 172), (64, 146, 274)):
        asked = dataclasses.replace(advice, searched=searched)
        assert told.format(more, number, number) in asked.sentence
        assert f"probably: {more} more prompts would tell" in str(asked.verdict)
        assert f"only from 137 prompts on (`--number {number}`, in Python `images={number}`); " in str(asked.verdict)
        # Where there are fewer, that is what is said.
        short, enough = (dataclasses.replace(asked, page=Page(available=number - few)) for few in (1, 0))
        assert f"probably: {more} more prompts (there are {number - 1} in all) would tell" in str(short.verdict)
        assert f"only from 137 prompts on (there are {number - 1} in all); " in str(short.verdict)
        assert str(enough.verdict) == str(asked.verdict)
        assert f"- {64 + searched} of {number} prompts were used, spread evenly over them.\n" in str(enough)
        assert "were used" not in str(dataclasses.replace(asked, page=Page(available=64 + searched)))
        # Of so many, the search takes as large a share.
        assert number - math.ceil(number * searched / (64 + searched)) == 137


def test_smaller_budgets_are_offered_only_where_they_are_smaller() -> None:
    def offered(speed: float, series: str = "a-mod", flops: float = 0.55) -> list[str]:
        advice = advice_of([("one", speed, Estimate(0.9, 0.85, 0.95), None)])
        row = dataclasses.replace(advice.rows[0], series=series, flops=flops)
        return re.findall("`--faster ([0-9.]+)`", str(dataclasses.replace(advice, rows=(row,))))

    # For 1.25 times the speed, the smallest budget is about that of the others.
    assert offered(1.1) == offered(1.3) == ["1.5"]
    assert offered(1.6) == ["2"]
    assert offered(2.1) == []
    # Three times fewer FLOPs were tried already, and what is of none of the usual series has no other budget.
    for silent in ({"flops": 0.33}, {"series": ""}, {"series": "mine"}, {"series": "random"}):
        assert offered(1.1, **silent) == []


def test_smaller_budgets_are_offered_where_the_smallest_of_a_series_loses_little() -> None:
    # The last one changed no answer of a few.
    alike, near, few = Estimate(1.0, 0.99, 1.0), Estimate(0.995, 0.985, 1.0), Estimate(1.0, 0.9, 1.0)
    lossy = Estimate(0.9, 0.85, 0.95)

    def offered(*rows: tuple[str, float, float, Estimate], **changes: Any) -> str:
        advice = advice_of([(f"{series}-{flops}", speed, score, None) for series, flops, speed, score in rows])
        made = [
            dataclasses.replace(row, series=series, flops=flops)
            for row, (series, flops, _, _) in zip(advice.rows, rows)
        ]
        advice = dataclasses.replace(advice, **{"rows": tuple(made), **changes})
        return next((fact for fact in advice.facts if "tries smaller budgets" in fact), "")

    # Also where it saves no time here, whose note on short passes stands beside it.
    for score in (alike, near, few):
        rows = [("gradual", 0.7, 1.0, lossy), ("gradual", 0.55, 1.0, score)]
        assert offered(*rows) == (
            "gradual-0.55 loses little: `--faster 1.4`, in Python `faster=1.4`, tries smaller budgets."
        )
    # The speed is one that was not reached.
    rows = [("merge-late", 0.55, 1.6, alike), ("smaller-image", 0.54, 1.3, alike), ("", 0.57, 1.1, alike)]
    assert offered(*rows).startswith("merge-late-0.55 and smaller-image-0.54 lose little: `--faster 1.7`, ")
    both = offered(("prune", 0.55, 1.8, alike), rows[1])
    assert both.startswith("prune-0.55 and smaller-image-0.54 lose little: `--faster 1.9`")
    # A tenth fewer FLOPs may make up for being slower by as much.
    assert offered(("gradual", 0.55, 0.91, alike)).startswith("gradual-0.55 loses little: `--faster 1.4`, ")
    # The smallest loses, is slower by more, or has no smaller ones.
    for silent in (("gradual", 0.55, 1.0, lossy), ("gradual", 0.55, 0.89, alike), ("", 0.57, 1.0, alike)):
        assert offered(silent) == ""
    assert offered(("gradual", 0.7, 1.0, alike), ("gradual", 0.55, 1.0, lossy)) == ""
    assert offered(rows[0], faster=1.3) == offered(rows[0], classes=5, accuracy=0.2) == ""


def test_what_the_images_leave_open_is_named() -> None:
    def advice(*rows: tuple[str, float, float, float]) -> Advice:
        return advice_of(
            [(name, speed, Estimate((low + high) / 2, low, high), None) for name, speed, low, high in rows]
        )

    clear, lost = ("clear", 1.5, 0.99, 1.0), ("lost", 2.0, 0.90, 0.95)
    for rows, best, open_ones in (
        ([lost, clear], "clear", []),
        ([("lower", 1.7, 0.96, 0.985), clear], "clear", ["lower"]),
        # What is clear is advised, whatever else may be faster: a stricter tolerance allows no more.
        ([("higher", 1.7, 0.97, 0.999), clear], "clear", ["higher"]),
        # Speeds that are within the noise of a machine.
        ([("lossy", 1.51, 0.981, 0.983), clear], "clear", []),
        ([("open", 1.54, 0.97, 0.999), clear], "clear", []),
        ([("open", 1.56, 0.97, 0.999), clear], "clear", ["open"]),
        ([("higher", 1.7, 0.97, 0.999), ("lower", 1.6, 0.96, 0.985)], None, ["higher"]),
        # Slower than what is clear, or hardly faster than the dense model.
        ([clear, ("slow", 1.4, 0.97, 0.999)], "clear", []),
        ([lost, ("noise", 1.02, 0.97, 0.999)], None, []),
        ([("lower", 1.7, 0.96, 0.985)], None, ["lower"]),
    ):
        named = advice(*rows)
        assert (named.best.name if named.best else None) == best
        assert [row.name for row in named.undecided] == open_ones
        # Beside a choice, what probably loses more is not worth a row.
        assert ("| probably" in str(named.verdict)) == (bool(open_ones) and (best is None or open_ones != ["lower"]))


def test_accuracy_decides_where_there_are_labels(tmp_path: Path) -> None:
    same = Estimate(1.0, 0.99, 1.0)
    other = Estimate(0.6, 0.5, 0.7)
    # The first agrees with the dense model and is wrong more often, the second differs and is right as often.
    wrong = ("wrong", 2.0, same, Estimate(-0.05, -0.06, -0.04))
    right = ("right", 1.5, other, Estimate(0.001, -0.005, 0.007))
    advice = advice_of([wrong, right])
    assert advice.metric == "accuracy"
    assert advice.sentence == ("Use right for batches of 8: 1.50 times as fast, +0.1 [-0.5, +0.7] points of accuracy.")
    assert "and has 90.0 % accuracy." in str(advice)
    advice.save(tmp_path / "with")
    assert "![accuracy over speed-up]" in (tmp_path / "with/advice.md").read_text()
    # With a cache it is advice for prompts.
    prompts = dataclasses.replace(advice, cache=2**20)
    assert prompts.metric == "right answers"
    assert prompts.sentence.endswith(" points of right answers.")
    prompts.save(tmp_path / "prompts")
    page = (tmp_path / "prompts/advice.md").read_text()
    assert "right answers to dense" in page
    assert "and has 90.0 % right answers." in page
    assert "accuracy" not in page
    without = advice_of([(*row[:3], None) for row in (wrong, right)])
    assert without.metric == "agreement"
    assert without.sentence.startswith(
        "Use wrong for batches of 8: 2.00 times as fast, +0.0 [-1.0, +0.0] points of agreement"
    )


@pytest.mark.parametrize("options", [{}, {"num_classes": 0}], ids=["classes", "features"])
def test_figures_are_those_of_models_changed_by_the_printed_lines(
    options: dict[str, Any], clock: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({})
    if options:
        few_series(monkeypatch, "gradual", "smaller-image")
    # Recipes near the front are evaluated in two steps.
    monkeypatch.setattr(samples, "FIRST_LOOK", 4)
    images = pictures(10)
    with torch.no_grad():
        dense = make(**options)(images)
    labels = dense.argmax(-1)
    advice = mmod.advise(make(**options), [(images[:6], labels[:6]), (images[6:], labels[6:])], progress=False)
    assert {row.images for row in advice.rows} <= {4, 10}
    # Without a head, the dense model beats all that are as fast.
    assert {row.images for row in advice.rows if row.on_front} <= {10}
    assert any(row.images == 10 for row in advice.rows)
    assert not advice.refused
    images, dense, labels = (values[samples.look_order(10)] for values in (images, dense, labels))
    for row in advice.rows:
        model, other = make(**options), make(**options)
        exec(row.code, {"mmod": mmod, "model": model})
        fields = yaml.safe_load(row.config)
        arguments = fields.pop("model", None)
        assert arguments == ({"args": {"dynamic_img_size": True}} if row.series == "smaller-image" else None)
        ((key, value),) = fields.items()
        mmod.apply_(other, read_method(value[0]) if key == "methods" else resolve_routing(value))
        assert methods_of(model) == methods_of(other), row.name
        with torch.no_grad(), mmod.trace(model) as decisions:
            changed = model(images[: row.images])
        # All images are noise, of which no patches are alike.
        assert row.flops == pytest.approx(mmod.flops(model, SIDE, kept=decisions).share, rel=1e-6)
        if options:
            expected = torch.cosine_similarity(changed, dense[: row.images]).mean()
            assert (advice.measure, row.accuracy) == ("cosine of features", None)
        else:
            expected = (changed.argmax(-1) == labels[: row.images]).float().mean()
            assert row.accuracy is not None
            assert row.accuracy.value == pytest.approx(float(expected) - 1)
        assert row.score.value == pytest.approx(float(expected), abs=1e-5)
        # Of so few cosines nothing is sure.
        assert row.score.has_interval == (not options)
        assert row.score.has_interval <= (row.score.low <= row.score.value <= row.score.high)
    assert advice.accuracy == (None if options else 1.0)


def test_patches_of_smaller_images_are_compared_in_the_dense_grid(
    clock: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({})
    few_series(monkeypatch, "gradual", "a-mod", "smaller-image")
    # 8 x 18 patches are 144, which a square would hold too.
    size = (128, 288)
    options = {"num_classes": 0, "global_pool": ""}
    images = torch.randn(4, 3, *size)
    advice = mmod.advise(make(**options), [images], progress=False)
    assert advice.measure == "cosine of patches"
    assert not advice.refused
    sizes = {
        row.name: row.label.removeprefix(f"{row.name} ").strip("()")
        for row in advice.rows
        if row.series == "smaller-image"
    }
    assert {*sizes.values()} >= {"112 x 256 px", "96 x 224 px", "80 x 176 px"}
    prefix = make(**options).num_prefix_tokens
    grid = (size[0] // 16, size[1] // 16)
    with torch.no_grad():
        dense = make(**options)(images)[:, prefix:].half().float()
        for row in advice.rows:
            model = make(**options)
            exec(row.code, {"mmod": mmod, "model": model})
            patches = model(images)[:, prefix:].half().float()
            if row.series == "smaller-image":
                rows, *columns = (int(word) // 16 for word in sizes[row.name].split()[:-1:2])
                map_BCHW = patches.transpose(1, 2).unflatten(2, (rows, *(columns or [rows])))
                resized = torch.nn.functional.interpolate(map_BCHW, size=grid, mode="bilinear")
                patches = resized.flatten(2).transpose(1, 2)
            expected = torch.cosine_similarity(patches, dense, dim=-1).mean()
            assert row.score.value == pytest.approx(float(expected), abs=1e-5)


def test_what_is_compared_may_be_named_as_on_the_command_line(clock: Callable[..., None], tmp_path: Path) -> None:
    clock({})
    options: dict[str, Any] = {"candidates": [Candidate("norm", routing={"router": "norm"})], "progress": False}
    images = pictures(4)
    model = make()
    for measure, named, changes in (
        ("top1", "agreement", {}),
        ("features", "cosine of features", {"num_classes": 0}),
        ("patches", "cosine of patches", {"num_classes": 0, "global_pool": ""}),
    ):
        advice = mmod.advise(model, [images], measure=measure, **options)  # type: ignore[arg-type]
        assert advice.measure == named
        # Of a model that returns it anyway the figures are the same; the head stays on the user's.
        headless = make(**changes)
        headless.load_state_dict(model.state_dict(), strict=False)
        expected = mmod.advise(headless, [images], **options)
        assert [row.score for row in advice.rows] == [row.score for row in expected.rows]
        assert model(images).shape == (4, 7)
    tuned = mmod.advise(model, [images], measure="features", candidates=[], models={"tuned": make()}, progress=False)
    assert [row.score.value for row in tuned.rows] == [pytest.approx(1.0)]

    # What an own model returns is compared as is asked, with labels or without, each in its own rows of the store.
    own, own_images = make_own("einsum"), make_own_images(4)
    labelled = [(own_images, torch.zeros(4, dtype=torch.long))]
    for batches, measure, named in (
        (labelled, "features", "cosine of features"),
        ([own_images], "top1", "agreement"),
        ([own_images], None, "cosine of outputs"),
    ):
        folder = tmp_path / named
        advice = mmod.advise(own, batches, measure=measure, folder=folder, **options)  # type: ignore[arg-type]
        assert (advice.measure, advice.accuracy) == (named, None)
        assert ("Labels are not used" in str(advice)) == (batches is labelled)
    for wrong, message in (
        ("patches", r"measure='patches' needs a model that returns a row for each patch, \(B, N, F\), and this \w+ "),
        ("top5", "measure of this .* must be one of 'top1', 'features', 'patches', got 'top5'"),
    ):
        with pytest.raises(ValueError, match=message):
            mmod.advise(own, [own_images], measure=wrong, progress=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="which has no classes, must be one of 'features', 'patches', got 'top1'"):
        mmod.advise(make(num_classes=0), [images], measure="top1", progress=False)


@pytest.mark.parametrize("side", [64, 72], ids=["a usual size", "another size"])
def test_printed_lines_change_a_model_that_runs_on_one_size_of_images(side: int, clock: Callable[..., None]) -> None:
    clock({"both": 2.0})
    model = OwnViT(lambda _: OwnBlock(), depth=2).eval()
    model.places = nn.Parameter(torch.randn(1, (side // 8) ** 2, model.places.shape[2]))
    images = torch.randn(64, 3, side, side)
    both = Candidate("both", methods=({"kind": "experts", "experts": 2},), routing={"router": "stride"})
    advice = mmod.advise(model, [images], candidates=[both], tolerance=0.99, progress=False)
    ((lines,),) = [re.findall(r"```python\n(.*?)```", str(advice), re.DOTALL)]
    assert ("tokens=" in lines) == (side == 72)
    for printed in (advice.code, lines):
        changed = mmod.model.copy_of(model)
        exec(printed, {"model": changed})
        assert [method.kind for method in methods_of(changed)] == ["experts", "routing"]
        assert changed(images).shape == (64, 10)


def test_a_class_of_ones_own_is_compared_as_those_of_libraries_are(
    clock: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({})
    few_series(monkeypatch, "gradual", "smaller-image", "tome", "prune")
    images = make_own_images(4)
    with torch.no_grad():
        right = make_own("einsum")(images).argmax(-1)
    labels = torch.where(torch.arange(4) < 3, right, (right + 1) % 10)
    own = mmod.advise(make_own("einsum"), [(images, labels)], progress=False)
    assert (own.measure, own.accuracy, own.classes) == ("agreement", 0.75, 10)
    assert {"tome", "prune", "gradual"} <= {row.series for row in own.rows}
    assert set(own.refused) == {"smaller-image"}
    assert own.redundancy is not None
    # It has no training config and no study.
    assert not any(row.config for row in own.rows)
    assert "mmod tradeoff" not in str(own)
    assert "a training config" not in str(dataclasses.replace(own, tolerance=0.99))
    stride = [Candidate("stride", routing={"router": "stride"})]
    assert mmod.advise(make_own("einsum"), [images], candidates=stride, progress=False).measure == "cosine of outputs"
    with pytest.raises(ValueError, match="the labels reach 10, and this OwnViT returns 10 numbers"):
        mmod.advise(make_own("einsum"), [(images, labels.clamp(min=10))], progress=False)
    headless = mmod.advise(make(num_classes=0), [(pictures(2), labels[:2])], candidates=stride, progress=False)
    assert "Labels are not used, because the model has no classes." in str(headless)
    assert headless.classes is None


@pytest.mark.parametrize("name", ["attention in the block", "parallel branches"])
def test_where_attention_would_run_twice_gradual_merges_before_the_block_and_it_is_said_once(
    name: str, clock: Callable[..., None], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    clock({})
    few_series(monkeypatch, "gradual", "random", "tome")
    images = make_own_images(4)
    advice = mmod.advise(make_own(name), [images], progress=False)
    merging = {row.series: row for row in advice.rows if row.series in ("gradual", "random")}
    assert set(merging) == {"gradual", "random"}
    assert all('skipped={"before": "block"}' in row.code for row in merging.values())
    told = "compute attention twice, so that they save less: "
    assert str(advice).count(told) == (name == "attention in the block")
    if name == "attention in the block":
        tome = [row.name for row in advice.rows if row.series == "tome"]
        assert tome
        assert all(one in str(advice).partition(told)[2].partition(".\n")[0] for one in tome)
        assert "`gradual` merges before the block here" in str(advice)
    # Asked for by name, it runs as it is.
    own = Candidate("mine", routing={"preset": "gradual"})
    if name == "attention in the block":
        alone = str(mmod.advise(make_own(name), [images], candidates=[own], progress=False))
        assert f"{told}mine. " in alone
        assert 'merge before the block, as `mmod.preset("gradual", skipped={"before": "block"})` does.' in alone
    assert not [one for one in recwarn if issubclass(one.category, MethodWarning)]


def test_flops_that_follow_from_the_images_are_those_of_all() -> None:
    # More than are looked at first, or run at once, and the last are not like the first.
    images = torch.cat([pictures(45), pictures(25, flat=True)])
    model = mmod.route_(make(), "pixelprune")
    with torch.no_grad():
        given = samples.Images(make(), "image", 1, images, None, 8)
        table = Table()
        for start, stop in pairwise([0, 40, len(images)]):
            table.add("pixelprune", 0, given.evaluate(model, start, stop))
        counted = given.costs(model, table.runs["pixelprune"][0].kept)
        with mmod.trace(model) as decisions:
            model(images)
    assert counted.flops == mmod.flops(model, SIDE, kept=decisions).routed


@pytest.mark.parametrize("action", ["default", "once"])
def test_another_warning_of_the_changes_of_several_candidates_is_passed_on_once(
    action: Literal["default", "once"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmod.model.change_", lambda *_: warnings.warn(f"another, {action}", stacklevel=1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        for name in ("a", "b", "c", "d"):
            assert not Candidate(name, routing={"router": "norm"}).apply_(make(), "image", 6)
    assert [str(one.message) for one in caught] == [f"another, {action}"]


def test_the_redundancy_of_the_images_stands_beside_the_table(clock: Callable[..., None]) -> None:
    clock({})
    images = torch.cat([pictures(2), pictures(2, flat=True)])
    stride = [Candidate("stride", routing={"router": "stride"})]
    advice = mmod.advise(make(), [images], candidates=stride, progress=False)
    assert advice.redundancy == mmod.redundancy(images, 16)
    assert "The images: 50 % of patches are flat" in str(advice)


def test_a_finished_answer_runs_the_dense_model_on_its_first_images_alone(
    clock: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({})
    run = samples.outputs
    sizes: list[int] = []

    def counted(model: nn.Module, images: Tensor, part: str) -> Tensor:
        sizes.append(len(images))
        return run(model, images, part)

    monkeypatch.setattr(samples, "outputs", counted)
    images = pictures(48)
    labels = torch.arange(48) % 3
    # The images decide what the second one costs, which is known once it has run on them.
    tried = [Candidate("norm", routing={"router": "norm"}), Candidate("pixelprune", routing={"preset": "pixelprune"})]
    options: dict[str, Any] = {"batch_size": 2, "folder": tmp_path, "progress": False, "candidates": tried}
    advice = mmod.advise(make(), [(images, labels)], **options)
    # All models on all, and a first trial of the changed ones.
    assert sum(sizes) == 3 * 48 + 2
    sizes.clear()
    assert mmod.advise(make(), [(images, labels)], **options) == advice
    assert sum(sizes) == 16 + 2
    # What stands behind the first images is part of the question too.
    others = images.clone()
    others[-1] = others[-1].flip(-1) + 0.1
    labels = labels.clone()
    for changed in ((others, labels), (images, torch.cat([labels[:-1], labels[:1]]))):
        with pytest.raises(FileExistsError, match="differs in samples: remove"):
            mmod.advise(make(), [changed], **options)
    turned = make()
    turned.head.weight.data[0] *= 1.1
    with pytest.raises(FileExistsError, match="by another version of mmod, which differs in model: remove"):
        mmod.advise(turned, [(images, labels)], **options)


def test_a_batch_of_more_images_than_there_are_is_told(clock: Callable[..., None]) -> None:
    clock({})
    options: dict[str, Any] = {"progress": False, "candidates": [Candidate("norm", routing={"router": "norm"})]}
    told = "The timed batches of 5 repeat the 4 images."
    assert told in str(mmod.advise(make(), [pictures(4)], batch_size=5, **options))
    assert "repeat" not in str(mmod.advise(make(), [pictures(4)], batch_size=4, **options))


def test_a_killed_call_goes_on_and_another_finds_its_own(
    clock: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({})
    tried = [Candidate(name, routing={"router": name}) for name in ("random", "norm")]
    options: dict[str, Any] = {"batch_size": 2, "folder": tmp_path, "progress": False, "candidates": tried}
    ran: list[str] = []

    def counted(store: Store, identity: Mapping[str, Any], measure: Callable[[], Measured]) -> Measured:
        def compute() -> Measured:
            ran.append("")
            if len(ran) == 3:
                raise KeyboardInterrupt
            return measure()

        return rows_once(store, identity, compute)

    monkeypatch.setattr(entrants, "rows_once", counted)
    with pytest.raises(KeyboardInterrupt):
        mmod.advise(make(), [pictures(4)], **options)
    advice = mmod.advise(make(), [pictures(4)], **options)
    # The dense model and each candidate once, and again the one that was interrupted.
    assert len(ran) == 1 + len(advice.rows) + 1
    done = len(ran)
    assert mmod.advise(make(), [pictures(4)], **options) == advice
    assert len(ran) == done
    # Other images, labels or weights are evaluated anew, and one candidate more is alone in being evaluated.
    labels = torch.arange(4) % 3
    turned = make()
    turned.head.weight.data = turned.head.weight.data.flip(0)
    for model, batches in ((make(), [(pictures(3), labels[:3])]), (turned, [pictures(4)])):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(entrants, "rows_once", rows_once)
            expected = mmod.advise(model, batches, **{**options, "folder": None})
        ran[:] = [""] * 3
        # The store may be shared; a page is not replaced.
        for name in WRITTEN:
            (tmp_path / name).unlink()
        assert mmod.advise(model, batches, **options) == expected
        assert len(ran) == 3 + 1 + len(expected.rows)
    ran[:] = [""] * 3
    further = [*tried, Candidate("stride", routing={"router": "stride"})]
    for name in WRITTEN:
        (tmp_path / name).unlink()
    mmod.advise(make(), [pictures(4)], **{**options, "candidates": further})
    assert len(ran) == 3 + 1


@pytest.mark.parametrize(("milliseconds", "told"), [(10.0, True), (8.0, False)])
def test_advice_says_from_which_size_on_gradual_pays(
    milliseconds: float, told: bool, clock: Callable[..., None]
) -> None:
    clock({"gradual 0.5": milliseconds})
    candidates = [Candidate(f"gradual {mean}", routing={"preset": "gradual", "mean": mean}) for mean in (0.5, 0.8)]
    advice = mmod.advise(make(), [pictures(2)], candidates=candidates, progress=False)
    advice = dataclasses.replace(advice, milliseconds=24.9)
    rule = (
        "No `gradual` saves time in passes of 24.9 ms: by a rule of thumb for an idle CPU thread, it pays from 25 ms."
    )
    assert any(rule in fact for fact in advice.facts) == told
    # What was measured says more than a rule that it contradicts.
    assert not any("gradual` saves" in fact for fact in dataclasses.replace(advice, milliseconds=25.0).facts)
    # What saves nothing at any budget is not tried at smaller ones.
    rows = [dataclasses.replace(row, series="gradual", flops=0.9) for row in advice.rows]
    assert any("tries smaller budgets" in fact for fact in dataclasses.replace(advice, rows=rows).facts) != told


def test_where_gradual_saves_no_time_and_nothing_is_to_be_used_larger_batches_are_named() -> None:
    def named(milliseconds: float, speed: float = 1.0, accuracy: float = 0.9) -> list[str]:
        same = Estimate(1.0, 0.99, 1.0)
        rows = [("gradual-0.5", 1.0, same, Estimate(0.0)), ("other", speed, same, Estimate(0.0, -0.01, 0.01))]
        advice = dataclasses.replace(advice_of(rows), milliseconds=milliseconds, accuracy=accuracy, classes=5)
        told = r"it pays from 25 ms\. Larger batches may pay: `(--batch_size \d+)`, in Python `batch_size=32`\."
        return re.findall(told, str(advice))

    assert named(13.4) == named(5.9) == ["--batch_size 32"]
    # Another recipe is to be used, the dense model guesses, or the larger batches are too small as well.
    assert named(13.4, speed=1.5) == named(13.4, accuracy=0.2) == named(2.9) == []


def test_times_that_are_uncertain_are_measured_again_in_another_folder_only_where_one_keeps_them(
    clock: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock({})
    monkeypatch.setattr(trials.Table, "caution", "Speeds are uncertain.")
    options: dict[str, Any] = {"candidates": [Candidate("stride", routing={"router": "stride"})], "progress": False}
    assert mmod.advise(make(), [pictures(2)], **options).caution == "Speeds are uncertain."
    kept = mmod.advise(make(), [pictures(2)], folder=tmp_path, **options)
    named = "`--output FOLDER`, in Python `folder=`"
    assert kept.caution == f"Speeds are uncertain. Use a new folder ({named}): this one keeps its times."


def test_methods_and_routing_of_one_candidate_are_applied_and_printed_together(clock: Callable[..., None]) -> None:
    clock({})
    both = Candidate("both", methods=({"kind": "experts", "experts": 2},), routing={"router": "stride"})
    (row,) = mmod.advise(make(), [pictures(2)], candidates=[both], progress=False).rows
    model = make()
    exec(row.code, {"mmod": mmod, "model": model})
    assert [method.kind for method in methods_of(model)] == ["experts", "routing"]
    assert list(yaml.safe_load(row.config)) == ["methods", "routing"]


def test_what_cannot_be_applied_is_left_out_with_its_reason(
    clock: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({})
    few_series(monkeypatch, "a-mod", "smaller-image")
    advice = mmod.advise(make(dynamic_img_size=False), [pictures(2)], progress=False)
    assert set(advice.refused) == {"smaller-image"}
    assert "Left out: smaller-image: this VisionTransformer takes images of a fixed size" in str(advice)
    assert not {row.series for row in advice.rows} & set(advice.refused)


def test_a_clip_model_is_evaluated_by_its_image_features(
    clock: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({})
    few_series(monkeypatch, "a-mod", "tome")
    advice = mmod.advise(make_clip("ViT-B-32"), [make_images("ViT-B-32", 4)], progress=False)
    assert advice.measure == "cosine of features"
    routed = [row for row in advice.rows if "image=mmod." in row.code]
    assert routed
    # Its config routes two towers by name.
    assert all(list(yaml.safe_load(row.config)["routing"]) == ["image"] for row in routed)


def questions(number: int, labels: bool = False) -> list[dict[str, Any]]:
    """Return batches of two prompts with one image and with two."""
    batches = [prompt("llava", (1, 2), seed=seed) for seed in range(number)]
    for batch in batches if labels else ():
        ids = batch["input_ids"]
        batch["labels"] = torch.where(torch.arange(ids.shape[1]) >= ids.shape[1] - 2, ids, -100)
    return batches


def answered(model: Any, batch: Mapping[str, Any], place: int) -> Tensor:
    """Return the tokens that a model answers to one prompt alone."""
    is_asked = batch["attention_mask"][place].bool()
    if "labels" in batch:
        is_asked &= batch["labels"][place] == -100
    pictures = batch["pixel_values"][:1] if place == 0 else batch["pixel_values"][1:]
    image = model.config.image_token_id
    ids_BN = batch["input_ids"][place][is_asked][None]
    options = {"max_new_tokens": 2, "do_sample": False, "suppress_tokens": [image]}
    return model.generate(input_ids=ids_BN, pixel_values=pictures, pad_token_id=0, **options)[0, ids_BN.shape[1] :]


def is_right(model: nn.Module, batch: Mapping[str, Any]) -> list[bool]:
    """Return for each prompt of a batch whether a model gives the answer that is its label."""
    answers = [label_N[label_N != -100] for label_N in batch["labels"]]
    return [torch.equal(answered(model, batch, place), answer) for place, answer in enumerate(answers)]


def with_answers_of(model: nn.Module, batches: list[dict[str, Any]]) -> None:
    """Let the answer of every second prompt be the model's."""
    for batch in batches:
        given = answered(model, batch, 1)
        for column in ("input_ids", "labels"):
            batch[column][1][batch["labels"][1] != -100] = given


@pytest.mark.parametrize("labels", [False, True])
def test_a_language_model_is_evaluated_by_answers_or_next_tokens(
    labels: bool, clock: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({"as FastV": 5.0})
    monkeypatch.setattr(samples, "FIRST_LOOK", 2)
    batches = questions(3, labels)
    tried = ("searched 0.7", "as FastV", "random 0.5", "pixelprune") if labels else ("as FastV", "pixelprune")
    named: list[str] = []

    def few(*arguments: Any) -> list[Candidate]:
        """Return one of each way to choose tokens; without labels, without a search."""
        if labels:
            candidates = untrained.language_candidates(*arguments)
            named.extend(candidate.name for candidate in candidates)
            return [candidate for candidate in candidates if candidate.name in tried]
        spread, equal = {"preset": "evenly-spread", "capacity": 0.5}, {"preset": "pixelprune-language"}
        return [Candidate(name, routing=routing) for name, routing in zip(tried, (spread, equal))]

    monkeypatch.setattr(trials, "language_candidates", few)
    shares: dict[str, list[float]] = {}
    update = Stages.update

    def told(stages: Stages, share: float) -> None:
        shares.setdefault(stages._stage, []).append(share)
        update(stages, share)

    monkeypatch.setattr(Stages, "update", told)
    if labels:
        with_answers_of(make_joint("llava"), batches)
    advice = mmod.advise(make_joint("llava"), batches, images=6, folder=tmp_path, progress=False)
    assert (advice.measure, advice.samples, advice.images, advice.searched) == ("agreement", "prompts", 4, 2)
    # Each batch is told, of all that takes long.
    for stage, batches_told in (("reading prompts", 3), ("dense model", 2), ("answers of the dense model", 2)):
        assert shares[stage] == [number / batches_told for number in range(batches_told + 1)]
    assert shares["plan search"] == [0.0] * (1 + labels)
    assert {f"making {name}" for name in tried} <= shares.keys()
    if labels:
        assert {"as p-MoD", "as PyramidDrop", "evenly-spread-0.25", "frozen after 2", *tried} <= {*named}
        assert {row.name for row in advice.rows} == {*tried}
        assert "whether these differ from their controls, in points: 'as FastV' (" in str(advice)
    assert advice.cache is not None
    assert "| cache" in str(advice)
    assert "95 % intervals over prompts" in str(advice)
    assert advice.metric == ("right answers" if labels else "next-token agreement")
    assert ("no answers, so that next tokens decide" in str(advice)) != labels
    dense = make_joint("llava")
    dense_right = [is_right(dense, batch) for batch in batches[1:]] if labels else []
    for row in advice.rows:
        model = make_joint("llava")
        exec(row.code, {"mmod": mmod, "model": model})
        alike, right, base = [], [], []
        with torch.no_grad():
            for number, batch in enumerate(batches[1 : 1 + row.images // 2]):
                inputs = {name: value for name, value in batch.items() if name != "labels"}
                dense_words, other = dense(**inputs).logits.argmax(-1), model(**inputs).logits.argmax(-1)
                is_text = batch["attention_mask"].bool() & (batch["input_ids"] != dense.config.image_token_id)
                for place in range(2):
                    asked = is_text[place]
                    if labels:
                        asked = torch.cat([batch["labels"][place, 1:] != -100, torch.zeros(1, dtype=torch.bool)])
                    alike.append(float((dense_words[place] == other[place])[asked].double().mean()))
                if labels:
                    right += is_right(model, batch)
                    base += dense_right[number]
        assert row.score.value == pytest.approx(sum(alike) / len(alike))
        assert (row.accuracy is not None) == labels
        if row.accuracy is not None:
            assert row.accuracy.value == pytest.approx(sum(right) / len(right) - sum(base) / len(base))
        # No two patches of these pictures are equal.
        count = mmod.flops(model, mmod.Prompt(10, 13), kept=1.0 if by_data(model) else None)
        assert row.cache == pytest.approx(count.cache_share * advice.cache, rel=0.15)
    # Searches go on in test_search.py.
    if not labels:
        assert mmod.advise(make_joint("llava"), batches, images=6, folder=tmp_path, progress=False) == advice


@pytest.mark.parametrize(
    ("model", "batches", "message"),
    [
        (
            lambda: make_joint("llava"),
            questions(1),
            "plans are found on one batch of prompts and evaluated on others, and there is one alone, of 2",
        ),
        (lambda: make_joint("llava"), [], "no images or prompts: batches is empty"),
        (lambda: make_language("llama"), questions(2), "reads text: use mmod.search_plan"),
        (make, [], "no images or prompts: batches is empty"),
        # What has no length is empty once it is read.
        (make, DataLoader([]), "no images: batches is empty"),
        (lambda: make_joint("llava"), DataLoader([]), "no prompts: batches is empty"),
        # Before a class of the user's own is looked into, by images that it may not read.
        (lambda: nn.Linear(2, 2), [], "no images or prompts: batches is empty"),
        (lambda: timm.create_model("resnet10t"), [pictures(1)], "ResNet"),
        (lambda: make_joint("llava"), [pictures(1)], "batches must hold prompts"),
        (lambda: mmod.route_(make(), mmod.RoutingConfig()), [pictures(1)], "is changed already: call mmod.undo_ first"),
        (make, [pictures(1)[0]], "batches must hold images"),
        (make, pictures(1), "got a Tensor alone: put it into a list"),
        (make, "photos", "got 'photos': folders and files are read by the command, mmod advise MODEL --images FOLDER"),
        (make, Path("photos"), "got 'photos': folders and files are read by the command"),
        (make, [pictures(1), torch.zeros(1, 3, 8, 8)], r"must have one size, got \(1, 3, .*\) and \(1, 3, 8, 8\)"),
    ],
)
def test_errors_say_what_is_wrong(model: Callable[[], nn.Module], batches: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        mmod.advise(model(), batches, progress=False)


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        (["gradual"], "candidates must be several values, each a Candidate or null, got"),
        ([], "candidates must name at least one"),
        ([Candidate("a")], "candidate 'a' is the dense model: give it a routing or methods"),
        *(
            ([Candidate("a", **fields)], "candidate 'a' is one of a study, and advice trains nothing")  # type: ignore[arg-type]
            for fields in (
                {"changes": {"epochs": 1}},
                {"from_scratch": True},
                {"image_size": 96},
                {"search": PlanOptions()},
            )
        ),
    ],
)
def test_candidates_that_advice_cannot_make_are_refused(candidates: list[Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        mmod.advise(make(), [pictures(1)], candidates=candidates, progress=False)


@pytest.mark.parametrize("is_own", [False, True])
def test_own_models_are_compared_as_they_are(
    is_own: bool, clock: Callable[[Mapping[str, float]], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({"tuned": 4.0, "random": 4.0, "shallow": 5.0})
    monkeypatch.setattr(samples, "FIRST_LOOK", 20)
    dense, tuned, random, shallow = (make_own("einsum") if is_own else make() for _ in range(4))
    images = make_own_images(25) if is_own else pictures(25)
    for model, router in ((tuned, "attention"), (random, "random")):
        mmod.route_(model, mmod.RoutingConfig(router=router, blocks="late", capacity=0.5))
    # Its last block adds nothing, as where there is none.
    with torch.no_grad():
        for parameter in find_stacks(shallow)["image"].blocks[-1].parameters():
            parameter.zero_()
        labels = dense(images).argmax(-1)
    models = {"tuned": tuned.train(), "random": random, "shallow": shallow}
    advice = mmod.advise(dense, [(images, labels)], candidates=[], models=models, progress=False)
    rows = {row.name: row for row in advice.rows}
    assert set(rows) == set(models)
    assert {name: row.chooses for name, row in rows.items()} == {"tuned": True, "shallow": False, "random": True}
    assert {name: row.control for name, row in rows.items()} == {"tuned": "random", "shallow": None, "random": None}
    assert {name: row.speedup.median for name, row in rows.items()} == {"tuned": 2.5, "random": 2.5, "shallow": 2.0}
    assert tuned.training
    images, labels = (values[samples.look_order(25)] for values in (images, labels))
    with torch.no_grad():
        for name, model in models.items():
            # What is clearly beaten sees the first images alone.
            seen = rows[name].images
            agreed = (model.eval()(images[:seen]).argmax(-1) == labels[:seen]).double().mean()
            change = rows[name].accuracy
            assert change is not None
            assert change.has_interval
            # Random tokens are drawn anew in each pass.
            assert name == "random" or change.value == pytest.approx(float(agreed) - 1, abs=1e-6)
    assert {name: round(row.flops or 0.0, 3) for name, row in rows.items()} == {
        name: round(mmod.flops(model, tuple(images.shape[1:])).share, 3) for name, model in models.items()
    }
    assert "Compared as they are: tuned, random, shallow." in str(advice)
    assert "mmod tradeoff" not in str(advice)
    advice.save(tmp_path)
    # Beside candidates, which are made of the dense model.
    stride = [Candidate("stride", routing={"router": "stride"})]
    both = mmod.advise(dense, [images], candidates=stride, models={"tuned": tuned}, progress=False)
    assert {row.name: row.chooses for row in both.rows} == {"stride": True, "tuned": True}


@pytest.mark.parametrize(
    ("models", "options", "message"),
    [
        ({"a": 3}, {}, "models must"),
        ({"dense": make}, {}, "the name 'dense' of another model: dense, a; choose another"),
        ({"a": make}, {}, "the name 'a' of another model"),
        ({"b": make}, {"folder": "out"}, "leave out folder, and save the advice"),
        ({"b": lambda: make(num_classes=3)}, {}, "'b' does not run as .*: it returns 3 numbers, and the dense model 7"),
        ({"b": lambda: make(in_chans=1)}, {}, "'b' does not run as the dense one does"),
    ],
)
def test_own_models_that_cannot_be_compared_are_refused(
    models: Mapping[str, Any], options: dict[str, Any], message: str
) -> None:
    made = {name: make_one() if callable(make_one) else make_one for name, make_one in models.items()}
    stride = [Candidate("a", routing={"router": "stride"})]
    with pytest.raises((TypeError, ValueError), match=message):
        mmod.advise(make(), [pictures(1)], candidates=stride, models=made, progress=False, **options)


@pytest.mark.parametrize("faster", [1.2, 4.0])
def test_a_wanted_speed_is_reached_with_the_least_loss(faster: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(readings: Any, **options: Any) -> Any:
        # The first candidates are the slowest.
        return {trials.BATCH: {name: [10.0 / (1 + 0.15 * place)] * 2 for place, name in enumerate(readings)}}

    monkeypatch.setattr(timing, "sample_times", timed)
    # The others would be timed again, at other places.
    monkeypatch.setattr(trials, "FEW_ROUNDS", 1)
    if faster > 2:
        few_series(monkeypatch, "smaller-image")
    model = make(num_classes=1000)
    images = torch.randn(4, 3, 160, 160, generator=torch.Generator().manual_seed(0))
    advice = trials.advise(model, [images], batch_size=2, faster=faster, progress=False)
    tried = {row.name.rpartition("-")[0] or row.name for row in advice.rows}
    only_timed = set(re.findall(r"([a-z-]+)-0\.\d+ \([\d.]+\)", str(advice)))
    # All that advice tries without a speed, but for what chooses at random.
    series = {one.series for one in untrained.image_series() if not one.at_random}
    assert tried | only_timed | advice.refused.keys() == {*series, "pixelprune"}
    assert len(tried) >= 3 or faster > 2
    reaching = [row for row in advice.rows if 1.03 * row.speedup.median >= faster]
    if not reaching:
        assert advice.best is None
        assert advice.sentence.startswith(f"Nothing tried is {faster:g} times as fast")
        assert "- Larger batches may be faster.\n" in str(advice)
        return
    assert advice.best is not None
    assert advice.best.loss.high == min(row.loss.high for row in reaching)
    assert re.search(f"{faster:g} times (the speed|as fast)", advice.sentence)


@pytest.mark.parametrize(("mine", "control"), [(1.5, 1.3), (1.3, 1.5)])
def test_own_models_are_compared_whatever_speed_is_wanted(
    mine: float, control: float, clock: Callable[[Mapping[str, float]], None]
) -> None:
    clock({"mine": 10 / mine, "random": 10 / control})
    model = make(num_classes=1000)
    models = {}
    for name, router in {"mine": "norm", "random": "random"}.items():
        models[name] = mmod.route_(mmod.model.copy_of(model), mmod.RoutingConfig(router=router, blocks="late"))
    advice = trials.advise(model, [pictures(64)], faster=1.5, models=models, progress=False)
    rows = {row.name: row for row in advice.rows}
    assert rows.keys() == {"mine", "random"}
    # On more images, what is never named would run on few; what it loses is not why.
    on_few = "\n".join(dataclasses.replace(advice, images=256).facts)
    barred = "random" if mine == 1.5 else "random, mine"
    assert f"Too slow or random, and so on few images: {barred}." in on_few
    assert ("if all were like these, the lower end" in on_few) == (mine == 1.5)
    assert rows["mine"].to_control is not None
    assert advice.recommendations[0].named == rows["mine"]
    assert ("The fastest is mine" in advice.sentence) == (mine < control)


@pytest.mark.parametrize("caution", ["", "Speeds are uncertain."])
@pytest.mark.parametrize(("faster", "rounds"), [(None, 5), (1.2, 3)])
def test_each_timed_round_reads_other_images_and_all_models_the_same(
    faster: float | None, rounds: int, caution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many tokens a model keeps may depend on the images, as equal patches do."""
    monkeypatch.setattr("mmod.analysis.table.timing_caution", lambda *_: caution)
    # What depends on images is timed further in any case.
    monkeypatch.setattr(trials, "by_data", lambda _: False)
    monkeypatch.setattr(trials, "front_in", lambda table, *_, **options: [*table.runs][:3])
    monkeypatch.setattr(trials.Table, "scatters", lambda _, name: name.startswith("gradual"))
    # Of a wanted speed, the dense model and this one take further rounds.
    monkeypatch.setattr(trials, "unclear_at", lambda table, *_: [*table.times[BATCH]][1:2])
    monkeypatch.setattr(timing, "_FURTHER", 3)
    read: list[float] = []

    def output(model: nn.Module, images: Tensor) -> None:
        if len(images) > 1:
            read.append(float(images.double().sum()))

    monkeypatch.setattr(samples, "image_output", output)
    model = make(num_classes=1000)
    advice = trials.advise(model, [pictures(64)], batch_size=4, faster=faster, progress=False)
    models = [len(list(same)) for _, same in groupby(read)]
    # The unclear one, beside the dense model.
    further = 2
    if faster is None:
        assert models[0] == 1 + len(advice.rows)
        # On a busy machine the front, else what scatters.
        scattering = [row for row in advice.rows if row.name.startswith("gradual")]
        further = 3 if caution else 1 + len(scattering)
    assert models == [*rounds * [models[0]], *3 * [further]]
    assert len(set(read)) == len(models)


# Where time falls less than FLOPs do, the largest budget is close to the speed or clearly misses it.
@pytest.mark.parametrize(("fixed", "batch_size", "most"), [(0.25, 8, 1040), (0.2, 8, 1190), (0.25, 32, 2240)])
def test_a_wanted_speed_takes_few_passes_and_shows_life(
    fixed: float, batch_size: int, most: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = ""
    passes: Counter[str] = Counter()

    def share_of(name: str) -> float:
        """The share of the FLOPs that stands in the name of a model, or of the stage that evaluates it."""
        found = re.match(r"[a-z-]+-(0\.\d+)", name)
        return float(found[1]) if found else 1.0

    def begin(stages: Stages, name: str, work: float, rounds: int = 0) -> None:
        nonlocal stage
        stage = name
        begun(stages, name, work, rounds)

    def counted(model: nn.Module, images: Tensor, part: str) -> Tensor:
        passes[stage] += len(images)
        return run(model, images, part)

    def interleave(calls: Mapping[tuple[str, str], Any], *, callback: Any, **_: Any) -> dict[Any, list[float]]:
        assert {of for _, of in calls} == {trials.BATCH}
        for number, (name, _) in enumerate(calls, 1):
            passes["timing"] += batch_size * share_of(name)  # type: ignore[assignment]
            callback(number / len(calls))
        return {(name, of): [fixed + (1 - fixed) * share_of(name)] for name, of in calls}

    begun, run = Stages.begin, samples.outputs
    monkeypatch.setattr(Stages, "begin", begin)
    monkeypatch.setattr(samples, "outputs", counted)
    monkeypatch.setattr(timing, "interleave", interleave)
    # Each look at the clock takes half a minute.
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=count(0, 30).__next__))
    monkeypatch.setattr(progress, "_MOST", 60)
    model = make(num_classes=1000)
    images = pictures(256)
    advice = trials.advise(model, [images], batch_size=batch_size, faster=1.4)
    assert passes.pop("dense model") + passes.pop("answers of the dense model") == len(images)
    # Each is tried on one.
    checked = sum(passes.pop(name) for name in list(passes) if name.startswith("making "))
    assert checked <= 25
    timed = passes.pop("timing")
    looks = {name: number for name, number in passes.items() if name.endswith(" samples")}
    assert looks == dict(passes)
    evaluated = sum(number * share_of(name) for name, number in looks.items())
    assert len(images) + checked + timed + evaluated <= most
    assert timed <= len(images) + evaluated or batch_size > 8
    assert max(row.images for row in advice.rows) == len(images)
    assert advice.recommendations[0].named is not None
    assert advice.recommendations[0].named.images == len(images)
    for why in ("too slow", "as a larger one of its kind is fast enough"):
        assert f"Only timed, {why}: " in str(advice)

    told = capsys.readouterr().err.splitlines()
    lines = [re.fullmatch(r"advise: (\d+) % (.*?)(, [\d:]+ left)?", line) for line in told]
    assert all(lines)
    percents = [int(line[1]) for line in lines if line]
    assert percents == sorted(percents)
    assert percents[-1] < 100
    names = " ".join(line[2] for line in lines if line)
    assert all(name in names for name in ("dense model", "timing, round 1 of 3", "timing, round 3 of 3", *looks))


def test_a_wanted_speed_chooses_candidates_itself() -> None:
    model = make(num_classes=1000)
    images = [torch.randn(2, 3, 160, 160)]
    for options in ({"faster": 1.0}, {"faster": 1.4, "candidates": [Candidate("a", routing={"router": "norm"})]}):
        with pytest.raises(ValueError, match="faster"):
            trials.advise(model, images, progress=False, **options)


def test_blocks_of_an_own_model_are_found_by_the_images_of_the_loader() -> None:
    """Of a size that no setting names, and that its positions need."""
    model = OwnViT(lambda _: OwnBlock(), depth=2).eval()
    model.places = nn.Parameter(torch.randn(1, 81, model.places.shape[2]))
    batches = [torch.randn(2, 3, 72, 72) for _ in range(2)]
    stride = mmod.planning.Candidate("stride", routing={"router": "stride", "blocks": [1], "capacity": 0.5})
    advice = mmod.advise(model, batches, candidates=[stride], batch_size=2, progress=False)
    assert "stride" in [row.name for row in advice.rows]
    search = mmod.search_plan(model, batches, 0.9, options=[mmod.planning.Option(0.5, "attention", "kept")])
    assert search.names == tuple(f"stages.{block}" for block in range(2))
    for wrong in (None, 3):
        with pytest.raises(TypeError, match="batches must be a list or a loader of batches, got a "):
            mmod.search_plan(model, wrong, 0.9)  # type: ignore[arg-type]
    # A loader is begun once: its order is that of one reading, and what goes on where it stopped misses no batch.
    loader = DataLoader(TensorDataset(torch.randn(4, 3, 72, 72)), batch_size=2, shuffle=True)
    torch.manual_seed(0)
    expected = list(loader)
    following = torch.rand(1)
    seen: list[list[Tensor]] = []

    @by_first_batch
    def read(model: nn.Module, batches: Iterable[list[Tensor]]) -> None:
        seen.extend(batches)

    torch.manual_seed(0)
    read(model, loader)
    assert torch.equal(torch.rand(1), following)
    assert all(torch.equal(one[0], other[0]) for one, other in zip(seen, expected, strict=True))
    # Nothing of it stays on the model.
    with pytest.raises(ValueError, match="no input reached the first of its stages"):
        mmod.route_(model, "a-mod")
