"""The study of features: what is compared, that it goes on where it stopped, and that nothing is lost silently."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image
from safetensors.torch import save_file

import mmod
from mmod.config.parse import read_config
from mmod.data.config import DataConfig
from mmod.data.corrupt import CorruptDataError
from mmod.data.loader import image_stream
from mmod.data.stream import BatchStream
from mmod.io.configs import find_config
from mmod.io.store import STORE, Store
from mmod.opening.timm import check_published
from mmod.studies.candidates import comparison_of
from mmod.studies.features import (
    features_store,
    identity_of_features,
    linear_probe,
    nearest_neighbours,
    split_by_class,
)
from mmod.studies.kind_configs import FeaturesStudyConfig
from mmod.studies.report import StudyResult
from mmod.studies.study import run_study
from mmod.training.engine import start
from mmod.training.image.config import ModelConfig
from mmod.training.image.features import extract, feature_of, read_features
from mmod.training.image.preparation import open_start
from tests.kit.scripts import ROOT

MODEL = {"patch_size": 4, "embed_dim": 16, "depth": 4, "num_heads": 2, "num_classes": 3}
CLASSES, EACH = 3, 12
ONE = {"random": {"router": "random"}}


@pytest.fixture(scope="module")
def given_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs in one folder a class, weights, and a training config."""
    root, draw = tmp_path_factory.mktemp("features"), np.random.default_rng(0)
    for label in range(CLASSES):
        (root / "photos" / f"class{label}").mkdir(parents=True)
        for number in range(EACH):
            pixels = draw.integers(0, 120, (20, 24, 3))
            pixels[..., label] += 60
            Image.fromarray(pixels.astype(np.uint8)).save(root / "photos" / f"class{label}" / f"{number}.png")
    torch.manual_seed(1)
    model = timm.create_model("vit_tiny_patch16_224", img_size=16, **MODEL)
    save_file(model.state_dict(), root / "weights.safetensors")
    dense = {
        "output": "unused",
        "model": {"name": "vit_tiny_patch16_224", "args": {**MODEL, "img_size": 16}},
        "data": {"source": "folder", "train_split": "", "val_split": "", "image_size": 16, "channels": 3}
        | {"batch_size": 4, "on_corrupt": "skip"},
        "epochs": 1,
        "epoch_steps": 2,
    }
    (root / "dense.yaml").write_text(yaml.safe_dump(dense))
    return root


def config(files: Path, output: Path, **changes: Any) -> FeaturesStudyConfig:
    values: dict[str, Any] = {
        "output": str(output),
        "dense": str(files / "dense.yaml"),
        "images": str(files / "photos"),
        "checkpoint": str(files / "weights.safetensors"),
        "routers": {
            "attention": {"router": "attention"},
            "random": {"router": "random"},
            "small": {"router": "random", "image_size": 12},
        },
        "baselines": {
            "resolution": {
                1.0: {"kind": "resolution", "image_size": 16},
                0.6: {"kind": "resolution", "image_size": 12},
            },
            "merging": {0.5: {"kind": "merge", "r": 2}},
            "both": {0.5: {"kind": "merge", "r": 2, "image_size": 12}},
        },
        "neighbours": 3,
        "folds": 3,
        # Several would be cross-validated within each fold.
        "strengths": [0.1],
        "latency_batch": 2,
        "latency_batches": [1],
        "latency_rounds": 1,
        "maps": 2,
    }
    return FeaturesStudyConfig(**{**values, **changes})


def run(study: FeaturesStudyConfig) -> tuple[StudyResult, list[dict[str, Any]]]:
    result = run_study(study, progress=False)
    return result, [*result.rows]


def test_models_are_compared_image_by_image(given_files: Path, tmp_path: Path) -> None:
    result, rows = run(config(given_files, tmp_path / "study"))
    by_name = {row["name"]: row for row in rows}
    routed, baselines = ["attention-0.5", "random-0.5", "small-0.5"], ["resolution-1", "resolution-0.6"]
    assert list(by_name) == ["dense", *routed, *baselines, "merging-0.5", "both-0.5"]
    # Fewer pixels and fewer tokens add up.
    for both, more in (("small-0.5", "random-0.5"), ("both-0.5", "merging-0.5")):
        assert by_name[both]["gflops"] < min(by_name["resolution-0.6"]["gflops"], by_name[more]["gflops"])
    dense, same = by_name["dense"], by_name["resolution-1"]
    assert dense["cosine"] == pytest.approx(1)
    assert dense["to_dense"] is None
    assert same["cosine"] == pytest.approx(1)
    for gap in (same["to_dense"], same["knn_to_dense"]):
        assert gap.value == 0
        assert gap.low <= 0 <= gap.high
    for row in rows:
        assert row["gflops"] > 0
        assert all(row[column] > 0 for column in ("latency_ms", "latency_ms_b1", "speedup", "speedup_b1", "peak_mb"))
        for gap in (row["to_dense"], row["knn_to_dense"], row["to_control"], row["to_baseline_b2"]):
            assert gap is None or gap.low <= gap.value <= gap.high
        for probe, gap in (("knn", row["knn_to_dense"]), ("linear", row["to_dense"])):
            assert row["name"] == "dense" or gap.value == pytest.approx(row[probe] - dense[probe], abs=1e-4)
    assert by_name["resolution-0.6"]["gflops"] < dense["gflops"]
    assert by_name["attention-0.5"]["kept"] < 1
    assert by_name["attention-0.5"]["to_control"] is not None
    assert dense["knn"] > 60, "classes differ in colour"
    for row in rows:
        baseline = by_name.get(row["baseline_b2"] or "")
        assert baseline is None or baseline["series"] not in ("attention", "random", "small")
        for column, probe in (("linear_to_baseline_b2", "linear"), ("knn_to_baseline_b2", "knn")):
            assert baseline is None or row[column].value == pytest.approx(row[probe] - baseline[probe], abs=1e-4)
    assert "36 images; 95 % intervals" in result.table
    for picture in ("tradeoff", "maps-attention-0.5"):
        assert (tmp_path / "study" / f"{picture}.png").stat().st_size


def test_cheaper_versions_of_the_dense_model_are_evaluated_by_its_classifier(given_files: Path, tmp_path: Path) -> None:
    for split, numbers in (("train", range(8)), ("test", range(8, EACH))):
        for label in range(CLASSES):
            folder = tmp_path / "split" / split / f"class{label}"
            folder.mkdir(parents=True)
            for number in numbers:
                shutil.copy(given_files / "photos" / f"class{label}" / f"{number}.png", folder)
    splits = {"images": str(tmp_path / "split"), "changes": {"data": {"train_split": "train", "val_split": "test"}}}
    study = config(given_files, tmp_path / "study", classifier="dense", strengths=[0.01], **splits)
    by_name = {row["name"]: row for row in run(study)[1]}
    features, runs = features_store(Path(study.output)), {run.name: run.training for run in comparison_of(study).runs()}
    identities = {
        name: {split: identity_of_features(study.feature, runs[name], split) for split in ("fitted", "tested")}
        for name in runs
    }
    fitted = {name for name in runs if {**identities[name]["fitted"], "batch": 0} in features}
    others = {"small-0.5", "resolution-0.6", "both-0.5"}
    # The same images at the same size are those of the dense model, which is also the baseline at its size.
    assert fitted == {"dense", "resolution-1", *others}
    train = read_features(features, identities["dense"]["fitted"])
    for name in ("attention-0.5", "merging-0.5", "resolution-1", "resolution-0.6"):
        tested = read_features(features, identities[name]["tested"])
        own = read_features(features, identities[name]["fitted"]) if name in others else train
        x_ND = torch.cat([own.x_ND, tested.x_ND]).numpy()
        labels = torch.cat([own.label_N, tested.label_N]).numpy()
        split = (np.arange(len(own.label_N)), np.arange(len(own.label_N), len(labels)))
        assert by_name[name]["linear"] == pytest.approx(100 * linear_probe(x_ND, labels, [split], [0.01]).mean())
    with pytest.raises(ValueError, match=r"classifier=.dense. is fitted on data\.train_split and tested"):
        run_study(config(given_files, tmp_path / "other", classifier="dense"), progress=False)
    with pytest.raises(ValueError, match="classifier='dense' needs tune=False and processes=1"):
        config(given_files, tmp_path / "other", classifier="dense", processes=2)


def test_too_few_images_of_a_class_are_refused_before_any_model_is_made(
    given_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    monkeypatch.setattr(start, "create", lambda kind: made.append(kind.config))
    study = config(given_files, tmp_path / "study", folds=EACH + 1, baselines={}, routers=ONE)
    with pytest.raises(ValueError, match=rf"folds={EACH + 1} .* class 0 has {EACH}"):
        run_study(study, progress=False)
    assert not made


def test_a_wrong_folder_of_images_leaves_the_output_free(given_files: Path, tmp_path: Path) -> None:
    study = config(given_files, tmp_path, images=str(tmp_path / "photoz"))
    with pytest.raises(ValueError, match="photoz' is no folder"):
        run_study(study, progress=False)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_weights_that_cannot_be_fetched_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", fail)
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: pytest.fail("weights were asked for"))
    config = ModelConfig(name="vit_small_patch14_dinov2", pretrained=True)
    with pytest.raises(ConnectionError, match=r"'vit_small_patch14_dinov2' .*: set model\.checkpoint to a file"):
        open_start(config)
    with pytest.raises(ConnectionError, match=r"'vit_small_patch14_dinov2' .*: set checkpoint to a file of weights$"):
        check_published(config.name, config.args, "set checkpoint to a file of weights")


@pytest.mark.parametrize("name", ["dinov2-untrained", "segmentation-untrained"])
def test_the_published_tables_are_of_the_model_of_their_command(name: str, tmp_path: Path) -> None:
    page = (ROOT / "docs/notebook/equal_time.md").read_text()
    command, _, table = page.partition(f"    mmod tradeoff {name} ")[2].partition("\n")
    words = [tmp_path / "weights" if word == "FILE" else word for word in shlex.split(command)]
    config = read_config([str(find_config(name)), *map(str, words), "--maps", "0"], FeaturesStudyConfig)
    dense: Any = comparison_of(config).runs()[0].training
    model = timm.create_model(dense.model.name, **dense.model.args)
    (row,) = [line for line in table.splitlines() if line.startswith(f"| dense, {dense.data.image_size} pixels")][:1]
    assert mmod.flops(model, dense.data.image_size).dense / 1e9 == pytest.approx(float(row.split("|")[2]), rel=0.005)


def test_a_study_that_was_stopped_goes_on_to_the_same(
    given_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few: dict[str, Any] = {"routers": ONE, "baselines": {}, "maps": 0}
    uninterrupted, _ = run(config(given_files, tmp_path / "whole", **few))
    batches, read = BatchStream.every_batch, []

    def stopping(self: BatchStream, epoch: int, start: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        read.append(start)
        for number, batch in enumerate(batches(self, epoch, start)):
            if number == 6:
                raise KeyboardInterrupt
            yield batch

    stopped = config(given_files, tmp_path / "stopped", **few)
    with monkeypatch.context() as patched:
        patched.setattr(BatchStream, "every_batch", stopping)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                run(stopped)
    # Every start describes the images first.
    assert read[1:4:2] == [0, 4], "the dense model's second start went on where its first stopped"
    resumed, _ = run(stopped)
    assert [point.figures for point in resumed.points] == [point.figures for point in uninterrupted.points]
    for name in (STORE, "features.jsonl"):
        whole, resumed_lines = (
            [
                line
                for line in (tmp_path / study / name).read_bytes().splitlines()[1:]
                if b'"work": "timed round"' not in line
            ]
            for study in ("whole", "stopped")
        )
        assert whole == resumed_lines
    # Other features are computed anew, and stand beside these; their table does not, and is another study's.
    changed = dataclasses.replace(stopped, feature="mean")
    with pytest.raises(FileExistsError, match="feature: 'head' there, 'mean' now"):
        run(changed)
    (tmp_path / "stopped/tradeoff.json").unlink()
    fresh = dataclasses.replace(changed, output=str(tmp_path / "fresh"))
    assert [point.figures for point in run(changed)[0].points] == [point.figures for point in run(fresh)[0].points]
    before = (tmp_path / "stopped" / "features.jsonl").read_bytes()
    (tmp_path / "stopped/tradeoff.json").unlink()
    assert [point.figures for point in run(stopped)[0].points] == [point.figures for point in resumed.points]
    assert (tmp_path / "stopped" / "features.jsonl").read_bytes() == before


def test_unreadable_images_are_counted_or_raise(given_files: Path, tmp_path: Path) -> None:
    shutil.copytree(given_files / "photos", tmp_path / "photos")
    (tmp_path / "photos" / "class0" / "0.png").write_bytes(b"no image")
    options: dict[str, Any] = {"routers": {"random": {"router": "random"}}, "baselines": {}}
    broken = config(given_files, tmp_path / "study", images=str(tmp_path / "photos"), **options)
    assert "35 images (1 could not be read)" in run(broken)[0].table
    strict = dataclasses.replace(broken, output=str(tmp_path / "strict"), changes={"data": {"on_corrupt": "raise"}})
    with pytest.raises(CorruptDataError, match=r"class0/0\.png"):
        run(strict)


def test_features_of_readable_images_stand_once_wherever_they_stopped(given_files: Path, tmp_path: Path) -> None:
    shutil.copytree(given_files / "photos", tmp_path / "photos")
    photos = sorted((tmp_path / "photos").rglob("*.png"))
    # Two whole batches, of which one is a chunk of its own.
    unreadable = [*range(4, 8), *range(32, 36)]
    for index in unreadable:
        photos[index].write_bytes(b"no image")
    data = DataConfig(
        "folder", str(tmp_path / "photos"), "", "", image_size=16, channels=3, batch_size=4, on_corrupt="skip"
    )
    model = timm.create_model("vit_tiny_patch16_224", img_size=16, **MODEL).eval()
    mmod.route_(model, mmod.RoutingConfig(router="random"))
    whole = extract(model, image_stream(data), Store(None), {})
    readable = np.delete(np.repeat(np.arange(CLASSES), EACH), unreadable)
    assert whole.label_N.tolist() == readable.tolist()
    assert len(whole.x_ND.unique(dim=0)) == len(whole.kept_NL) == len(readable)

    def stop(share: float) -> None:
        raise KeyboardInterrupt

    store = Store(None)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            extract(model, image_stream(data), store, {}, callback=stop)
    for _ in range(2):
        assert all(map(torch.equal, extract(model, image_stream(data), store, {}), whole))
    for photo in photos:
        photo.write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"hold none that can be read: choose another"):
        extract(model, image_stream(data), Store(None), {})


def test_a_split_of_their_own_fits_the_classifiers_and_tuning_goes_through_training(
    given_files: Path, tmp_path: Path
) -> None:
    for split in ("train", "val"):
        shutil.copytree(given_files / "photos", tmp_path / "photos" / split)
    study = config(
        given_files,
        tmp_path / "study",
        images=str(tmp_path / "photos"),
        changes={"data": {"train_split": "train", "val_split": "val"}},
        routers={"attention": {"router": "attention"}},
        baselines={},
        limit=18,
        strengths=[0.01, 0.1],
        tune=True,
        finetune={"epochs": 1},
        before=True,
        controls={"attention": False},
        rates=[0.5, 1.0],
        rate_split="train",
    )
    result, rows = run(study)
    assert "18 images" in result.table
    # Rates are chosen by the figure that models are compared by, of features and not of the classifier.
    assert json.loads((result.folder / "tradeoff.json").read_text())["rates"].keys() == {"dense", "attention-0.5"}
    assert [row["name"] for row in rows] == ["dense", "attention-0.5"]
    assert all({"before", "top1", "knn", "linear"} <= row.keys() for row in rows)
    assert (tmp_path / "study" / "seed0" / "attention-0.5" / "result.json").exists()
    assert run(study)[0].points[0].figures == result.points[0].figures


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": 2}, "seeds=1"),
        ({"train_dense": True}, "train_dense=False"),
        ({"strengths": []}, "at least one value"),
        ({"isoflop": "scratch"}, "isoflop='none'"),
        ({"folds": 1}, "folds"),
    ],
)
def test_configs_that_do_not_fit(given_files: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(given_files, tmp_path, **changes)


def test_features_are_what_the_model_says_before_its_classifier() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=16, **MODEL).eval()
    images = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        tokens = model.forward_features(images)
        torch.testing.assert_close(model.head(feature_of(model, "head")(images)), model(images))
        torch.testing.assert_close(feature_of(model, "class")(images), tokens[:, 0])
        torch.testing.assert_close(feature_of(model, "mean")(images), tokens[:, 1:].mean(1))
    without = timm.create_model("vit_tiny_patch16_224", img_size=16, class_token=False, global_pool="avg", **MODEL)
    with pytest.raises(ValueError, match="needs a class token"):
        feature_of(without, "class")
    with pytest.raises(ValueError, match="no forward_features"):
        feature_of(torch.nn.Linear(1, 1), "head")


def test_classifiers_learn_what_is_there_and_nothing_else() -> None:
    rng, labels = np.random.default_rng(0), np.repeat(np.arange(4), 25)
    splits = split_by_class(labels, 5)
    assert sorted(np.concatenate([tested for _, tested in splits]).tolist()) == list(range(100))
    noise = rng.normal(size=(100, 8))
    centres = 5 * np.eye(4, 8)[labels]
    for probe in (lambda x: nearest_neighbours(x, labels, splits, 5), lambda x: linear_probe(x, labels, splits, [0.1])):
        assert probe(noise + centres).mean() > 0.95
        assert probe(noise).mean() < 0.5
    with pytest.raises(ValueError, match=r"folds=30 .* class 0 has 25"):
        split_by_class(labels, 30)
