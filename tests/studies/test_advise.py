"""The command that advises: models and images by name, and errors of one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from mmod.cli import main
from mmod.planning import comparison
from mmod.studies.advise import load_model
from tests.kit.prompts import make_prompts


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "interleave", lambda calls, **_: {name: [1.0, 1.0] for name in calls})


def make_folder(root: Path, classes: int, images: int) -> Path:
    for label in range(classes):
        (root / f"class {label}").mkdir(parents=True)
        for number in range(images):
            colour = (40 * label, 10 * number, 99)
            Image.new("RGB", (50, 40), colour).save(root / f"class {label}" / f"{number}.png")
    return root


def words(folder: Path, output: Path, *more: str) -> list[str]:
    return ["advise", "test_vit", "--no_pretrained", "--images", str(folder), "--output", str(output), *more]


def test_a_folder_of_images_gives_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, output = make_folder(tmp_path / "images", 3, 4), tmp_path / "advice"
    main(words(folder, output, "--number", "6"))
    shown = capsys.readouterr().out
    assert "| recipe" in shown
    assert "images of 96 px" in shown
    assert "Labels are not used: the images are in 3 folders, and the model has 1000 classes." in shown
    assert {file.name for file in output.iterdir()} == {"advice.json", "advice.md", "advice.png", "journal.jsonl"}


def test_a_checkpoint_of_as_many_classes_is_judged_by_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, model = make_folder(tmp_path / "images", 3, 2), timm.create_model("test_vit", num_classes=3)
    timm.models.save_for_hf(model, str(tmp_path / "saved"), safe_serialization=True)
    main(
        [
            "advise",
            str(tmp_path / "saved"),
            "--images",
            str(folder),
            "--output",
            str(tmp_path / "advice"),
        ]
    )
    assert "and has an accuracy of" in capsys.readouterr().out
    loaded, transform = load_model(str(tmp_path / "saved"), None, True)
    assert loaded.dynamic_img_size
    pixels = transform(Image.new("RGB", (30, 30)))[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(pixels), model.eval()(pixels))


@pytest.mark.parametrize(
    ("more", "measure"), [((), "cosine of features"), (("--measure", "patches"), "cosine of patches")]
)
def test_a_checkpoint_of_another_size_is_converted_and_judged_at_the_size_asked_for(
    more: tuple[str, ...], measure: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "images", 1, 3)
    headless = timm.create_model("test_vit", num_classes=0, img_size=96)
    save_file(headless.state_dict(), tmp_path / "weights.safetensors")
    main(
        [
            "advise",
            "test_vit",
            "--checkpoint",
            str(tmp_path / "weights.safetensors"),
            "--image_size",
            "128",
            "--images",
            str(folder),
            "--output",
            str(tmp_path / "advice"),
            *more,
        ]
    )
    shown = capsys.readouterr().out
    assert f" {measure} |" in shown
    assert "images of 112 px" in shown
    assert "images of 128 px" not in shown
    model, transform = load_model("test_vit", str(tmp_path / "weights.safetensors"))
    assert transform(Image.new("RGB", (30, 30))).shape[1:] == (160, 160)
    assert model.num_classes == 0


def test_a_saved_model_of_another_size_gets_images_of_its_size(tmp_path: Path) -> None:
    model = timm.create_model("test_vit", img_size=96, dynamic_img_size=True, num_classes=3)
    timm.models.save_for_hf(model, str(tmp_path / "saved"), safe_serialization=True)
    _, transform = load_model(str(tmp_path / "saved"))
    assert transform(Image.new("RGB", (30, 30))).shape == (3, 96, 96)


def test_measures_that_a_model_cannot_have_are_refused(tmp_path: Path) -> None:
    headless = timm.create_model("test_vit", num_classes=0)
    save_file(headless.state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match="has no classes: use --measure features"):
        load_model("test_vit", str(tmp_path / "weights.safetensors"), measure="top1")
    with pytest.raises(ValueError, match="judged by its image features, got --measure patches"):
        load_model("open_clip:ViT-B-32", measure="patches")


def test_broken_images_are_named_or_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path / "images", 1, 3)
    (folder / "class 0" / "1.png").write_bytes(b"no image")
    with pytest.raises(SystemExit, match=r"error: .*1\.png.* cannot be decoded.*on_corrupt='skip'"):
        main(words(folder, tmp_path / "advice"))
    main(words(folder, tmp_path / "advice", "--on_corrupt", "skip"))
    assert "1 broken images were skipped." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("vit_tinny", "timm knows no model 'vit_tinny'"),
        ("resnet10t", "ResNet"),
        ("models/none", "no folder of a model at 'models/none'"),
        ("open_clip:RN5000", "open_clip knows no model 'RN5000'"),
    ],
)
def test_models_that_cannot_be_are_refused(model: str, message: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "images", 1, 1)
    with pytest.raises(SystemExit, match=message):
        main(["advise", model, "--no_pretrained", "--images", str(folder), "--output", str(tmp_path / "advice")])


@pytest.mark.parametrize(
    ("model", "more", "message"),
    [
        ("test_vit", ("--number", "0"), "--number must be an integer of at least 1, got 0"),
        ("test_vit", ("--image_size", "-3"), "--image_size must be .*got -3"),
        ("test_vit", ("--image_size", "100"), "--image_size must be a multiple of the model's patches, 16 px"),
        ("resnet10t", ("--image_size", "96"), "resnet10t takes no img_size"),
        ("test_vit", ("--tolerance", "2"), r"tolerance must be a number in \[0, 1\), got 2"),
    ],
)
def test_options_out_of_range_are_refused(model: str, more: tuple[str, str], message: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "images", 1, 1)
    with pytest.raises(SystemExit, match=message):
        main(["advise", model, "--no_pretrained", "--images", str(folder), "--output", str(tmp_path / "out"), *more])


def test_folders_without_images_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=r"error: .*empty"):
        main(words(tmp_path / "empty", tmp_path / "advice"))
    with pytest.raises(SystemExit, match="no folder of images at"):
        main(words(tmp_path / "none", tmp_path / "advice"))


def test_folders_of_splits_are_images_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path / "images", 2, 2)
    (folder / "class 0").rename(folder / "train")
    main(words(folder, tmp_path / "advice"))
    assert "| 4 |" in " ".join(capsys.readouterr().out.split())


def test_a_file_of_prompts_gives_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_prompts(tmp_path)
    command = [
        "advise",
        str(tmp_path / "llava"),
        "--prompts",
        str(tmp_path / "questions.json"),
        "--output",
        str(tmp_path / "advice"),
    ]
    main([*command, "--batch_size", "2", "--device", "cpu"])
    shown = capsys.readouterr().out
    assert "as PyramidDrop" in shown
    assert "2 prompts" in shown
    assert (tmp_path / "advice" / "advice.md").is_file()
    with pytest.raises(SystemExit, match="leave out --measure"):
        main([*command, "--measure", "top1"])
    with pytest.raises(SystemExit, match="advice needs --images FOLDER, or --prompts FILE"):
        main(command[:2])
    with pytest.raises(SystemExit, match=r"--prompts 'missing\.json' is no file"):
        main([*command[:2], "--prompts", "missing.json"])
    with pytest.raises(SystemExit, match=r"'\./none' is no folder of a processor"):
        main(["advise", "./none", *command[2:]])
