"""Each kind of training is evaluated, counted, searched and loaded in the same way."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import mmod
from mmod.analysis.table import DENSE
from mmod.config.parse import named_kind, read_config
from mmod.io.store import OptionalStore, Store
from mmod.io.yaml import read_yaml
from mmod.planning.candidate import PlanOptions
from mmod.studies import commands
from mmod.studies.assess import assess
from mmod.studies.kind import study_kind
from mmod.studies.measure import Measurer, measure_run
from mmod.studies.runs import Run
from mmod.training.engine.evaluate import BatchStore, RoutedResult
from mmod.training.engine.kind import Step, load
from mmod.training.kinds import KINDS, all_configs, config_class, fit, kind_of
from tests.kit.chat_configs import vlm_config
from tests.kit.image_study import config as image_config
from tests.kit.pairs_worker import MODEL, write_model
from tests.kit.scripts import ROOT
from tests.kit.sets import SETS
from tests.kit.text_configs import text_config


def _tiny(kind: str, folder: Path) -> Any:
    """Return the config of a run of a few steps."""
    if kind == "image":
        return image_config(folder)
    if kind == "chat":
        return vlm_config(folder, trainer={"max_steps": 1})
    if kind == "text":
        return text_config(folder / "run", epochs=1, epoch_steps=1)
    vision = {**MODEL["vision_cfg"], "image_size": 48, "patch_size": 16}  # type: ignore[dict-item]
    text = {**MODEL["text_cfg"], "context_length": 12}  # type: ignore[dict-item]
    fields = {
        "output": str(folder / "run"),
        "model": write_model(folder, "clip", vision_cfg=vision, text_cfg=text),
        "data": {"train": "scenes:tiny/train", "val": "scenes:tiny/val", "root": str(SETS / "scenes"), "batch_size": 8},
        "augment": None,
        "epochs": 1,
        "epoch_steps": 1,
        "device": "cpu",
    }
    return config_class("pairs").from_dict(fields)


PAIRED = {"image": "top1", "pairs": "recall1", "chat": "right"}
UNITS = {"image": {"image"}, "pairs": {"image", "text"}, "chat": {"prompt"}, "text": {"window"}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_evaluated_and_planned_as_it_was_trained(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    training = kind_of(_tiny(kind, tmp_path))
    steps: list[Step] = []
    trained: RoutedResult = fit(training.config, progress=False, after_step=steps.append).best
    assert [step.done for step in steps] == [*range(1, steps[-1].total + 1)]
    done = dataclasses.replace(training.config.finished(training.config.output), output=str(tmp_path / "done"))
    path = tmp_path / "done.yaml"
    path.write_text(yaml.safe_dump(done.to_dict()))
    assert named_kind([str(path), "--seed", "1"]) == kind

    figure = PAIRED.get(kind)
    result, outcomes = kind_of(done).score(load(kind_of(done)))
    assert bool(outcomes) == (figure is not None)
    if figure is not None:
        # What models are paired by gives what is shown, the same samples weighted alike.
        samples = len(next(iter(outcomes.values())))
        equal_SN = np.full((1, samples), 1 / samples)
        weigh = study_kind(kind).weigh
        shown = 100 * outcomes[figure].mean() if figure in outcomes else weigh[figure](outcomes, equal_SN)[0]
        assert shown == pytest.approx(result.columns()[figure], abs=1e-4)

    # What is stored of each batch needs no model.
    batches = BatchStore(OptionalStore(tmp_path / "batches.jsonl"), {})
    assert kind_of(done).score(load(kind_of(done)), store=batches).result == result
    silent = load(kind_of(done))
    with monkeypatch.context() as patch:
        patch.setattr(type(silent), "forward", None)
        again = kind_of(done).score(silent, store=batches)
    assert again.result == result
    assert again.outcomes.keys() == outcomes.keys()
    assert all(np.array_equal(again.outcomes[name], value) for name, value in outcomes.items())

    created: list[Any] = []
    start = import_module(f"{done.engine}.start")
    create = start.create
    with monkeypatch.context() as patch:
        patch.setattr(start, "create", lambda kind: created.append(kind) or create(kind))  # type: ignore[func-returns-value]
        table = assess(done, progress=False)
    # Counted and timed as it was evaluated: a large model is neither read nor held twice.
    assert len(created) == 1
    assert table.figures(DENSE) == {0: trained.columns()}
    assert {inputs for inputs, _ in table.times} == UNITS[kind]
    assert table.costs[DENSE].keys() == {"parameters", *UNITS[kind]}
    assert all(cost > 0 for cost in table.costs[DENSE].values())
    commands.evaluate([str(path)])
    assert str(trained) in capsys.readouterr().out

    # A comparison writes a searched plan into `routing` as this kind reads it; `test_references.py` searches for them.
    options = PlanOptions()
    searched = mmod.RoutingConfig(blocks=(1,), capacity=(0.5,), router="norm")
    routed = mmod.route_(load(kind_of(done)), **{done.parts[0]: searched})
    candidate = mmod.planning.Candidate("searched", series="searched", search=options)
    run = Run(name="searched", seed=0, training=done, candidate=candidate, searches=(options,), plans=tmp_path)
    plans = {tmp_path: {options.budget: searched.to_dict()}}
    ready = Measurer(measure_run, Store(), plans=plans).ready(run)
    assert list(mmod.routed_blocks(load(kind_of(ready.training)))) == list(mmod.routed_blocks(routed)) != []


def test_a_config_says_its_kind() -> None:
    kinds = {**dict.fromkeys(("digits", "imagenet", "patches", "photos"), "image"), "text": "text"}
    kinds |= {"clip": "pairs", "vlm": "chat"}
    paths = [path for folder in kinds for path in ROOT.glob(f"configs/{folder}/*.yaml")]
    assert {path.parent.name for path in paths} == set(kinds)
    said = {path: named_kind([str(path)]) or "image" for path in paths}
    assert said == {path: kinds[path.parent.name] for path in paths}
    assert {path for path in paths if not config_class(said[path]).from_dict(read_yaml(path)).output} == set()


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_its_weights_is_the_same_model(kind: str, tmp_path: Path) -> None:
    config = _tiny(kind, tmp_path)
    started = config.started_from("run")
    if kind == "chat":
        with pytest.raises(ValueError, match=r"give either model\.checkpoint or model\.config"):
            started.started_from(None)
        return
    assert started.model.has_weights
    assert started.started_from(None) == config


def test_only_a_config_of_a_kind_has_a_recipe() -> None:
    with pytest.raises(TypeError, match="one of image, pairs, chat, text, got str"):
        kind_of("image")
    with pytest.raises(ValueError, match="kind must be one of"):
        read_config(["--kind", "audio"], all_configs())


def test_a_refused_config_that_names_no_kind_is_told_of_the_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pairs.yaml"
    path.write_text(yaml.safe_dump({"output": "run", "augment": None}))
    for options in ([], ["--kind", "image"]):
        with pytest.raises(SystemExit):
            commands.evaluate([str(path), *options])
        error = capsys.readouterr().err
        assert "unknown config key 'augment'" in error
        assert ("without a key `kind`" in error) == (not options)
