"""Bad configs, options and weights of every kind of training."""

from __future__ import annotations

import dataclasses
import json
import pickle
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mmod.io.options import dataclass_in
from mmod.training import TrainConfig
from mmod.training.chat.config import TrainConfig as ChatConfig
from mmod.training.pairs.config import TrainConfig as PairsConfig
from mmod.training.text.config import TrainConfig as TextConfig
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


OUT_OF_RANGE = [
    (TrainConfig, "grad_clip", -1, "a number above 0 or null"),
    (TrainConfig, "grad_clip", 0, "a number above 0 or null"),
    (TrainConfig, "ema.decay", 2, "a number in [0, 1)"),
    (TrainConfig, "ema.decay", -0.1, "a number in [0, 1)"),
    (TrainConfig, "optim.lr", -1e-3, "a number of at least 0"),
    (TrainConfig, "optim.weight_decay", -0.1, "a number of at least 0"),
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
    (TrainConfig, "routing", {"capcity": 1}, "valid ones are router, capacity"),
    (TrainConfig, "routing", {"preset": "amod"}, "a-mod"),
    (TrainConfig, "routing", {"preset": "gradual", "meen": 0.7}, "valid ones are mean, start, router"),
    (TrainConfig, "routing", {"preset": "gradual", "mean": 0.1}, "a number in (0.4, 1]"),
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
    (ChatConfig, "routing", {"language": {"preset": "p_mod"}}, "near ones: 'p-mod'"),
    (ChatConfig, "data.max_length", 1, "an integer of at least 2 or null"),
    (ChatConfig, "max_new_tokens", 0, "an integer of at least 1"),
]
"""Config, key, value, and what the message says of the valid ones."""


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
