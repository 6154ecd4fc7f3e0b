"""The command that advises: models and images by name, and errors of one line."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from open_clip.model import set_model_preprocess_cfg
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from transformers import AutoProcessor, LlamaConfig, LlamaForCausalLM, LlavaForConditionalGeneration

import mmod
from mmod.analysis import timing
from mmod.analysis.timing import Spread
from mmod.cli import main
from mmod.data import DataConfig
from mmod.data.corrupt import CorruptDataError
from mmod.data.readers.conversations import ConversationsConfig
from mmod.methods import methods_of
from mmod.planning import Advice, Candidate, trials, untrained
from mmod.planning.prompts import questions_of
from mmod.studies import advise
from mmod.studies.advised import drawn_evenly, open_advised, read_prompts
from mmod.training import fit
from mmod.training.chat.config import ModelConfig as ChatModelConfig
from mmod.training.chat.config import TrainConfig as ChatConfig
from mmod.training.chat.kind import ChatKind
from mmod.training.chat.processor import create_word_processor
from mmod.training.chat.start import resize_images
from mmod.training.engine.groups import ScheduleConfig
from mmod.training.engine.kind import calibration, load
from mmod.training.engine.start import sketch
from mmod.training.image.config import ModelConfig, TrainConfig
from mmod.training.kinds import kind_of
from tests.kit.clip_zoo import make_clip, small_config
from tests.kit.disk import visible
from tests.kit.fitted import few_series, fit_once
from tests.kit.folders import make_image_model, save_image_model, save_images
from tests.kit.prompts import make_prompts, make_qwen_prompts

ALL_SERIES = untrained.image_series


@pytest.fixture(autouse=True)
def fitted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fit_once(monkeypatch)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    few_series(monkeypatch, "gradual", "smaller-image")
    monkeypatch.setattr(timing, "interleave", lambda calls, **_: {name: [1.0, 1.0] for name in calls})


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
    assert "- 6 of 12 images were used, spread evenly over them.\n" in shown
    assert "| recipe" in shown
    # Whatever is slower here, and so on no screen.
    page = (output / "advice.md").read_text()
    assert "| smaller-image-" in page.replace("*", " ").replace("  ", "")
    assert (
        "Labels are not used: the images are in 3 folders (class 0, class 1, class 2), and the model has 1000 classes."
        in shown
    )
    assert visible(output) == {"advice.json", "advice.md", "advice.png", "question.json", "store.jsonl"}
    # The lines of Python run as they are printed.
    opening = json.loads((output / "advice.json").read_text())["page"]["opening"]
    assert opening == 'model = mmod.open_model("test_vit", pretrained=False).model'


def test_the_lines_of_smaller_images_run_for_models_of_a_fixed_size(tmp_path: Path) -> None:
    name = "vit_tiny_patch16_224"
    folder = make_folder(tmp_path / "images", 1, 2)
    shape = {"img_size": 64, "depth": 2, "num_classes": 3}
    model = timm.create_model(name, **shape)
    timm.models.save_for_hf(model, str(tmp_path / "saved"), safe_serialization=True)
    mmod.save_pretrained(mmod.apply_(model, mmod.methods.Merge(r=1)), tmp_path / "changed")
    printed = {}
    for spec in (name, str(tmp_path / "saved"), str(tmp_path / "changed")):
        options = ["--image_size", "64", "--no_pretrained"] if spec == name else []
        output = tmp_path / f"advice {len(printed)}"
        main(["advise", spec, *options, "--images", str(folder), "--batch_size", "1", "--output", str(output)])
        advice = json.loads((output / "advice.json").read_text())
        printed[spec] = [(advice["page"]["opening"], row) for row in advice["rows"] if row["series"] == "smaller-image"]
        assert printed[spec]
    for opening, row in (row for rows in printed.values() for row in rows):
        scope: dict[str, Any] = {"mmod": mmod}
        exec(f"{opening}\n{row['code']}", scope)
        smaller = scope["model"](torch.zeros(1, 3, 64, 64))
        assert smaller.shape[0] == 1
        fields = yaml.safe_load(row["config"])
        args = {**shape, **fields["model"]["args"]}
        data = DataConfig("folder", "images", "", "", image_size=64, channels=3, batch_size=2)
        keys = TrainConfig(output="run", model=ModelConfig(name, args), data=data, methods=fields["methods"])
        assert [method.kind for method in methods_of(sketch(kind_of(keys)))] == ["resize"]


def test_every_question_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    few_series(monkeypatch, "gradual")
    make_folder(tmp_path / "images/one", 2, 3)
    make_folder(tmp_path / "images/two", 1, 3)
    torch.manual_seed(0)
    timm.models.save_for_hf(timm.create_model("test_vit", num_classes=2), "saved/model", safe_serialization=True)
    main(["advise", "saved/model", "--images", "images/one"])
    main(["advise", "saved/model", "--images", "images/two/", "--batch_size", "2"])
    main(["advise", "saved/model", "--images", "images/one", "--tolerance", "0.5"])
    main(["advise", "saved/model", "--images", "images/one", "--mean", "0.5", "0.5", "0.4", "--faster", "1.5"])
    assert visible(tmp_path / "runs/advise/saved-model") == {
        "images-one",
        "images-two-batch_size-2",
        "images-one-mean-0.5-0.5-0.4-faster-1.5",
    }


def test_advice_that_was_killed_between_its_files_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    few_series(monkeypatch, "gradual")
    make_folder(tmp_path / "images", 2, 3)
    timm.models.save_for_hf(timm.create_model("test_vit", num_classes=2), "saved", safe_serialization=True)
    command = ["advise", "saved", "--images", "images", "--output", "advice"]

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Advice, "plot", kill)
        with pytest.raises(SystemExit):
            main(command)
    main(command)
    assert visible(tmp_path / "advice") == {"advice.json", "advice.md", "advice.png", "question.json", "store.jsonl"}


def test_a_checkpoint_of_as_many_classes_is_evaluated_by_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, model = make_folder(tmp_path / "images", 3, 2), timm.create_model("test_vit", num_classes=3)
    timm.models.save_for_hf(model, str(tmp_path / "saved"), safe_serialization=True)
    main(["advise", str(tmp_path / "saved"), "--images", str(folder), "--output", str(tmp_path / "advice")])
    assert "% accuracy." in capsys.readouterr().out
    advised = open_advised(str(tmp_path / "saved"))
    loaded: Any = advised.model
    assert loaded.dynamic_img_size
    pixels = advised.preprocessing.transform()(Image.new("RGB", (30, 30)))[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(pixels), model.eval()(pixels))


def test_a_checkpoint_of_another_size_is_converted_and_evaluated_at_the_size_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "images", 1, 3)
    headless = timm.create_model("test_vit", num_classes=0, img_size=96)
    save_file(headless.state_dict(), tmp_path / "weights.safetensors")
    asked = ["--image_size", "128", "--measure", "patches", "--images", str(folder)]
    weights = ["--checkpoint", str(tmp_path / "weights.safetensors"), "--output", str(tmp_path / "advice")]
    main(["advise", "test_vit", *weights, *asked])
    assert " cosine of patches |" in capsys.readouterr().out
    advice = json.loads((tmp_path / "advice/advice.json").read_text())
    sides = {row["label"].partition(" (")[2].rstrip(")") for row in advice["rows"] if row["series"] == "smaller-image"}
    assert sides == {f"{side} px" for side in (80, 96, 112)}
    with pytest.raises(
        ValueError, match="of images of 96 px, and the model of 160 px: set image_size to 96, or to 160"
    ):
        open_advised("test_vit", str(tmp_path / "weights.safetensors"))
    advised = open_advised("test_vit", str(tmp_path / "weights.safetensors"), image_size=160)
    assert advised.preprocessing.transform()(Image.new("RGB", (30, 30))).shape[1:] == (160, 160)
    assert advised.model.num_classes == 0


def test_a_saved_model_of_another_size_gets_images_of_its_size(tmp_path: Path) -> None:
    model = timm.create_model("test_vit", img_size=96, dynamic_img_size=True, num_classes=3)
    timm.models.save_for_hf(model, str(tmp_path / "saved"), safe_serialization=True)
    transform = open_advised(str(tmp_path / "saved")).preprocessing.transform()
    assert transform(Image.new("RGB", (30, 30))).shape == (3, 96, 96)


def test_a_run_is_advised_with_the_preprocessing_of_its_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "images", 3, 4)
    monkeypatch.chdir(tmp_path)
    size = {"img_size": 32, "patch_size": 8, "in_chans": 1, "embed_dim": 24, "depth": 2, "num_heads": 2}
    config = TrainConfig(
        output="run",
        model=ModelConfig("vit_tiny_patch16_224", {**size, "num_classes": 3}),
        data=DataConfig("folder", "images", "", "", image_size=32, channels=1, mean=[0.1], std=[0.3], batch_size=4),
        methods=[{"kind": "merge", "r": 2}],
        epochs=1,
        schedule=ScheduleConfig(warmup_epochs=0),
    )
    fit(config, progress=False)
    expected = config.finished("run")
    for name in ("run", "run/model"):
        main(["advise", name, "--images", str(folder), "--output", name.replace("/", "-") + "-advice"])
        shown = capsys.readouterr().out
        assert shown.startswith("Preprocessing of the run: 32 x 32 px, bicubic, crop_pct ")
        assert "mean (0.1), std (0.3)." in shown
        assert (
            "The model is the final model of the run run, changed by merge; that is undone, its dense weights remain."
            in shown
        )
        # Its classes are known by name.
        assert "% accuracy." in shown
    advised = open_advised("run")
    assert not methods_of(advised.model)
    pixels = torch.stack([advised.preprocessing.transform()(Image.new("L", (50, 40), 9 * n)) for n in range(3)])
    dense = mmod.undo_(load(kind_of(expected)))
    with torch.no_grad():
        torch.testing.assert_close(advised.model.eval()(pixels), dense(pixels))
    again = ["--images", str(folder), "--output", "other", "--mean", "0.5", "--std", "0.2"]
    main(["advise", "run", *again])
    shown = capsys.readouterr().out
    assert "mean (0.5), std (0.2)." in shown
    # No study takes a changed model for its dense one.
    assert "`mmod tradeoff my-model --dense RUN --tune true` fine-tunes the same candidates" in shown
    fields = yaml.safe_load(Path("run/config.yaml").read_text())
    Path("run/config.yaml").write_text(yaml.safe_dump({**fields, "methods": []}))
    named = {"RUN": ["test_vit", "other", "run --checkpoint weights.pt"], "run": ["run", "run/model"]}
    for run, asked in named.items():
        for one in asked:
            assert advise._run_of(advise._parser().parse_args([*one.split(), *again])) == run
    with pytest.raises(SystemExit, match="--mean needs 1 values, one for each channel, got 3"):
        main(["advise", "run", "--images", str(folder), "--mean", "0.5", "0.5", "0.5"])
    with pytest.raises(SystemExit, match="'run' has its own weights and size of images: leave out image_size"):
        main(["advise", "run", "--images", str(folder), "--image_size", "64"])


def test_answers_to_prompts_are_right_but_for_case_and_spacing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    functions: list[Any] = []
    monkeypatch.setattr("mmod.planning.trials.advise", lambda *_, is_right, **__: functions.append(is_right))
    make_prompts(tmp_path)
    main(["advise", str(tmp_path / "llava"), "--prompts", str(tmp_path / "questions.json"), "--output", str(tmp_path)])
    tokenizer = create_word_processor(image_size=8, patch_size=4).tokenizer
    two, three = (torch.tensor(tokenizer(word)["input_ids"]) for word in ("2", "3"))
    ended = torch.cat([two, torch.tensor([tokenizer.eos_token_id])])
    assert functions[0](two, ended)
    assert not functions[0](three, ended)
    assert not functions[0](torch.cat([two, two]), ended)


def test_prompts_that_cannot_be_read_are_counted_and_named(tmp_path: Path) -> None:
    make_prompts(tmp_path)
    file = tmp_path / "questions.json"
    questions = json.loads(file.read_text())
    questions[2]["image"] = "none.png"
    file.write_text(json.dumps(questions))
    line = [str(tmp_path / "llava"), "--prompts", str(file), "--batch_size", "1"]
    told = r"none\.png \(--on_corrupt skip counts such samples and leaves them out\)$"
    with pytest.raises(CorruptDataError, match=told):
        read_prompts(advise._parser().parse_args(line))
    line += ["--on_corrupt", "skip"]
    read = read_prompts(advise._parser().parse_args(line))
    assert re.match(r"Prompts that were skipped: 1, such as \S+questions\.json \[2\]: image not found", read.note)
    assert len(list(read.batches)) == read.available == len(questions) - 1
    # An image that cannot be decoded is found when it is read.
    questions[2]["image"] = "one.png"
    file.write_text(json.dumps(questions))
    (tmp_path / "one.png").write_bytes(b"no image")
    with pytest.raises(CorruptDataError, match=r"8 bytes cannot be read \(--on_corrupt skip counts"):
        read_prompts(advise._parser().parse_args(line[:-2]))
    # In another folder than that of the file.
    Image.new("RGB", (9, 9)).save(tmp_path / "one.png")
    for question in questions:
        question["image"] = str(tmp_path / "one.png")
    (tmp_path / "asked").mkdir()
    (tmp_path / "asked/questions.json").write_text(json.dumps(questions))
    line[2] = str(tmp_path / "asked/questions.json")
    told = "image outside the folder: .*name the folder of their paths by --images FOLDER"
    with pytest.raises(CorruptDataError, match=told):
        read_prompts(advise._parser().parse_args(line[:-2]))
    read_prompts(advise._parser().parse_args([*line[:-2], "--images", str(tmp_path)]))


@given(total=st.integers(1, 500), count=st.integers(1, 600))
def test_samples_are_drawn_over_all_and_each_once(total: int, count: int) -> None:
    drawn = drawn_evenly(total, count)
    assert len(drawn) == min(total, count)
    assert drawn == sorted(set(drawn))
    even = [number * total / len(drawn) for number in range(len(drawn))]
    assert drawn == pytest.approx(even, rel=0, abs=64)


@pytest.mark.parametrize("count", [300, 600, 900, 1200])
def test_kinds_that_take_turns_are_drawn_alike(count: int) -> None:
    """Every k-th of 1,800 samples would be of one kind in six, or of three."""
    kinds = np.bincount([number % 6 for number in drawn_evenly(1800, count)], minlength=6)
    assert kinds.min() > 0.7 * count / 6


def test_folders_that_mmod_saved_are_advised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path / "images", 3, 2)
    model = timm.create_model("test_vit", num_classes=3)
    mmod.save_pretrained(mmod.route_(model, mmod.RoutingConfig(router="linear")), tmp_path / "timm")
    main(["advise", str(tmp_path / "timm"), "--images", str(folder), "--output", str(tmp_path / "advice")])
    assert "changed by routing; that is undone" in capsys.readouterr().out
    clip = mmod.route_(make_clip("ViT-B-32"), image=mmod.RoutingConfig(router="norm"))
    mmod.save_pretrained(clip, tmp_path / "bare", architecture=small_config("ViT-B-32"))
    with pytest.raises(
        ValueError, match=r"does not say how its images are prepared: make it by open_clip\.create_model"
    ):
        open_advised(str(tmp_path / "bare"))
    set_model_preprocess_cfg(clip, {"size": 64, "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.2)})
    mmod.save_pretrained(clip, tmp_path / "clip", architecture=small_config("ViT-B-32"))
    advised = open_advised(str(tmp_path / "clip"))
    assert not methods_of(advised.model)
    assert str(advised.preprocessing) == (
        "Preprocessing of the saved model: 64 x 64 px, mean (0.5, 0.4, 0.3), std (0.2, 0.2, 0.2)."
    )
    assert advised.preprocessing.transform()(Image.new("RGB", (50, 40))).shape == (3, 64, 64)


def test_measures_that_a_model_cannot_have_are_refused(tmp_path: Path) -> None:
    headless = timm.create_model("test_vit", num_classes=0)
    save_file(headless.state_dict(), tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match=r"which has no classes, must be one of .features., .patches."):
        open_advised("test_vit", str(tmp_path / "weights.safetensors"), measure="top1")
    with pytest.raises(ValueError, match=r"--measure of a model of open_clip must be one of .features., got"):
        open_advised("open_clip:ViT-B-32", measure="patches")


def test_broken_images_are_named_or_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path / "images", 1, 3)
    (folder / "class 0" / "1.png").write_bytes(b"no image")
    with pytest.raises(SystemExit, match=r"error: .*1\.png.* cannot be decoded.*\(--on_corrupt skip counts"):
        main(words(folder, tmp_path / "advice"))
    main(words(folder, tmp_path / "advice", "--on_corrupt", "skip"))
    assert "1 broken images were skipped." in capsys.readouterr().out


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    make_folder(root / "images", 1, 1)
    (root / "empty").mkdir()
    save_image_model("vit", root / "vit")
    make_image_model("vit").save_pretrained(root / "unprepared")
    mmod.save_pretrained(mmod.apply_(timm.create_model("test_vit"), mmod.lab.Recursions()), root / "shared")
    make_prompts(root)
    # Without all that prepares inputs, and without what splits text alone.
    for name, lost in (("unasked", "[!cm]*"), ("silent", "token*")):
        shutil.copytree(root / "llava", root / name)
        for file in (root / name).glob(lost):
            file.unlink()
    text = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    LlamaForCausalLM(text).save_pretrained(root / "text")
    return root


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("vit_tinny --images images", "timm knows no model 'vit_tinny'"),
        ("resnet10t --no_pretrained --images images", "ResNet"),
        ("models/none --images images", "no folder of a model at 'models/none'"),
        ("open_clip:RN5000 --images images", "open_clip knows no model 'RN5000'"),
        ("empty --images images", r"holds neither a run \(config\.yaml\) nor a model saved by mmod\.save_pre"),
        ("shared --images images", "changed by recursions, which replaced dense weights"),
        ("unprepared --images images", "does not say how its images are prepared: save the image processor there"),
        ("vit --images images --image_size 64", "has its own weights and size of images: leave out image_size"),
        ("vit --images images --measure patches", "which has 2 classes, must be one of .top1., got"),
        ("test_vit --images images --number 0", "--number must be an integer of at least 1, got 0"),
        ("test_vit --images images --image_size -3", "--image_size must be .*got -3"),
        ("test_vit --no_pretrained --images images --image_size 100", "a multiple of the model's patches, 16 px"),
        ("resnet10t --no_pretrained --images images --image_size 96", "cannot build 'resnet10t' with .*img_size"),
        ("resnet10t --no_pretrained --images images", "cannot route ResNet"),
        ("test_vit --no_pretrained --images images --tolerance 3", r"in \[0, 1\), got 3; write 0.03 if 3 % is meant"),
        ("test_vit --images images --tolerance 2.5%", r"in \[0, 1\), got '2.5%'; write 0.025 if 2.5 % is meant"),
        (
            "test_vit --images images --tolerance few%",
            r"--tolerance must be a number in \[0, 1\), got 'few%'; 0\.02 are 2 points$",
        ),
        ("test_vit --images images --tolerance 2", r"--tolerance must be .* in \[0, 1\), got 2; 0\.02 are 2 points$"),
        ("test_vit --images images --faster 1.4x", "--faster must be a number above 1, got '1.4x'"),
        ("test_vit --images images --faster 30%", r"got '30%'; 30 % less time is a speed-up of 1\.43$"),
        ("test_vit --images images --faster 0.7", r"got 0\.7; 30 % less time is a speed-up of 1\.43$"),
        # Before the weights, which may come from a hub.
        ("vit_tiny_patch16_224 --images empty", "--images: the folder 'empty' is empty"),
        ("test_vit --no_pretrained --images none", "--images: there is no folder 'none'"),
        ("llava --prompts questions.json --measure top1", "--measure: of image models alone$"),
        ("llava --prompts questions.json --no_pretrained", "--no_pretrained: of image models alone"),
        (
            "llava --prompts questions.json --faster 1.4",
            "--faster: of image models alone; with --prompts, the table has the speed",
        ),
        ("llava", "advice needs --images FOLDER, or --prompts FILE"),
        ("llava --images images", "'llava' is a language model, which continues text: name a file .* by --prompts"),
        ("text --images images", "'text' is a language model, which continues text: use mmod.search_plan"),
        ("vit --prompts questions.json", "ViTImageProcessor has no fast tokenizer .*: name a vision-language model"),
        (
            "test_vit --prompts questions.json",
            "no folder 'test_vit' here; .* leave out --prompts for a model of timm or",
        ),
        ("open_clip:ViT-B-32 --prompts questions.json", "no folder 'open_clip:ViT-B-32' here; .* leave out --prompts"),
        ("hf-hub:timm/vit --prompts questions.json", "no folder 'hf-hub:timm/vit' here; .* leave out --prompts"),
        (
            "unasked --prompts questions.json",
            r"'unasked' holds no whole processor: save it there .*\('unasked'\)`: Can't",
        ),
        (
            "silent --prompts questions.json",
            "'silent' holds no whole processor: .*: Couldn't instantiate the .* from one",
        ),
        ("llava --prompts missing.json", r"--prompts 'missing\.json' is no file"),
        ("llava --prompts question.json", r"--prompts 'question\.json' is no file; near ones: questions\.json"),
        ("test_vit --images image", "--images: there is no folder 'image'; near ones: images"),
        ("test_vit --images questions.json", r"--images: 'questions\.json' is a file, and no folder"),
        (
            "./none --prompts questions.json",
            r"no folder '\./none' here; a model of the hub is OWNER/NAME",
        ),
    ],
)
def test_what_cannot_be_advised_is_refused(
    words: str, message: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders)
    with pytest.raises(SystemExit, match=message):
        main(["advise", *words.split()])
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("name", "shown"),
    [("timm wrapper", "accuracy to dense"), ("clip", "cosine of features")],
)
def test_a_folder_of_transformers_gives_a_report(
    name: str, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(untrained, "image_series", ALL_SERIES)
    save_image_model(name, tmp_path / "model")
    save_images(tmp_path / "images", 2)
    words = ["advise", str(tmp_path / "model"), "--images", str(tmp_path / "images"), "--device", "cpu"]
    main([*words, "--output", str(tmp_path / "advice"), "--batch_size", "2"])
    text = capsys.readouterr().out
    assert shown in text
    assert ("% accuracy." in text) == (name == "timm wrapper")
    page = (tmp_path / "advice/advice.md").read_text()
    recipes = [row.split("|")[1].strip(" *") for row in page.splitlines() if row.startswith("| ")]
    series = {recipe.rpartition("-")[0] for recipe in recipes}
    assert {one.series for one in ALL_SERIES()} <= series
    assert "Left out" not in text


def test_folders_of_splits_are_images_too(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "images", 2, 2)
    (folder / "class 0").rename(folder / "train")
    main(words(folder, tmp_path / "advice"))
    assert "| 4 |" in " ".join((tmp_path / "advice/advice.md").read_text().split())


def test_prompts_with_smaller_images_are_compared_with_the_same_dense_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "language_candidates", lambda *_: [])
    make_prompts(tmp_path)
    model = LlavaForConditionalGeneration.from_pretrained(tmp_path / "llava")
    for parameter in model.parameters():
        # So that answers depend on the images.
        parameter.data.normal_(std=0.5)
    model.save_pretrained(tmp_path / "llava")
    talks = []
    for number, question in enumerate(["how many objects ?", "which digit is left of the 7 ?"] * 4):
        pixels = torch.randint(256, (9, 9, 3), dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(tmp_path / f"{number}.png")
        turns = [{"from": "human", "value": f"<image>\n{question}"}, {"from": "gpt", "value": str(number)}]
        talks.append({"id": str(number), "image": f"{number}.png", "conversations": turns})
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(talks))
    data = ConversationsConfig(str(path), None)
    config = ChatConfig(output="run", model=ChatModelConfig(str(tmp_path / "llava")), data=data)
    kinds = [ChatKind(config), ChatKind(config.at_size(4))]
    models: list[Any] = [load(kind) for kind in kinds]
    batches = [list(calibration(kind, model, 4, 2)) for kind, model in zip(kinds, models)]
    image = models[0].config.image_token_id

    def answers(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        asked = questions_of(batch, 0).inputs
        options = {"max_new_tokens": 2, "do_sample": False, "suppress_tokens": [image], "pad_token_id": 0}
        return model.generate(**asked, **options)[:, asked["input_ids"].shape[1] :]

    alike, right = [], []
    with torch.no_grad():
        for pair in zip(*batches):
            # The dense model answers every second prompt as its label says.
            given = answers(models[0], pair[0])
            for batch in pair:
                for column in ("input_ids", "labels"):
                    batch[column][1][batch["labels"][1] != -100] = given[1]
            tops = []
            for model, batch in zip(models, pair):
                inputs = {name: value for name, value in batch.items() if name != "labels"}
                top_BN = model(**inputs).logits[:, :-1].argmax(-1)
                tops.append([top[labels[1:] != -100] for top, labels in zip(top_BN, batch["labels"])])
            alike.append([float((dense == small).double().mean()) for dense, small in zip(*tops)])
            right.append(bool(torch.equal(answers(models[1], pair[1])[1], given[1])))

    def at_size(model: nn.Module, side: int) -> list[Any]:
        resize_images(model, side)
        return batches[1]

    # What is in the folder is not measured again by the calls below.
    options: dict[str, Any] = {"folder": tmp_path / "advice", "progress": False}
    advice = mmod.advise(models[0], batches[0], at_size=at_size, **options)
    # One of 2 x 2 patches.
    row = next(row for row in advice.rows if row.series == "smaller-image")
    assert (row.label, row.code) == ("smaller-image-0.25 (4 px)", "")
    assert row.config == 'model: {"image_size": 4}'
    assert row.score.value == pytest.approx(sum(map(sum, alike[1:])) / 6)
    assert 0 < row.score.value < 1
    assert advice.accuracy == pytest.approx(0.5)
    assert row.accuracy is not None
    assert row.accuracy.value == pytest.approx(sum(right[1:]) / 6 - 0.5)
    # Three of about ten tokens less.
    assert row.cache is not None
    assert advice.cache is not None
    assert row.cache < advice.cache
    # What is advised has no line of Python.
    advised = dataclasses.replace(
        advice, rows=(dataclasses.replace(row, speedup=Spread(2.0, 2.0, 2.0)),), tolerance=0.99
    )
    assert advised.best is not None
    assert "```python" not in str(advised)
    told = 'smaller-image-0.25 (4 px) in a training config:\n\n```yaml\nmodel: {"image_size": 4}\n```'
    assert told in str(advised)
    # Other prompts are not compared.
    refused = mmod.advise(models[0], batches[0], at_size=lambda *_: batches[0][::-1], **options).refused
    assert refused["smaller-image-0.25"].startswith("images of another size change more of the prompts")

    def failing(model: nn.Module, side: int) -> list[Any]:
        raise IndexError("no grid of this size")

    refused = mmod.advise(models[0], batches[0], at_size=failing, **options).refused
    assert refused["smaller-image-0.25"] == "images of 4 px: no grid of this size"
    with pytest.raises(ValueError, match="leave it out for images, or candidates"):
        mmod.advise(timm.create_model("test_vit"), [torch.zeros(1, 3, 160, 160)], at_size=at_size)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_fewer_pixels_of_images_of_any_size_are_compared(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "language_candidates", lambda *_: [])
    make_qwen_prompts(tmp_path, kind)
    options = ["--prompts", str(tmp_path / "questions.json"), "--batch_size", "2", "--device", "cpu"]
    read = read_prompts(advise._parser().parse_args([str(tmp_path / "qwen"), *options]))
    batches = list(read.batches)
    image = read.model.config.image_token_id
    limits = read.pixel_limits
    assert limits == {"shortest_edge": 64, "longest_edge": 25600}
    folder, show = str(tmp_path / "qwen"), {"progress": False}
    advice = mmod.advise(read.model, batches, at_size=read.at_size, pixel_limits=limits, **show)
    rows = {row.name: row for row in advice.rows}
    assert set(rows) == {f"fewer-pixels-{share}" for share in (0.7, 0.5, 0.35)}
    # Plans are searched on the first batch of this order.
    order = np.random.default_rng(0).permutation(6)
    pictures = [Image.open(tmp_path / f"{number}.png") for number in order[2:]]
    pixels = [picture.width * picture.height for picture in pictures]

    def counted(processor: Any) -> list[int]:
        grids = processor.image_processor(images=pictures, return_tensors="pt")["image_grid_thw"]
        return (grids.prod(1) // 4).tolist()

    dense = counted(AutoProcessor.from_pretrained(folder))
    assert dense == [number // 64 for number in pixels]
    text = sum(int(((batch["input_ids"] != image) & batch["attention_mask"].bool()).sum()) for batch in batches[1:])
    for share in (0.7, 0.5, 0.35):
        row = rows[f"fewer-pixels-{share}"]
        # What a user writes.
        size = yaml.safe_load(row.config)["model"]["processor_args"]["size"]
        assert row.label == f"{row.name} (at most {size['longest_edge']:,})"
        assert row.code == ""
        assert sum(min(one, size["longest_edge"]) for one in pixels) == pytest.approx(share * sum(pixels), abs=4)
        tokens = counted(AutoProcessor.from_pretrained(folder, size=size))
        # Whole tokens, along both sides.
        assert 0.85 * share < sum(tokens) / sum(dense) <= share
        # Means per prompt, in whole tokens.
        assert row.cache is not None
        assert advice.cache is not None
        few, many = (sum(one) // 4 + (text + sum(one)) // 4 - sum(one) // 4 for one in (tokens, dense))
        assert row.cache / advice.cache == pytest.approx(few / many)
        again = list(read.at_size(read.model, size))
        for before, after in zip(batches, again):
            words = [batch["input_ids"][batch["attention_mask"].bool()] for batch in (before, after)]
            assert torch.equal(*[ids[ids != image] for ids in words])
        assert sum(int((batch["input_ids"] == image).sum()) for batch in again[1:]) == sum(tokens)


def test_images_that_cannot_have_fewer_pixels_are_left_out_with_their_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "language_candidates", lambda *_: [])
    make_qwen_prompts(tmp_path, "qwen3_vl")
    words = ["--prompts", str(tmp_path / "questions.json"), "--batch_size", "2", "--device", "cpu"]
    read = read_prompts(advise._parser().parse_args([str(tmp_path / "qwen"), *words]))
    batches, limits = list(read.batches), read.pixel_limits
    show = {"progress": False}
    # Its processor may have no limit.
    refused = mmod.advise(read.model, batches, at_size=read.at_size, **show).refused
    assert refused["smaller images"].endswith("and its processor has no limit of their pixels")
    refused = mmod.advise(read.model, batches, at_size=lambda *_: batches, pixel_limits=limits, **show).refused
    assert set(refused) == {f"fewer-pixels-{share}" for share in (0.7, 0.5, 0.35)}
    assert refused["fewer-pixels-0.5"] == "images of another size have as many image tokens as before"
    for wrong in ({"pixel_limits": limits}, {"at_size": read.at_size, "pixel_limits": {"max_pixels": 64}}):
        with pytest.raises(ValueError, match="pixel_limits are the shortest_edge and longest_edge that at_size"):
            mmod.advise(read.model, batches, **wrong)


def test_a_file_of_prompts_gives_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def few(*arguments: Any) -> list[Candidate]:
        return [one for one in untrained.language_candidates(*arguments) if one.name == "as PyramidDrop"]

    monkeypatch.setattr(trials, "language_candidates", few)
    make_prompts(tmp_path)
    file = tmp_path / "questions.json"
    file.write_text(json.dumps(2 * json.loads(file.read_text())))
    asked = ["--prompts", str(file), "--output", str(tmp_path / "advice")]
    main(["advise", str(tmp_path / "llava"), *asked, "--batch_size", "2", "--number", "4", "--device", "cpu"])
    shown = capsys.readouterr().out
    assert "as PyramidDrop" in shown
    assert "- 4 of 8 prompts were used, spread evenly over them.\n" in shown
    assert " smaller-image-0.25 (4 px) " in shown
    assert "per prompt in batches of 2 (" in shown
    assert (tmp_path / "advice" / "advice.md").is_file()
