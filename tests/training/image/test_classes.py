"""Class names of a run: recorded at its start, and matched to those of the data wherever the run is evaluated."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from mmod.data.config import DataConfig
from mmod.data.corrupt import CorruptDataError
from mmod.data.labels import read_classes
from mmod.opening.opened import Opened, Preprocessing
from mmod.opening.runs import run_classes
from mmod.opening.timm import published_classes
from mmod.studies.advised import read_images
from mmod.studies.audit.sets import read_set
from mmod.training import EvalResult, ModelConfig, TrainConfig, fit
from mmod.training.engine.distributed import Process
from mmod.training.engine.kind import create, load
from mmod.training.engine.run_folder import told_start
from mmod.training.image.config import DistillConfig
from mmod.training.image.kind import ImageKind
from mmod.training.kinds import estimate, kind_of
from tests.kit.folders import stop_behind_a_checkpoint
from tests.kit.processes import run_processes

NAMES = ["9", "10", "ant", "bee", "cow", "dog"]
ARGS = {"img_size": 16, "patch_size": 8, "in_chans": 1, "embed_dim": 16, "depth": 1, "num_heads": 2}


def write_images(folder: Path, names: Sequence[str], per_class: int = 3) -> None:
    """Write grey images whose value is the class."""
    for name in names:
        (folder / name).mkdir(parents=True)
        for number in range(per_class):
            image = Image.new("L", (16, 16), 40 * NAMES.index(name) if name in NAMES else 0)
            image.save(folder / name / f"{number}.png")


def config_of(folder: Path, root: Path, classes: int = len(NAMES), **changes: Any) -> TrainConfig:
    loader = {"source": "folder", "image_size": 16, "crop_pct": 1.0, "batch_size": 4, **changes.pop("data", {})}
    model = ModelConfig("vit_tiny_patch16_224", {**ARGS, "num_classes": classes}, **changes.pop("model", {}))
    fields = {"epochs": 1, "device": "cpu", **changes}
    return TrainConfig(output=str(folder), model=model, data=DataConfig(root=str(root), **loader), **fields)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, and the images that it was trained on."""
    folder = tmp_path_factory.mktemp("classes")
    for split in ("train", "val"):
        write_images(folder / "data" / split, NAMES)
    fit(config_of(folder / "run", folder / "data"), progress=False)
    return folder


def assessed(config: TrainConfig) -> tuple[EvalResult, Any]:
    kind = ImageKind(config)
    model = load(kind)
    return kind.score(model).result, model


def of_run(trained: Path, data: Path, **changes: Any) -> TrainConfig:
    return config_of(trained / "none", data, model={"checkpoint": str(trained / "run")}, **changes)


def test_a_run_records_the_names_of_its_classes_in_the_order_of_its_outputs(trained: Path) -> None:
    expected = {name: number for number, name in enumerate(NAMES)}
    assert read_classes(trained / "run" / "classes.json") == expected
    exported = json.loads((trained / "run" / "model" / "config.json").read_text())
    assert exported["label_names"] == {str(number): name for name, number in expected.items()}


@pytest.mark.parametrize("present", [NAMES, NAMES[2:5], NAMES[1:2], NAMES[::-2]])
@pytest.mark.parametrize("place", ["run", "run/model", "run/model/model.safetensors"])
def test_a_subset_has_the_labels_of_the_run_without_a_training_folder(
    trained: Path, tmp_path: Path, present: list[str], place: str
) -> None:
    write_images(tmp_path / "val", present)
    config = config_of(tmp_path / "none", tmp_path, model={"checkpoint": str(trained / place)})
    result, model = assessed(config)
    expected = []
    with torch.no_grad():
        for name in present:
            image = torch.full((1, 1, 16, 16), (40 * NAMES.index(name) / 255 - 0.5) / 0.5)
            expected += 3 * [int(model(image).argmax()) == NAMES.index(name)]
    assert result.top1 == pytest.approx(100 * np.mean(expected))
    said = None if present == NAMES else f"{len(present)} of 6 classes, matched by name"
    assert result.classes == said
    assert said is None or said in str(result)
    labels = torch.cat([batch.batch[1] for batch in _audited(config)])
    assert sorted(labels.tolist()) == sorted(3 * [NAMES.index(name) for name in present])


def _audited(config: TrainConfig) -> Any:
    kind = ImageKind(config)
    return read_set(kind, load(kind))


def test_classes_that_the_run_does_not_know_are_refused_and_a_new_classifier_takes_them(
    trained: Path, tmp_path: Path
) -> None:
    for split in ("train", "val"):
        write_images(tmp_path / split, ["ant", "elk"])
    config = of_run(trained, tmp_path)
    with pytest.raises(ValueError, match=r"val has classes that the run of '.*run' does not name: elk; it names 9, 10"):
        assessed(config)
    with pytest.raises(ValueError, match=r"does not name: elk.*model\.head='fresh'"):
        fit(replace(config, output=str(tmp_path / "run")), progress=False)
    with pytest.raises(ValueError, match=r"2 classes, the folders ant, elk of .*train, and the model 6 .* to 2; or"):
        fit(replace(config, output=str(tmp_path / "run"), model=replace(config.model, head="fresh")), progress=False)
    model = replace(config.model, head="fresh", args={**ARGS, "num_classes": 2})
    fresh = replace(config, output=str(tmp_path / "run"), model=model)
    assert fit(fresh, progress=False).steps == 1
    assert read_classes(tmp_path / "run" / "classes.json") == {"ant": 0, "elk": 1}
    assert assessed(fresh.finished(str(tmp_path / "run")))[0].classes is None


def test_training_on_a_subset_goes_on_with_the_outputs_of_the_run(trained: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_images(tmp_path / split, ["bee", "dog"])
    config = replace(of_run(trained, tmp_path), output=str(tmp_path / "run"))
    result = fit(config, progress=False)
    assert result.evaluation.classes == "2 of 6 classes, matched by name"
    assert read_classes(tmp_path / "run" / "classes.json") == read_classes(trained / "run" / "classes.json")
    stream = ImageKind(config).data(create(ImageKind(config)), Process(0, 1, torch.device("cpu")), seed=0)
    assert {int(label) for _, labels in stream.batches(0) for label in labels} == {3, 5}
    # Of the classes that are trained, not of those that the run knows.
    shutil.rmtree(tmp_path / "val" / "dog")
    with pytest.warns(UserWarning, match="the evaluation images have 1 of the 2 classes of the training images"):
        fit(replace(config, output=str(tmp_path / "other")), progress=False)


def test_without_names_another_number_of_classes_is_refused_and_each_advice_works(
    trained: Path, tmp_path: Path
) -> None:
    write_images(tmp_path / "val", NAMES[2:4])
    weights = tmp_path / "model.safetensors"
    shutil.copy(trained / "run" / "model" / "model.safetensors", weights)
    bare = config_of(tmp_path / "none", tmp_path, model={"checkpoint": str(weights)})
    with pytest.raises(ValueError, match=r"2 classes, the folders ant, bee of .*val, and .*data\.classes"):
        assessed(bare)
    (tmp_path / "names.txt").write_text("\n".join(NAMES))
    expected = assessed(of_run(trained, tmp_path))[0]
    named = replace(bare, data=replace(bare.data, classes=str(tmp_path / "names.txt")))
    assert assessed(named)[0] == expected
    write_images(tmp_path / "train", NAMES)
    assert assessed(bare)[0] == expected


def test_another_set_of_classes_does_not_resume(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "data", tmp_path / "data")
    config = config_of(tmp_path / "run", tmp_path / "data")
    fit(config, progress=False)
    stop_behind_a_checkpoint(tmp_path / "run")
    shutil.rmtree(tmp_path / "data" / "train" / "cow")
    shutil.rmtree(tmp_path / "data" / "val" / "cow")
    with pytest.raises(ValueError, match="the training data is no longer that with which the run"):
        fit(config, progress=False)
    (tmp_path / "run" / "files.json").unlink()
    with pytest.raises(ValueError, match=r"classes\.json' records other classes .*gone: cow; new: none.*restore"):
        fit(config, progress=False)


def test_a_run_with_other_files_does_not_resume_and_each_way_on_works(trained: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(trained / "data", data)
    config = config_of(tmp_path / "run", data)
    expected = fit(config, progress=False)
    (image, *_) = sorted((data / "train").rglob("*.png"))
    shutil.copy(image, image.with_name("further.png"))
    # A finished run needs no data.
    assert fit(config, progress=False).reused
    stop_behind_a_checkpoint(tmp_path / "run")
    told = r"training data is no longer .*: (\d+) files, \w{8} then, (\d+) files, \w{8} now\. Restore them, remove '"
    for goes_on in (partial(fit, config, progress=False), partial(told_start, kind_of(config).config, 1)):
        with pytest.raises(ValueError, match=told) as refusal:
            goes_on()
        found = re.search(told, str(refusal.value))
        assert found is not None
        before, now = map(int, found.groups())
        assert now == before + 1
    image.with_name("further.png").unlink()
    # Of training images the names count, and of those of the evaluation the sizes too; wherever they lie.
    bytes_of = image.read_bytes()
    image.write_bytes(bytes_of + b"0")
    assert "resume at step 1" in told_start(kind_of(config).config, 1)
    image.write_bytes(bytes_of)
    (seen, *_) = sorted((data / "val").rglob("*.png"))
    seen.write_bytes(seen.read_bytes() + b"0")
    with pytest.raises(ValueError, match="the evaluation data is no longer"):
        told_start(kind_of(config).config, 1)
    (tmp_path / "run" / "files.json").unlink()
    assert "resume at step 1" in told_start(kind_of(config).config, 1)
    # Without a checkpoint nothing goes on.
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert "start anew" in told_start(kind_of(config).config, 1)
    assert fit(config, progress=False).evaluation == expected.evaluation


@pytest.mark.parametrize(
    ("recorded", "changes"),
    [
        ({"indoor": 0, "outdoor": 1}, "gone: indoor, outdoor; new: ant, bee"),
        ({".ipynb_checkpoints": 0, "ant": 1, "bee": 2}, r"gone: \.ipynb_checkpoints; new: none"),
    ],
)
def test_a_run_whose_classes_were_other_folders_does_not_resume(
    recorded: dict[str, int], changes: str, tmp_path: Path
) -> None:
    for split in ("train", "val"):
        for name in ("ant/indoor", "ant/outdoor", "bee/indoor", "bee/outdoor", "ant/.ipynb_checkpoints"):
            write_images(tmp_path / split, [name])
    config = config_of(tmp_path / "run", tmp_path, classes=2)
    with pytest.warns(UserWarning, match=r"left out are folders .*: \.ipynb_checkpoints \(1\)"):
        fit(config, progress=False)
    assert read_classes(tmp_path / "run" / "classes.json") == {"ant": 0, "bee": 1}
    stop_behind_a_checkpoint(tmp_path / "run")
    (tmp_path / "run" / "classes.json").write_text(json.dumps(recorded))
    with pytest.raises(ValueError, match=rf"records other classes than the training data has now \({changes}\)"):
        fit(config, progress=False)


def test_a_teacher_with_other_classes_is_refused(trained: Path, tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_images(tmp_path / split, [*NAMES[:5], "elk"])
    config = config_of(tmp_path / "run", tmp_path)
    distilled = replace(config, distill=replace(config.distill, teacher=str(trained / "run")))
    with pytest.raises(ValueError, match=r"the teacher '.*run' answers with other classes: 'dog' is 5 there and none"):
        fit(distilled, progress=False)


def test_published_weights_know_imagenet_by_name(tmp_path: Path) -> None:
    from timm.data import ImageNetInfo

    synsets = ImageNetInfo("imagenet-1k").label_names()
    chosen = [synsets[number] for number in (7, 500, 999)]
    write_images(tmp_path, chosen)
    model = timm.create_model("test_vit", num_classes=1000)
    batch, note, _ = read_images(str(tmp_path), advised(model), 9, "raise")
    assert batch[1].tolist() == [7] * 3 + [500] * 3 + [999] * 3  # type: ignore[union-attr]
    assert note == "3 of 1000 classes, matched by name."
    _, note, _ = read_images(str(tmp_path), advised(timm.create_model("test_vit", num_classes=7)), 9, "raise")
    assert (
        note == f"Labels are not used: the images are in 3 folders ({', '.join(chosen)}), and the model has 7 classes."
    )


def advised(model: torch.nn.Module, classes: dict[str, int] | None = None) -> Opened:
    """Return a model with the classes of a run, or those of its weights."""
    preprocessing = Preprocessing({"input_size": (3, 16, 16)}, "of a test")
    known = classes or published_classes(model)
    return Opened(model, "of a test", lambda: preprocessing, known, is_run=classes is not None)


def test_advice_uses_labels_of_a_run_only_by_name(trained: Path, tmp_path: Path) -> None:
    model = timm.create_model("test_vit", num_classes=6)
    classes = run_classes(trained / "run" / "model" / "model.safetensors")
    write_images(tmp_path / "some", ["dog", "ant"])
    batch, *_ = read_images(str(tmp_path / "some"), advised(model, classes), 6, "raise")
    assert batch[1].tolist() == [2] * 3 + [5] * 3  # type: ignore[union-attr]
    write_images(tmp_path / "others", ["a", "b", "c", "d", "e", "f"])
    (tmp_path / "others/a/broken.png").write_bytes(b"no picture")
    batch, note, _ = read_images(str(tmp_path / "others"), advised(model, classes), 99, "skip")
    assert isinstance(batch, torch.Tensor)
    # What changes the measure comes first.
    assert note.startswith(
        "Labels are not used: the images are in 6 folders (a, b, c, d, e and 1 more), and the model has 6 classes of "
        "other names. 1 broken"
    )


def test_a_dry_run_reads_some_of_the_training_images_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images(tmp_path / "data/train", ["a"], 12)
    write_images(tmp_path / "data/val", ["a"], 2)
    order = np.random.default_rng([0, 0]).permutation(12)
    config = config_of(tmp_path / "run", tmp_path / "data", classes=1, data={"batch_size": 2})
    monkeypatch.setattr("mmod.training.engine.estimate._READ", 8)
    # The tenth image of an epoch is not read, the eighth is.
    (tmp_path / f"data/train/a/{order[9]}.png").write_bytes(b"no picture")
    assert str(estimate(config)).endswith("\nsamples read: 2 of evaluation, 8 of training; none is broken")
    (tmp_path / f"data/train/a/{order[7]}.png").write_bytes(b"no picture")
    with pytest.raises(CorruptDataError, match=rf"/a/{order[7]}\.png.*\(on_corrupt: skip in data counts"):
        estimate(config)
    skipping = estimate(replace(config, data=replace(config.data, on_corrupt="skip")))
    assert "\nsamples read: 2 of evaluation, 8 of training; 1 broken, left out:\n" in str(skipping)
    assert re.search(rf"/a/{order[7]}\.png: .*\Z", str(skipping))


def evaluate_in_processes(folder: str, patches: bool) -> None:
    """Train and evaluate where all samples of one process cannot be read."""
    result = fit(unreadable(Path(folder), patches), progress=False)
    skipped = sum(result.skipped["val"].values())
    if (result.evaluation.samples, skipped) != (3, 3):
        raise AssertionError(f"{result.evaluation} {result.skipped}")


def refuse_in_processes(folder: str, patches: bool) -> None:
    """Check that both processes end before the first step, though one alone has samples that cannot be read."""
    refuse_unreadable(partial(fit, progress=False), Path(folder), patches)


def refuse_unreadable(run: Callable[[TrainConfig], object], folder: Path, patches: bool) -> None:
    """Check that a function of a config names all samples that cannot be read, and trains nothing."""
    config = unreadable(folder, patches)
    strict = replace(config, data=replace(config.data, on_corrupt="raise"), output=str(folder / "strict"))
    with pytest.raises(CorruptDataError, match=r"1\.png.*; .*3\.png.*; .*5\.png.*on_corrupt: skip in data counts"):
        run(strict)
    assert not (folder / "strict/config.yaml").exists()


def unreadable(folder: Path, patches: bool) -> TrainConfig:
    """Return the config of a run whose second process reads no sample of the evaluation."""
    data: dict[str, Any] = {"on_corrupt": "skip", "batch_size": 2}
    if not patches:
        return config_of(folder / "run", folder / "data", classes=1, data=data)
    data |= {"source": "maps:16", "label_patch": 8}
    config = config_of(folder / "run", folder / "data", classes=3, data=data)
    model = ModelConfig(config.model.name, {**config.model.args, "global_pool": "", "class_token": False})
    return replace(config, model=model)


@pytest.mark.parametrize("patches", [False, True])
def test_a_process_without_a_readable_sample_waits_for_no_one(tmp_path: Path, patches: bool) -> None:
    for split, count in (("train", 4), ("val", 6)):
        folder = tmp_path / "data" / (f"images/{split}" if patches else f"{split}/a")
        folder.mkdir(parents=True)
        if patches:
            (tmp_path / "data" / "labels" / split).mkdir(parents=True)
        for number in range(count):
            Image.new("L", (16, 16), number).save(folder / f"{number}.png")
            if patches:
                Image.new("L", (16, 16), number % 3).save(tmp_path / "data" / "labels" / split / f"{number}.png")
            if split == "val" and number % 2:
                (folder / f"{number}.png").write_bytes(b"no picture")
    refuse_unreadable(estimate, tmp_path, patches)
    log = tmp_path / "log"
    assert run_processes(refuse_in_processes, str(tmp_path), patches, world=2, log=log) == [0, 0], log.read_text()
    assert run_processes(evaluate_in_processes, str(tmp_path), patches, world=2, log=log) == [0, 0], log.read_text()


def test_a_run_with_another_teacher_does_not_resume(trained: Path, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher.safetensors"
    shutil.copy(trained / "run" / "model" / "model.safetensors", teacher)
    config = config_of(tmp_path / "run", trained / "data", distill=DistillConfig(str(teacher)))
    fit(config, progress=False)
    stop_behind_a_checkpoint(tmp_path / "run")
    assert "resume at step 1" in told_start(kind_of(config).config, 1)
    teacher.write_bytes(teacher.read_bytes() + b" ")
    with pytest.raises(ValueError, match="the teacher is no longer that with which the run"):
        fit(config, progress=False)
