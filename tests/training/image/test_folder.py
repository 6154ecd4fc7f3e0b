"""Training and evaluation of models in folders of transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from timm.data import create_transform
from torch import Tensor

import mmod
from mmod.adapters import find_stack, image_facts, image_output
from mmod.analysis.table import DENSE
from mmod.data.loader import evaluation_fields
from mmod.methods import methods_of
from mmod.opening.opened import Options
from mmod.opening.transformers import create_images, processor_fields
from mmod.studies.assess import assess, described
from mmod.training import fit
from mmod.training.engine.kind import create, load
from mmod.training.engine.start import create_models
from mmod.training.image.config import TrainConfig
from mmod.training.image.features import feature_of
from mmod.training.image.kind import ImageKind
from tests.kit.cover import in_turn
from tests.kit.folders import NAMES, make_image_model, save_image_model, save_images, side_of

GRADUAL = {"preset": "gradual"}
LEARNED = {"router": "linear", "capacity": 0.5}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for split in ("train", "validation"):
        save_images(tmp_path / "images" / split)
    return tmp_path / "images"


def config(images: Path, name: str = "vit", **changes: Any) -> TrainConfig:
    """Return the config of a run of one epoch of two steps, with its model in a folder beside the images."""
    folder = images.parent / name
    if not folder.exists():
        save_image_model(name, folder)
    data = {"source": "folder", "root": str(images), "channels": 3, "image_size": side_of(name), "batch_size": 4}
    if name != "timm wrapper":
        data |= {"mean": [0.5] * 3, "std": [0.5] * 3}
    fields = {"output": str(images.parent / "run"), "model": {"name": str(folder), "pretrained": True}, "data": data}
    return TrainConfig.from_dict({**fields, "epochs": 1, "device": "cpu", **changes})


def read(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return image_output(model.eval(), x)


@pytest.mark.parametrize(
    ("name", "routing"),
    [*in_turn(["vit", "dinov2", "siglip classifier"], [None, GRADUAL, LEARNED]), ("timm wrapper", GRADUAL)],
)
def test_a_run_is_evaluated_and_opened_as_it_was_trained(
    name: str, routing: dict[str, Any] | None, images: Path
) -> None:
    started = config(images, name, routing=routing)
    trained = fit(started, progress=False).evaluation
    finished = started.finished(started.output)
    assessed = assess(finished, progress=False)
    assert assessed.figures(DENSE) == {0: trained.columns()}
    assert (trained.mean_kept < 1) == (routing is not None)
    costs = assessed.costs[DENSE]
    assert costs["image"] > 0
    # A changed model is compared with the dense one.
    assert (
        ("image, dense" in costs) == (routing is not None) == ("FLOPs than dense, times as fast" in described(assessed))
    )
    assert costs["image"] < costs.get("image, dense", math.inf)
    folder = Path(started.output, "model")
    if routing is None:
        opened = transformers.AutoModelForImageClassification.from_pretrained(folder)
    else:
        opened = mmod.load_pretrained(folder)
    assert opened.config.id2label == NAMES
    model, x = load(ImageKind(finished)), torch.randn(2, 3, side_of(name), side_of(name))
    assert torch.equal(read(opened, x), read(model, x))
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    mean = getattr(processor, "image_mean", None) or processor.data_config["mean"]
    assert list(mean) == pytest.approx([0.485, 0.456, 0.406] if name == "timm wrapper" else [0.5] * 3)


def test_the_saved_processor_prepares_images_as_the_evaluation_did(tmp_path: Path) -> None:
    save_image_model("vit", tmp_path / "vit")
    # Embedded sets are never cropped, whatever `crop_pct` says.
    data = {"source": "digits:tiny", "channels": 3, "image_size": side_of("vit"), "crop_pct": 0.5}
    fields = {"output": str(tmp_path / "run"), "data": data, "epochs": 1, "epoch_steps": 1, "device": "cpu"}
    model = {"name": str(tmp_path / "vit"), "args": {"num_classes": 10}}
    started = TrainConfig.from_dict({**fields, "model": model})
    fit(started, progress=False)
    saved, expected = processor_fields(tmp_path / "run/model"), evaluation_fields(started.data)
    assert saved["crop_pct"] == expected["crop_pct"] == 1
    for name in ("input_size", "interpolation", "mean", "std"):
        assert list(saved[name]) == list(expected[name])


def test_a_run_starts_from_another_with_its_routers(images: Path) -> None:
    first = config(images, routing=LEARNED)
    fit(first, progress=False)
    model = {"name": str(images.parent / "vit"), "checkpoint": first.output}
    second = config(images, output=str(images.parent / "second"), model=model, routing=LEARNED)
    expected, actual = load(ImageKind(first.finished(first.output))), load(ImageKind(second))
    assert expected.state_dict().keys() == actual.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(actual.state_dict()[name], value)


def test_a_folder_without_a_classifier_gets_one(images: Path) -> None:
    started = config(images, "headless")
    model = {"name": str(images.parent / "headless"), "pretrained": True, "args": {"num_classes": 2}}
    made: Any = load(ImageKind(config(images, "headless", model=model, routing=GRADUAL)))
    dense = make_image_model("headless")
    assert type(made).__name__ == "Dinov2ForImageClassification"
    for name, value in dense.state_dict().items():
        assert torch.equal(made.dinov2.state_dict()[name], value)
    with pytest.raises(ValueError, match=r"the model has 0 classes .*train it with model\.args\.num_classes"):
        fit(started, progress=False)


def test_a_folder_or_a_run_of_transformers_teaches(images: Path) -> None:
    save_image_model("dinov2", images.parent / "dinov2")
    first = config(images, distill={"teacher": str(images.parent / "dinov2")})
    teacher: Any = create_models(ImageKind(first))[1]
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(read(teacher, x), read(make_image_model("dinov2"), x))
    fit(first, progress=False)
    second = config(images, output=str(images.parent / "second"), distill={"teacher": first.output})
    taught: Any = create_models(ImageKind(second))[1]
    opened = transformers.AutoModelForImageClassification.from_pretrained(Path(first.output, "model"))
    assert torch.equal(read(taught, x), read(opened, x))


def test_gradients_are_the_same_if_activations_are_recomputed(images: Path) -> None:
    gradients = []
    for recomputes in (False, True):
        model = create(ImageKind(config(images, routing=GRADUAL, grad_checkpointing=recomputes)))
        torch.manual_seed(0)
        image_output(model, torch.randn(2, 3, 32, 32)).square().sum().backward()
        gradients.append({name: value.grad for name, value in model.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"size": {"height": 32, "width": 32}, "resample": 2},
        {"size": {"shortest_edge": 36}, "do_center_crop": True, "crop_size": {"height": 32, "width": 32}},
    ],
)
def test_images_are_prepared_as_by_the_folders_processor(options: dict[str, Any], tmp_path: Path) -> None:
    transformers.ViTImageProcessor(**options).save_pretrained(tmp_path)
    save_image_model("vit", tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").write_text((tmp_path / "preprocessor_config.json").read_text())
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "model")
    picture = Image.effect_noise((50, 40), 60).convert("RGB")
    expected = processor(picture, return_tensors="pt")["pixel_values"][0]
    actual = create_transform(**processor_fields(tmp_path / "model"), is_training=False)(picture)
    # Pillow and torchvision round in other places.
    torch.testing.assert_close(actual, expected, rtol=0, atol=0.02)


def test_processors_that_keep_sizes_are_refused(tmp_path: Path) -> None:
    save_image_model("vit", tmp_path)
    transformers.ViTImageProcessor(do_resize=False).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must resize images to one size, rescale and normalise"):
        processor_fields(tmp_path)


def test_a_changed_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    model = mmod.route_(make_image_model("vit"), "gradual")
    model.save_pretrained(tmp_path)
    again, x = create_images(tmp_path, Options()), torch.randn(2, 3, 32, 32)
    assert [method.kind for method in methods_of(again)] == ["routing"]
    assert torch.equal(read(again, x), read(model, x))
    with pytest.raises(ValueError, match="has its own weights and size of images: leave out args"):
        create_images(tmp_path, Options(args={"num_classes": 3}))


@pytest.mark.parametrize(
    ("written", "args", "message"),
    [
        ({}, {"intermediate_size": 64}, r"is \(48,\), the model's is \(64,\)"),
        ({}, {"depht": 3}, "model.args depht is no field of the ViTConfig"),
        ({"architectures": ["ViTForPoems"]}, {}, "names the architecture 'ViTForPoems', which is no model of trans"),
    ],
)
def test_what_does_not_fit_the_weights_is_refused(
    written: dict[str, Any], args: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_image_model("vit", tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, **written}))
    with pytest.raises(ValueError, match=message):
        create_images(tmp_path, Options(args=args))


@pytest.mark.parametrize("name", ["vit", "dinov2", "siglip classifier"])
@pytest.mark.parametrize("side", [16, 48])
def test_position_embeddings_are_resampled_as_the_host_does(name: str, side: int, tmp_path: Path) -> None:
    model = save_image_model(name, tmp_path)
    if name == "siglip classifier":
        sized = {"vision_config": {**model.config.vision_config.to_dict(), "image_size": side}}
        with pytest.raises(ValueError, match="do not fit the model"):
            create_images(tmp_path, Options(args=sized))
        return
    x = torch.randn(2, 3, side, side)
    expected = model(x, interpolate_pos_encoding=True).logits
    resized: Any = create_images(tmp_path, Options(args={"img_size": side}))
    torch.testing.assert_close(resized.eval()(x).logits, expected)
    assert resized.config.image_size == side


@pytest.mark.parametrize("name", ["vit", "dinov2", "timm wrapper"])
def test_models_of_another_depth_and_number_of_classes_are_drawn(name: str, tmp_path: Path) -> None:
    save_image_model(name, tmp_path)
    model = create_images(tmp_path, Options(pretrained=False, args={"depth": 2, "num_classes": 5}))
    assert image_facts(model).classes == 5
    assert len(find_stack(model).blocks) == 2
    side = side_of(name)
    assert image_output(model, torch.randn(1, 3, side, side)).shape == (1, 5)


def test_every_weight_that_trains_has_a_gradient(tmp_path: Path) -> None:
    # Several processes wait for the gradients of all weights, and the token of masked pretraining gets none.
    save_image_model("dinov2", tmp_path)
    model = create_images(tmp_path, Options(pretrained=True))
    side = side_of("dinov2")
    image_output(model, torch.randn(2, 3, side, side)).square().sum().backward()
    assert [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None] == []


def test_images_must_be_as_the_processor_says(images: Path) -> None:
    started = config(images)
    data = {**started.to_dict()["data"], "mean": [0.485, 0.456, 0.406]}
    with pytest.raises(ValueError, match=r"normalised with mean \[0\.5, 0\.5, 0\.5\].*set data\.mean to"):
        load(ImageKind(config(images, data=data)))
    data = {**started.to_dict()["data"], "image_size": 64}
    told = r"data\.image_size is 64 and the model takes 32x32; .*img_size to 64, data\.image_size to the .*, or both"
    with pytest.raises(ValueError, match=told):
        load(ImageKind(config(images, data=data)))


@pytest.mark.parametrize("name", ["vit", "dinov2", "siglip classifier", "timm wrapper"])
def test_the_classifier_reads_the_features(name: str) -> None:
    model, x = make_image_model(name), torch.randn(2, 3, side_of(name), side_of(name))
    head = model.timm_model.head if name == "timm wrapper" else model.classifier
    torch.testing.assert_close(head(feature_of(model, "head")(x)), model(x).logits)
    patches = feature_of(model, "patches")(x)
    assert patches.shape[1] == 16
    assert torch.equal(feature_of(model, "mean")(x), patches.mean(1))
