"""What a config makes of a vision-language model: routed parts, frozen parts, parts that learn."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

import mmod
from mmod.data.readers.chat import ChatCollator
from mmod.data.readers.conversations import open_conversations
from mmod.io.files import DamagedFileError
from mmod.io.refusals import one_line_errors
from mmod.io.tensors import read_tensors
from mmod.training import fit
from mmod.training.chat.config import ModelConfig
from mmod.training.chat.processor import create_processor, create_word_processor, pixel_limits_of
from mmod.training.chat.start import create_with_processor, freeze_parts, resize_images, router_parameters
from mmod.training.command import main
from mmod.training.kinds import estimate
from tests.kit.chat_configs import GAMMA, MASKED, MODEL, P_MOD, PREDICTOR, VISION, vlm_config
from tests.kit.processors import qwen
from tests.kit.vlm_zoo import JOINT, make_joint


@pytest.mark.parametrize("routing", [None, P_MOD, GAMMA], ids=["dense", "p-mod", "gamma-mod"])
def test_protection_that_changes_nothing_is_refused(folder: Path, routing: Any) -> None:
    config = vlm_config(folder, data=replace(vlm_config(folder).data, protected="question"), routing=routing)
    with pytest.raises(ValueError, match=r"data\.protected: question would change nothing.*tokens: all"):
        create_with_processor(config)


def test_routers_that_would_not_learn_are_refused_before_training(folder: Path) -> None:
    routing = {"language": {"router": "linear", "gate": "identity", "blocks": [1, 2]}}
    with pytest.raises(ValueError, match=r"router of model.language_model.layers.1 would not learn: gate 'identity'"):
        create_with_processor(vlm_config(folder, routing=routing))
    create_with_processor(
        vlm_config(folder, routing={"language": {**routing["language"], "losses": {"capacity": 0.1}}})
    )


def test_starts_that_a_run_cannot_have_are_refused_with_those_that_it_can(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{kind: image, output: run, model: {name: test_vit}, data: {source: digits}}")
    words = ["vlm/tiny-llava", "--output", str(tmp_path / "run"), "--model.config", "null", "--model.processor", "null"]
    with pytest.raises(
        ValueError, match=rf"{tmp_path}' is a run of kind 'image': name one of kind 'chat', or a vision"
    ):
        main([*words, "--model.checkpoint", str(tmp_path)], "chat")
    with pytest.raises(FileNotFoundError, match=r"no folder '\./none' here; a model of the hub is OWNER/NAME"):
        create_processor(vlm_config(folder, model=ModelConfig(checkpoint="./none")))
    for part in create_with_processor(vlm_config(folder, routing=P_MOD)):
        part.save_pretrained(folder / "routed")
    routed = vlm_config(folder, model=ModelConfig(checkpoint=str(folder / "routed")), routing=GAMMA)
    with pytest.raises(ValueError, match=r"is routed already: set `routing: null` .* name the dense model"):
        create_with_processor(routed)
    create_with_processor(replace(routed, routing=None))


def test_a_damaged_checkpoint_is_named(folder: Path) -> None:
    for part in create_with_processor(vlm_config(folder)):
        part.save_pretrained(folder / "cut")
    path = folder / "cut" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DamagedFileError, match=rf"^'{path}' is no complete safetensors file"):
        create_with_processor(vlm_config(folder, model=ModelConfig(checkpoint=str(path.parent))))


@pytest.mark.parametrize("tower", ["siglip", "clip"])
def test_smaller_images_have_fewer_tokens_and_resampled_positions(folder: Path, tower: str) -> None:
    config = vlm_config(folder)
    vision = {name: value for name, value in VISION.items() if tower == "siglip" or name != "vision_use_head"}
    kind = {"vision_config": {**vision, "model_type": f"{tower}_vision_model"}}
    select = {"vision_feature_select_strategy": "full" if tower == "siglip" else "default"}
    config = replace(config, model=ModelConfig(config={**MODEL, **kind, **select}, processor="words"))
    large, processor = create_with_processor(config)
    model, smaller = create_with_processor(config.at_size(16))
    talks = open_conversations(config.data.train, config.data)
    for one, one_processor, patches in ((large, processor, 16), (model, smaller, 4)):
        batch = ChatCollator(one_processor)([talks[0]])
        assert int((batch["input_ids"] == one_processor.image_token_id).sum()) == patches * len(talks[0].images)
        assert one(**batch).loss.isfinite()
    # The host's own resampling, from which training goes on.
    small, old = model.model.vision_tower, large.model.vision_tower
    image = torch.randn(2, 3, 16, 16)
    assert torch.equal(small(image).last_hidden_state, old(image, interpolate_pos_encoding=True).last_hidden_state)
    assert small.get_input_embeddings() is not None
    model.save_pretrained(folder / f"small-{tower}")
    again = type(model).from_pretrained(folder / f"small-{tower}")
    assert torch.equal(again.model.vision_tower(image).last_hidden_state, small(image).last_hidden_state)
    with pytest.raises(ValueError, match="multiple of 8"):
        create_with_processor(config.at_size(12))


def test_images_of_any_size_are_not_resized() -> None:
    with pytest.raises(ValueError, match="has no position embedding of patches"):
        resize_images(make_joint("qwen2.5-vl"), 16)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (["image"], {"projector", "language"}),
        (["image", "projector"], {"language"}),
        (["language"], {"image", "projector", "router"}),
    ],
)
def test_frozen_parts_do_not_train(folder: Path, parts: list[str], expected: set[str]) -> None:
    model, _ = create_with_processor(vlm_config(folder, frozen=parts, routing=P_MOD))

    def kind(name: str) -> str:
        if "router" in name:
            return "router"
        return "image" if "vision_tower" in name else "projector" if "projector" in name else "language"

    trained = {kind(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == expected | {"router"}


@pytest.mark.parametrize("name", JOINT)
def test_parts_of_every_family_freeze(name: str) -> None:
    model: Any = make_joint(name)
    text = getattr(model.model, "language_model", None) or model.model.text_model
    language = {id(parameter) for module in (text, model.lm_head) for parameter in module.parameters()}
    freeze_parts(model, ["image", "projector"])
    assert {id(parameter) for parameter in model.parameters() if parameter.requires_grad} == language
    model.requires_grad_(True)
    freeze_parts(model, ["image", "language"])
    assert any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("routing", [None, P_MOD, GAMMA, MASKED], ids=["dense", "p-mod", "gamma-mod", "masked"])
def test_packed_samples_train_like_padded_ones(folder: Path, routing: Any) -> None:
    data = replace(vlm_config(folder).data, protected="question" if routing is MASKED else None)
    config = vlm_config(folder, data=data, routing=routing)
    model, processor = create_with_processor(config)
    data = open_conversations(config.data.train, config.data)
    # The first conversations about two, one and no images.
    talks = [data[int((data.images == count).argmax())] for count in (2, 1, 0)]
    losses, gradients = [], []
    for packed in (False, True):
        batch = ChatCollator(processor, packed=packed, protected=config.data.protected)(talks)
        assert ("attention_mask" in batch) is not packed
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        if routing is MASKED:
            for block in mmod.routed_blocks(model).values():
                keep_BN = block.mod_state.routing.keep_BN
                assert bool(keep_BN[batch["protected_mask"]].all())
                free_BN = batch.get("attention_mask", torch.ones_like(keep_BN)).bool() & ~batch["protected_mask"]
                assert 0 < int(keep_BN[free_BN].sum()) <= int(free_BN.sum()) // 2
        losses.append(float(loss.detach()))
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for name, value in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], value, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("routing", "lora"),
    [(PREDICTOR, None), (P_MOD, {"r": 2, "target_modules": ["q_proj"]})],
    ids=["predictor, weights", "p-mod, LoRA"],
)
def test_routers_of_a_model_in_half_precision_train_in_single(
    folder: Path, routing: dict[str, Any], lora: dict[str, Any] | None
) -> None:
    model = ModelConfig(config=MODEL, processor="words", args={"dtype": "bfloat16"})
    config = vlm_config(folder, f"half-{routing is P_MOD}-{lora is None}", model=model, routing=routing, lora=lora)
    made, _ = create_with_processor(config)
    assert {value.dtype for value in router_parameters(made).values()} == {torch.float32}
    start = router_parameters(create_with_processor(config.plain())[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fit(config, progress=False)
    halves = [str(one.message) for one in caught if "without copies in float32" in str(one.message)]
    # Adapters are in single precision by themselves.
    assert len(halves) == (lora is None)
    saved = Path(result.folder) / "model"
    dtypes = {(value.dtype, "router" in name) for name, value in read_tensors(saved / "model.safetensors")[0].items()}
    assert dtypes == {(torch.float32, True), (torch.bfloat16, False)}
    after = router_parameters(mmod.load_pretrained(saved, dtype="float32"))
    assert any(not torch.equal(after[name], value) for name, value in start.items())


@pytest.mark.parametrize(
    ("fields", "given"),
    [
        ({"target_modules": "q_prj"}, "target_modules='q_prj'"),
        ({"target_modules": ["q_prj"]}, r"target_modules=\['q_prj'\]"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [9]}, r".*, layers_to_transform=\[9\]"),
        ({"r": 2}, "target_modules=None"),
    ],
)
def test_adapters_that_match_nothing_are_refused_with_names_that_do(
    folder: Path, fields: dict[str, Any], given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = vlm_config(folder, "no-match", lora=fields, routing=P_MOD)
    names = r"such as q_proj, k_proj, .* such as '\.\*q_proj'"
    message = rf"lora with {given} matches no module of LlavaForConditionalGeneration: .*{names}"
    for start in (estimate, fit):
        with pytest.raises(SystemExit) as ended, one_line_errors():
            start(config)
        assert ended.value.code == 2
        assert re.fullmatch(f"error: {message}\n", capsys.readouterr().err.splitlines(keepends=True)[-1])
    assert not (folder / "no-match" / "model").exists()
    for modules in (["q_proj"], ".*q_proj"):
        made, _ = create_with_processor(replace(config, lora={"r": 2, "target_modules": modules}))
        assert any("q_proj.lora_A" in name for name, _ in made.named_parameters())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bias": "some"}, "is refused by peft: Requested bias: some, is not implemented"),
        ({"target_modules": "(("}, "is refused by peft: missing \\), unterminated subpattern"),
        ({"target_modules": 5}, "is refused by peft: 'int' object is not iterable"),
        ({"target_modules": ["self_attn"]}, "is refused by peft: Target module .* \\.\\.\\.$"),
        ({"init_lora_weights": "foo"}, "is refused by peft: Unknown initialization"),
        (
            {"layers_to_transform": [1], "target_modules": ".*q_proj"},
            "by peft: `layers_to_transform` cannot",
        ),
        ({"rank_pattern": 5}, "rank_pattern=5 is refused by peft"),
        ({"modules_to_save": ["nothing"]}, "lora.modules_to_save: no module of the model is named 'nothing'"),
        ({"modules_to_save": 5}, "lora.modules_to_save must be several values, each a text, got 5"),
        ({"inference_mode": True}, "lora.inference_mode would train no adapter: leave it out"),
    ],
)
def test_other_mistakes_in_adapters_are_told_in_one_line(folder: Path, fields: dict[str, Any], message: str) -> None:
    config = vlm_config(folder, lora={"target_modules": ["q_proj"], **fields})
    with pytest.raises((ValueError, TypeError), match=message) as refusal:
        create_with_processor(config, on_meta=True)
    assert "\n" not in str(refusal.value)


def test_adapters_train_beside_named_modules_and_from_decomposed_weights(folder: Path) -> None:
    with warnings.catch_warnings():
        # Of peft and transformers, which no key of a config asks for.
        warnings.simplefilter("error", FutureWarning)
        config = vlm_config(folder, lora={"target_modules": ["q_proj"], "modules_to_save": "lm_head"})
        model, _ = create_with_processor(config)
    trained = [name for name, value in model.named_parameters() if value.requires_grad and "lora_" not in name]
    assert trained == ["base_model.model.lm_head.modules_to_save.default.weight"]
    # An estimate has no weights to decompose.
    create_with_processor(vlm_config(folder, lora={"target_modules": ["q_proj"], "init_lora_weights": "pissa"}), True)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("Qwen2VLImageProcessor", {}, (3136, 1003520)),
        ("Qwen2VLImageProcessor", {"max_pixels": 7840, "patch_size": 16}, (3136, 7840)),
        ("VideoLlama3ImageProcessor", {}, (3136, 1003520)),
        # It counts the pixels of two frames.
        ("Glm4vImageProcessor", {}, None),
        ("Idefics2ImageProcessor", {}, None),
        ("CLIPImageProcessor", {}, None),
    ],
)
def test_processors_that_limit_pixels_are_told_from_those_with_sides(
    name: str, arguments: dict[str, Any], expected: tuple[int, int] | None
) -> None:
    processor = qwen()
    processor.image_processor = getattr(transformers, name)(**arguments)
    limits = pixel_limits_of(processor)
    assert (limits and tuple(limits.values())) == expected


def test_an_image_size_is_one_of_processors_with_sides(tmp_path: Path) -> None:
    def resized(images: Any) -> Any:
        processor = create_word_processor(image_size=24, patch_size=6)
        processor.image_processor = images
        processor.save_pretrained(tmp_path)
        source = ModelConfig(config=MODEL, processor=str(tmp_path), image_size=12)
        return create_processor(vlm_config(tmp_path, model=source))

    picture = Image.new("RGB", (30, 40))
    # One crops nothing.
    for images in (transformers.CLIPImageProcessor(), transformers.SiglipImageProcessor()):
        pixels = resized(images).image_processor(picture, return_tensors="pt")["pixel_values"]
        assert pixels.shape == (1, 3, 12, 12)
    limits = {"longest_edge": 7840, "shortest_edge": 784}
    told = "takes images of any size within limits; set others by model.processor_args, which would be {'size': "
    for images in (transformers.Qwen2VLImageProcessor(size=limits), transformers.Idefics2ImageProcessor(size=limits)):
        with pytest.raises(ValueError, match=re.escape(f"model.image_size: {type(images).__name__} {told}{limits}")):
            resized(images)


@pytest.mark.filterwarnings("error::FutureWarning")
def test_processors_take_arguments(tmp_path: Path) -> None:
    qwen().save_pretrained(tmp_path / "processor")
    picture = Image.new("RGB", (300, 300))

    def tokens(**arguments: Any) -> int:
        source = ModelConfig(config=MODEL, processor=str(tmp_path / "processor"), processor_args=arguments)
        processor = create_processor(vlm_config(tmp_path, model=source))
        processor.save_pretrained(tmp_path / "again")
        both = [processor, transformers.AutoProcessor.from_pretrained(tmp_path / "again")]
        counts = {one(images=[picture], text=["<image>"])["input_ids"][0].count(one.image_token_id) for one in both}
        assert len(counts) == 1
        return counts.pop()

    assert tokens() == 49
    limits = {"shortest_edge": 784, "longest_edge": 28 * 28 * 20}
    assert tokens(size=limits) == 16
    # Its place is taken.
    source = ModelConfig(config=MODEL, processor="saved", processor_args={"max_pixels": 1, "use_fast": True})
    limited = vlm_config(tmp_path, model=source).with_pixels(limits)
    assert limited.model.processor_args == {"use_fast": True, "size": limits}
