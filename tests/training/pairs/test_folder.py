"""Folders of transformers' CLIP and SigLIP train and are evaluated as models of open_clip are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

import mmod
from mmod.training import fit
from mmod.training.engine.kind import load
from mmod.training.pairs.config import ModelConfig, TrainConfig
from mmod.training.pairs.kind import PairsKind, create_dense, create_transforms
from tests.kit.pair_folders import SIDE, save_pair_model
from tests.kit.sets import SETS

KINDS = ("clip", "siglip")
CAPTIONS = ["a large 7 left of a small 1 on clutter", "a small 3"]


@pytest.fixture(scope="module", params=KINDS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_pair_model(request.param, folder)


def config_of(folder: Path, output: Path, **changes: Any) -> TrainConfig:
    data = {"train": "scenes:tiny/train", "val": "scenes:tiny/val", "root": str(SETS / "scenes"), "batch_size": 24}
    fields: dict[str, Any] = {
        "output": str(output),
        "model": {"name": str(folder)},
        "data": data,
        "augment": None,
        "epochs": 1,
        "epoch_steps": 3,
        "device": "cpu",
        "zero_shot": "scenes",
        "optim": {"lr": 1e-3},
    }
    return TrainConfig.from_dict(fields | changes)


def test_similarities_are_those_of_the_host(saved: tuple[Path, Any]) -> None:
    folder, host = saved
    model = create_dense(ModelConfig(str(folder))).eval()
    transform, tokenizer = create_transforms(model, str(folder), None)
    image = Image.effect_noise((SIDE + 31, SIDE + 7), 80).convert("RGB")
    processor = transformers.AutoProcessor.from_pretrained(folder)
    texts = {"padding": "max_length", "max_length": tokenizer.length, "truncation": True}
    inputs = processor(text=CAPTIONS, images=image, return_tensors="pt", **texts)
    # The processors resize tensors, open_clip's transform the image.
    pixels = transform(image)[None]
    assert (pixels - inputs["pixel_values"]).abs().mean() < 0.02
    assert torch.equal(tokenizer(CAPTIONS), inputs["input_ids"])
    with torch.no_grad():
        output = model(pixels, tokenizer(CAPTIONS))
        expected = host(pixel_values=pixels, input_ids=inputs["input_ids"]).logits_per_image
    similarity = output["logit_scale"] * output["image_features"] @ output["text_features"].T
    torch.testing.assert_close(similarity + output.get("logit_bias", 0), expected, rtol=1e-5, atol=1e-5)


def test_a_routed_run_is_trained_evaluated_and_reopened(saved: tuple[Path, Any], tmp_path: Path) -> None:
    folder, host = saved
    loss = "siglip" if host.config.model_type == "siglip" else "clip"
    config = config_of(folder, tmp_path / "run", routing={"image": {"router": "linear", "capacity": 0.5}}, loss=loss)
    result = fit(config, progress=False)
    assert set(result.evaluation.kept) == {f"inner.vision_model.encoder.layers.{number}" for number in (1, 3)}
    # transformers reads the folder of the run, and so does a further run.
    reopened = mmod.load_pretrained(tmp_path / "run" / "model")
    assert type(reopened) is not type(host)
    assert isinstance(reopened, type(host))
    again = config_of(tmp_path / "run" / "model", tmp_path / "again", loss=loss)
    kind = PairsKind(again)
    assert kind.score(load(kind)).result.columns() == pytest.approx(result.evaluation.columns())
    dense = config_of(folder, tmp_path / "dense", model={"name": str(folder), "checkpoint": str(tmp_path / "run")})
    with pytest.raises(ValueError, match="router"):
        load(PairsKind(dense))


def test_capacity_1_is_evaluated_as_the_dense_model(saved: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = saved
    results = []
    for name, routing in {"dense": None, "routed": {"image": {"router": "linear", "capacity": 1.0}}}.items():
        kind = PairsKind(config_of(folder, tmp_path / name, routing=routing))
        results.append(kind.score(load(kind)).result.columns())
    dense, routed = ({key: value for key, value in columns.items() if "kept" not in key} for columns in results)
    assert routed == pytest.approx(dense)


def test_folders_that_hold_no_image_text_model_are_refused(saved: tuple[Path, Any], tmp_path: Path) -> None:
    folder, host = saved
    with pytest.raises(ValueError, match=r"leave out model\.pretrained"):
        create_dense(ModelConfig(str(folder), pretrained="openai"))
    lacking = shutil.copytree(folder, tmp_path / "lacking")
    (lacking / "tokenizer.json").unlink()
    (lacking / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="holds no tokeniser of its captions: save it there too"):
        create_transforms(create_dense(ModelConfig(str(lacking))), str(lacking), None)
    tower = type(host.vision_model)(host.config.vision_config)
    shutil.copytree(folder, tmp_path / "tower")
    tower.save_pretrained(tmp_path / "tower")
    with pytest.raises(ValueError, match="models of image-text pairs in folders of transformers read both"):
        create_dense(ModelConfig(str(tmp_path / "tower")))
