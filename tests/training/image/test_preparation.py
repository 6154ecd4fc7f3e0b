"""Images are prepared as the model wants them, alike in advice, studies, evaluations and the library itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import timm
import torch
import transformers
import yaml
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_data_config
from torch import Tensor, nn

from mmod import route_, save_pretrained
from mmod.data.config import PREPARATION, DataConfig
from mmod.data.loader import evaluation_fields, image_stream
from mmod.methods.route import is_routed
from mmod.opening.open import open_model
from mmod.opening.opened import Opened, Preprocessing
from mmod.opening.runs import RUN_HEADER
from mmod.opening.transformers import processor_fields
from mmod.plain import without
from mmod.studies.advised import open_advised, read_images
from mmod.studies.candidates import comparison_of, training_configs
from mmod.studies.kind_configs import ImageStudyConfig
from mmod.studies.runs import Run
from mmod.training import fit
from mmod.training.engine.kind import create
from mmod.training.engine.start import create_models
from mmod.training.image.config import TrainConfig
from mmod.training.image.kind import ImageKind
from mmod.training.image.preparation import wanted_by
from mmod.training.kinds import kind_of
from mmod.training.opened import of_run
from tests.kit.folders import save_image_model, side_of

OWN = {"mean": [0.4, 0.3, 0.2], "std": [0.3, 0.2, 0.1], "crop_pct": 0.8, "interpolation": "bilinear"}
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 2}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Return a folder of pictures, of which none is square."""
    draw = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in ("cat", "dog"):
            folder = tmp_path / "images" / split / label
            folder.mkdir(parents=True)
            for number in range(3):
                pixels = draw.integers(0, 256, (40 + 9 * number, 61, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "images"


def fields_of(images: Path, side: int, model: Mapping[str, Any], **data: Any) -> dict[str, Any]:
    """Return the fields of a run of one step that says nothing of how images are prepared."""
    common = {"source": "folder", "root": str(images), "image_size": side, "channels": 3, "batch_size": 4}
    output = str(images.parent / "output")
    return {"output": output, "model": model, "data": {**common, **data}, "epochs": 1, "device": "cpu"}


def read(config: Any) -> Tensor:
    """Return the evaluation images of a config, as its kind reads them."""
    return torch.cat([batch for batch, _ in image_stream(kind_of(config).config.data).batches(0)])


def studied(fields: Mapping[str, Any], **changes: Any) -> ImageStudyConfig:
    """Return a study of a dense model that is not trained, with one smaller image."""
    baselines = {"smaller": {0.5: {"kind": "resolution", "image_size": 16}}}
    options = {"output": "study", "baselines": baselines, "train_dense": False, "tune": False, "latency_rounds": 1}
    return ImageStudyConfig(**{**options, "dense": dict(fields), **changes})


def advised(spec: str | Path, images: Path, checkpoint: str | None = None) -> Tensor:
    opened = open_advised(str(spec), checkpoint, checkpoint is not None or Path(spec).exists())
    read_batch, *_ = read_images(str(images / "val"), opened, 99, "raise")
    return read_batch[0] if isinstance(read_batch, tuple) else read_batch


def prepared(fields: Mapping[str, Any], images: Path) -> Tensor:
    """Return the evaluation images as timm prepares them."""
    transform = create_transform(**fields, is_training=False)
    return torch.stack([transform(Image.open(path)) for path in sorted((images / "val").glob("*/*.png"))])


@pytest.mark.parametrize("name", ["test_vit", "test_efficientnet", "test_mambaout"])
def test_a_model_of_timm_sees_the_same_images_wherever_it_is_named(name: str, images: Path) -> None:
    model = timm.create_model(name)
    save_file(model.state_dict(), images.parent / "own.safetensors")
    weights = str(images.parent / "own.safetensors")
    fields = resolve_data_config({}, model=model)
    expected = prepared(fields, images)
    run = fields_of(images, fields["input_size"][1], {"name": name, "checkpoint": weights})
    assert torch.equal(read(TrainConfig.from_dict(run)), expected)
    assert torch.equal(read(training_configs(studied(run))[0]), expected)
    assert torch.equal(advised(name, images, weights), expected)
    # What is trained from scratch sees what its name says too.
    assert torch.equal(read(TrainConfig.from_dict({**run, "model": {"name": name}})), expected)


@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
def test_arguments_of_a_model_may_say_how_images_are_prepared(crop_mode: str, images: Path) -> None:
    own = {**OWN, "crop_mode": crop_mode}
    fields = fields_of(images, 160, {"name": "test_vit", "args": {"pretrained_cfg_overlay": own}})
    expected = prepared({**own, "input_size": (3, 160, 160)}, images)
    assert torch.equal(read(TrainConfig.from_dict(fields)), expected)


@pytest.mark.parametrize("crop_mode", ["center", "squash"])
@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_a_run_and_its_folder_prepare_images_as_in_training(library: str, crop_mode: str, images: Path) -> None:
    model: dict[str, Any] = {"name": "vit_tiny_patch16_224", "args": SMALL}
    if library == "transformers":
        save_image_model("vit", images.parent / "vit")
        model = {"name": str(images.parent / "vit")}
    # The side before the crop is a whole number, as processors have it.
    own = {**OWN, "crop_pct": 0.8, "crop_mode": crop_mode}
    fields = fields_of(images, side_of("vit"), model, **own)
    config = TrainConfig.from_dict(fields)
    fit(config, progress=False)
    expected = prepared({**own, "input_size": (3, 32, 32)}, images)
    run = config.output
    assert torch.equal(read(config.finished(run)), expected)
    assert torch.equal(advised(run, images), expected)
    assert torch.equal(read(training_configs(studied({"base": run}))[0]), expected)
    # Its folder alone too, and what starts from either.
    (images.parent / "copy").symlink_to(Path(run, "model").resolve())
    saved = str(images.parent / "copy")
    assert torch.equal(advised(saved, images), expected)
    for checkpoint in (run, saved):
        other = fields_of(images, 32, {**model, "checkpoint": checkpoint})
        assert torch.equal(read(TrainConfig.from_dict(other)), expected)
    # Of a name of a folder, its weights.
    named = fields_of(images, 32, {"name": saved, "pretrained": True})
    assert torch.equal(read(TrainConfig.from_dict(named)), expected)


def test_all_models_of_a_study_see_what_the_dense_one_does_but_for_runs_of_their_own(images: Path) -> None:
    model = {"name": "vit_tiny_patch16_224", "args": SMALL}
    own = TrainConfig.from_dict({**fields_of(images, 32, model, **OWN), "output": str(images.parent / "own")})
    fit(own, progress=False)
    start = {"name": "vit_tiny_patch16_224", "args": {**SMALL, "depth": 3, "img_size": 32}}
    dense = fields_of(images, 32, start, crop_pct=0.9)
    baselines = {
        "smaller-image": {0.5: {"kind": "resolution", "image_size": 16}},
        "shallow": {0.7: {"kind": "smaller", "args": {"depth": 1}}},
        "other": {0.6: {"kind": "smaller", "checkpoint": own.output}},
    }
    study = studied(dense, baselines=baselines, train_dense=True, tune=True, finetune={"epochs": 1}, output="study")
    runs = {run.name: run for run in comparison_of(study).runs()}

    def values(run: Run) -> list[object]:
        return [getattr(run.training.data, name) for name in PREPARATION]

    expected = [(0.5,) * 3, (0.5,) * 3, 0.9, "center", "bicubic"]
    assert len(runs) == 5
    for name, run in runs.items():
        if name != "other-0.6":
            assert values(run) == expected, name
    other = [tuple(OWN["mean"]), tuple(OWN["std"]), 0.8, "center", "bilinear"]  # type: ignore[arg-type]
    assert values(runs["other-0.6"]) == other


def test_a_run_records_what_it_used_whatever_a_later_timm_says(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig.from_dict(
        fields_of(images, 160, {"name": "test_vit", "args": {"num_classes": 2}}, std=[0.2] * 3)
    )
    first = fit(config, progress=False)
    recorded = yaml.safe_load(Path(config.output, "config.yaml").read_text())["data"]
    # Values of the config win, the others are timm's.
    expected = {
        "mean": [0.5] * 3,
        "std": [0.2] * 3,
        "crop_pct": 0.95,
        "crop_mode": "center",
        "interpolation": "bicubic",
    }
    assert {name: recorded[name] for name in PREPARATION} == expected
    before = read(config)
    create_model = timm.create_model

    def later(*args: Any, **options: Any) -> Any:
        return create_model(*args, **options, pretrained_cfg_overlay={"mean": (0.1,) * 3, "crop_pct": 0.5})

    monkeypatch.setattr(timm, "create_model", later)
    again = fit(config, progress=False)
    assert again.reused
    assert again.evaluation == first.evaluation
    assert torch.equal(read(config), before)
    assert torch.equal(read(config.finished(config.output)), before)
    # Another run takes what timm says now.
    other = kind_of(dataclasses.replace(config, output=str(images.parent / "other"))).config
    assert (other.data.mean, other.data.crop_pct) == ((0.1,) * 3, 0.5)


def test_a_run_of_an_earlier_version_goes_on_with_the_images_it_read(images: Path) -> None:
    model = {"name": "test_vit", "args": {"num_classes": 2}}
    fields = fields_of(images, 160, model)
    fixed = evaluation_fields(DataConfig("folder", "r", image_size=160, channels=3))
    config = TrainConfig.from_dict({**fields, "data": {**fields["data"], **without(fixed, ["input_size"])}})
    first = fit(config, progress=False)
    # So it recorded them.
    file = Path(config.output, "config.yaml")
    recorded = yaml.safe_load(file.read_text())
    recorded["data"] = {**without(recorded["data"], ["crop_mode"]), "mean": None, "std": None}
    file.write_text(RUN_HEADER + yaml.safe_dump(recorded))
    left_open = TrainConfig.from_dict(fields)
    again = fit(left_open, progress=False)
    assert again.reused
    assert again.evaluation == first.evaluation
    expected = prepared(fixed, images)
    assert torch.equal(read(left_open), expected)
    assert torch.equal(read(left_open.finished(config.output)), expected)
    # What it has not saved yet is known by its name alone, for which timm prepares images in another way.
    named = open_model("test_vit", pretrained=False)
    assert of_run(named, Path(config.output)).preprocessing.fields == fixed
    assert named.preprocessing.fields["mean"] != fixed["mean"]


def test_what_a_users_config_says_in_a_run_folder_counts(images: Path) -> None:
    named = open_model("test_vit", pretrained=False)
    (images / "config.yaml").write_text(yaml.safe_dump({"model": {"name": "test_vit"}, "data": {"mean": [0.4] * 3}}))
    expected = {**named.preprocessing.fields, "mean": [0.4] * 3}
    assert of_run(named, images).preprocessing.fields == expected


@pytest.mark.parametrize(
    ("data", "in_chans"),
    [
        ({"source": "digits:tiny", "channels": 1}, 1),
        ({"source": "digits:tiny", "channels": 3}, 3),
        ({"channels": 1}, 1),
    ],
)
def test_embedded_sets_and_grey_images_are_prepared_by_their_own_values(
    data: dict[str, Any], in_chans: int, images: Path
) -> None:
    fields = fields_of(images, 32, {"name": "vit_tiny_patch16_224", "args": {**SMALL, "in_chans": in_chans}}, **data)
    config = TrainConfig.from_dict(fields)
    used = ImageKind(config).config.data
    assert evaluation_fields(used) == evaluation_fields(config.data)
    assert None not in [getattr(used, name) for name in PREPARATION]


def test_label_maps_are_not_cropped_and_normalised_as_the_model_wants(images: Path) -> None:
    model = {"name": "test_vit", "args": {"global_pool": ""}}
    data = {"source": "maps:160", "label_patch": 16}
    used = ImageKind(TrainConfig.from_dict(fields_of(images, 160, model, **data))).config.data
    assert (used.mean, used.crop_pct) == ((0.5,) * 3, 1.0)


def test_a_folder_without_a_processor_leaves_images_to_the_defaults(images: Path) -> None:
    save_image_model("vit", images.parent / "vit")
    (images.parent / "vit" / "preprocessor_config.json").unlink()
    config = TrainConfig.from_dict(fields_of(images, 32, {"name": str(images.parent / "vit")}))
    assert evaluation_fields(ImageKind(config).config.data) == evaluation_fields(config.data)
    pretrained = {"name": str(images.parent / "vit"), "pretrained": True}
    with pytest.raises(ValueError, match="does not say how its images are prepared: save the image processor"):
        create(ImageKind(TrainConfig.from_dict(fields_of(images, 32, pretrained))))


def test_a_teacher_that_expects_other_images_is_refused(images: Path) -> None:
    model = {"name": "vit_tiny_patch16_224", "args": SMALL}
    own = TrainConfig.from_dict({**fields_of(images, 32, model, **OWN), "output": str(images.parent / "own")})
    fit(own, progress=False)
    student = {**fields_of(images, 32, model), "distill": {"teacher": own.output}}
    with pytest.raises(
        ValueError, match=r"the teacher .*own' expect images .* mean \[0\.4, 0\.3, 0\.2\], data gives \[0\.5"
    ):
        create_models(ImageKind(TrainConfig.from_dict(student)))
    alike = {**fields_of(images, 32, model, **OWN), "distill": {"teacher": own.output}}
    assert create_models(ImageKind(TrainConfig.from_dict(alike)))[1] is not None


def test_a_teacher_whose_folder_has_single_precision_is_no_other(images: Path) -> None:
    model = {"name": "vit_tiny_patch16_224", "args": SMALL}
    single = {name: torch.tensor(OWN[name]).tolist() for name in ("mean", "std")}
    own = TrainConfig.from_dict(
        {**fields_of(images, 32, model, **{**OWN, **single}), "output": str(images.parent / "own")}
    )
    fit(own, progress=False)
    student = {**fields_of(images, 32, model, **OWN), "distill": {"teacher": own.output}}
    assert create_models(ImageKind(TrainConfig.from_dict(student)))[1] is not None


def test_weights_beside_the_config_of_another_program_start_a_run(images: Path) -> None:
    saved = timm.create_model("test_vit", num_classes=2).state_dict()
    save_file(saved, images / "own.safetensors")
    (images / "config.json").write_text('{"lr": 0.1}')
    model = {"name": "test_vit", "args": {"num_classes": 2}, "checkpoint": str(images / "own.safetensors")}
    kind = ImageKind(TrainConfig.from_dict(fields_of(images, 160, model)))
    assert torch.equal(create(kind).state_dict()["cls_token"], saved["cls_token"])


def test_a_model_that_mmod_saved_on_the_hub_is_named_with_its_weights(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = images.parent / "saved"
    save_pretrained(route_(timm.create_model("test_vit", num_classes=2), "gradual"), saved)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(saved))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(saved))
    config = TrainConfig.from_dict(fields_of(images, 160, {"name": "hf-hub:me/saved", "pretrained": True}))
    assert is_routed(create(ImageKind(config)))
    assert ImageKind(config).config.data.mean == (0.5,) * 3


def test_what_a_saved_processor_cannot_say_is_refused(images: Path) -> None:
    save_image_model("vit", images.parent / "vit")
    model = {"name": str(images.parent / "vit")}
    fields = fields_of(images, side_of("vit"), model, crop_mode="border")
    with pytest.raises(ValueError, match="crop_mode is 'border', which no processor of transformers does"):
        create(ImageKind(TrainConfig.from_dict(fields)))


def test_weights_of_a_model_of_text_are_said_not_to_fit(images: Path) -> None:
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1)
    transformers.GPT2LMHeadModel(config).save_pretrained(images)
    model = {"name": "test_vit", "args": {"num_classes": 2}, "checkpoint": str(images)}
    with pytest.raises(ValueError, match="does not fit the model: missing"):
        create(ImageKind(TrainConfig.from_dict(fields_of(images, 160, model))))


@pytest.mark.parametrize("mode", ["shortest", "squash"])
def test_a_clip_is_started_from_with_its_own_preprocessing(mode: str) -> None:
    fields = {"size": (32, 32), "mode": "RGB", "mean": (0.4,) * 3, "std": (0.2,) * 3, "interpolation": "bicubic"}
    clip = Preprocessing({**fields, "resize_mode": mode, "fill_color": 0}, "of a test", is_clip=True)
    wanted = wanted_by(Opened(nn.Identity(), "of a test", lambda: clip))
    timm_fields = {name: wanted[name] for name in PREPARATION}
    data = dataclasses.replace(DataConfig("folder", "r", image_size=32, channels=3), **timm_fields)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 40, 3), dtype=np.uint8))
    actual = create_transform(**evaluation_fields(data), is_training=False)(picture)
    assert torch.equal(actual, clip.transform()(picture))


@pytest.mark.parametrize(("crop_mode", "crop_pct"), [("squash", 1.0), ("squash", 0.8), ("center", 0.8)])
def test_a_folders_processor_is_read_as_it_is_written(crop_mode: str, crop_pct: float, images: Path) -> None:
    size = round(32 / crop_pct)
    sides = {"height": size, "width": size} if crop_mode == "squash" else {"shortest_edge": size}
    options = {"do_center_crop": True, "crop_size": {"height": 32, "width": 32}, "image_mean": [0.3] * 3}
    save_image_model("vit", images.parent / "vit")
    transformers.ViTImageProcessor(size=sides, **options).save_pretrained(images.parent / "vit")
    config = TrainConfig.from_dict(fields_of(images, 32, {"name": str(images.parent / "vit"), "pretrained": True}))
    expected = prepared(processor_fields(images.parent / "vit"), images)
    assert torch.equal(read(config), expected)
    assert torch.equal(advised(images.parent / "vit", images), expected)
