"""Folders of routed models, loaded by transformers' Auto classes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import mmod
import mmod.registry.transformers
from mmod.model import routing_configs
from tests.adapters.vlm_zoo import JOINT, LANGUAGE, LINEAR, make_joint, make_language, prompt, words

NAMES = sorted({name.removesuffix("-window") for name in (*LANGUAGE, *JOINT)} - {"llava-mistral"})
TEXT = LINEAR.replace(tokens="all")


def save(name: str, folder: Path) -> nn.Module:
    model = make_joint(name) if name in JOINT else make_language(name)
    mmod.route_(model, language=LINEAR if name in JOINT else TEXT).save_pretrained(folder)
    return model


@pytest.fixture(autouse=True)
def _no_dense_load() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*routed model")
        yield


@pytest.mark.parametrize("name", NAMES)
def test_routed_folders_give_routed_models(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    auto = transformers.AutoModelForImageTextToText if name in JOINT else transformers.AutoModelForCausalLM
    again = auto.from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert routing_configs(again) == routing_configs(model)
    batch = prompt(name, (1, 2)) if name in JOINT else words()
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, model(**batch).logits)


def test_arguments_mean_what_they_always_do(tmp_path: Path) -> None:
    model = save("llama", tmp_path)
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager", device_map={"": "cpu"}, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert (again.dtype, again.config._attn_implementation) == (torch.bfloat16, "eager")
    assert mmod.capacities(again) == mmod.capacities(model)


def test_the_model_without_its_head_is_routed(tmp_path: Path) -> None:
    model = save("llama", tmp_path)
    again = transformers.AutoModel.from_pretrained(tmp_path)
    assert type(again) is transformers.LlamaModel
    assert list(mmod.routed_blocks(again)) == ["layers.1", "layers.3"]
    batch = words()
    with torch.no_grad():
        assert torch.equal(again(**batch)[0], model.model(**batch)[0])


def test_pipelines_run_the_routed_model(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    model = mmod.route_(make_language("llama"), language=TEXT.replace(select=mmod.Threshold(0.5)))
    model.save_pretrained(tmp_path)
    own = Tokenizer(models.WordLevel({f"w{index}": index for index in range(model.config.vocab_size)}, unk_token="w0"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = transformers.PreTrainedTokenizerFast(tokenizer_object=own, unk_token="w0", pad_token="w1")
    tokens.save_pretrained(tmp_path)
    options, text = {"max_new_tokens": 8, "do_sample": False}, "w5 w9 w11 w5 w7 w3"
    written = transformers.pipeline("text-generation", model=str(tmp_path))(text, return_tensors=True, **options)
    with torch.no_grad():
        wanted = model.generate(**tokens(text, return_tensors="pt"), **options)
    assert written[0]["generated_token_ids"] == wanted[0].tolist()


def test_weights_without_routers_are_refused(tmp_path: Path) -> None:
    model = save("llama", tmp_path)
    state = {name: value for name, value in model.state_dict().items() if ".router." not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match="has lost its routers"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["llama", "llava"])
def test_dense_models_are_what_they_were(name: str, tmp_path: Path) -> None:
    model = make_joint(name) if name in JOINT else make_language(name)
    auto = transformers.AutoModelForImageTextToText if name in JOINT else transformers.AutoModelForCausalLM
    model.save_pretrained(tmp_path)
    for again in (auto.from_pretrained(tmp_path), auto.from_config(model.config)):
        assert type(again) is type(model)
        assert type(again).__module__.startswith("transformers.")
        assert [type(module) for module in again.modules()] == [type(module) for module in model.modules()]
        assert not mmod.is_routed(again)
    again = auto.from_pretrained(tmp_path, dtype=torch.float16)
    assert again.dtype == torch.float16


def test_every_supported_type_of_model_is_registered() -> None:
    for model_type in mmod.registry.transformers.MODEL_TYPES:
        loader = transformers.MODEL_MAPPING[transformers.CONFIG_MAPPING[model_type]]
        assert issubclass(loader, getattr(transformers, loader.__name__))
        assert loader is not getattr(transformers, loader.__name__)
