"""Bad input of every kind: one clear line that names the value and the valid ones, nothing executed, nothing lost."""

from __future__ import annotations

import dataclasses
import json
import pickle
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from mmod import Gate, LanguageRouting, Merged, RoutingConfig, Threshold
from mmod.config import Plan
from mmod.data.config import AugmentConfig, DataConfig
from mmod.data.loader import _transform
from mmod.io.claim import claim_folder
from mmod.io.options import dataclass_in
from mmod.training import TrainConfig
from mmod.training.chat.config import TrainConfig as ChatConfig
from mmod.training.engine.checkpoint import find_weights, read_weights
from mmod.training.engine.model import described
from mmod.training.engine.parse import parse_config
from mmod.training.engine.run_folder import read_fit
from mmod.training.image.evaluate import EvalResult
from mmod.training.pairs.config import TrainConfig as PairsConfig
from mmod.training.text.config import TrainConfig as TextConfig
from mmod.values import from_plain
from tests.kit.trap import Trap

KINDS: dict[type, dict[str, Any]] = {
    TrainConfig: {"output": "run", "model": {"name": "vit_tiny_patch16_224"}, "data": {}},
    PairsConfig: {"output": "run", "model": {"name": "ViT-B-32"}, "data": {}},
    ChatConfig: {"output": "run", "model": {"checkpoint": "folder"}, "data": {}},
    TextConfig: {"output": "run", "model": {"checkpoint": "folder"}, "data": {}},
}
NAN, INF = float("nan"), float("inf")
# A value that no field of the type takes.
FOREIGN: dict[Any, Any] = {bool: 3, int: True, float: True, str: 3, list: 3, tuple: 3, dict: 3}


def fields_of(kind: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    hints = typing.get_type_hints(kind)
    for name in [field.name for field in dataclasses.fields(kind)]:
        hint = hints[name]
        group = dataclass_in(hint)
        if group is None:
            yield f"{prefix}{name}", hint
        else:
            yield f"{prefix}{name}", dict
            yield from fields_of(group, f"{prefix}{name}.")


def basic_type(hint: Any) -> Any:
    """Return the plain type that a hint stands for first."""
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return str
    if origin in (list, tuple, dict):
        return origin
    arguments = [one for one in typing.get_args(hint) if one is not type(None)]
    return basic_type(arguments[0]) if arguments else hint


def nested(fields: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(fields))
    group = copy
    *parents, name = key.split(".")
    for parent in parents:
        group = group.setdefault(parent, {})
    group[name] = value
    return copy


def one_line(error: BaseException, *words: str) -> None:
    text = str(error)
    assert "\n" not in text
    assert len(text) < 1000
    for word in words:
        assert word in text


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__module__)
def test_a_value_of_another_type_and_a_number_that_is_not_finite_are_refused(kind: type) -> None:
    for key, hint in fields_of(kind):
        type_ = basic_type(hint)
        for value in (FOREIGN[type_], *((NAN, INF, -INF) if type_ in (int, float) else ())):
            with pytest.raises((TypeError, ValueError)) as error:
                from_plain(kind, nested(KINDS[kind], key, value))
            one_line(error.value, key, "must be", f"got {value!r}")


OUT_OF_RANGE = [
    (TrainConfig, "grad_clip", -1, "a number above 0 or null"),
    (TrainConfig, "grad_clip", 0, "a number above 0 or null"),
    (TrainConfig, "ema.decay", 2, "a number in [0, 1)"),
    (TrainConfig, "ema.decay", -0.1, "a number in [0, 1)"),
    (TrainConfig, "optim.lr", -1e-3, "a number of at least 0"),
    (TrainConfig, "optim.weight_decay", -0.1, "a number of at least 0"),
    (TrainConfig, "optim.momentum", 1, "a number in [0, 1)"),
    (TrainConfig, "optim.layer_decay", 0, "a number in (0, 1] or null"),
    (TrainConfig, "optim.lr_per", 0, "an integer of at least 1 or null"),
    (TrainConfig, "schedule.min_lr", 1, "at most the learning rate, 0.001"),
    (TrainConfig, "schedule.min_lr", -1, "a number of at least 0"),
    (TrainConfig, "schedule.warmup_epochs", -1, "an integer of at least 0"),
    (TrainConfig, "schedule.sched", "cosinus", "one of 'cosine', 'tanh'"),
    (TrainConfig, "loss.kind", "mse", "one of 'ce', 'bce'"),
    (TrainConfig, "loss.smoothing", 1, "a number in [0, 1)"),
    (TrainConfig, "mixup.prob", 1.5, "a number in [0, 1]"),
    (TrainConfig, "mixup.mixup_alpha", -1, "a number of at least 0"),
    (TrainConfig, "distill.weight", 0, "a number above 0"),
    (TrainConfig, "distill.temperature", -2, "a number above 0"),
    (TrainConfig, "capacity_schedule.start", 0, "a number in (0, 1]"),
    (TrainConfig, "precision", "fp8", "one of 'fp32', 'bf16', 'fp16'"),
    (TrainConfig, "epochs", 0, "an integer of at least 1"),
    (TrainConfig, "epochs", 1.5, "an integer"),
    (TrainConfig, "accumulate", 0, "an integer of at least 1"),
    (TrainConfig, "checkpoint_every", 0, "an integer of at least 1 or null"),
    (TrainConfig, "log_every", 0, "an integer of at least 1"),
    (TrainConfig, "seed", -1, "an integer of at least 0"),
    (TrainConfig, "output", "", "output must name a folder"),
    (TrainConfig, "data.batch_size", 0, "an integer of at least 1"),
    (TrainConfig, "data.workers", -1, "an integer of at least 0"),
    (TrainConfig, "data.std", [0.0], "each a number above 0"),
    (TrainConfig, "data.interpolation", "cubic", "one of 'nearest', 'bilinear', 'bicubic'"),
    (TrainConfig, "data.interpolation", "random", "one of 'nearest', 'bilinear', 'bicubic'"),
    (TrainConfig, "data.augment.interpolation", "cubic", "one of 'nearest', 'bilinear', 'bicubic'"),
    (TrainConfig, "data.augment.auto_augment", "random-m9", "one of 'rand', 'augmix', 'original'"),
    (TrainConfig, "data.augment.hflip", 2, "a number in [0, 1]"),
    (TrainConfig, "data.augment.re_count", 0, "an integer of at least 1"),
    (TrainConfig, "routing", {"capcity": 1}, "valid ones are router, capacity"),
    (TrainConfig, "routing", {"preset": "amod"}, "a-mod"),
    (TrainConfig, "routing", {"capacity": 2}, "a number in [0, 1]"),
    (PairsConfig, "routing.image", {"select": {"threshold": NAN}}, "a finite number"),
    (PairsConfig, "loss", "infonce", "one of 'clip', 'siglip', 'coca'"),
    (PairsConfig, "zero_shot", "cifar", "'scenes' or 'imagenet:FOLDER'"),
    (ChatConfig, "frozen", ["eyes"], "'vision', 'projector', 'language'"),
    (ChatConfig, "trainer", {"learning_rate": -1}, "a number of at least 0"),
    (ChatConfig, "trainer", {"learning_rate": "fast"}, "a number of at least 0"),
    (ChatConfig, "trainer", {"max_grad_norm": NAN}, "a number of at least 0"),
    (ChatConfig, "trainer", {"output_dir": "x"}, "the run sets them"),
    (ChatConfig, "lora", {"r": 0}, "an integer of at least 1"),
    (ChatConfig, "routing", {"language": {"router": {"name": "linear", "bias": 3}}}, "true or false"),
    (ChatConfig, "data.max_length", 1, "an integer of at least 2 or null"),
    (ChatConfig, "max_new_tokens", 0, "an integer of at least 1"),
]
"""Config, key, value, and what the message says of the valid ones."""


@pytest.mark.parametrize(("kind", "key", "value", "valid"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused_with_the_valid_ones(kind: type, key: str, value: Any, valid: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        from_plain(kind, nested(KINDS[kind], key, value))
    one_line(error.value, valid)


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
            RoutingConfig(**nested({"router": "linear"}, name, value))
        one_line(error.value, *([option] if isinstance(value, dict) and name in PARTS else [option, "must be"]))


@pytest.mark.parametrize("fields", [{"blocks": (1.5,)}, {"blocks": "x"}, {"capacities": ("x",)}, {"depth": True}])
def test_every_field_of_a_plan_is_strict(fields: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(fields))):
        Plan(**{"blocks": (1,), "capacities": (0.5,), "depth": 4, **fields})


BASE = "output: run\nmodel: {name: vit_tiny_patch16_224}\ndata: {source: digits}\n"
LAUGHS = "a: &a [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join(['*a' + str(i - 1 or '')] * 9)}]\n" for i in range(1, 30))


FILES = [
    ("", "a mapping of keys to values, got nothing"),
    ("- 1\n", "a mapping of keys to values, got list"),
    ("just words", "a mapping of keys to values, got str"),
    ("a: [1", "config.yaml, line 1: "),
    (BASE + "\tepochs: 1\n", r"config.yaml, line 4: found character '\t'"),
    (BASE + "  epochs: 1\n", "config.yaml, line 4: "),
    (BASE + "epochs: 1\nepochs: 2\n", "config.yaml, line 5: the key 'epochs' occurs twice"),
    (BASE + "optim: {lr: 1, lr: 2}\n", "config.yaml, line 4: the key 'lr' occurs twice"),
    (BASE + "optim: !!python/object/apply:os.system ['true']\n", "config.yaml, line 4: could not determine"),
    (BASE + "optim: !mine 3\n", "config.yaml, line 4: could not determine a constructor for the tag '!mine'"),
    (LAUGHS, "config.yaml, line 2: aliases (*name) are not supported"),
    ("a: &a [*a]\n", "config.yaml, line 1: aliases (*name) are not supported"),
    ("[" * 100_000, "config.yaml, line 1: values are nested more than 100 deep"),
    ("{a: " * 500, "config.yaml, line 1: values are nested more than 100 deep"),
    (BASE + "---\na: 1\n", "config.yaml, line 4: but found another document"),
    (BASE + "epochs: " + "9" * 5000, "is no YAML"),
    (BASE + "\x07", "is no YAML: unacceptable character"),
    (BASE + "? [a]\n: 1\n", "config.yaml, line 4: found unhashable key"),
    (BASE + "1: 2\n", "unknown config key '1'; valid keys at the top level"),
    (BASE + "optim: {lrr: 1}\n", "unknown config key 'optim.lrr'; valid keys in group 'optim': args"),
    (BASE + "optim: 3\n", "optim must be"),
    ("epochs: 3\n", "required"),
]
"""Text of a config file, and what the message says."""


@pytest.mark.parametrize(("text", "message"), FILES, ids=range(22))
def test_a_wrong_file_is_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises((TypeError, ValueError)) as error:
        TrainConfig.load(path)
    one_line(error.value, message)


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match=r"config.yaml' is no text in UTF-8"):
        TrainConfig.load(tmp_path / "config.yaml")
    with pytest.raises(FileNotFoundError, match="no config file at"):
        TrainConfig.load(tmp_path)


OPTIONS = [
    (["--bogus", "1"], "unknown config key 'bogus'; valid keys at the top level"),
    (["--optim.bogus=1"], "unknown config key 'optim.bogus'; valid keys in group 'optim'"),
    (["stray"], "unrecognized arguments: stray"),
    (["--epochs"], "expected one argument"),
    (["--epochs", "many"], "epochs must be an integer, got 'many'"),
    (["--optim.lr", "nan"], "optim.lr must be a finite number, got 'nan'"),
    (["--optim.lr", ".nan"], "optim.lr must be a finite number, got nan"),
    (["--ema.decay", "2"], "ema.decay must be a number in [0, 1), got 2.0"),
    (["--routing", "{capacity: 0.5, capacity: 0.3}"], "the key 'capacity' occurs twice"),
    (["--routing.losses.lode=1"], "a loss must be one of 'capacity', 'importance', 'load', 'membership'"),
    (["--tensorboard", "perhaps"], "tensorboard must be true or false, got 'perhaps'"),
    (["--precision", "fp8"], "precision must be one of 'fp32', 'bf16', 'fp16', got 'fp8'"),
    (["--output="], "output must name a folder, got ''"),
]
"""Words of a command line, and what the message says."""


@pytest.mark.parametrize(("options", "message"), OPTIONS)
def test_a_wrong_command_line_ends_with_one_line(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(BASE)
    with pytest.raises(SystemExit) as stop:
        parse_config([str(tmp_path / "config.yaml"), *options], TrainConfig)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert message in line


def cut(path: Path) -> None:
    save_file({"a": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:-10])


WEIGHTS = [
    ("model.safetensors", lambda path: path.write_bytes(b""), "no complete safetensors file"),
    ("model.safetensors", lambda path: path.write_bytes(b"\xff" * 100), "no complete safetensors file"),
    ("model.safetensors", cut, "no complete safetensors file"),
    ("model.pt", lambda path: path.write_bytes(b""), "no whole file of tensors"),
    ("model.pt", lambda path: path.write_bytes(b"PK\x03\x04" + b"x" * 50), "no whole file of tensors"),
    ("model.pt", lambda path: path.write_text("words"), "no whole file of tensors"),
    ("model.pt", lambda path: torch.save([1, 2], path), "holds no state dict"),
    (
        "model.pt",
        lambda path: torch.save({1: torch.zeros(2)}, path),
        "holds no state dict, .* it maps 1 to a Tensor",
    ),
    ("model.pt", lambda path: torch.save({"model": {None: torch.zeros(2)}}, path), "it maps None to a Tensor"),
    ("model.pt", lambda path: torch.save({"a": 1}, path), "holds no state dict"),
    ("model.pt", lambda path: path.write_bytes(pickle.dumps(Trap(path.parent / "ran"), 2)), "no whole file of"),
    ("model.pt", lambda path: torch.save({"a": Trap(path.parent / "ran")}, path), "no whole file of tensors"),
    (
        "model.pt",
        lambda path: torch.save({"a": Path("b")}, path),
        "it holds pathlib.* besides; save the state dict",
    ),
]
"""File name, function that writes the file, and what the message says."""


@pytest.mark.parametrize(("name", "write", "message"), WEIGHTS)
def test_weights_that_are_none_are_refused(
    name: str, write: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path / name)
    with pytest.raises(ValueError, match=f"'{tmp_path / name}'.*{message}") as error:
        read_weights(tmp_path / name)
    one_line(error.value, str(tmp_path / name))
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step-000000001-epoch-00000").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors in the folder"):
        find_weights(tmp_path)


@pytest.mark.parametrize("text", ["", "[", "3", "null", "{}", '{"evaluation": {"x": 1}, "average": null}'])
def test_a_foreign_result_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ValueError, match=r"result\.json' is no result of a finished run") as error:
        read_fit(tmp_path, EvalResult)
    one_line(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "config.yaml, line 2: the key 'a' occurs twice"),
        ("a: [", "config.yaml, line 1"),
        ("- 1", "a mapping of keys to values, got list"),
    ],
)
def test_a_foreign_record_is_left_alone(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r".+") as error:
        claim_folder(tmp_path, {"a": 1}, file="config.yaml", kind="a run")
    one_line(error.value, message)
    assert path.read_text() == text


def test_what_a_record_holds_is_read_back(tmp_path: Path) -> None:
    record = TrainConfig.from_dict(KINDS[TrainConfig]).to_dict()
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(record))
    assert claim_folder(tmp_path, record, file="config.yaml", kind="a run")


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
        (
            {"text_config": {"model_type": "llama", "hiden_size": 32}},
            "text_config.hiden_size .*: is hidden_size meant",
        ),
        ({"text_config": {"model_type": "llama", "hidden_size": "32"}}, "describes no model of transformers: .*'32'"),
        ({"model_type": "lava"}, "describes no model of transformers: Unrecognized model identifier: lava"),
    ],
)
def test_fields_of_a_transformers_config_are_checked_before_it_is_built(fields: Any, message: str) -> None:
    # This one is read by the tower, and declared by no config.
    vision = {"vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False}}
    config = {"model_type": "llava", **vision}
    assert not described(config).vision_config.vision_use_head
    with pytest.raises(ValueError, match=message) as error:
        described({**config, **fields})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("policy", ["rand-z9", "augmix-q1", "v0-m3"])
def test_options_that_no_policy_of_augmentation_has_are_refused(policy: str) -> None:
    config = DataConfig(channels=3, image_size=32, augment=AugmentConfig(auto_augment=policy))
    with pytest.raises(ValueError, match="timm creates no transform with") as error:
        _transform(config, True, torch.zeros(3), torch.ones(3))
    one_line(error.value, f"auto_augment={policy!r}")
