"""Bad configs, options and weights of every kind of training."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from mmod.plain import dataclass_in
from mmod.training import TrainConfig
from mmod.training.chat.config import TrainConfig as ChatConfig
from mmod.training.pairs.config import TrainConfig as PairsConfig
from mmod.training.text.config import TrainConfig as TextConfig
from tests.kit.trap import Trap

VIT = {"name": "vit_tiny_patch16_224"}
KINDS: dict[type, dict[str, Any]] = {
    TrainConfig: {"output": "run", "model": VIT, "data": {}},
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
        return type(typing.get_args(hint)[0])
    if origin in (list, tuple, dict):
        return origin
    arguments = [one for one in typing.get_args(hint) if one is not type(None)]
    return basic_type(arguments[0]) if arguments else hint


def nested(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the fields with values at dotted keys."""
    changed = copy.deepcopy(fields)
    for key, value in changes.items():
        group = changed
        *parents, name = key.split(".")
        for parent in parents:
            group = group.setdefault(parent, {})
        # A file has no value in two places.
        group[name] = copy.deepcopy(value)
    return changed


RANDOM = {"router": "random", "capacity": 0.5}
ELASTIC = {"capacities": [0.25, 1.0], "samples": 2}
QUARTER = {"capacity": 0.25}
PRUNE = [{"kind": "prune", "keep": 0.5, "blocks": [0]}]
RECURSIONS = [{"kind": "recursions"}]
CROWDS = {"source": "crowds", "label_patch": 4}
LLAMA = {"model_type": "llama"}
LLAVA = {"model_type": "llava", "text_config": LLAMA}
WORDS = {"config": LLAVA, "processor": "words"}
BITS = {"quantization_config": {"load_in_4bit": True}}
QUANTIZED = {"checkpoint": "x", "args": BITS}
SPLIT = {"trainer": {"fsdp": "full_shard"}, "data.val": None}
REFUSED: list[tuple[type, dict[str, Any], str]] = [
    (TrainConfig, {"grad_clip": -1}, "a number above 0 or null"),
    (TrainConfig, {"grad_clip": 0}, "a number above 0 or null"),
    (TrainConfig, {"ema.decay": 2}, "a number in [0, 1)"),
    (TrainConfig, {"ema.decay": -0.1}, "a number in [0, 1)"),
    (TrainConfig, {"optim.lr": -1e-3}, "a number of at least 0"),
    (TrainConfig, {"optim.weight_decay": -0.1}, "a number of at least 0"),
    (TrainConfig, {"optim.layer_decay": 0}, "a number in (0, 1] or null"),
    (TrainConfig, {"optim.lr_per": 0}, "an integer of at least 1 or null"),
    (TrainConfig, {"schedule.min_lr": -1}, "a number of at least 0"),
    (TrainConfig, {"schedule.warmup_epochs": -1}, "an integer of at least 0"),
    (TrainConfig, {"schedule.sched": "cosinus"}, "one of 'cosine', 'tanh'"),
    (TrainConfig, {"loss.kind": "mse"}, "one of 'ce', 'bce'"),
    (TrainConfig, {"loss.smoothing": 1}, "a number in [0, 1)"),
    (TrainConfig, {"mixup.prob": 1.5}, "a number in [0, 1]"),
    (TrainConfig, {"mixup.mixup_alpha": -1}, "a number of at least 0"),
    (TrainConfig, {"distill.weight": 0}, "a number above 0"),
    (TrainConfig, {"precision": "fp8"}, "one of 'fp32', 'bf16', 'fp16'"),
    (TrainConfig, {"epochs": 0}, "an integer of at least 1"),
    (TrainConfig, {"epochs": 1.5}, "an integer"),
    (TrainConfig, {"accumulate": 0}, "an integer of at least 1"),
    (TrainConfig, {"checkpoint_every": 0}, "an integer of at least 1 or null"),
    (TrainConfig, {"log_every": 0}, "an integer of at least 1"),
    (TrainConfig, {"seed": -1}, "an integer of at least 0"),
    (TrainConfig, {"output": ""}, "output must name a folder"),
    (TrainConfig, {"data.batch_size": 0}, "an integer of at least 1"),
    (TrainConfig, {"data.workers": -1}, "an integer of at least 0"),
    (TrainConfig, {"data.std": [0.0]}, "each a number in (0, 1]"),
    (TrainConfig, {"data.interpolation": "cubic"}, "one of 'nearest', 'bilinear', 'bicubic'"),
    (TrainConfig, {"data.interpolation": "random"}, "one of 'nearest', 'bilinear', 'bicubic'"),
    (TrainConfig, {"data.augment.interpolation": "cubic"}, "one of 'nearest', 'bilinear', 'bicubic'"),
    (TrainConfig, {"data.augment.auto_augment": "random-m9"}, "one of 'rand', 'augmix', 'original'"),
    (TrainConfig, {"data.augment.hflip": 2}, "a number in [0, 1]"),
    (TrainConfig, {"routing": {"capcity": 1}}, "valid ones are router, capacity"),
    (TrainConfig, {"routing": "gradual"}, "write routing: {preset: gradual}, got 'gradual'"),
    (TrainConfig, {"routing": {"preset": "amod"}}, "a-mod"),
    (TrainConfig, {"routing": {"preset": "gradual", "meen": 0.7}}, "valid ones are mean, start, router"),
    (TrainConfig, {"routing": {"preset": "gradual", "mean": 0.1}}, "a number in (0.4, 1]"),
    (TrainConfig, {"routing": {"capacity": 2}}, "a number in [0, 1]"),
    (PairsConfig, {"routing.image": {"select": {"threshold": NAN}}}, "a finite number"),
    (PairsConfig, {"loss": "infonce"}, "one of 'clip', 'siglip', 'coca'"),
    (PairsConfig, {"zero_shot": "cifar"}, "'scenes' or 'imagenet:FOLDER'"),
    (ChatConfig, {"frozen": ["eyes"]}, "'image', 'projector', 'language'"),
    (ChatConfig, {"trainer": {"learning_rate": -1}}, "a number of at least 0"),
    (ChatConfig, {"trainer": {"learning_rate": "fast"}}, "a number of at least 0"),
    (ChatConfig, {"trainer": {"max_grad_norm": NAN}}, "a number of at least 0"),
    (ChatConfig, {"trainer": {"output_dir": "x"}}, "the run sets them"),
    (ChatConfig, {"lora": {"r": 0}}, "an integer of at least 1"),
    (ChatConfig, {"routing": {"language": {"router": {"name": "linear", "bias": 3}}}}, "true or false"),
    (ChatConfig, {"routing": {"language": {"preset": "p_mod"}}}, "near ones: p-mod"),
    (ChatConfig, {"data.max_length": 1}, "an integer of at least 2 or null"),
    (ChatConfig, {"max_new_tokens": 0}, "an integer of at least 1"),
    (TrainConfig, {"schedule.sched": "plateau"}, "schedule.sched must be one of 'cosine'"),
    (TrainConfig, {"ema.decai": 1}, "unknown config key 'ema.decai'; near ones: decay; valid keys in group 'ema'"),
    (TrainConfig, {"mixup": {"mixup_alpha": 0, "cutmix_alpha": 0}}, "use `mixup: null` for none"),
    (TrainConfig, {"mixup.mode": "elem", "data.batch_size": 7}, "needs an even data.batch_size, got 7"),
    (TrainConfig, {"mixup": {}, "data": CROWDS}, "mixup mixes the labels of images: with data.label_patch"),
    (
        TrainConfig,
        {"model.pretrained": True, "model.checkpoint": "x"},
        "set model.pretrained to false, or model.checkpoint",
    ),
    (
        PairsConfig,
        {"model.pretrained": "y", "model.checkpoint": "x"},
        "set model.pretrained to null, or model.checkpoint",
    ),
    (
        ChatConfig,
        {"model.config": LLAVA, "model.processor": "bpe", "model.checkpoint": "x"},
        "model.checkpoint='x' and model.config exclude each other: set model.config and model.processor to null",
    ),
    (
        ChatConfig,
        {"model.config": LLAVA, "model.processor": "saved", "model.checkpoint": "x"},
        "model.checkpoint='x' and model.config exclude each other: set model.config to null",
    ),
    (
        ChatConfig,
        {"model.processor": "bpe", "model.checkpoint": "x"},
        "model.processor='bpe' is built for a model.config, and model.checkpoint='x' has its own: set",
    ),
    (TrainConfig, {"model.head": "fresh"}, "set model.checkpoint"),
    (TrainConfig, {"distill.features": 1.0}, "distill.features=1 needs a teacher"),
    (TrainConfig, {"distill.teacher": "dense"}, "needs trained weights: set model.checkpoint or model.pretrained"),
    (TrainConfig, {"distill.teacher": "dense", "model.head": "fresh", "model.checkpoint": "x"}, "trained weights"),
    (TrainConfig, {"elastic": ELASTIC}, "elastic needs a routing config whose capacity is one of"),
    (TrainConfig, {"elastic": ELASTIC, "routing": {"preset": "gradual"}}, "elastic needs a routing config"),
    (TrainConfig, {"elastic": ELASTIC, "routing": RANDOM}, "one of elastic.capacities=[0.25, 1.0]"),
    (TrainConfig, {"elastic": ELASTIC, "routing": QUARTER, "grad_checkpointing": True}, "elastic cannot be combined"),
    (TrainConfig, {"elastic.capacities": [0.25, 1.0]}, "are fewer than elastic.samples=4"),
    (TrainConfig, {"elastic": {"capacities": [0.5, 0.25], "samples": 2}}, "must ascend"),
    (TrainConfig, {"elastic": {"capacities": [0.25, 1.5], "samples": 2}}, "elastic.capacities"),
    (TrainConfig, {"routing": {"router": "linear", "training_only": True}}, "router 'linear' adds some"),
    (
        TrainConfig,
        {"methods": [{"kind": "experts", "training_only": True}]},
        "field of method 'experts': training_only",
    ),
    (TrainConfig, {"elastic": ELASTIC, "routing": {**QUARTER, "training_only": True}}, "has training_only: true"),
    (TrainConfig, {"training_only_epochs": 2, "routing": RANDOM}, "needs methods for training alone"),
    (
        TrainConfig,
        {"training_only_epochs": 4, "epochs": 3, "routing": {**RANDOM, "training_only": True}},
        "training_only_epochs must be an integer in [1, 3], got 4",
    ),
    (TrainConfig, {"methods": PRUNE, "routing": {"capacity": 0.5}}, "'routing' cannot follow 'prune'"),
    (TrainConfig, {"methods": PRUNE, "grad_checkpointing": True}, "grad_checkpointing"),
    (TrainConfig, {"distributed.kind": "fsdp", "precision": "fp16"}, "'fsdp' takes neither precision 'fp16'"),
    (
        TrainConfig,
        {"distributed.kind": "fsdp", "optim.opt": "lookahead_adamw"},
        "'fsdp' takes neither precision 'fp16'",
    ),
    (
        TrainConfig,
        {
            "distributed.kind": "fsdp",
            "compile": True,
            "grad_checkpointing": True,
            "routing": {"router": "attention"},
        },
        "grad_checkpointing then loses the importance that routers read",
    ),
    (TrainConfig, {"distributed.timeout": 0.0}, "distributed.timeout must be "),
    (TrainConfig, {"data.channels": 4}, "data.channels must be one of 1, 3, got 4"),
    (TrainConfig, {"data.crop_pct": 1.5}, "data.crop_pct must be a number in (0, 1] or null, got 1.5"),
    (TrainConfig, {"data.mean": [0.5, 0.5]}, "channels=1 values"),
    (TrainConfig, {"data.source": "crowds"}, "source 'crowds' has labels for patches: set label_patch"),
    (TrainConfig, {"data.source": "digits", "data.label_patch": 4}, "source 'digits' lacks"),
    (TrainConfig, {"data": {**CROWDS, "label_patch": 0}}, "label_patch must be an integer of at least 1"),
    (TrainConfig, {"data": {**CROWDS, "augment": {}}}, "cannot be combined with augment"),
    *(
        (TrainConfig, {"data": {"source": source, "root": "a", "label_patch": 8}}, "must be maps:SIDE")
        for source in ("maps", "maps:", "maps:0", "maps:30")
    ),
    (TrainConfig, {"data": {"source": "maps:32", "label_patch": 8}}, "needs root"),
    (TrainConfig, {"data": {"source": "maps:32", "root": "a"}}, "needs root"),
    (PairsConfig, {"routing": {"images": {}}}, "part in routing images; near ones: image; valid ones are image, text"),
    (PairsConfig, {"routing": {"image": {"router": "atention"}}}, "router 'atention' is unknown; near ones: attention"),
    (PairsConfig, {"distill.teacher": "dense"}, "distill.teacher='dense' needs trained weights: set model.checkpoint"),
    (PairsConfig, {"data.workers": -1}, "data.workers must be an integer of at least 0, got -1"),
    (PairsConfig, {"data.batch_size": 0}, "data.batch_size must be an integer of at least 1, got 0"),
    (PairsConfig, {"model": {"name": "ViT-B-32", "checkpoint": "x", "image_checkpoint": "y"}}, "holds both towers"),
    (ChatConfig, {"trainer": {"fsdp": "full_shard"}, "data.val": "x.json"}, "data.val: null"),
    (ChatConfig, {"trainer": {"seed": 1}}, "trainer must not set seed"),
    *(
        (ChatConfig, {"trainer": {name: 1}}, f"trainer.{name}: ")
        for name in ("label_smoothing_factor", "auto_find_batch_size", "save_only_model")
    ),
    (ChatConfig, {"data.val": None, "trainer": {"eval_on_start": True}}, "eval_on_start asks questions"),
    (ChatConfig, {"data.val": None, "trainer": {"eval_strategy": "epoch"}}, "eval_strategy asks questions in training"),
    (ChatConfig, {"routing": {"vision": {}}}, "unknown part in routing vision; valid ones are language, image"),
    (ChatConfig, {"routing": {"image": {}, "langage": {"plan": "p.json"}}}, "routing langage; near ones: language"),
    (ChatConfig, {"routing": {"language": 3}}, "routing must be a mapping of names to (a mapping of names or null)"),
    (ChatConfig, {"routing": {"preset": "p-mod"}}, "write routing: {language: {preset: p-mod}}, got"),
    (PairsConfig, {"routing": {"capacity": 0.5}}, "write routing: {image: {capacity: 0.5}}, got"),
    (PairsConfig, {"routing": "gradual"}, "write routing: {image: {preset: gradual}}, got 'gradual'"),
    (ChatConfig, {"routing": {"image": "gradual"}}, "write routing: {image: {preset: gradual}}, got"),
    (ChatConfig, {"routing": {"language": {"capacty": 1}}}, "unknown routing option capacty"),
    (ChatConfig, {"model.args": {"tp_plan": "auto"}}, "model.args tp_plan: a run does not train"),
    (ChatConfig, {"model": QUANTIZED}, "quantized weights are not trained: give lora"),
    (ChatConfig, {"model": QUANTIZED, "lora": {"r": 2}, **SPLIT}, "not split by fsdp or deepspeed"),
    (ChatConfig, {"model": {**WORDS, "args": BITS}}, "model.args quantization_config need a checkpoint"),
    (ChatConfig, {"model": {}}, "either"),
    (ChatConfig, {"model": {"config": LLAVA}}, "needs model.processor: a folder, a name, 'bpe' or 'words'"),
    (
        ChatConfig,
        {"model": {**WORDS, "processor_args": {"size": 784}}},
        "those of a saved processor, not of 'words'",
    ),
    (
        ChatConfig,
        {"model": {"checkpoint": "qwen", "processor_args": {"size": {"shortest_edge": 784}, "max_pixels": 3136}}},
        "model.processor_args: max_pixels would replace a part of size: leave one out",
    ),
    (ChatConfig, {"lora": {"r": 2, "peft_type": "FOO"}}, "lora.peft_type must be 'LORA', got 'FOO'"),
    (TextConfig, {"methods": RECURSIONS, "routing": {"preset": "mod"}}, "'routing' cannot follow 'recursions'"),
    (TextConfig, {"methods": RECURSIONS, "grad_checkpointing": True}, "'recursions' cannot be trained with grad_check"),
    (TextConfig, {"elastic": True}, "elastic trains a routed model"),
    (TextConfig, {"elastic": True, "routing": RANDOM, "grad_checkpointing": True}, "with grad_checkpointing"),
    (TextConfig, {"model": {"config": LLAMA, "pretrained": True}}, "no published weights read bytes"),
    (TextConfig, {"model": {}}, "give model.config"),
    (TextConfig, {"model": {"config": {"hidden_size": 8}}}, "model.config needs a model_type, got hidden_size"),
    (TextConfig, {"routing": {"router": "nope"}}, "nope"),
]
"""Config, values by key, and what the message says."""


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
    (BASE + "tensorboard: yes\n", "config.yaml, line 4: write true for yes, or 'yes' in quotes if it is a text"),
    (BASE + "finetune: {qk_norm: Off}\n", "config.yaml, line 4: write false for Off, or 'Off' in quotes"),
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
    (
        BASE + "optim:\n\tlr: 1\n",
        "config.yaml, line 5: found character '\\t' that cannot start any token: YAML is inde",
    ),
    (BASE + "1: 2\n", "unknown config key '1'; valid keys at the top level"),
    (BASE + "optim: {lrr: 1}\n", "unknown config key 'optim.lrr'; near ones: lr"),
    (BASE + "optim: 3\n", "optim must be"),
    ("epochs: 3\n", "required"),
]
"""Text of a config file, and what the message says."""


OPTIONS = [
    (["--bogus", "1"], "unknown config key 'bogus'; valid keys at the top level"),
    (["--optim.bogus=1"], "unknown config key 'optim.bogus'; valid keys in group 'optim'"),
    (["stray"], "unrecognized arguments: stray"),
    (["--epochs"], "expected one argument"),
    (["--epochs", "many"], "epochs must be an integer of at least 1, got 'many'"),
    (["--optim.lr", "nan"], "optim.lr must be a number of at least 0, got 'nan'"),
    (["--optim.lr", ".nan"], "optim.lr must be a number of at least 0, got nan"),
    (["--ema.decay", "2"], "ema.decay must be a number in [0, 1), got 2.0"),
    (["--routing", "{capacity: 0.5, capacity: 0.3}"], "--routing: the key 'capacity' occurs twice"),
    (["--routing", "{preset: gradual"], "--routing: '{preset: gradual' lacks a closing }"),
    (["--batchsize", "4"], "unknown config key 'batchsize'; near ones: data.batch_size"),
    (["--routing.losses.lode=1"], "a loss 'lode' is unknown; near ones: load"),
    (["--tensorboard", "yes"], "--tensorboard: write true for yes, or 'yes' in quotes if it is a text"),
    (["--model.args.qk_norm", "off"], "--model.args.qk_norm: write false for off, or 'off' in quotes"),
    (["--model.args", "{qk_norm: no}"], "--model.args: write false for no, or 'no' in quotes"),
    (["--tensorboard", "perhaps"], "tensorboard must be true or false, got 'perhaps'"),
    (["--precision", "fp8"], "precision must be one of 'fp32', 'bf16', 'fp16', got 'fp8'"),
    (["--output="], "output must name a folder, got ''"),
]
"""Words of a command line, and what the message says."""


def cut(path: Path) -> None:
    save_file({"a": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:-10])


TWICE = {"a": torch.zeros(1), "module.a": torch.ones(1)}
WEIGHTS = [
    ("model.safetensors", lambda path: path.write_bytes(b""), "no complete safetensors file"),
    ("model.safetensors", lambda path: path.write_bytes(b"\xff" * 100), "no complete safetensors file"),
    ("model.safetensors", cut, "no complete safetensors file"),
    ("model.pt", lambda path: path.write_bytes(b""), "no whole file of tensors"),
    ("model.pt", lambda path: path.write_bytes(b"PK\x03\x04" + b"x" * 50), "no whole file of tensors"),
    ("model.pt", lambda path: path.write_text("words"), "tensors and plain values: it is no checkpoint, or a dam"),
    ("model.pt", lambda path: path.write_text("hi"), "tensors and plain values: it is no checkpoint, or a damaged one"),
    ("model.pt", lambda path: torch.save([1, 2], path), "holds no state dict"),
    ("model.pt", lambda path: torch.save({1: torch.zeros(2)}, path), "holds no state dict, .* it maps 1 to a Tensor"),
    ("model.pt", lambda path: torch.save({"model": {None: torch.zeros(2)}}, path), "it maps None to a Tensor"),
    ("model.pt", lambda path: torch.save({"a": 1}, path), "holds no state dict"),
    ("model.pt", lambda path: torch.save({"epoch": 3}, path), "it maps 'epoch' to a int"),
    (
        "model.pt",
        lambda path: torch.save({"state_dict": {"a": np.zeros(2)}}, path),
        "'a' to an object that is not",
    ),
    ("model.pt", lambda path: torch.save({"state_dict": TWICE}, path), "two weights are named 'a'"),
    ("model.pt", lambda path: path.write_bytes(pickle.dumps(Trap(path.parent / "ran"), 2)), "no whole file of"),
    ("model.pt", lambda path: torch.save({"a": Trap(path.parent / "ran")}, path), "no whole file of tensors"),
    ("model.pt", lambda path: torch.save({"a": Path("b")}, path), "it holds pathlib.* besides; save the state dict"),
]
"""File name, function that writes the file, and what the message says."""
