"""Runs that would train to their end in vain are refused before the first step, with the value to set."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mmod.cli import main
from mmod.data.labels import Classes
from mmod.training import TrainConfig, fit
from mmod.training.chat.preflight import check_words
from mmod.training.engine.groups import ScheduleConfig, check_warmup
from mmod.training.image.preflight import check_outputs
from mmod.training.kinds import config_class, estimate
from tests.kit.engine_worker import MODEL, TensorStream, run, tiny_config
from tests.kit.folders import stop_behind_a_checkpoint
from tests.kit.sets import SETS

RECORDS = Path(__file__).parents[2] / "references.json"
IMAGES: dict[str, Any] = {
    "model": {"name": "vit_tiny_patch16_224", "args": {**MODEL, "img_size": 32, "patch_size": 8, "num_classes": 10}},
    "data": {"source": "digits:tiny", "root": str(SETS / "digits"), "batch_size": 64},
    "device": "cpu",
    "epochs": 2,
}


def refused(tmp_path: Path, fields: dict[str, Any], match: str) -> None:
    """Check that a run and its estimate are refused, and that nothing is written."""
    config = TrainConfig.from_dict({**IMAGES, **fields, "output": str(tmp_path / "run")})
    with pytest.raises(ValueError, match=match):
        fit(config, progress=False)
    with pytest.raises(ValueError, match=match):
        estimate(config)
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize(("warmup", "advice"), [(2, "0, or at most 1"), (5, "0, or at most 1")])
def test_a_warmup_as_long_as_the_run_is_refused(tmp_path: Path, warmup: int, advice: str) -> None:
    match = rf"warmup_epochs={warmup} is as long as the run, epochs=2: .*Set schedule\.warmup_epochs to {advice}$"
    refused(tmp_path, {"schedule": {"warmup_epochs": warmup}}, match)


def test_the_advised_warmup_is_valid() -> None:
    for length in (1, 2, 7, 2.5):
        with pytest.raises(ValueError, match="is as long as the run") as caught:
            check_warmup("warmup", length, "epochs", length)
        most = int(str(caught.value).rpartition(" ")[2])
        check_warmup("warmup", most, "epochs", length)
        check_warmup("warmup", 0, "epochs", length)
        assert most < length


@pytest.mark.parametrize("key", ["min_lr", "warmup_lr"])
def test_a_rate_that_a_small_batch_scaled_below_its_bounds_names_the_batch(tmp_path: Path, key: str) -> None:
    fields = {
        "optim": {"lr": 1e-3, "lr_per": 4096},
        "schedule": {key: 1e-4, "warmup_epochs": int(key == "warmup_lr")},
    }
    match = (
        rf"schedule\.{key} must be at most the learning rate, 1\.5625e-05, got 0\.0001: optim\.lr=0\.001 is for "
        rf"optim\.lr_per=4096 samples a step, and a step has 64\. Set optim\.lr_per to null to train at "
        rf"optim\.lr=0\.001, or schedule\.{key} to 0$"
    )
    refused(tmp_path, fields, match)
    for advised in ({"optim": {"lr": 1e-3}}, {"schedule": {**fields["schedule"], key: 0.0}}):
        TrainConfig.from_dict({**IMAGES, **fields, **advised, "output": "run"}).check_schedule()


def test_a_rate_below_its_bounds_is_refused_with_batches_of_a_caller_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"min_lr must be .* 1e-05, got 0\.0001\. Set schedule\.min_lr to 0$"):
        run(tiny_config(output=tmp_path / "run", optim={"lr": 1e-5}, schedule=ScheduleConfig(min_lr=1e-4)))


def test_batches_of_a_caller_are_refused_where_there_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="gives no batch of 64 samples"):
        run(tiny_config(output=tmp_path / "none", batch_size=64))


def test_classes_of_a_callers_batches_are_those_that_the_run_records(tmp_path: Path) -> None:
    config = tiny_config(output=tmp_path / "run", epochs=1)
    train = TensorStream(8, seed=0)
    streams: Any = train, TensorStream(8, seed=None)
    train.classes = Classes({"a": 0, "b": 1, "c": 2, "d": 3}, given=False)  # type: ignore[attr-defined]
    fit(config, streams=streams, progress=False)
    # The files of the config's data are not what it reads.
    assert not (Path(config.output) / "files.json").exists()
    stop_behind_a_checkpoint(tmp_path / "run")
    train.classes = Classes({"a": 0, "b": 1, "c": 2, "e": 3}, given=False)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"records other classes .*\(gone: d; new: e\)"):
        fit(config, streams=streams, progress=False)


@pytest.mark.parametrize(
    ("kind", "data", "match"),
    [
        ("image", {"source": "folder", "root": "nowhere"}, "data.root='nowhere' is no folder"),
        ("image", {"source": "shards:nowhere/{split}-*.tar"}, "no shard matches 'nowhere/train"),
        ("image", {"source": "maps:32", "root": "nowhere", "label_patch": 8}, "nowhere/images/train, which does not"),
        ("pairs", {"train": "nowhere/*.tar", "val": "nowhere/*.tar"}, "no shard matches"),
        ("pairs", {"train": ".", "val": "."}, "'.' is a folder, and no shard: name those in it, as"),
        ("text", {"source": "nowhere/*.txt"}, "matches no file"),
        ("chat", {"train": "nowhere.json"}, "no file of conversations at 'nowhere.json'"),
        (
            "chat",
            {"train": str(RECORDS), "images": "nowhere"},
            "data.images='nowhere' is no folder: name the one from which",
        ),
        ("chat", {"train": "nowhere/*.tar"}, "no shard matches"),
    ],
)
def test_missing_data_are_told_before_missing_weights(
    tmp_path: Path, kind: str, data: dict[str, Any], match: str
) -> None:
    models: dict[str, dict[str, Any]] = {
        "image": {"name": "test_vit", "args": {"global_pool": ""} if "label_patch" in data else {}},
        "pairs": {"name": "ViT-B-32"},
        "text": {"config": {"model_type": "llama"}},
        "chat": {},
    }
    model = {**models[kind], "checkpoint": str(tmp_path / "no-weights")}
    config = config_class(kind).from_dict({"output": str(tmp_path / "run"), "model": model, "data": data})
    for start in (estimate, fit):
        with pytest.raises((ValueError, FileNotFoundError), match=match):
            start(config)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("outputs", [2, 3, 4, None])
def test_outputs_are_as_many_as_the_classes_unless_these_are_matched(given: bool, outputs: int | None) -> None:
    classes = Classes({"a": 0, "b": 1, "c": 2}, given=given)
    if outputs in (3, None) or (outputs == 4 and given):
        check_outputs(classes, outputs, from_checkpoint=True)
        return
    with pytest.raises(ValueError, match=rf"3 classes, a, b, c, and the model {outputs} outputs: .*num_classes to 3"):
        check_outputs(classes, outputs, from_checkpoint=False)
    with pytest.raises(ValueError, match=r"num_classes to 3 and model\.head to fresh"):
        check_outputs(classes, outputs, from_checkpoint=True)


class Words:
    """A tokenizer that knows one word."""

    unk_token_id: int | None = 0
    unk_token = "<unk>"

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        assert not add_special_tokens
        return {"input_ids": [[int(word == "known") for word in text.split()] for text in texts]}


def test_unknown_words_are_noted_when_few_and_refused_when_many(recwarn: pytest.WarningsRecorder) -> None:
    tokenizer = Words()
    check_words(["known known"], tokenizer, "Set x.")
    assert not recwarn
    with pytest.warns(UserWarning, match=r"does not know 1\.0% of the tokens of training answers.*'<unk>'.*Set x\."):
        check_words(["known " * 99, "other"], tokenizer, "Set x.")
    with pytest.raises(ValueError, match=r"does not know 50\.0% .*Set x\."):
        check_words(["known other"], tokenizer, "Set x.")
    tokenizer.unk_token_id = None
    check_words(["other"], tokenizer, "Set x.")


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("model.args", "timm cannot build 'vit_tiny_patch16_224' with model.args "),
        ("optim.args", "timm cannot make the optimiser 'adamw' with optim.args "),
    ],
)
def test_a_misspelt_argument_of_the_host_is_one_line(
    tmp_path: Path, group: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**IMAGES, "output": str(tmp_path / "run")}))
    with pytest.raises(SystemExit) as end:
        main(["train", "image", str(tmp_path / "config.yaml"), f"--{group}.depht", "2"])
    assert message in str(end.value)
    assert "'depht'" in str(end.value)
    config = TrainConfig.from_dict({**IMAGES, "output": str(tmp_path / "run")})
    fit(config, progress=False)
    misspelt = replace(config, model=replace(config.model, args={**config.model.args, "dept": 2}))
    with pytest.raises(ValueError, match=r"model\.args\.dept: not set there, 2 now \(is model\.args\.depth meant\?\)"):
        fit(misspelt, progress=False)
