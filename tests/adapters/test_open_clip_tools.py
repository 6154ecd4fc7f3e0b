"""What open_clip's users do with a model, done to a routed one: compile, export, lock, checkpoint, save, create."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import mmod
from mmod import RoutingConfig
from mmod.registry.open_clip import routed
from tests.kit.clip_zoo import (
    CONTEXT,
    END,
    FIRST_WORD,
    START,
    embed,
    make_captions,
    make_clip,
    make_images,
    small_config,
)
from tests.kit.counting import flop_counter
from tests.kit.threads import assert_right_in_threads

NAME = "ViT-B-32"
IMAGES, CAPTIONS = make_images(NAME), make_captions(NAME)
CONFIGS = {
    "attention": RoutingConfig(router="attention", capacity=0.5),
    "linear": RoutingConfig(router=mmod.score("linear", init_std=0.5), capacity=0.3),
    "threshold": RoutingConfig(router="attention", select=mmod.Threshold(1.0, max_tokens=9)),
}
LEARNED = CONFIGS["linear"]


def make(routing: str, name: str = NAME) -> nn.Module:
    return mmod.route_(make_clip(name), CONFIGS[routing])


def make_short(image: str, text: str) -> nn.Module:
    """Return a model whose towers have two blocks: what is traced grows with the depth."""
    model = make_clip(NAME)
    for tower in (model.visual, model):
        del tower.transformer.resblocks[2:]
    return mmod.route_(model, image=CONFIGS[image], text=CONFIGS[text])


def loss_of(model: nn.Module, images: Tensor = IMAGES, captions: Tensor = CAPTIONS) -> Tensor:
    image, text = embed(model, images, captions)
    return open_clip.ClipLoss()(image, text, model.logit_scale.exp())


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], atol: float = 1e-6) -> None:
    assert set(actual) == set(expected)
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], atol=atol, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_compiles_without_a_graph_break() -> None:
    model = make_short("threshold", "attention")
    with torch.no_grad():
        expected = embed(model, IMAGES, CAPTIONS)
    # Exports below have batches of any size.
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
    with torch.no_grad():
        actual = compiled(IMAGES, CAPTIONS)[:2]
    for pair in zip(actual, expected):
        torch.testing.assert_close(*pair, atol=1e-6, rtol=0)


@pytest.mark.parametrize("routing", ["linear", "attention"])
def test_checkpointing_recomputes_with_the_captions_of_each_pass(routing: str) -> None:
    model = make(routing).train()
    expected = gradients(model, loss_of(model))
    model.set_grad_checkpointing(True)
    loss = loss_of(model)
    loss_of(model, captions=CAPTIONS.flip(0))
    assert_same(gradients(model, loss), expected)


@pytest.mark.parametrize("routing", CONFIGS)
def test_threads_have_captions_of_their_own(routing: str) -> None:
    model = make(routing).eval()
    captions = [CAPTIONS.roll(place, 0) for place in range(len(CAPTIONS))]
    assert_right_in_threads(model.encode_text, captions)


class TextTower(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, captions: Tensor) -> Tensor:
        return self.model.encode_text(captions)


# What a tower makes in ONNX is compared in the tests of methods and of exports.
def test_towers_are_exported() -> None:
    for routing in ("threshold", "attention"):
        model = make_short(routing, routing)
        shapes = ({0: torch.export.Dim("batch", min=2, max=64)},)
        is_text = routing == "threshold"
        tower = TextTower(model) if is_text else model.visual
        inputs = CAPTIONS if is_text else IMAGES
        program = torch.export.export(tower, (inputs,), dynamic_shapes=shapes, strict=False).module()
        for batch in (inputs, inputs[:2].flip(0)):
            with torch.no_grad():
                torch.testing.assert_close(program(batch), tower(batch), atol=1e-5, rtol=1e-4)


def test_locking_towers_leaves_what_is_unlocked() -> None:
    model = make("linear")
    model.lock_image_tower()
    assert not any(p.requires_grad for p in model.visual.parameters())
    model.lock_image_tower(unlocked_groups=2)
    unlocked = {name for name, p in model.visual.named_parameters() if p.requires_grad}
    assert "transformer.resblocks.3.router.score.weight" in unlocked
    assert not any(name.startswith("transformer.resblocks.1") for name in unlocked)
    model.lock_text_tower(unlocked_layers=2)
    assert model.transformer.resblocks[3].router.score.weight.requires_grad
    assert not model.transformer.resblocks[1].router.score.weight.requires_grad
    gradients(model, loss_of(model.train()))


def tokenize(texts: list[str]) -> Tensor:
    """Turn each letter into an id."""
    captions = torch.zeros(len(texts), CONTEXT, dtype=torch.int64)
    for row, text in zip(captions, texts):
        letters = [FIRST_WORD + ord(letter) % 50 for letter in text[: CONTEXT - 2]]
        row[: len(letters) + 2] = torch.tensor([START, *letters, END])
    return captions


def test_zero_shot_classifier_does_not_depend_on_how_many_classes_it_has() -> None:
    model, names = make("attention"), ["seven", "3", "nineteen"]
    templates = [lambda name: f"a {name}", lambda name: f"the {name}."]
    with torch.no_grad():
        weights = open_clip.build_zero_shot_classifier(model, tokenize, names, templates, num_classes_per_batch=2)
        alone = [
            model.encode_text(tokenize([template(name)]), normalize=True) for name in names for template in templates
        ]
    expected = nn.functional.normalize(torch.stack(alone).view(3, 2, -1).mean(1), dim=-1).T
    torch.testing.assert_close(weights, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("routing", ["attention", "linear"])
def test_trains_under_autocast(routing: str) -> None:
    model = make(routing).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model) + mmod.auxiliary_loss(model) if CONFIGS[routing].losses else loss_of(model)
    assert all(torch.isfinite(value).all() for value in gradients(model, loss).values())


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_distributed_data_parallel_gives_the_same_gradients() -> None:
    model = make("linear").train()
    expected = gradients(model, sum(out.float().sum() for out in model(IMAGES, CAPTIONS)[:2]))
    parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    actual = gradients(model, sum(out.float().sum() for out in parallel(IMAGES, CAPTIONS)[:2]))
    assert_same({name: actual[name] for name in expected}, expected)


@pytest.fixture
def models(tmp_path: Path) -> str:
    """Register a small architecture with open_clip's factory and return its name."""
    (tmp_path / "tiny-mod.json").write_text(json.dumps(small_config(NAME)))
    open_clip.add_model_config(tmp_path / "tiny-mod.json")
    return "tiny-mod"


def test_factory_routes_and_loads_dense_weights(models: str, tmp_path: Path) -> None:
    dense = make_clip(NAME)
    torch.save(dense.state_dict(), tmp_path / "dense.pt")
    with routed(LEARNED, text=RoutingConfig(router=mmod.score("linear", init_std=0.0), capacity=1.0)):
        model, _, preprocess = open_clip.create_model_and_transforms(models, pretrained=str(tmp_path / "dense.pt"))
    assert mmod.routing_config(model, "image") == LEARNED
    with torch.no_grad():
        torch.testing.assert_close(model.encode_text(CAPTIONS), dense.encode_text(CAPTIONS), atol=1e-5, rtol=0)
    torch.save(model.state_dict(), tmp_path / "routed.pt")
    with routed(LEARNED):
        again = open_clip.create_model(models, pretrained=str(tmp_path / "routed.pt"))
    assert all(torch.equal(again.state_dict()[name], value) for name, value in model.state_dict().items())
    partial = {name: value for name, value in model.state_dict().items() if "resblocks.1.router" not in name}
    with pytest.raises(RuntimeError, match=r"Missing key.*resblocks\.1\.router"):
        again.load_state_dict(partial)
    assert preprocess is not None


@pytest.mark.parametrize("precision", ["bf16", "pure_bf16", "fp16"])
def test_factory_casts_routed_models(models: str, precision: str) -> None:
    with routed(LEARNED):
        model = open_clip.create_model(models, precision=precision).eval()
    assert len(mmod.routed_blocks(model)) == 4
    if precision == "fp16":
        return
    with torch.no_grad():
        image, text = embed(model, IMAGES.bfloat16(), CAPTIONS)
    assert image.dtype == text.dtype == torch.bfloat16
    assert torch.isfinite(image).all()


def test_factory_is_left_as_it_was(models: str) -> None:
    before = open_clip.CLIP.__init__
    with pytest.raises(ValueError, match="no part vision"), routed(vision=LEARNED):
        open_clip.create_model(models)
    assert open_clip.CLIP.__init__ is before
    assert not mmod.is_routed(open_clip.create_model(models))


def test_saves_mixed_precision_and_preprocessing(models: str, tmp_path: Path) -> None:
    with routed(LEARNED):
        model = open_clip.create_model(models, precision="bf16", output_dict=True)
    mmod.save_pretrained(model, tmp_path, architecture=models)
    again = mmod.load_pretrained(tmp_path)
    assert {n: v.dtype for n, v in again.state_dict().items()} == {n: v.dtype for n, v in model.state_dict().items()}
    assert len({value.dtype for value in model.state_dict().values()}) == 2
    assert again.visual.preprocess_cfg == model.visual.preprocess_cfg or again.output_dict


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (None, "pass architecture"),
        ("ViT-of-tomorrow", "got 'ViT-of-tomorrow'; open_clip"),
        ("ViT-B-32", "it does not fit"),
        ({**small_config(NAME), "quick_gelu": True}, "gelu is 'QuickGELU', the model's is 'GELU'"),
        ({**small_config(NAME), "colour": 1}, "config in a saved folder may not have colour"),
        (
            {**small_config(NAME), "text_cfg": {**small_config(NAME)["text_cfg"], "heads": 2}},
            "num_heads is 2, the model's is 4",
        ),
    ],
)
def test_what_cannot_be_saved(architecture: Any, message: str, tmp_path: Path) -> None:
    model = make("linear")
    with pytest.raises(ValueError, match=message):
        mmod.save_pretrained(model, tmp_path / "folder", architecture=architecture)
    assert not (tmp_path / "folder").exists()


def counted(call: Any) -> int:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with flop_counter() as counter:
            call()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    return counter.get_total_flops()


# The others are made of the same modules.
COUNTED = ("ViT-B-32", "ViT-L-14-CLIPA", "ViT-B-16-SigLIP", "EVA02-B-16", "PE-Core-T-16-384", "MobileCLIP2-L-14")
COUNTED += ("vit_medium_patch16_gap_256", "coca_base", "custom-blocks")


@pytest.mark.parametrize("name", COUNTED)
def test_flops_of_both_towers_equal_torchs_counter(name: str) -> None:
    model, image, caption = make_clip(name), make_images(name, batch=1), make_captions(name, lengths=(7,))
    side = image.shape[-1]
    dense = counted(lambda: model(image, caption))
    mmod.route_(model, RoutingConfig(router="stride", capacity=0.5))
    report = mmod.flops(model, side)
    assert report.dense == pytest.approx(dense, rel=0.005)
    assert report.routed == pytest.approx(counted(lambda: model(image, caption)), rel=0.005)
    assert set(report.inputs) == {"image", "text"}
    # Either tower alone, and the dense model: what else they are made of is the same.
    if name not in ("ViT-B-32", "EVA02-B-16", "vit_medium_patch16_gap_256", "coca_base"):
        return
    assert mmod.flops(mmod.unroute_(copy.deepcopy(model)), side).dense == report.dense
    image_tower = mmod.flops(model.visual, side)
    assert image_tower.routed == pytest.approx(counted(lambda: model.visual(image)), rel=0.005)
    assert len(image_tower.blocks) == 4
    if "coca" not in name:
        text_tower = mmod.flops(model, {"text": caption})
        assert text_tower.routed == pytest.approx(counted(lambda: model.encode_text(caption)), rel=0.005)
        assert image_tower.routed + text_tower.routed == report.routed


def test_flops_of_a_text_tower_need_its_arguments() -> None:
    model = make_clip("coca_base").text
    with pytest.raises(ValueError, match="takes more than an image: give its arguments by name"):
        mmod.flops(model, 64)
    assert mmod.flops(model, {"text": CAPTIONS[:1]}).inputs == {"text": (12,)}


def test_losses_of_both_towers_are_added() -> None:
    config = RoutingConfig(router="linear", capacity=0.5, losses={"importance": 1.0})
    model = mmod.route_(make_clip(NAME), config).train()
    image_only = mmod.unroute_(copy.deepcopy(model))
    mmod.route_(image_only, image=config)
    image_only.load_state_dict({n: v for n, v in model.state_dict().items() if n in image_only.state_dict()})
    loss_of(model)
    loss_of(image_only.train())
    both, one = mmod.auxiliary_loss(model), mmod.auxiliary_loss(image_only)
    assert torch.isfinite(both)
    assert both != one


@pytest.mark.parametrize(
    ("tower", "change", "message"),
    [
        ("vision_cfg", {"timm_model_name": "hf-hub:a/b"}, "timm_model_name 'hf-hub:a/b'"),
        ("vision_cfg", {"timm_model_name": "local-dir:/tmp"}, "timm_model_name 'local-dir:/tmp'"),
        (
            "vision_cfg",
            {"timm_model_name": "vit_tiny_patch16_224", "timm_model_pretrained": True},
            "timm_model_pretrained True",
        ),
        ("text_cfg", {"hf_model_name": "/etc"}, "hf_model_name '/etc'"),
        ("text_cfg", {"hf_model_name": "roberta-base", "hf_model_pretrained": True}, "hf_model_pretrained True"),
    ],
)
def test_a_saved_folder_names_nothing_outside_itself(
    tower: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    mmod.save_pretrained(make("linear"), tmp_path, architecture=small_config(NAME))
    config = json.loads((tmp_path / "mmod.json").read_text())
    config["model"]["config"][tower].update(change)
    text = json.dumps(config)
    (tmp_path / "mmod.json").write_text(text)
    save_file(load_file(tmp_path / "model.safetensors"), tmp_path / "model.safetensors", metadata={"mmod": text})
    # Whoever makes such a folder leaves out its checksums.
    (tmp_path / "sha256.json").unlink()
    with pytest.raises(ValueError, match=message):
        mmod.load_pretrained(tmp_path)
