"""The evaluation of a model that a run starts from: done once, and anew where its weights or its config are others."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mmod.analysis.table import DENSE, Measured, Table, compare
from mmod.data.corrupt import Fault
from mmod.data.stream import BatchStream
from mmod.io.jobs import Runner
from mmod.io.store import STORE, Store
from mmod.io.tensors import read_tensors, write_tensors
from mmod.planning import Candidate
from mmod.studies.measure import Measurer, evaluate_once, identity_of, measure_run
from mmod.studies.runs import Comparison
from mmod.training import fit
from mmod.training.engine.evaluate import Evaluated
from mmod.training.engine.kind import load
from mmod.training.image.config import TrainConfig
from mmod.training.image.kind import ImageKind
from mmod.training.kinds import config_class
from tests.kit.sets import SETS

ARGS = {"img_size": 32, "patch_size": 8, "in_chans": 1, "num_classes": 10, "embed_dim": 16, "depth": 2, "num_heads": 2}


def tiny_config(output: Path) -> TrainConfig:
    data = {"source": "digits:tiny", "root": str(SETS / "digits"), "image_size": 32, "channels": 1}
    model = {"name": "vit_tiny_patch16_224", "args": ARGS}
    return TrainConfig.from_dict({"data": data, "model": model, "output": str(output), "epochs": 1, "epoch_steps": 1})


@pytest.mark.parametrize("progress", [False, True])
def test_each_evaluation_of_a_comparison_may_have_a_bar(
    progress: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tiny_config(tmp_path / "dense"), progress=False)
    dense = tiny_config(tmp_path / "compared").started_from(str(tmp_path / "dense"))
    comparison = Comparison(candidates=[Candidate(DENSE)], dense=dense)
    shown: list[bool] = []
    score = ImageKind.score

    def told(kind: ImageKind, model: nn.Module, progress: bool = False) -> Evaluated:
        shown.append(progress)
        return score(kind, model, progress)

    monkeypatch.setattr(ImageKind, "score", told)
    measurer = Measurer(measure_run, Store(), progress=progress)
    list(compare(Table(), [comparison.checked_runs()], measurer, Runner(progress=False)))
    assert shown == [progress]


def test_a_model_is_loaded_once_to_be_evaluated_and_counted_and_dropped_before_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tiny_config(tmp_path / "dense"), progress=False)
    kind = ImageKind(tiny_config(tmp_path / "compared").started_from(str(tmp_path / "dense")))
    candidates = [Candidate(DENSE), *(Candidate(name, routing={"router": name}) for name in ("norm", "random"))]
    comparison = Comparison(candidates=candidates, dense=kind.config)
    loaded: list[nn.Module] = []

    def tracked(kind: ImageKind) -> nn.Module:
        loaded.append(load(kind))
        return loaded[-1]

    def draws() -> dict[str, float]:
        store = Store(tmp_path / "compared" / STORE)
        measurer = Measurer(measure_run, store)
        drawn = {}
        for run in compare(Table(), [comparison.checked_runs()], measurer, Runner(progress=False)):
            assert measurer.final(run) is loaded[-1]
            drawn[run.name] = float(torch.rand(()))
        return drawn

    monkeypatch.setattr("mmod.studies.measure.load", tracked)
    (tmp_path / "compared").mkdir()
    first = draws()
    assert len(loaded) == len(candidates)
    # Evaluations are read from the store, and the same is drawn.
    assert draws() == first

    kept = Measurer(measure_run, Store())
    kept.load(kind)
    assert kept.models
    assert not pickle.loads(pickle.dumps(kept)).models
    (run, *_) = comparison.runs()
    kept = dataclasses.replace(kept, measure=lambda run, callback, measurer: Measured({}, samples=len(measurer.models)))
    assert kept(run, print) == Measured({}, samples=1)
    assert kept(dataclasses.replace(run, is_trained=True), print) == Measured({})


@pytest.mark.parametrize(
    ("train_dense", "tunes_dense", "expected"),
    [
        (True, True, [("base", True, None), ("dense", True, "base"), ("a", True, "base")]),
        (True, False, [("dense", True, None), ("a", True, "dense")]),
        (False, True, [("dense", True, None), ("a", True, None)]),
        (False, False, [("dense", False, None), ("a", True, None)]),
    ],
)
def test_what_the_dense_model_is_decides_what_others_start_from(
    train_dense: bool, tunes_dense: bool, expected: list[tuple[str, bool, str | None]], tmp_path: Path
) -> None:
    dense = tiny_config(tmp_path)
    train = dense.started_from("published")
    candidates = [Candidate(DENSE, is_trained=tunes_dense), Candidate("a", routing={"router": "norm"})]
    comparison = Comparison(candidates=candidates, dense=dense, train=train, train_dense=train_dense, seeds=2)
    runs = comparison.runs()
    for seed in (0, 1):
        of_seed = [run for run in runs if run.seed == seed]
        starts = [None if run.starts_from is None else run.starts_from[0] for run in of_seed]
        assert [(run.name, run.is_trained, start) for run, start in zip(of_seed, starts)] == expected
        for run, start in zip(of_seed, starts):
            # The run of the dense config starts as that says.
            named = None if run is of_seed[0] and (train_dense or not tunes_dense) else "published"
            assert run.training.model.checkpoint == (named if start is None else f"{tmp_path}/seed{seed}/{start}")
            assert (run.training.output, run.training.seed) == (f"{tmp_path}/seed{seed}/{run.name}", seed)


def test_a_model_is_evaluated_once_and_anew_with_other_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = tmp_path / "study" / "dense"
    fit(tiny_config(dense), progress=False)
    start: TrainConfig = tiny_config(tmp_path / "study" / "routed").started_from(str(dense))
    evaluate_all, calls = ImageKind.score, []
    monkeypatch.setattr(ImageKind, "score", lambda *args: calls.append("") or evaluate_all(*args))  # type: ignore[func-returns-value]

    def evaluated(folder: Path, config: TrainConfig) -> Measured:
        rows = evaluate_once(Store(folder / STORE), ImageKind(config))
        # What models are paired by has the mean that is shown.
        assert rows.figures["top1"] == pytest.approx(100 * rows.outcomes["top1"].mean())
        assert rows.samples == len(rows.outcomes["top1"]) == 64
        return rows._replace(outcomes=rows.outcomes["top1"].tolist())

    first = evaluated(tmp_path / "study", start)
    assert evaluated(tmp_path / "study", start) == first
    assert len(calls) == 1
    evaluated(tmp_path / "study", dataclasses.replace(start, precision="bf16"))
    assert len(calls) == 2
    shutil.move(tmp_path / "study", tmp_path / "moved")
    moved = dataclasses.replace(start, output=str(tmp_path / "moved" / "routed"))
    moved = moved.started_from(str(tmp_path / "moved" / "dense"))
    assert evaluated(tmp_path / "moved", moved) == first
    assert len(calls) == 2
    file = next((tmp_path / "moved" / "dense").rglob("model.safetensors"))
    (file.parent / "sha256.json").unlink()
    state, header = read_tensors(file)
    write_tensors(file, {name: torch.zeros_like(value) for name, value in state.items()}, header)
    assert evaluated(tmp_path / "moved", moved).figures["loss"] != first.figures["loss"]
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("kind", "model", "key"),
    [
        ("image", {"checkpoint": "FILE", "name": "vit_tiny_patch16_224"}, "checkpoint"),
        ("image", {"name": "FOLDER", "pretrained": True}, "name"),
        ("image", {"name": "local-dir:FOLDER", "pretrained": True}, "name"),
        ("pairs", {"name": "FOLDER"}, "name"),
        ("pairs", {"name": "local-dir:FOLDER"}, "name"),
        ("pairs", {"name": "ViT-B-32", "pretrained": "FILE"}, "pretrained"),
        ("pairs", {"name": "ViT-B-32", "image_checkpoint": "FILE"}, "image_checkpoint"),
        ("pairs", {"name": "ViT-B-32", "checkpoint": "FOLDER"}, "checkpoint"),
        ("text", {"checkpoint": "FOLDER"}, "checkpoint"),
        ("chat", {"checkpoint": "FOLDER"}, "checkpoint"),
    ],
)
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_other_weights_in_the_same_place_are_another_model(
    kind: str, model: dict[str, Any], key: str, file: str, tmp_path: Path
) -> None:
    weights = tmp_path / "folder" / file
    places = {"FILE": str(weights), "FOLDER": str(weights.parent)}
    model = {name: _placed(value, places) for name, value in model.items()}
    data = {"chat": {"train": "conversations.jsonl"}, "text": {"length": 8}}.get(kind, {})
    config = config_class(kind).from_dict({"output": "run", "model": model, "data": data})
    weights.parent.mkdir()
    identities = []
    for content in (b"one", b"others"):
        weights.write_bytes(content)
        identities.append(identity_of(config))
    first, second = identities
    assert first["weights"].keys() == {key}
    assert first["weights"] != second["weights"]
    assert first["config"] == second["config"]


def test_weights_with_another_description_are_another_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    described = tmp_path / "config.json"
    models: dict[str, dict[str, Any]] = {
        "image": {"name": str(tmp_path), "pretrained": True},
        "chat": {"checkpoint": str(tmp_path)},
        "pairs": {"name": "config", "config": str(described), "checkpoint": str(tmp_path / "model.safetensors")},
    }
    data = {"chat": {"train": "conversations.jsonl"}}
    for kind, model in models.items():
        config = config_class(kind).from_dict({"output": "run", "model": model, "data": data.get(kind, {})})
        identities = []
        for content in ("{}", '{"mean": 0.5}'):
            described.write_text(content)
            identities.append(identity_of(config))
        assert identities[0] != identities[1]


def _placed(value: object, places: Mapping[str, str]) -> object:
    if not isinstance(value, str):
        return value
    for name, place in places.items():
        value = value.replace(name, place)
    return value


@pytest.mark.parametrize("faults", [[], [Fault("a.png", "", "no image")]])
def test_evaluation_samples_that_all_can_be_read_are_read_by_one_run_before_it_trains(
    faults: list[Fault], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path / "compared")
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, on_corrupt="skip"))
    candidates = [Candidate(DENSE, is_trained=False), Candidate("norm", routing={"router": "norm"})]
    comparison = Comparison(candidates=candidates, dense=config, train=config, train_dense=True, seeds=2)
    reads: list[BatchStream] = []

    def read(stream: BatchStream, shown: bool = False) -> list[Fault]:
        reads.append(stream)
        return faults

    monkeypatch.setattr(BatchStream, "faults", read)
    runs = comparison.checked_runs()
    measurer = Measurer(measure_run, Store(tmp_path / STORE))
    list(compare(Table(), [runs], measurer, Runner(progress=False)))
    assert len(runs) == 4
    # Faults may be mended meanwhile, and every run counts its own.
    assert len(reads) == (len(runs) if faults else 1)
    # A run alone reads them, whatever was compared before.
    fit(dataclasses.replace(config, output=str(tmp_path / "alone")), progress=False)
    assert len(reads) == (len(runs) if faults else 1) + 1
