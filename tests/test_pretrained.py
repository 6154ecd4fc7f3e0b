"""Save and load: the same model and routing again, or a message that says what is wrong."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import safetensors.torch
import timm
import torch
from torch import nn

import mmod
from mmod import RoutingConfig, load_pretrained, save_pretrained
from mmod.io.files import DamagedFileError, UnwrittenError
from mmod.io.sums import write_sums
from mmod.opening.weights import read_weights
from mmod.random_state import Unfilled
from tests.kit.clip_zoo import make_clip, small_config
from tests.kit.disk import small_disk
from tests.kit.processes import run_processes
from tests.kit.quantized import quantize_
from tests.kit.saved_models import edit

IMAGE = (2, 3, 160, 160)
LEARNED = RoutingConfig(
    router=mmod.score("linear", init_std=0.3), capacity=(0.5, 0.25), blocks=(2, 4), losses={"importance": 1.0}
)


def routed(config: RoutingConfig = LEARNED, **arguments: Any) -> nn.Module:
    return mmod.route_(timm.create_model("test_vit", **arguments), config).eval()


def test_round_trip(tmp_path: Path) -> None:
    model = routed(num_classes=5)
    save_pretrained(model, tmp_path / "new" / "folder")
    again = load_pretrained(tmp_path / "new" / "folder")
    x = torch.randn(IMAGE)
    assert torch.equal(again(x), model(x))
    assert not again.training
    assert mmod.routing_config(again) == LEARNED
    assert type(again) is type(model)
    names = {path.name for path in (tmp_path / "new" / "folder").iterdir()}
    assert names == {"mmod.json", "model.safetensors", "sha256.json"}


def test_a_flipped_byte_is_told_and_weights_that_were_changed_on_purpose_are_read(tmp_path: Path) -> None:
    save_pretrained(routed(), tmp_path)
    save_pretrained(routed(), tmp_path, overwrite=True)
    weights = tmp_path / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    for door in (load_pretrained, mmod.open_model):
        with pytest.raises(
            DamagedFileError, match=r"model\.safetensors' is damaged: it differs .* sha256\.json, which may"
        ):
            door(tmp_path)
    (tmp_path / "sha256.json").unlink()
    assert load_pretrained(tmp_path)


@pytest.mark.parametrize("is_routed", [False, True])
def test_a_model_that_its_host_saves_anew_is_not_damaged(is_routed: bool, tmp_path: Path) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model: Any = ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, **sizes))
    if is_routed:
        mmod.route_(model, mmod.RoutingConfig(capacity=0.5))
    model.save_pretrained(tmp_path)
    doors: list[Callable[[Path], Any]] = [lambda folder: mmod.open_model(folder).model]
    if is_routed:
        doors.append(load_pretrained)
    weights = tmp_path / "model.safetensors"
    write_sums(tmp_path)
    loaded: Any = doors[0](tmp_path)
    with torch.no_grad():
        loaded.classifier.bias.add_(1)
    loaded.save_pretrained(tmp_path)
    assert (tmp_path / "sha256.json").exists() is not is_routed
    for door in doors:
        assert torch.equal(door(tmp_path).classifier.bias, loaded.classifier.bias)
    assert torch.equal(read_weights(weights)["classifier.bias"], loaded.classifier.bias)
    for foreign in ('["a"]', '{"model.safetensors": 3}', "no JSON"):
        (tmp_path / "sha256.json").write_text(foreign)
        assert all(door(tmp_path) for door in doors)
        assert read_weights(weights)
        loaded.save_pretrained(tmp_path)
        assert (tmp_path / "sha256.json").read_text() == foreign
    write_sums(tmp_path)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    for door in doors:
        with pytest.raises(DamagedFileError, match=r"model\.safetensors' is damaged: it differs"):
            door(tmp_path)


def test_a_full_disk_keeps_what_was_saved_before(tmp_path: Path) -> None:
    save_pretrained(routed(), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    message = r"model\.safetensors' could not be written: .*model\.safetensors' is kept as it was"
    with small_disk(100_000), pytest.raises(UnwrittenError, match=message):
        save_pretrained(routed(), tmp_path, overwrite=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_weights_are_readable_for_all_who_may_read_their_description(tmp_path: Path) -> None:
    save_pretrained(routed(), tmp_path)
    assert len({(tmp_path / name).stat().st_mode for name in ("mmod.json", "model.safetensors")}) == 1


def die_while_saving(folder: str) -> None:
    """Leave what safetensors has where it is killed: a part of the file, under a random name in its folder."""

    def die(state: Any, path: Path, **options: Any) -> NoReturn:
        (path.parent / ".tmpZ4s14n").write_bytes(b"half")
        os._exit(9)

    safetensors.torch.save_file = die
    save_pretrained(routed(), folder, overwrite=True)


def test_what_a_killed_save_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    save_pretrained(routed(), tmp_path / "saved")
    before = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    assert run_processes(die_while_saving, str(tmp_path / "saved"), world=1, log=tmp_path / "log") == [9]
    left = {path.name for path in (tmp_path / "saved").rglob("*")}
    assert ".tmpZ4s14n" in left
    # Nothing is lost meanwhile.
    load_pretrained(tmp_path / "saved")
    save_pretrained(routed(), tmp_path / "saved", overwrite=True)
    assert {path.name for path in (tmp_path / "saved").rglob("*")} == {*before}


def test_changes_since_creation_are_kept(tmp_path: Path) -> None:
    model = routed(drop_path_rate=0.2)
    model.reset_classifier(3, "avg")
    model.set_input_size(96)
    mmod.set_capacity_(model, {"blocks.2": 0.125})
    model.to(torch.bfloat16)
    save_pretrained(model, tmp_path)
    again = load_pretrained(tmp_path, device="cpu")
    x = torch.randn(2, 3, 96, 96, dtype=torch.bfloat16)
    assert torch.equal(again(x), model(x))
    assert mmod.capacities(again) == {"blocks.2": 0.125, "blocks.4": 0.25}
    assert again.blocks[5].drop_path1.drop_prob == pytest.approx(0.2)


def test_data_config_is_kept(tmp_path: Path) -> None:
    model = mmod.route_(
        timm.create_model("vit_tiny_patch16_224.augreg_in21k_ft_in1k", depth=2, embed_dim=24), mmod.RoutingConfig()
    )
    save_pretrained(model, tmp_path)
    again = load_pretrained(tmp_path)
    assert timm.data.resolve_model_data_config(again) == timm.data.resolve_model_data_config(model)
    assert again.pretrained_cfg["tag"] == "augreg_in21k_ft_in1k"


def test_entry_of_the_registry_loads_without_it(tmp_path: Path) -> None:
    importlib.import_module("mmod.registry.timm")
    model = timm.create_model(
        "test_vit_mod", router={"name": "linear", "init_std": 0.3}, blocks=(2, 4), num_classes=3
    ).eval()
    save_pretrained(model, tmp_path)
    config = json.loads((tmp_path / "mmod.json").read_text())
    assert config["model"]["architecture"] == "test_vit"
    x = torch.randn(IMAGE)
    assert torch.equal(load_pretrained(tmp_path)(x), model(x))


def test_tied_tensors_are_stored(tmp_path: Path) -> None:
    model = routed()
    model.blocks[1].attn.proj.weight = model.blocks[0].attn.proj.weight
    save_pretrained(model, tmp_path)
    x = torch.randn(IMAGE)
    assert torch.equal(load_pretrained(tmp_path)(x), model(x))


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    save_pretrained(routed(), tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="overwrite=True"):
        save_pretrained(routed(), tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    save_pretrained(routed(), tmp_path, overwrite=True)
    assert (tmp_path / "model.safetensors").read_bytes() != before
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_interrupted_overwriting_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_pretrained(routed(), tmp_path)
    replace = os.replace

    def stop_at_weights(source: Path, target: Path) -> None:
        if target.name == "model.safetensors":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", stop_at_weights)
    with pytest.raises(KeyboardInterrupt):
        save_pretrained(routed(RoutingConfig()), tmp_path, overwrite=True)
    with pytest.raises(ValueError, match="do not belong together"):
        load_pretrained(tmp_path)


def exchange_head(model: nn.Module, head: nn.Module) -> nn.Module:
    model.head = head
    return model


def quantized(first: bool) -> nn.Module:
    model = timm.create_model("test_vit")
    if first:
        quantize_(model)
    mmod.route_(model, LEARNED)
    if not first:
        quantize_(model)
    return model


# What stands around or in a model, and what the message says.
UNSAVED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "quantized first": (
        lambda: quantized(first=True),
        r"blocks\.0\.attn\.qkv\.weight \(Int8Weight\), .* Save .* before",
    ),
    "quantized afterwards": (lambda: quantized(first=False), r"qkv\.weight \(Int8Weight\), .* more\. Save .* before"),
    "dense": (lambda: timm.create_model("test_vit"), "no method changed this VisionTransformer"),
    "function": (lambda: routed(RoutingConfig(router=lambda x: x.mean(-1))), "function cannot be saved"),
    "no create_model": (
        lambda: mmod.route_(timm.models.VisionTransformer(depth=2, embed_dim=24, num_heads=2), mmod.RoutingConfig()),
        "create_model",
    ),
    "compiled": (
        lambda: torch.compile(routed()),
        r"mmod\.save_pretrained\(model\._orig_mod, ",
    ),
    "wrapped": (lambda: nn.Sequential(routed()), r"place, model\[0\] = mmod\.load_pretrained\(folder\)$"),
    "exchanged head": (
        lambda: exchange_head(routed(), nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 2))),
        r"exchanged\. .* alike: missing: 4 keys \(head\.0\.bias",
    ),
    "other classes": (
        lambda: exchange_head(routed(), nn.Linear(64, 2)),
        r"reset_classifier\), .* or save model\.state_dict\(\) .*: head\.weight has shape \(1000, 64\), the model's is",
    ),
    "class as argument": (lambda: routed(act_layer=nn.ReLU), "JSON"),
    "part": (
        lambda: mmod.route_(nn.Sequential(timm.create_model("test_vit")), mmod.RoutingConfig())[0],
        "part of a changed model: save that model",
    ),
    "features": (
        lambda: mmod.route_(timm.create_model("test_vit", features_only=True), mmod.RoutingConfig()),
        r"load it back inside, features\.model = mmod\.load_pretrained",
    ),
}


@pytest.mark.parametrize("name", UNSAVED)
def test_what_cannot_be_saved(name: str, tmp_path: Path) -> None:
    make, message = UNSAVED[name]
    with pytest.raises(ValueError, match=message):
        save_pretrained(make(), tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


ALTERATIONS: dict[str, tuple[Callable[[Any], None], Callable[[Any], None]]] = {
    "blocks.1.norm1.eps": (
        lambda model: setattr(model.blocks[1].norm1, "eps", 0.1),
        lambda model: setattr(model.blocks[1].norm1, "eps", 1e-6),
    ),
    "blocks.0.mlp.act": (
        lambda model: setattr(model.blocks[0].mlp, "act", nn.ReLU()),
        lambda model: setattr(model.blocks[0].mlp, "act", nn.GELU()),
    ),
    "blocks.3.attn.num_heads": (
        lambda model: [setattr(model.blocks[3].attn, name, value) for name, value in HALVED.items()],
        lambda model: [setattr(model.blocks[3].attn, name, value) for name, value in FULL.items()],
    ),
    "head.forward": (
        lambda model: setattr(model.head, "forward", lambda x: x),
        lambda model: delattr(model.head, "forward"),
    ),
    "patch_embed.proj.padding": (
        lambda model: setattr(model.patch_embed.proj, "padding", (1, 1)),
        lambda model: setattr(model.patch_embed.proj, "padding", (0, 0)),
    ),
}
FULL = {"num_heads": 2, "head_dim": 32}
HALVED = {"num_heads": 1, "head_dim": 64}


@pytest.mark.parametrize("name", ALTERATIONS)
def test_another_function_with_the_same_weights_is_not_saved(name: str, tmp_path: Path) -> None:
    model, images = routed(), torch.randn(IMAGE)
    change, change_back = ALTERATIONS[name]
    assert {key: getattr(model.blocks[3].attn, key) for key in FULL} == FULL
    change(model)
    with pytest.raises(ValueError, match=rf"its {name} is .*repeat it after mmod\.load_pretrained"):
        save_pretrained(model, tmp_path)
    assert not list(tmp_path.iterdir())
    with torch.no_grad():
        expected = model(images)
        change_back(model)
        assert not torch.equal(model(images), expected)
        save_pretrained(model, tmp_path)
        loaded = load_pretrained(tmp_path)
        change(loaded)
        assert torch.equal(loaded(images), expected)


def test_what_changes_no_output_is_saved(tmp_path: Path) -> None:
    model: Any = routed()
    model.epoch = 3
    model.train()
    model.set_grad_checkpointing(True)
    model.blocks[0].attn.fused_attn = False
    save_pretrained(model, tmp_path)
    assert not load_pretrained(tmp_path).training


# What is changed in a saved description, in one of its parts, and what the message says beside the part's name.
OUTSIDE: list[tuple[str | None, dict[str, Any], str]] = [
    ("arguments", {"checkpoint_path": "/tmp/other.pt"}, "in a saved folder may not have checkpoint_path"),
    ("arguments", {"pretrained": True}, "in a saved folder may not have pretrained"),
    ("arguments", {"pretrained_cfg_overlay": {"file": "x"}}, "in a saved folder may not have pretrained_cfg_overlay"),
    ("arguments", {"cache_dir": "/tmp"}, "in a saved folder may not have cache_dir"),
    ("pretrained_cfg", {"url": "https://example.org/x"}, "in a saved folder may not have url"),
    ("pretrained_cfg", {"file": "/tmp/other.pt"}, "in a saved folder may not have file"),
    ("pretrained_cfg", {"hf_hub_id": "a/b"}, "in a saved folder may not have hf_hub_id"),
    ("pretrained_cfg", {"source": "local-dir"}, "in a saved folder may not have source"),
    (None, {"architecture": "hf-hub:timm/vit"}, "knows no model 'hf-hub:timm/vit'"),
    (None, {"architecture": "local-dir:/tmp"}, "knows no model 'local-dir:/tmp'"),
    (None, {"architecture": 3}, "architecture in a saved folder must be a string, got 3"),
    (None, {"arguments": 3}, "arguments in a saved folder must be a mapping, got 3"),
    (None, {"pretrained": True}, "is described by architecture, arguments, pretrained_cfg"),
    ("arguments", {"depth": "many"}, "saved with"),
    ("arguments", {"embed_dim": 1 << 14}, "do not fit"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to copy and to change."""
    folder = tmp_path_factory.mktemp("saved")
    save_pretrained(routed(), folder / "model")
    return folder / "model"


def test_options_of_other_hosts_are_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="may not have device_map: models have no such option"):
        load_pretrained(saved, device_map="auto")
    # What was given is to blame, and not the folder.
    with pytest.raises(ValueError, match=r"mmod\.json' with \{'device_map': 'auto'\} describes no model that"):
        load_pretrained(saved, device_map="auto")
    with pytest.raises(ValueError, match=r"do not fit with \{'num_classes': 77\}: head"):
        load_pretrained(saved, num_classes=77)
    clip = mmod.route_(make_clip("ViT-B-32"), image=RoutingConfig(capacity=0.5))
    save_pretrained(clip, tmp_path, architecture=small_config("ViT-B-32"))
    with pytest.raises(TypeError, match="dtype are for models of timm and transformers, not of 'open_clip'"):
        load_pretrained(tmp_path, dtype="auto")


@pytest.mark.parametrize(("part", "change", "message"), OUTSIDE)
def test_a_saved_folder_names_nothing_outside_itself(
    part: str | None,
    change: dict[str, Any],
    message: str,
    saved: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch.hub, "download_url_to_file", refuse)
    monkeypatch.setattr(timm.models._builder, "load_state_dict_from_hf", refuse)
    edit(tmp_path, lambda config, weights: (config["model"][part] if part else config["model"]).update(change))
    with pytest.raises(ValueError, match=message):
        load_pretrained(tmp_path)


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("something outside the folder was read")


def test_no_weights_are_drawn_that_the_saved_ones_replace(tmp_path: Path) -> None:
    mmod.save_pretrained(mmod.route_(timm.create_model("test_vit"), mmod.RoutingConfig(router="linear")), tmp_path)
    before = torch.get_rng_state()
    load_pretrained(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_tensor_that_no_initial_weights_name_is_filled() -> None:
    parameter = nn.Parameter(torch.ones(3))
    with Unfilled(), torch.no_grad():
        nn.init.zeros_(tensor=parameter)
        nn.init.constant_(parameter, 2.0)
        assert torch.equal(parameter, torch.ones(3))
        torch.zero_(input=parameter)
    assert torch.equal(parameter, torch.zeros(3))


def test_what_a_method_put_aside_is_drawn_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recursions save the blocks that they share alone; the others are no memory that nobody has written."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    model = mmod.apply_(timm.create_model("test_vit", depth=6), mmod.lab.Recursions(recursions=2))
    mmod.save_pretrained(model, tmp_path / "saved")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        loaded = mmod.undo_(mmod.load_pretrained(tmp_path / "saved"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(weight.isfinite().all() for weight in loaded.parameters())


@pytest.mark.parametrize("damage", ["lost", "cut off"])
def test_a_description_is_written_again_from_the_header_of_the_weights(damage: str, tmp_path: Path) -> None:
    model = routed()
    mmod.save_pretrained(model, tmp_path / "saved")
    description = tmp_path / "saved" / "mmod.json"
    if damage == "lost":
        description.unlink()
    else:
        description.write_text(description.read_text()[:40])
    with pytest.raises((FileNotFoundError, ValueError), match=r"writes it back$") as refusal:
        mmod.load_pretrained(tmp_path / "saved")
    found = re.search(r"`(import .*)` writes it back$", str(refusal.value))
    assert found is not None
    exec(found[1], {})
    again = mmod.load_pretrained(tmp_path / "saved")
    images = torch.randn(IMAGE)
    assert torch.equal(again(images), model(images))


def test_a_saved_folder_that_lost_its_weights_is_said_to_be_one(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    mmod.save_pretrained(routed(), folder)
    with pytest.raises(FileNotFoundError, match=r"there is no folder '.*svaed' here: .* of a run; near ones: .*saved$"):
        mmod.load_pretrained(tmp_path / "svaed")
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit" / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=rf"it has no mmod\.json\. '{folder}' may be meant$"):
        mmod.load_pretrained(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"saved' has lost its weights, model\.safetensors: copy the file back"):
        mmod.load_pretrained(folder)
