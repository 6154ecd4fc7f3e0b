"""One way to open a model: every form of a name, and every path in a run, means the same model everywhere."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import open_clip
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

import mmod
from mmod import Opened, open_model
from mmod.methods import methods_of
from mmod.opening.opened import Preprocessing
from mmod.opening.runs import check_source, find_run, find_weights, model_folder, weight_sums
from mmod.opening.weights import check_size
from mmod.training import fit
from mmod.training.command import parse_run
from mmod.training.engine import loop
from mmod.training.engine.kind import load
from mmod.training.kinds import all_configs, config_class, kind_of
from tests.kit.chat_configs import MODEL
from tests.kit.clip_zoo import make_clip
from tests.kit.folders import save_image_model
from tests.kit.pairs_worker import write_model
from tests.kit.prompts import make_prompts
from tests.kit.references import CHAT, IMAGE, ROUTINGS, TEXT, pairs
from tests.kit.trap import Trap

LOOP_KINDS = ("image", "pairs", "text")
KINDS = (*LOOP_KINDS, "chat")
MERGE = {"kind": "merge", "r": 1}
Runs = Callable[..., Path]


def fields_of(kind: str, folder: Path) -> dict[str, Any]:
    """Return the config of a small run of a kind, without its output."""
    if kind == "pairs":
        return pairs(folder)
    fields: dict[str, dict[str, Any]] = {
        "image": IMAGE,
        "text": TEXT,
        # No test here reads its evaluation.
        "chat": {**CHAT, "data": {**CHAT["data"], "val": None}, "model": {"config": MODEL, "processor": "words"}},
    }
    return dict(fields[kind])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return a function that returns the folder of a finished run of a kind, which is trained once."""
    done: dict[tuple[str, str], Path] = {}

    def run(kind: str, how: str = "dense") -> Path:
        if (kind, how) not in done:
            folder = tmp_path_factory.mktemp(kind)
            changes = {"dense": {}, "routing": {"routing": ROUTINGS[kind]}, "merge": {"methods": [MERGE]}}[how]
            # Keep the checkpoints, as a run that was stopped after its last step has them.
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(loop, "remove_checkpoints", lambda folder: None)
                config = {**fields_of(kind, folder), "output": str(folder / "run"), **changes}
                fit(config_class(kind).from_dict(config), progress=False)
            done[kind, how] = folder / "run"
        return done[kind, how]

    return run


def same(actual: nn.Module, expected: nn.Module) -> None:
    """Assert that two models have the same weights and methods."""
    one, other = actual.state_dict(), expected.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert [method.kind for method in methods_of(actual)] == [method.kind for method in methods_of(expected)]


@pytest.mark.parametrize(
    ("kind", "how"), [*((kind, "routing") for kind in KINDS), ("chat", "dense"), ("image", "merge")]
)
def test_every_path_in_a_run_is_the_same_model_for_every_command(kind: str, how: str, runs: Runs) -> None:
    run = runs(kind, how)
    expected = load(kind_of(parse_run([str(run)], all_configs())))
    file = next((run / "model").glob("*.safetensors"))
    checkpoints = sorted((run / "checkpoints").glob("step-*"))
    assert bool(checkpoints) == (kind in LOOP_KINDS)
    paths = (run, run / "model", file, *checkpoints[-1:], *(place / "model.safetensors" for place in checkpoints))
    for number, path in enumerate(paths):
        opened = open_model(path)
        assert not opened.model.training
        same(opened.model, expected)
        assert str(run) in opened.sentence
        assert ("changed by" in opened.sentence) == (how != "dense")
        # As evaluate, audit and plan take it; what was changed otherwise takes the two ways in turn.
        config = parse_run([str(path)], all_configs())
        assert (config.kind, config.output) == (kind, str(run))
        if how == "routing" or number % 2:
            same(load(kind_of(config)), expected)
        # As `checkpoint` of a config, with the methods that weights of the loop are loaded into.
        methods = {"routing": config.routing, "methods": config.methods}
        started = config_class(kind).from_dict({**fields_of(kind, run.parent), "output": "next", **methods})
        started = dataclasses.replace(started, model=started.model.started_from(str(path)))
        if how == "routing" or not number % 2:
            same(load(kind_of(started)), expected)


def test_an_average_and_the_last_weights_of_a_run_are_told_apart(tmp_path: Path) -> None:
    config = {**IMAGE, "output": str(tmp_path / "run"), "ema": {}, "epoch_steps": 3}
    fit(config_class("image").from_dict(config), progress=False)
    average, last = (
        open_model(tmp_path / "run").model.state_dict(),
        open_model(tmp_path / "run/last").model.state_dict(),
    )
    assert any(not torch.equal(value, last[name]) for name, value in average.items())
    loaded = load(kind_of(parse_run([str(tmp_path / "run/last")], all_configs())))
    assert all(torch.equal(value, last[name]) for name, value in loaded.state_dict().items())


def test_images_of_a_run_are_prepared_as_in_its_training(runs: Runs) -> None:
    run = runs("image", "routing")
    for path in (run, run / "model", next((run / "checkpoints").iterdir())):
        preprocessing = open_model(path).preprocessing
        assert str(preprocessing).startswith("Preprocessing of the run: 32 x 32 px, bicubic, crop_pct 1, mean (0.094)")
        assert preprocessing.mode == "L"
    assert str(open_model(runs("pairs")).preprocessing).startswith("Preprocessing of the run: 48 x 48 px")
    processor = open_model(runs("chat", "routing")).preprocessing
    assert processor.image_token_id == processor.tokenizer.convert_tokens_to_ids("<image>")


@pytest.mark.parametrize(("kind", "parts"), [("image", {"image"}), ("pairs", {"image", "text"})])
def test_the_parts_of_a_model_are_those_that_can_be_routed(kind: str, parts: set[str], runs: Runs) -> None:
    assert set(open_model(runs(kind)).parts) == parts


def names(folder: Path) -> dict[str, tuple[Any, dict[str, Any], str, tuple[str, ...]]]:
    """Return names of every form, their options, the sentence about each, and the parts of its model."""
    save_image_model("vit", folder / "vit")
    make_prompts(folder)
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=3)
    save_file(model.state_dict(), folder / "weights.safetensors")
    timm.models.save_for_hf(model, str(folder / "timm"), safe_serialization=True)
    mmod.save_pretrained(mmod.route_(model, mmod.RoutingConfig(router="linear")), folder / "saved")
    write_model(folder, "opened-clip")
    open_clip.add_model_config(folder / "opened-clip.json")
    fields = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    drawn = {"pretrained": False}
    weights = str(folder / "weights.safetensors")
    return {
        "timm": ("test_vit", drawn, "test_vit of timm with random weights", ("image",)),
        "checkpoint": ("test_vit", {"checkpoint": weights}, f"with the weights of {weights}", ("image",)),
        "folder of timm": (folder / "timm", {}, "the model of timm in .* with its weights", ("image",)),
        "open_clip": ("open_clip:opened-clip", drawn, "opened-clip of open_clip with random", ("image", "text")),
        "images of transformers": (folder / "vit", {}, "the image model in the folder", ("image",)),
        "conversations": (folder / "llava", {}, "the model of transformers in", ("image", "language")),
        "saved": (folder / "saved", {}, "that mmod saved in .*, changed by routing", ("image",)),
        "saved, dense": (folder / "saved", {"dense": True}, "changed by routing; that is undone", ("image",)),
        "config": (fields, {}, "a LlamaForCausalLM with random weights", ("language",)),
        "module": (make_clip("ViT-B-32"), {}, "a CLIP of open_clip", ("image", "text")),
    }


def test_every_form_of_a_name_is_opened(tmp_path: Path) -> None:
    for form, (spec, options, sentence, parts) in names(tmp_path).items():
        opened = open_model(spec, **options)
        assert isinstance(opened, Opened)
        assert re.search(sentence, opened.sentence), f"{form}: {opened.sentence}"
        assert set(opened.parts) == set(parts), form
        assert not opened.model.training, form


def test_a_model_has_the_classes_and_preprocessing_of_its_weights(tmp_path: Path) -> None:
    save_image_model("vit", tmp_path / "vit")
    opened = open_model(tmp_path / "vit")
    assert opened.classes == {"cat": 0, "dog": 1}
    assert isinstance(opened.preprocessing, Preprocessing)
    # What a module says of itself.
    again = open_model(opened.model)
    assert again.preprocessing == opened.preprocessing
    published = open_model("test_vit", pretrained=False)
    assert published.classes is not None
    assert published.classes["n01440764"] == 0
    x = published.preprocessing.transform()(Image.new("RGB", (50, 40)))
    assert x.shape == (3, 160, 160)


def test_saved_models_and_checkpoints_take_arguments_that_change_no_weight(tmp_path: Path, runs: Runs) -> None:
    checkpoint = next((runs("image", "merge") / "checkpoints").iterdir())
    saved = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2)
    mmod.save_pretrained(mmod.apply_(saved, mmod.methods.Merge(r=1)), tmp_path / "saved")
    for path in (tmp_path / "saved", checkpoint):
        fixed: Any = open_model(path).model
        patches = fixed.patch_embed
        large = torch.zeros(1, patches.proj.in_channels, *(2 * side for side in patches.img_size))
        with pytest.raises(AssertionError, match="doesn't match model"):
            fixed(large)
        for dense in (False, True):
            model = open_model(path, args={"dynamic_img_size": True}, dense=dense).model
            assert [method.kind for method in methods_of(model)] == ["merge"] * (not dense)
            assert len(model(large)) == 1
        same(open_model(path, args={"dynamic_img_size": True}).model, fixed)


def test_published_weights_of_registers_are_of_the_size_of_the_model(tmp_path: Path) -> None:
    args = {"no_embed_class": True, "reg_tokens": 4, "num_classes": 0}
    saved = timm.create_model("test_vit", **args).state_dict()
    # As DINOv2 names them, with an embedding of the class token.
    state = {**saved, "register_tokens": saved["reg_token"], "mask_token": torch.zeros(1, 64)}
    del state["reg_token"]
    state["pos_embed"] = torch.cat([torch.zeros(1, 1, 64), saved["pos_embed"]], dim=1)
    torch.save(state, tmp_path / "dino.pth")
    model = open_model("test_vit", checkpoint=tmp_path / "dino.pth", args=args).model
    assert torch.equal(model.state_dict()["pos_embed"], saved["pos_embed"])


@pytest.mark.parametrize(
    ("saved", "opened", "told"),
    [
        (("vit_base_r50_s16_384", {}), ("vit_base_r50_s16_224", {}), "of images of 384 px, and the model of 224 px"),
        (("deit_tiny_distilled_patch16_224", {}), ("deit_tiny_patch16_224", {}), ""),
        (("test_vit", {}), ("test_vit", {"class_token": False, "global_pool": "avg"}), ""),
    ],
)
def test_the_size_of_weights_is_that_of_their_images(saved: Any, opened: Any, told: str) -> None:
    with torch.device("meta"):
        (state, model) = (timm.create_model(name, **args) for name, args in (saved, opened))
    # What else differs is said where they are loaded.
    with pytest.raises(ValueError, match=told) if told else nullcontext():
        check_size(state.state_dict(), model, "file", "image_size", {})


def test_weights_of_another_size_are_resampled_on_demand(tmp_path: Path) -> None:
    small = open_model("test_vit", checkpoint=write_timm(tmp_path, img_size=32), image_size=32).model
    patches = timm.create_model("test_vit", img_size=64)
    patches.load_state_dict(timm.models.vision_transformer.checkpoint_filter_fn(small.state_dict(), patches))
    for asked in ({"image_size": 64}, {"args": {"img_size": 64}}):
        same(open_model("test_vit", checkpoint=tmp_path / "small.pt", **asked).model, patches)
    file = write_clip(tmp_path, 32)
    for size in (16, 32):
        clip: Any = open_model("open_clip:sized-clip", checkpoint=file, image_size=size).model
        assert clip.visual.image_size == (size, size)


def test_a_checkpoint_brings_its_classifier(tmp_path: Path) -> None:
    file = write_seven(tmp_path)
    expected = timm.create_model("test_vit", num_classes=7)
    expected.load_state_dict(load_file(file))
    same(open_model("test_vit", checkpoint=file).model, expected)
    # The same number said twice is no contradiction.
    same(open_model("test_vit", checkpoint=file, args={"num_classes": 7}).model, expected)


def test_arguments_go_to_the_host(tmp_path: Path) -> None:
    write_model(tmp_path, "argued-clip")
    open_clip.add_model_config(tmp_path / "argued-clip.json")
    clip: Any = open_model("open_clip:argued-clip", pretrained=False, args={"output_dict": True}).model
    assert clip.output_dict
    assert open_model("test_vit", pretrained=False, args={"depth": 3}).model.blocks[2:]  # type: ignore[index]
    make_prompts(tmp_path)
    assert next(open_model(tmp_path / "llava", args={"dtype": torch.float64}).model.parameters()).dtype == torch.float64


def write_trap(folder: Path) -> str:
    torch.save({"state_dict": {}, "callback": Trap(folder / "ran")}, folder / "trap.pt")
    return str(folder / "trap.pt")


def write_cut(folder: Path) -> str:
    """Return a folder of transformers whose weights are cut."""
    save_image_model("vit", folder / "cut")
    file = folder / "cut" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    return str(folder / "cut")


def write_weights(folder: Path) -> str:
    save_file({"a": torch.zeros(1)}, folder / "weights.safetensors")
    return str(folder / "weights.safetensors")


def write_seven(folder: Path) -> str:
    """Return a file with weights of seven classes."""
    save_file(timm.create_model("test_vit", num_classes=7).state_dict(), folder / "seven.safetensors")
    return str(folder / "seven.safetensors")


def write_timm(folder: Path, **changes: Any) -> str:
    torch.save(timm.create_model("test_vit", **changes).state_dict(), folder / "small.pt")
    return str(folder / "small.pt")


def write_clip(folder: Path, size: int) -> str:
    """Return a file with weights of the model "sized-clip", whose images have 16 px, at another size."""
    write_model(folder, "sized-clip")
    open_clip.add_model_config(folder / "sized-clip.json")
    torch.save(open_clip.create_model("sized-clip", force_image_size=size).state_dict(), folder / "clip.pt")
    return str(folder / "clip.pt")


def write_vit(folder: Path) -> str:
    save_image_model("vit", folder / "vit")
    return str(folder / "vit")


def write_config(folder: Path) -> str:
    (folder / "shapes.yaml").write_text("model: {name: test_vit}\n")
    return str(folder / "shapes.yaml")


def write_saved(folder: Path, method: Any) -> str:
    mmod.save_pretrained(mmod.apply_(timm.create_model("test_vit"), method), folder / "saved")
    return str(folder / "saved")


Refused = Callable[[Path], object]
REFUSED: dict[str, tuple[Refused, str]] = {
    "a name of timm": (lambda _: open_model("test_vitt"), "timm knows no model 'test_vitt'; .*test_vit"),
    "an argument of timm": (
        lambda _: open_model("test_vit", pretrained=False, args={"img_siz": 64}),
        "unexpected keyword argument 'img_siz'; near ones: img_size",
    ),
    "a file for a folder": (
        lambda folder: mmod.load_pretrained(write_weights(folder)),
        "is a file, and no folder that",
    ),
    "a name of open_clip": (
        lambda _: open_model("open_clip:ViT-B-33"),
        "open_clip knows no model 'ViT-B-33'; .*ViT-B-32",
    ),
    "a missing folder": (
        lambda _: open_model("models/none"),
        "no folder of a model at 'models/none'; a model of a hub is",
    ),
    "an empty folder": (lambda folder: open_model(folder), r"holds neither a run \(config.yaml\) nor a model saved by"),
    "weights alone": (
        lambda folder: open_model(write_weights(folder)),
        "is a file, which names no model. Weights are named as the model's checkpoint",
    ),
    "a config": (
        lambda folder: open_model(write_config(folder)),
        r"shapes\.yaml' is a file, which names no model.* name the folder of a run that was trained by it",
    ),
    "an untrusted pickle": (
        lambda folder: open_model("test_vit", checkpoint=write_trap(folder)),
        "is no whole file of tensors and plain values",
    ),
    "cut weights": (lambda folder: open_model(write_cut(folder)), "model.safetensors' is no complete safetensors file"),
    "other weights": (
        lambda folder: open_model("test_vit", checkpoint=write_weights(folder)),
        r"does not fit the model: missing: .*\. If it was made with further arguments, name them in Python as args of "
        r"mmod\.open_model, whose model goes to mmod\.advise\(model, loader\)$",
    ),
    "weights of another size": (
        lambda folder: open_model("test_vit", checkpoint=write_timm(folder, img_size=32)),
        r"pt' is of images of 32 px, and the model of 160 px: set image_size to 32, or to 160",
    ),
    "weights of another size, of an image-text model": (
        lambda folder: open_model("open_clip:sized-clip", checkpoint=write_clip(folder, 32)),
        r"clip\.pt' is of images of 32 px, and the model of 16 px: set image_size to 32, or to 16",
    ),
    "weights of images that are no squares": (
        lambda folder: open_model("test_vit", checkpoint=write_timm(folder, img_size=(32, 96))),
        "of images with 13 position embeddings, and the model of 160 px: set image_size to the checkpoint's size",
    ),
    "weights of other patches": (
        lambda folder: open_model("test_vit", checkpoint=write_timm(folder, patch_size=32)),
        "is of patches of 32 px, and the model of 16: name its own model",
    ),
    "classes that the weights do not have": (
        lambda folder: open_model("test_vit", checkpoint=write_seven(folder), args={"num_classes": 4}),
        r"args say num_classes 4 and checkpoint '.*seven\.safetensors' has 7: leave out num_classes",
    ),
    "features of weights with a classifier": (
        lambda folder: open_model("test_vit", checkpoint=write_seven(folder), args={"num_classes": 0}),
        "args say num_classes 0 and checkpoint .* has 7",
    ),
    "two sizes": (
        lambda _: open_model("test_vit", pretrained=False, image_size=96, args={"img_size": 64}),
        "image_size is 96 and args say img_size 64: leave out one",
    ),
    "two numbers of classes": (
        lambda folder: open_model(write_vit(folder), args={"num_classes": 4, "num_labels": 7}),
        r"model\.args say num_classes 4 and num_labels 7: leave out one",
    ),
    "a size that patches do not divide": (
        lambda _: open_model("test_vit", pretrained=False, image_size=100).preprocessing,
        "image_size must be a multiple of the model's patches, 16 px",
    ),
    "arguments that do not fit each other": (
        lambda _: open_model("test_vit", pretrained=False, args={"embed_dim": 65}),
        r"timm cannot build 'test_vit' with model\.args \{'embed_dim': 65\}: .*divisible",
    ),
    "a size of a model of any size": (
        lambda _: open_model("resnet10t", pretrained=False, image_size=96),
        "timm cannot build 'resnet10t' with .*unexpected keyword argument 'img_size'",
    ),
    "a size of a saved model": (
        lambda folder: open_model(write_saved(folder, mmod.methods.Merge(r=1)), image_size=96),
        "has its own weights and size of images: leave out image_size",
    ),
    "random weights of a saved model": (
        lambda folder: open_model(write_saved(folder, mmod.methods.Merge(r=1)), pretrained=False),
        "has its own weights and size of images: set pretrained to true",
    ),
    "arguments that change the weights of a saved model": (
        lambda folder: open_model(write_saved(folder, mmod.methods.Merge(r=1)), args={"num_classes": 7}),
        r"the weights in '.*saved' do not fit with \{'num_classes': 7\}: head\.bias has shape \(1000,\), the model's",
    ),
    "arguments that no model has": (
        lambda folder: open_model(write_saved(folder, mmod.methods.Merge(r=1)), args={"img_siz": 64}),
        "may not have img_siz: models have no such option",
    ),
    "a dense model that is not there": (
        lambda folder: open_model(write_saved(folder, mmod.lab.Recursions()), dense=True),
        "changed by recursions, which replaced dense weights",
    ),
    "arguments of a module": (lambda _: open_model(nn.Linear(1, 1), args={"a": 1}), "Linear .*: leave out args"),
    "no module": (lambda _: open_model(3), "spec must be a name, a path, .* got 3"),  # type: ignore[arg-type]
    "inputs of a module": (
        lambda _: open_model(nn.Linear(1, 1)).preprocessing,
        "does not say how its inputs are prepared",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_opened_is_refused_by_name(case: str, tmp_path: Path) -> None:
    call, message = REFUSED[case]
    with pytest.raises((ValueError, OSError, TypeError), match=message):
        call(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_only_paths_of_weights_in_a_run_are_a_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("model/model.safetensors", "config.yaml", "audit/audit.json", "checkpoints/step-1/ema.safetensors"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).touch()
    inside = [run, run / "model", run / "model/model.safetensors", run / "checkpoints/step-1/ema.safetensors"]
    assert [find_run(path) for path in inside] == [run] * 4
    outside = [run / "config.yaml", run / "audit", run / "audit/audit.json", tmp_path, run / "missing"]
    assert [find_run(path) for path in outside] == [None] * 5
    assert model_folder(run) is None
    (run / "model/config.json").touch()
    assert [model_folder(path) for path in inside[:3]] == [run / "model"] * 3


def test_the_sums_of_a_model_are_of_what_describes_it(tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text(name)
    before = weight_sums(str(tmp_path))
    assert len(before) == 3
    for name in ("sha256.json", "results.json"):
        (tmp_path / name).write_text("{}")
    assert weight_sums(str(tmp_path)) == before
    (tmp_path / "preprocessor_config.json").write_text("other")
    assert weight_sums(str(tmp_path)) != before


# What makes a model, or reads weights, by a name.
MAKERS = ("timm.create_model", "open_clip.create_model", "torch.load", "load_pretrained")
METHODS = ("from_pretrained", "from_config")
# Adapters build what a saved folder describes, and an embedding is made of a table.
OTHERS = {"adapters/timm.py", "adapters/transformers/saving.py", "training/chat/start.py"}


def test_models_are_made_from_names_in_one_folder() -> None:
    package = Path(mmod.__file__).parent
    makers = set()
    for path in package.rglob("*.py"):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        names = [ast.unparse(function) for function in calls]
        if any(name in MAKERS or name.rpartition(".")[2] in METHODS for name in names):
            makers.add(path.relative_to(package).as_posix())
    assert {name for name in makers if not name.startswith("opening/")} == OTHERS


def test_a_changed_model_is_not_changed_again(tmp_path: Path) -> None:
    mmod.save_pretrained(mmod.route_(timm.create_model("test_vit"), "gradual"), tmp_path / "saved")
    model = {"name": str(tmp_path / "saved"), "pretrained": True}
    data = {"source": "folder", "root": "unused", "image_size": 160, "channels": 3, "mean": [0.5] * 3, "std": [0.5] * 3}
    fields = {"output": str(tmp_path / "run"), "model": model, "data": data, "device": "cpu"}
    assert mmod.is_routed(load(kind_of(config_class("image").from_dict(fields))))
    with pytest.raises(ValueError, match="was changed by routing: name the dense model, or train it"):
        load(kind_of(config_class("image").from_dict({**fields, "methods": [MERGE]})))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llavva", r"^there is no folder 'llavva' here; near ones: llava; a model of the hub is OWNER/NAME$"),
        ("nothing", r"^there is no folder 'nothing' here; a model of the hub is OWNER/NAME$"),
        ("runs/mime", "no folder 'runs/mime' here; near ones: runs/mine; a model"),
        ("runs/mine/last", "no folder 'runs/mine/last' here; a model"),
        ("../none", r"no folder '\.\./none' here; a model"),
        ("/none", "no folder '/none' here; a model"),
    ],
)
def test_what_is_no_folder_and_no_name_of_the_hub_is_refused(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("llava", "runs/mine", "OWNER/NAME"):
        (tmp_path / folder).mkdir(parents=True)
    # A file of a name without an owner is no folder that it might be.
    (tmp_path / "gpt2.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=message):
        check_source(name)
    for right in ("llava", "runs/mine", "OTHER/NAME"):
        check_source(right)
    # Either may be meant.
    with pytest.warns(UserWarning, match="no folder 'OWNER/NAMES' here; near ones: OWNER/NAME: a model of the hub"):
        check_source("OWNER/NAMES")
    check_source("gpt2", owned=False)
    with pytest.raises(FileNotFoundError, match="there is no folder 'llavva' here; near ones: llava;"):
        open_model("transformers:llavva")
    with pytest.raises(ValueError, match=r"timm knows no model 'llavva'; .*; nor is it a folder here; near .* llava$"):
        open_model("llavva")
    (tmp_path / "runs/mine/model.safetensors").touch()
    # Of folders, those alone that hold weights.
    near = {"runs/mime": "; near ones: runs/mine", "weight.pt": "; near ones: weights.pt", "lava": ""}
    (tmp_path / "weights.pt").touch()
    (tmp_path / "weight").mkdir()
    for wrong, told in near.items():
        with pytest.raises(FileNotFoundError, match=rf"no checkpoint at '{wrong}'{told}$"):
            find_weights(wrong)
