"""Bad input of every kind: one clear line that names the value and the valid ones, nothing executed, nothing lost."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from safetensors.torch import save_file

import mmod
from mmod import Gate, LanguageRouting, Merged, RoutingConfig, Threshold
from mmod.io.files import DamagedFileError
from mmod.io.records import differences
from mmod.opening.language import config_of
from mmod.opening.runs import RUN_HEADER, find_weights, read_run_config
from mmod.opening.weights import load_weights
from mmod.plain import from_plain
from mmod.studies.candidates import training_configs
from mmod.studies.kind_configs import ImageStudyConfig
from mmod.training import TrainConfig
from mmod.training.chat.config import TrainConfig as ChatConfig
from mmod.training.command import parse_run
from mmod.training.engine.run_folder import told_start
from mmod.training.kinds import all_configs
from mmod.training.pairs.config import TrainConfig as PairsConfig
from mmod.training.text.config import TrainConfig as TextConfig
from tests.kit.bad_configs import (
    KINDS,
    NAN,
    VIT,
    nested,
)


def one_line(error: BaseException, *words: str) -> None:
    text = str(error)
    assert "\n" not in text
    assert len(text) < 1000
    for word in words:
        assert word in text


NONE_FITS = (object(), NAN, b"x", [None], {1: 2})
PARTS = {"select": Threshold, "gate": Gate, "skipped": Merged, "language": LanguageRouting}
NAMES = [field.name for field in dataclasses.fields(RoutingConfig)]
NAMES += [f"{part}.{field.name}" for part, kind in PARTS.items() for field in dataclasses.fields(kind)]


@pytest.mark.parametrize("name", NAMES)
def test_every_field_of_a_routing_is_strict(name: str) -> None:
    # The name of a gate is mostly given as the gate itself, and that is what the message calls it.
    option = "gate" if name == "gate.name" else name.rpartition(".")[2]
    for value in NONE_FITS:
        with pytest.raises((TypeError, ValueError)) as error:
            RoutingConfig(**nested({"router": "linear"}, {name: value}))
        one_line(error.value, *([option] if isinstance(value, dict) and name in PARTS else [option, "must be"]))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match=r"config.yaml' is no text in UTF-8"):
        TrainConfig.load(tmp_path / "config.yaml")
    meant = f": it is a folder, of which {tmp_path / 'config.yaml'} may be meant"
    (tmp_path / "runs/empty").mkdir(parents=True)
    (tmp_path / "runs/one").mkdir()
    (tmp_path / "runs/one/config.yaml").touch()
    run = f": it is a folder, of which {tmp_path / 'runs/one'} may be meant"
    nothing = ": it is a folder without a config or a run; `mmod configs` lists the configs that come with mmod"
    folders = ((tmp_path, meant), (tmp_path / "runs", run), (tmp_path / "runs/empty", nothing))
    for path, hint in (*folders, (tmp_path / "nowhere.yaml", "$")):
        with pytest.raises(FileNotFoundError, match=f"no config file at '{path}'{hint}"):
            TrainConfig.load(path)
    (tmp_path / "own.py").touch()
    with pytest.raises(ValueError, match=r"own.py' is a file of Python, and no config file: .* mmod\.advise\(model, "):
        TrainConfig.load(tmp_path / "own.py")


DENSE = f"output: run\nkind: image\nmodel: {{name: {VIT['name']}, args: {{depth: 2}}}}\ndata: {{source: digits}}\n"
CUT_RUNS = {
    "": "config.yaml' must hold a mapping of keys to values, got nothing. It is the config of a run: restore it",
    RUN_HEADER + DENSE[: DENSE.index("data")]: "config.yaml' is the config of a run, and lacks data, world_size: it",
    RUN_HEADER[
        :9
    ]: "config.yaml' must hold a mapping of keys to values, got nothing. It is the config of a run: restore it",
    DENSE[: DENSE.index("}}")]: "config.yaml, line 3: expected ',' or '}'",
    RUN_HEADER + DENSE: "config.yaml' is the config of a run, and lacks world_size: it was cut off or edited; restore",
}
"""Configs in a run folder, and what is said of them."""


@pytest.mark.parametrize("text", CUT_RUNS)
def test_a_cut_config_of_a_run_is_named_wherever_the_run_is(text: str, tmp_path: Path) -> None:
    (tmp_path / "run/model").mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text(text)
    save_file({"a": torch.zeros(1)}, tmp_path / "run/model/model.safetensors")
    start = TrainConfig.from_dict({**KINDS[TrainConfig], "model": {**VIT, "checkpoint": str(tmp_path / "run")}})
    begun = replace(start, output=str(tmp_path / "run"))
    doors: list[Callable[[], object]] = [
        lambda: parse_run([str(tmp_path / "run")], all_configs()),
        lambda: mmod.open_model(tmp_path / "run"),
        start.check_weights,
        lambda: told_start(begun, 1),
    ]
    for door in doors:
        with pytest.raises(DamagedFileError, match=re.escape(CUT_RUNS[text])):
            door()


FOREIGN = {
    "of other software": "lr: 0.1\nmodel: resnet50\n",
    "that is no YAML here": "model: resnet50\nuse_amp: yes\n",
    "with a model": "model: {name: resnet50}\ntask: classes\n",
}
"""Files of other software that have the name of a run's config."""


@pytest.mark.parametrize("text", FOREIGN.values(), ids=FOREIGN)
def test_a_config_of_other_software_above_weights_is_none_of_a_run(text: str, tmp_path: Path) -> None:
    for folder in ("checkpoints", "hub"):
        (tmp_path / folder).mkdir()
    timm.models.save_for_hf(timm.create_model(VIT["name"]), tmp_path / "hub", safe_serialization=True)
    for folder in (tmp_path, tmp_path / "hub"):
        (folder / "config.yaml").write_text(text)
    weights = shutil.copy(tmp_path / "hub/model.safetensors", tmp_path / "checkpoints/best.safetensors")
    shutil.copytree(tmp_path / "hub", tmp_path / "model", ignore=shutil.ignore_patterns("*.yaml"))
    start = {**KINDS[TrainConfig], "model": {**VIT, "checkpoint": str(weights)}}
    TrainConfig.from_dict(start).check_weights()
    for folder in ("hub", "model"):
        assert mmod.open_model(tmp_path / folder).preprocessing
    with pytest.raises(ValueError, match="does not fit the model"):
        load_weights(torch.nn.Linear(1, 1), {"a": torch.zeros(1)}, weights)
    begun = TrainConfig.from_dict({**KINDS[TrainConfig], "output": str(tmp_path / "own")})
    (tmp_path / "own").mkdir()
    (tmp_path / "own/config.yaml").write_text("lr: 0.1\n")
    with pytest.raises(FileExistsError, match=r"own' holds a config\.yaml that is no run's: choose a new or empty"):
        told_start(begun, 1)


def test_a_user_s_own_config_beside_a_model_need_not_have_what_a_run_writes(tmp_path: Path) -> None:
    timm.models.save_for_hf(timm.create_model(VIT["name"]), tmp_path / "model", safe_serialization=True)
    for text in (DENSE[: DENSE.index("data")], f"kind: text\nmodel: {{name: {VIT['name']}}}\n"):
        (tmp_path / "config.yaml").write_text(text)
        opened = mmod.open_model(tmp_path)
        assert opened.sentence.startswith("the final model of the run")
        assert opened.preprocessing
    (tmp_path / "config.yaml").write_text(DENSE.removeprefix("output: run\n"))
    routers: dict[str, Any] = {"x": {"router": "norm"}}
    study = ImageStudyConfig(dense=str(tmp_path), output="out", routers=routers, tune=False, train_dense=True)
    assert training_configs(study)[0].output == "out"


def test_weights_of_another_run_say_which_model_they_are_of(tmp_path: Path) -> None:
    (tmp_path / "run/model").mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text(DENSE)
    weights = tmp_path / "run/model/model.safetensors"
    save_file({"a": torch.zeros(1)}, weights)
    told = r"in the model: 1 key \(a\)\. They are of .*run, a run of kind 'image' with model: {name: vit_t.*depth: 2"
    for source in (tmp_path / "run", weights):
        with pytest.raises(ValueError, match=told):
            load_weights(torch.nn.Linear(1, 1), {"a": torch.zeros(1)}, source)
    for kind in (PairsConfig, TextConfig, ChatConfig):
        config = kind.from_dict({**KINDS[kind], "model": {**KINDS[kind]["model"], "checkpoint": str(tmp_path / "run")}})
        with pytest.raises(ValueError, match=rf"run' is a run of kind 'image': name one of kind '{config.kind}', or a"):
            config.check_weights()


def test_weights_of_another_run_are_taken_where_they_may_fit(tmp_path: Path) -> None:
    (tmp_path / "run/model").mkdir(parents=True)
    weights = tmp_path / "run/model/open_clip_model.safetensors"
    save_file({"a": torch.zeros(1)}, weights)

    def start(kind: str, checkpoint: Path) -> None:
        (tmp_path / "run/config.yaml").write_text(DENSE.replace("kind: image", f"kind: {kind}"))
        TrainConfig.from_dict({**KINDS[TrainConfig], "model": {**VIT, "checkpoint": str(checkpoint)}}).check_weights()

    # timm converts those of a CLIP.
    start("pairs", tmp_path / "run")
    for kind in ("pairs", "text", "chat"):
        start(kind, weights)
    for kind in ("text", "chat"):
        with pytest.raises(ValueError, match=rf"run of kind '{kind}': name one of kind 'image' or 'pairs', or a file"):
            start(kind, tmp_path / "run")


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step-000000001-epoch-00000").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"the folder holds no model\.safetensors"):
        find_weights(tmp_path)
    with pytest.raises(ValueError, match=r"weights of mmod must be one of .*digits-dense.* got 'digits'"):
        find_weights("mmod:digits")


def test_what_a_record_holds_is_read_back(tmp_path: Path) -> None:
    record = TrainConfig.from_dict(KINDS[TrainConfig]).to_dict()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(record))
    assert not differences(read_run_config(tmp_path), record)


@pytest.mark.parametrize("name", ["hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size"])
@pytest.mark.parametrize("value", [0, -4, 1.5])
def test_sizes_of_language_models_are_checked_before_they_are_built(name: str, value: Any) -> None:
    for kind, part in ((TextConfig, {}), (ChatConfig, {"text_config": {}})):
        described = {"model_type": "llama", **({"text_config": {name: value}} if part else {name: value})}
        model = {"config": described, **({"processor": "words"} if part else {})}
        with pytest.raises((TypeError, ValueError), match=rf"{name} must be an integer.*, got {value!r}"):
            from_plain(kind, {"output": "run", "model": model})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text_config": {"model_type": "llama", "hiden_size": 32}}, "text_config.hiden_size .*: is hidden_size meant"),
        ({"text_config": {"model_type": "llama", "hidden_size": "32"}}, "describes no model of transformers: .*'32'"),
        ({"model_type": "lava"}, "describes no model of transformers: Unrecognized model identifier: lava"),
    ],
)
def test_fields_of_a_transformers_config_are_checked_before_it_is_built(fields: Any, message: str) -> None:
    # This one is read by the tower, and declared by no config.
    vision = {"vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False}}
    config = {"model_type": "llava", **vision}
    assert not config_of(config).vision_config.vision_use_head
    with pytest.raises(ValueError, match=message) as error:
        config_of({**config, **fields})
    assert "\n" not in str(error.value)
