"""Routed language and vision-language models: copied, saved, loaded, split over devices, and with LoRA."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch

import mmod
from mmod.adapters.transformers import load
from mmod.model import routing_configs
from mmod.training.chat.model import router_parameters
from tests.adapters.vlm_zoo import IMAGE, LANGUAGE, LINEAR, make_joint, make_language, prompt, words
from tests.trap import Trap


def test_copies_route_alike() -> None:
    model, batch = mmod.route_(make_joint("llava"), language=LINEAR), prompt("llava", (1, 2))
    # After a forward pass transformers has left functions in a model, routed or not, that cannot be pickled.
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    with torch.no_grad():
        expected = model(**batch).logits
        for twin in twins:
            assert torch.equal(twin(**batch).logits, expected)
            mmod.unroute_(twin)
            assert mmod.is_routed(model)


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
@pytest.mark.parametrize("name", ["llava", "qwen2.5-vl"])
def test_saved_models_load_by_one_call(name: str, shard: str, tmp_path: Path) -> None:
    model = make_joint(name)
    mmod.route_(model, language=LINEAR.replace(shared=True, capacity=(0.5, 0.25)))
    if name == "llava":
        mmod.route_(model, vision=mmod.RoutingConfig(capacity=0.5))
    mmod.set_capacity(model, [0.4, *list(mmod.capacities(model).values())[1:]])
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
    again = mmod.load_pretrained(tmp_path)
    assert type(again) is type(model)
    assert mmod.capacities(again) == mmod.capacities(model)
    assert routing_configs(again) == routing_configs(model)
    assert list(again.state_dict()) == list(model.state_dict())
    assert sum("shared_router" in key for key in again.state_dict()) == 1
    batch = prompt(name, (1, 2))
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, model(**batch).logits)


def test_dense_checkpoints_are_not_taken_for_routed_ones(tmp_path: Path) -> None:
    make_language("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds no routed model"):
        load(tmp_path, lambda *_: None)


def test_dense_weights_load_into_a_routed_model() -> None:
    dense = make_language("qwen3", seed=1)
    model = mmod.route_(make_language("qwen3", seed=2), LINEAR.replace(tokens="all"))
    report = model.load_state_dict(dense.state_dict(), strict=False)
    assert not report.unexpected_keys
    assert all(".router." in key for key in report.missing_keys)


@pytest.mark.parametrize("first", ["peft", "mmod"])
def test_lora_before_or_after_routing(first: str, tmp_path: Path) -> None:
    import peft

    model, batch = make_joint("llava"), prompt("llava", (1, 2))
    options = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["router"])
    if first == "mmod":
        wrapped = peft.get_peft_model(mmod.route_(model, language=LINEAR), options)
    else:
        options.modules_to_save = None
        wrapped = mmod.route_(peft.get_peft_model(model, options), language=LINEAR)
        for block in mmod.routed_blocks(wrapped).values():
            block.router.requires_grad_(True)
    wrapped.train()
    labels = batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, -100)
    wrapped(**batch, labels=labels).loss.backward()
    trained = {name for name, p in wrapped.named_parameters() if p.grad is not None}
    assert any("lora" in name for name in trained)
    assert any("router" in name for name in trained)
    assert all("lora" in name or "router" in name for name in trained)
    with torch.no_grad():
        for name, p in wrapped.named_parameters():
            if name in trained:
                p.add_(0.1 * torch.randn_like(p))
    wrapped.eval()
    mmod.set_capacity(wrapped, 0.3)
    with torch.no_grad(), mmod.trace(wrapped) as decisions:
        expected = wrapped(**batch).logits
    assert all(int(r.keep_BN[0].sum()) < batch["attention_mask"][0].sum() for r in decisions.values())
    if first == "mmod":
        wrapped.save_pretrained(tmp_path)
        base = mmod.route_(make_joint("llava"), language=LINEAR.replace(capacity=0.3))
        again = peft.PeftModel.from_pretrained(base, tmp_path).eval()
        with torch.no_grad():
            torch.testing.assert_close(again(**batch).logits, expected)
    with torch.no_grad():
        torch.testing.assert_close(wrapped.merge_and_unload()(**batch).logits, expected, atol=1e-5, rtol=1e-4)


UNDER_PEFT = {
    "p-mod": mmod.preset("p-mod", blocks=(1, 2), capacity=0.5, init_std=0.2),
    "gamma-mod": mmod.preset("gamma-mod", depth=5, blocks=(1, 2), positions="original", init_std=0.2),
    "predictor": mmod.preset(
        "mod", capacity=0.5, inference_threshold=0.5, losses={"membership": 0.01}, predictor=True, init_std=0.2
    ),
}


@pytest.mark.parametrize("name", ["llama", "llava", "qwen2.5-vl"])
@pytest.mark.parametrize("method", UNDER_PEFT)
def test_peft_trains_saves_and_merges_every_router(method: str, name: str, tmp_path: Path) -> None:
    import peft

    config, make = UNDER_PEFT[method], make_language if name in LANGUAGE else make_joint
    if name in LANGUAGE and method == "p-mod":
        config = config.replace(tokens="all", inference_threshold=0.5)
    batch = words() if name in LANGUAGE else prompt(name, (1, 2))
    options = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["router"])
    model = peft.get_peft_model(mmod.route_(make(name), language=config), options).train()
    before = {key: value.clone() for key, value in router_parameters(model).items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    labels = batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, -100)
    for _ in range(3):
        loss = model(**batch, labels=labels).loss
        loss = loss + mmod.auxiliary_loss(model) if config.losses else loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    trained = router_parameters(model)
    assert len(trained) == {"p-mod": 4, "gamma-mod": 1, "predictor": 12}[method]
    assert all(p.requires_grad and not torch.equal(p, before[key]) for key, p in trained.items())
    model.eval().save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(mmod.route_(make(name), language=config), tmp_path).eval()
    with torch.no_grad():
        expected = model(**batch).logits
        torch.testing.assert_close(again(**batch).logits, expected)
        with model.disable_adapter():
            assert not torch.allclose(model(**batch).logits, expected)
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(**batch).logits, expected, atol=1e-5, rtol=1e-4)
    assert router_parameters(merged).keys() == router_parameters(mmod.route_(make(name), language=config)).keys()


def test_a_shared_score_follows_copies_and_is_read_by_its_former_name() -> None:
    model, config = make_joint("llava"), LINEAR.replace(shared=True)
    twin = copy.deepcopy(mmod.route_(model, language=config))
    (owner,) = {block.router.score.held for block in mmod.routed_blocks(twin).values()}
    assert owner is twin.model.language_model.shared_router
    # As it was called in state dicts of version 0.1.0.
    former = {key.replace("shared_router", "router_score"): value for key, value in model.state_dict().items()}
    assert "model.language_model.router_score.weight" in former
    owner.weight.data.zero_()
    twin.load_state_dict(former)
    assert torch.equal(owner.weight, model.model.language_model.shared_router.weight)
    dense = list(make_joint("llava").state_dict())
    assert list(mmod.unroute_(model).state_dict()) == dense
    with pytest.raises(RuntimeError, match="router_score"):
        model.load_state_dict(former)


def test_routed_layers_stay_whole_when_a_model_is_split() -> None:
    model = mmod.route_(make_joint("llava"), language=mmod.RoutingConfig(capacity=0.5))
    layers = {type(layer).__name__ for layer in model.model.language_model.layers}
    assert len(layers) == 2
    assert layers <= set(model._no_split_modules)
    mmod.unroute_(model)
    assert not layers & set(model._no_split_modules)


@pytest.mark.parametrize("architecture", ["pipeline", "Trainer", "os", None])
def test_a_config_names_a_model_of_transformers_alone(architecture: str | None, tmp_path: Path) -> None:
    mmod.route_(make_joint("llava"), language=LINEAR).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = None if architecture is None else [architecture]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"names {architecture!r} in its config.json, which is no model"):
        mmod.load_pretrained(tmp_path)


def test_code_beside_a_model_is_not_run(tmp_path: Path) -> None:
    mmod.route_(make_joint("llava"), language=LINEAR).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "code.Config"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Config: pass\n")
    (tmp_path / "model.safetensors").rename(tmp_path / "kept")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "executed")))
    with pytest.raises((ValueError, OSError)):
        mmod.load_pretrained(tmp_path)
    assert not (tmp_path / "executed").exists()
