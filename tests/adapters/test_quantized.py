"""Weights in 4 and 8 bits by bitsandbytes: host layers are quantized, routers are not."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import mmod
from mmod.analysis import Prompt, flops
from mmod.data.readers.chat import ChatCollator
from mmod.data.readers.conversations import open_conversations
from mmod.training import fit
from mmod.training.chat.config import ModelConfig
from mmod.training.chat.processor import create_processor, create_word_processor
from mmod.training.chat.start import create_with_processor, router_parameters
from mmod.training.kinds import estimate
from tests.kit.chat_configs import vlm_config
from tests.kit.cover import in_turn
from tests.kit.vlm_zoo import make_joint, make_language, prompt

ROUTED = mmod.RoutingConfig(
    router=mmod.score("linear", init_std=0.2),
    capacity=0.5,
    losses={"membership": 0.01},
    language=mmod.LanguageRouting(inference_threshold=0.5, predictor=True),
)
BITS = [4, 8]
needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes, which quantizes"
)


@pytest.fixture(autouse=True)
def small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave layers as they are: on some CPUs bitsandbytes packs them, and fails below 64 channels."""
    if importlib.util.find_spec("bitsandbytes") is not None:
        monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)


def options(bits: int) -> dict[str, Any]:
    return {"quantization_config": {f"load_in_{bits}bit": True}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Train a small model by one step and return its folder."""
    start = vlm_config(tmp_path_factory.mktemp("start"), trainer={"max_steps": 1, "save_strategy": "no"})
    return f"{fit(replace(start, data=replace(start.data, val=None)), progress=False).folder}/model"


def quantized(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if type(module).__name__ in ("Linear4bit", "Linear8bitLt")}


@needs_bitsandbytes
@pytest.mark.parametrize(("name", "bits"), in_turn(["llama", "llava"], BITS))
@torch.no_grad()
def test_capacity_one_is_the_quantized_model(tmp_path: Path, name: str, bits: int) -> None:
    joint = name == "llava"
    (make_joint(name) if joint else make_language(name)).save_pretrained(tmp_path)
    auto = transformers.AutoModelForImageTextToText if joint else transformers.AutoModelForCausalLM
    model: Any = auto.from_pretrained(tmp_path, **options(bits)).eval()
    assert quantized(model)
    batch = prompt("llava", (2,) if joint else (0,))
    dense, ids = model(**batch).logits, model.generate(**batch, max_new_tokens=3)
    config = mmod.RoutingConfig(
        router="linear", gate="identity", select=mmod.Threshold(0.0), language=mmod.LanguageRouting(tokens="all")
    )
    mmod.route_(model, language=config)
    torch.testing.assert_close(model(**batch).logits, dense)
    assert torch.equal(model.generate(**batch, max_new_tokens=3), ids)
    routed = flops(model, Prompt(8), kept=0.5)
    mmod.unroute_(model)
    assert flops(model, Prompt(8)).dense == routed.dense == flops(make_language("llama"), Prompt(8)).dense


@needs_bitsandbytes
@pytest.mark.parametrize("bits", BITS)
@torch.no_grad()
def test_a_routed_checkpoint_is_quantized_but_for_its_routers(tmp_path: Path, bits: int) -> None:
    saved = mmod.route_(make_joint("llava"), language=ROUTED)
    saved.save_pretrained(tmp_path / "full")
    model: Any = mmod.load_pretrained(tmp_path / "full", **options(bits))
    layers = {name for name in quantized(model) if "language_model.layers" in name}
    assert len(layers) == 4 * 7
    saved_routers, routers = router_parameters(saved), router_parameters(model)
    assert saved_routers.keys() == routers.keys()
    assert any("predictor" in name for name in saved_routers)
    assert all(torch.equal(value, saved_routers[name]) for name, value in routers.items())
    batch = prompt("llava", (2, 1, 0))
    assert model.generate(**batch, max_new_tokens=3).shape[0] == 3
    model.save_pretrained(tmp_path / "quantized")
    again: Any = mmod.load_pretrained(tmp_path / "quantized")
    assert quantized(again) == quantized(model)
    assert torch.equal(again(**batch).logits, model(**batch).logits)


@needs_bitsandbytes
@pytest.mark.parametrize("bits", BITS)
def test_adapters_and_routers_of_a_quantized_model_train(tmp_path: Path, checkpoint: str, bits: int) -> None:
    config = replace(
        vlm_config(tmp_path, "quantized", routing={"language": {"preset": "p-mod"}}),
        model=ModelConfig(checkpoint=checkpoint, args=options(bits)),
        lora={"r": 2, "target_modules": ["q_proj"]},
    )
    before, _ = create_with_processor(config)
    assert quantized(before)
    assert all(value.dtype == torch.float32 for value in router_parameters(before).values())
    # Their names in the model without adapters.
    start = {
        name.removeprefix("base_model.model.").replace(".modules_to_save.default", ""): value.clone()
        for name, value in router_parameters(before).items()
    }
    result = fit(config, progress=False)
    assert result.evaluation is not None
    model: Any = mmod.load_pretrained(tmp_path / "quantized" / "model")
    assert quantized(model)
    assert any(not torch.equal(value, start[name]) for name, value in router_parameters(model).items())
    val = open_conversations("questions:tiny/val", config.data)
    batch = ChatCollator(create_processor(config))([val[0], val[1]])
    assert bool(torch.isfinite(model(**batch).loss))


def test_plans_count_bits(tmp_path: Path, checkpoint: str) -> None:
    lora = {"r": 2, "target_modules": ["q_proj"]}
    model = ModelConfig(checkpoint=checkpoint)
    routing = {"language": {"preset": "p-mod"}}
    full, *quantized_plans = (
        estimate(replace(vlm_config(tmp_path, routing=routing), model=replace(model, args=args), lora=lora))
        for args in ({}, *map(options, BITS))
    )
    dense, _ = create_with_processor(vlm_config(tmp_path), on_meta=True)
    linear = sum(
        module.weight.numel()
        for name, module in dense.named_modules()
        if isinstance(module, nn.Linear) and name != "lm_head"
    )
    for bits, plan in zip(BITS, quantized_plans, strict=True):
        assert full.weight_bytes - plan.weight_bytes == linear * (32 - bits) // 8
        assert replace(plan, weight_bytes=full.weight_bytes) == full


def test_without_bitsandbytes_loading_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bits in BITS:
        module = f"transformers.quantizers.quantizer_bnb_{bits}bit.is_bitsandbytes_available"
        monkeypatch.setattr(module, lambda: False)
    mmod.route_(make_joint("llava"), language=ROUTED).save_pretrained(tmp_path)
    create_word_processor(image_size=12, patch_size=4).save_pretrained(tmp_path)
    model = ModelConfig(checkpoint=str(tmp_path), args=options(8))
    config = vlm_config(tmp_path, model=model, lora={"r": 2, "target_modules": ["q_proj"]})
    for bits in BITS:
        with pytest.raises(ImportError, match=f"{bits}-bit quantization requires bitsandbytes: `pip install"):
            mmod.load_pretrained(tmp_path, **options(bits))
    with pytest.raises(ImportError, match="requires bitsandbytes"):
        fit(config, progress=False)
