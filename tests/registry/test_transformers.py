"""Folders of routed models, loaded by transformers' own calls."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

import mmod
from mmod.model import routing_configs
from tests.adapters.vlm_zoo import JOINT, LANGUAGE, LINEAR, make_joint, make_language, prompt, words

ROOT = Path(__file__).parents[2]
NAMES = sorted({name.removesuffix("-window") for name in (*LANGUAGE, *JOINT)} - {"llava-mistral"})
TEXT = LINEAR.replace(tokens="all")


def save(name: str, folder: Path) -> nn.Module:
    model = make_joint(name) if name in JOINT else make_language(name)
    mmod.route_(model, language=LINEAR if name in JOINT else TEXT).save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", NAMES)
def test_routed_folders_give_routed_models(name: str, tmp_path: Path) -> None:
    model = save(name, tmp_path)
    auto = transformers.AutoModelForImageTextToText if name in JOINT else transformers.AutoModelForCausalLM
    batch = prompt(name, (1, 2)) if name in JOINT else words()
    for made_by in (auto, type(model)):
        again = made_by.from_pretrained(tmp_path)
        assert type(again) is type(model)
        assert routing_configs(again) == routing_configs(model)
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
    for load in (mmod.load_pretrained, transformers.AutoModelForCausalLM.from_pretrained, type(model).from_pretrained):
        with pytest.raises(ValueError, match=r"do not fit: missing \['.*router.*has lost its routers"):
            load(tmp_path)


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


def test_transformers_may_be_imported_first(tmp_path: Path) -> None:
    save("llama", tmp_path)
    # The other order is that of lmms-eval.
    code = (
        "import transformers, mmod\n"
        f"print(mmod.is_routed(transformers.LlamaForCausalLM.from_pretrained({str(tmp_path)!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "True"


def test_a_config_that_is_given_decides(tmp_path: Path) -> None:
    model = save("llama", tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    batch = words()
    for given in (config, str(tmp_path)):
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path, config=given)
        with torch.no_grad():
            assert torch.equal(again(**batch).logits, model(**batch).logits)
    # An argument that is an option of the config changes it, as ever.
    assert transformers.LlamaForCausalLM.from_pretrained(tmp_path, rms_norm_eps=0.5).config.rms_norm_eps == 0.5
    del config.mmod
    assert not mmod.is_routed(transformers.LlamaForCausalLM.from_pretrained(tmp_path, config=config))


def test_what_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    save("llama", tmp_path)
    with pytest.raises(OSError, match="elsewhere"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / "elsewhere")
    described = json.loads((tmp_path / "config.json").read_text())
    described["mmod"]["version"] = 99
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match="saved as version 99"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path)
