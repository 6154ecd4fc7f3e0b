"""Advice in errors: what a message tells to call or to set is called or set, and then it works."""

from __future__ import annotations

import re
import urllib.error
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import timm
import torch
import yaml
from torch import Tensor, nn

import mmod
from mmod.io.records import flatten
from mmod.io.yaml import merged
from mmod.studies.advised import open_advised
from mmod.training import TrainConfig, fit
from mmod.training.engine.start import create_models
from mmod.training.kinds import kind_of
from tests.kit.clip_zoo import make_clip
from tests.kit.engine_worker import MODEL
from tests.kit.own_vits import DIM, Mlp, OwnBlock, OwnViT, Sdpa
from tests.kit.sets import SETS
from tests.kit.vlm_zoo import make_language


class Oblong(OwnViT):
    """A model that takes images of a shape that nothing tells."""

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-2:] != (40, 72):
            raise ValueError("other images")
        x = self.patchify(images).flatten(2).transpose(1, 2)
        for stage in self.stages:
            x = stage(x)
        return self.classes(self.final(x).mean(1))


def make_pair(kind: str) -> nn.Module:
    """Return attention and MLP, each with its norm, in a container."""
    attention, mlp = (nn.Sequential(nn.LayerNorm(DIM), inner) for inner in (Sdpa(), Mlp()))
    if kind == "dict":
        return nn.ModuleDict({"attention": attention, "mlp": mlp})
    return nn.Sequential(attention, mlp) if kind == "sequential" else nn.ModuleList([attention, mlp])


class Pair(nn.Module):
    """A block as the refusal of pairs advises: it runs them."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        attention, mlp = self.inside.children()
        x = attention(x) + x
        return mlp(x) + x


class Taken(OwnViT):
    """A model that runs the modules in its blocks itself, as vit-pytorch's does.

    Args:
        kind: The container of a pair; "attributes" for blocks that are never called.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(lambda _: OwnBlock() if kind == "attributes" else make_pair(kind))
        self.kind = kind

    def write_a_class_of_blocks(self) -> None:
        """Do what the refusal advises."""
        if self.kind != "attributes":
            self.stages = nn.ModuleList([Pair(stage) for stage in self.stages])
        self.kind = ""

    def run(self, stage: Any, x: Tensor) -> Tensor:
        if not self.kind:
            return stage(x)
        if self.kind == "attributes":
            x = x + stage.mixer(stage.first(x))
            return x + stage.channels(stage.second(x))
        attention, mlp = (stage["attention"], stage["mlp"]) if self.kind == "dict" else stage
        x = attention(x) + x
        return mlp(x) + x

    def forward(self, images: Tensor) -> Tensor:
        x = self.patchify(images).flatten(2).transpose(1, 2) + self.places
        x = torch.cat([self.special.expand(len(x), -1, -1), x], dim=1)
        for stage in self.stages:
            x = self.run(stage, x)
        return self.classes(self.final(x).mean(dim=1))


def lossy(frozen: str = "") -> nn.Module:
    """Return a model with auxiliary losses in training mode, of which a part is in evaluation mode."""
    model = mmod.route_(timm.create_model("test_vit"), mmod.RoutingConfig(router="linear", losses={"importance": 0.1}))
    model.train().get_submodule(frozen).eval()
    model(torch.randn(2, 3, 160, 160))
    return model


class Call(NamedTuple):
    """A call that is refused.

    Args:
        wrong: The refused code, which works after the advised code unless that takes its place.
        message: Part of the refusal.
        advised: Lines of code that do what it says, each in another way. The message has the first statement, or names
            each function of mmod that the line calls.
    """

    setup: str
    wrong: str
    message: str
    advised: tuple[str, ...]
    replaces: bool = False


_AUXILIARY = "loss = loss + mmod.auxiliary_loss(model)"
CALLS = {
    "saving a dense model": Call(
        "model = vit()",
        "mmod.save_pretrained(model, folder)",
        "no method changed",
        ("mmod.route_(model, 'a-mod')", "mmod.apply_(model, mmod.methods.Merge(r=1))"),
    ),
    "capacity of a dense model": Call(
        "model = vit()", "mmod.set_capacity_(model, 0.25)", "nothing in .* is routed", ("mmod.route_(model, 'a-mod')",)
    ),
    "a routed model": Call(
        "model = mmod.route_(vit(), 'a-mod')", "mmod.route_(model, 'a-mod')", "already", ("mmod.undo_(model)",)
    ),
    "another capacity": Call(
        "model = mmod.route_(vit(), 'a-mod')",
        "mmod.route_(model, mmod.RoutingConfig(capacity=0.25))",
        "already",
        ("mmod.set_capacity_(model, 0.25)",),
        replaces=True,
    ),
    "a method after another": Call(
        "model = mmod.route_(vit(), 'a-mod')",
        "mmod.apply_(model, mmod.methods.Merge(r=1))",
        "already",
        ("mmod.undo_(model)",),
    ),
    "a preset by keyword": Call(
        "model = vit()",
        "mmod.route_(model, preset='gradual')",
        "no part preset",
        ("mmod.route_(model, 'gradual')",),
        replaces=True,
    ),
    "a preset with a field": Call(
        "model = vit()",
        "mmod.route_(model, 'a-mod', capacity=0.25)",
        "no part capacity",
        ("mmod.route_(model, mmod.preset('a-mod', capacity=0.25))",),
        replaces=True,
    ),
    "fields of a config": Call(
        "model = vit()",
        "mmod.route_(model, capacity=0.25)",
        "no part capacity",
        ("mmod.route_(model, mmod.RoutingConfig(capacity=0.25))",),
        replaces=True,
    ),
    "a part of a changed model": Call(
        "model = mmod.route_(clip('ViT-B-32'), image=mmod.RoutingConfig())",
        "mmod.undo_(model.visual)",
        "part of a changed model",
        ("mmod.undo_(model)",),
        replaces=True,
    ),
    "an image tower that is no transformer": Call(
        "model = clip('RN50'); config = mmod.RoutingConfig()",
        "mmod.route_(model, image=config)",
        "it must have a transformer of open_clip",
        ("mmod.route_(model, text=config)",),
        replaces=True,
    ),
    "thresholds have no capacity": Call(
        "model = mmod.route_(vit(), mmod.RoutingConfig(router='norm', select=mmod.Threshold(1.0)))",
        "mmod.set_capacity_(model, 0.25)",
        "no capacity applies",
        ("mmod.unroute_(model); mmod.route_(model, mmod.RoutingConfig(select='topk', capacity=0.5))",),
    ),
    "rows of a config for any depth": Call(
        "config = mmod.RoutingConfig()",
        "config.rows",
        "models of any depth: call config.resolved",
        ("config = config.resolved(12)",),
    ),
    "a predictor without a threshold": Call(
        "options = {'predictor': True}",
        "mmod.RoutingConfig(router='linear', language=options, losses={'membership': 0.01})",
        "set them, as to 0.5 and to 0.01",
        ("options['inference_threshold'] = 0.5",),
    ),
    "a predictor that nothing trains": Call(
        "losses = {}",
        "mmod.RoutingConfig(router='linear', language={'predictor': True, 'inference_threshold': 0.5}, losses=losses)",
        "set them, as to 0.5 and to 0.01",
        ("losses['membership'] = 0.01",),
    ),
    "thresholds of a routed model": Call(
        "model = mmod.route_(vit(), 'a-mod'); images = torch.randn(2, 3, 160, 160)",
        "mmod.lab.calibrate_thresholds(model, images, budget=0.7)",
        "is routed already",
        ("mmod.unroute_(model)",),
    ),
    "advice for a changed model": Call(
        "model = mmod.route_(vit(), 'a-mod'); images = [torch.randn(2, 3, 160, 160)]\n"
        "candidates = [mmod.planning.Candidate('a-mod', routing={'preset': 'a-mod'})]",
        "mmod.advise(model, images, batch_size=2, candidates=candidates, progress=False)",
        "is changed already",
        ("mmod.undo_(model)",),
    ),
    "importance of block 0": Call(
        "model = vit(); blocks = 'all'; router = 'attention'",
        "mmod.route_(model, mmod.RoutingConfig(router=router, blocks=blocks))",
        "as blocks='late' does, or choose by router='redundancy', which reads none",
        ("blocks='late'", "router='redundancy'"),
    ),
    "importance of block 0 for a loss": Call(
        "model = vit(); blocks = 'all'; losses = {'importance': 0.1}",
        "mmod.route_(model, mmod.RoutingConfig(router='linear', blocks=blocks, losses=losses))",
        r"as blocks='late' does \(routed are",
        ("blocks='late'",),
    ),
    "an early exit without classes": Call(
        "model = mmod.apply_(vit(), mmod.methods.Exit(blocks=(1,)))",
        "model.reset_classifier(0)",
        "needs class probabilities",
        ("mmod.undo_(model)",),
    ),
    "a folder of a class of one's own": Call(
        "dense = own(); mmod.save_pretrained(mmod.route_(own(), 'a-mod'), folder)",
        "mmod.load_pretrained(folder)",
        "which mmod cannot build",
        ("mmod.load_pretrained(folder, model=dense)",),
        replaces=True,
    ),
    "a mean that equal steps cannot reach": Call(
        "options = {'mean': 0.3}",
        "mmod.preset('gradual', 12, **options)",
        "equal steps cannot reach",
        ("capacity=0.3; options = {'capacity': capacity}",),
    ),
    "FLOPs of a routed language model": Call(
        "model = mmod.route_(llama(), mmod.RoutingConfig(router='linear')); text_tokens = 8; image_tokens = 0",
        "mmod.flops(model, {'input_ids': torch.ones(1, 8, dtype=torch.int64)})",
        "follows from the ids",
        ("mmod.flops(model, mmod.Prompt(text_tokens, image_tokens))",),
        replaces=True,
    ),
    "FLOPs of shared layers": Call(
        "model = mmod.apply_(llama(), mmod.lab.Recursions()); ids = torch.ones(1, 8, dtype=torch.int64)",
        "mmod.flops(model, mmod.Prompt(8))",
        "counted as a whole",
        ("mmod.flops(model, {'input_ids': ids})",),
        replaces=True,
    ),
    "FLOPs by threshold": Call(
        "model = mmod.route_(vit(), mmod.RoutingConfig(router='norm', select=mmod.Threshold(1.0))); kept = None",
        "mmod.flops(model, 160, kept)",
        "pass kept=, the share of tokens",
        ("kept = 0.5",),
    ),
    "FLOPs of a batch": Call(
        "model = vit(); size = torch.zeros(2, 3, 160, 160)",
        "mmod.flops(model, size)",
        r"pass \(3, 160, 160\)",
        ("size = (3, 160, 160)",),
    ),
    "a trace of what acts in training alone": Call(
        "model = mmod.route_(vit(), 'tread').eval()",
        "mmod.routed_blocks(model)",
        r"call model\.train\(\) first",
        ("model.train()",),
    ),
    "a dense folder loaded as a changed one": Call(
        "llama().save_pretrained(folder)",
        "mmod.load_pretrained(folder)",
        r"A dense model opens with mmod\.open_model\('.*'\)\.model",
        ("mmod.open_model(folder).model",),
        replaces=True,
    ),
    "losses in evaluation": Call(
        "model = lossy().eval(); loss = 0.0",
        _AUXILIARY,
        "evaluation mode",
        (f"if model.training: {_AUXILIARY}",),
        replaces=True,
    ),
    "losses with a frozen stage": Call(
        "model = lossy('blocks.3'); loss = 0.0; images = torch.randn(2, 3, 160, 160)",
        _AUXILIARY,
        r"blocks\.3 is in evaluation mode.* the model is not",
        ("model.get_submodule('blocks.3').train(); model(images)",),
    ),
    "a model of images of unknown shape": Call(
        "model = oblong(); images = torch.zeros(1, 3, 40, 72); tokens = None",
        "mmod.route_(model, 'a-mod', tokens=tokens)",
        "no input reached",
        ("tokens = mmod.Tokens('stages', example=images)",),
    ),
    "an example that the model does not take": Call(
        "model = oblong(); example = torch.zeros(1, 3, 40, 40)",
        "mmod.route_(model, 'a-mod', tokens=mmod.Tokens('stages', example=example))",
        r"no input reached .* the example must be these, in fp32 on a CPU too",
        ("example = torch.zeros(1, 3, 40, 72); model(example)",),
    ),
    **{
        f"blocks that are taken apart, {kind}": Call(
            f"model = taken({kind!r}); tokens = {tokens}",
            "mmod.route_(model, mmod.RoutingConfig(router='norm', capacity=0.5), tokens=tokens)",
            r"the first of its stages is not called: .* a pair of attention and MLP\. Write a class of blocks",
            ("model.write_a_class_of_blocks()",),
        )
        for kind, tokens in {
            "list": "None",
            "dict": "None",
            "sequential": "mmod.Tokens(example=torch.zeros(1, 3, 64, 64))",
            "attributes": "mmod.Tokens('stages')",
        }.items()
    },
    "two outputs of a head": Call(
        "model = distilled(); model.set_distilled_training(True); images = torch.randn(1, 3, 160, 160)\n"
        "mmod.apply_(model, mmod.methods.Exit(blocks=(1,))).train()",
        "model(images)",
        "one output",
        ("model.set_distilled_training(False)",),
    ),
}
HELPERS: dict[str, Any] = {
    "mmod": mmod,
    "torch": torch,
    "vit": lambda: timm.create_model("test_vit"),
    "distilled": lambda: timm.create_model("deit_tiny_distilled_patch16_224", img_size=160, depth=3),
    "clip": make_clip,
    "llama": lambda: make_language("llama"),
    "lossy": lossy,
    "own": lambda: OwnViT(lambda _: OwnBlock()).eval(),
    "oblong": lambda: Oblong(lambda _: OwnBlock()).eval(),
    "taken": lambda kind: Taken(kind).eval(),
}


@pytest.mark.parametrize(("name", "number"), [(name, i) for name in CALLS for i in range(len(CALLS[name].advised))])
def test_an_advised_call_works(name: str, number: int, tmp_path: Path) -> None:
    call = CALLS[name]
    advised = call.advised[number]
    names = {**HELPERS, "folder": tmp_path / "model"}
    exec(call.setup, names)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=call.message) as refusal:
        exec(call.wrong, names)
    text = str(refusal.value)
    assert advised.split(";")[0] in text or all(name in text for name in re.findall(r"mmod\.\w+(?=\()", advised))
    exec(advised, names)
    if not call.replaces:
        exec(call.wrong, names)


class Line(NamedTuple):
    """A training config that is refused.

    Args:
        changes: What is set in a config that works.
        message: Part of the refusal.
        advised: What it says to set, in any of these ways; the keys and values are in the message.
    """

    changes: Mapping[str, Any]
    message: str
    advised: tuple[Mapping[str, Any], ...]


LINES = {
    "classes": Line(
        {"model": {"args": {"num_classes": 7}}},
        "has 7 classes",
        ({"model": {"args": {"num_classes": 10}}},),
    ),
    "size": Line(
        {"model": {"args": {"img_size": 64}}},
        "data.image_size is 32 and model.args.img_size 64",
        ({"model": {"args": {"img_size": 32}}},),
    ),
    "patches": Line(
        {"data": {"image_size": 30}},
        r"30 and model\.args\.img_size 32; set both to a multiple of model\.args\.patch_size 8, such as 32$",
        ({"data": {"image_size": 32}},),
    ),
    "channels": Line(
        {"model": {"args": {"in_chans": 3}}},
        "data.channels is 1",
        ({"model": {"args": {"in_chans": 1}}}, {"data": {"channels": 3}}),
    ),
    "warm-up": Line({"schedule": {"warmup_epochs": 1}}, "as long as the run", ({"schedule": {"warmup_epochs": 0}},)),
    "learning rate": Line(
        {"optim": {"lr_per": 100_000}, "schedule": {"min_lr": 1e-4}},
        "at most the learning rate",
        ({"optim": {"lr_per": None}}, {"schedule": {"min_lr": 0}}),
    ),
    "moving average": Line(
        {"ema": {"decay": 0.9999, "use_warmup": False}},
        "averages over 10,000 steps",
        ({"ema": {"use_warmup": True}}, {"ema": {"decay": 0.368403}}),
    ),
    "mixup": Line({"mixup": {"mixup_alpha": 0, "cutmix_alpha": 0}}, "mixup needs", ({"mixup": None},)),
}


@pytest.mark.parametrize(("name", "number"), [(name, i) for name in LINES for i in range(len(LINES[name].advised))])
def test_an_advised_line_of_a_config_works(name: str, number: int, tmp_path: Path) -> None:
    line = LINES[name]
    fields: dict[str, Any] = {
        "output": str(tmp_path / "run"),
        "model": {
            "name": "vit_tiny_patch16_224",
            "args": {**MODEL, "img_size": 32, "patch_size": 8, "num_classes": 10},
        },
        "data": {"source": "digits:tiny", "root": str(SETS / "digits"), "batch_size": 64},
        "epochs": 1,
        "device": "cpu",
    }
    wrong = merged(fields, line.changes)
    with pytest.raises(ValueError, match=line.message) as refusal:
        fit(TrainConfig.from_dict(wrong), progress=False)
    advised = line.advised[number]
    for key, value in flatten(advised).items():
        assert key in str(refusal.value)
        assert yaml.safe_dump(value).split()[0] in str(refusal.value)
    assert fit(TrainConfig.from_dict(merged(wrong, advised)), progress=False).steps == 4


def start_run(folder: Path, **model: Any) -> None:
    args = {"img_size": 32, "patch_size": 16, "in_chans": 1, "num_classes": 10}
    data = {"source": "digits:tiny", "root": str(SETS / "digits")}
    fields = {"output": str(folder), "model": {"name": "test_vit", "args": args} | model, "data": data}
    create_models(kind_of(TrainConfig.from_dict(fields)))


# What asks for published weights, the advice of its command, and a call that follows it, given a file of weights.
OFFLINE: dict[str, tuple[Callable[[Path], object], str, Callable[[Path, Path], object]]] = {
    "advise": (
        lambda _: open_advised("test_vit"),
        "name a file of weights, --checkpoint FILE",
        lambda _, file: open_advised("test_vit", checkpoint=str(file)),
    ),
    "train": (
        lambda folder: start_run(folder, pretrained=True),
        "set model.checkpoint to a file of weights and model.pretrained to false",
        lambda folder, file: start_run(folder, checkpoint=str(file), pretrained=False),
    ),
}


@pytest.mark.parametrize("command", OFFLINE)
def test_without_a_network_a_command_names_its_own_options(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no network")

    monkeypatch.setattr("urllib.request.urlopen", fail)
    call, advice, follow = OFFLINE[command]
    with pytest.raises(ConnectionError, match=rf"the published weights of 'test_vit' .* does not answer: {advice}$"):
        call(tmp_path / "run")
    args = {"img_size": 32, "in_chans": 1, "num_classes": 10} if command == "train" else {}
    torch.save(timm.create_model("test_vit", **args).state_dict(), tmp_path / "weights.pt")
    follow(tmp_path / "run", tmp_path / "weights.pt")
