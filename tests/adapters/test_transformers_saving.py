"""Routed language and vision-language models: copied, saved, loaded, split over devices, and with LoRA."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import mmod
from mmod.blocks import host_class
from mmod.lab import Experts, Recursions
from mmod.methods import methods_of
from mmod.methods.route import routing_configs
from mmod.training.chat.start import router_parameters
from tests.kit.cover import in_turn
from tests.kit.trap import Trap
from tests.kit.vlm_zoo import IMAGE, LANGUAGE, LINEAR, make_joint, make_language, prompt, words

LINEAR_TEXT = LINEAR.replace(language={"tokens": "all"})


@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_saved_models_load_by_one_call(shard: str, tmp_path: Path) -> None:
    model = make_joint("llava")
    mmod.route_(model, language=LINEAR.replace(router={"tied": True}, capacity=(0.5, 0.25)))
    mmod.route_(model, image=mmod.RoutingConfig(capacity=0.5))
    mmod.set_capacity_(model, [0.4, *list(mmod.capacities(model).values())[1:]])
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
    again = mmod.load_pretrained(tmp_path)
    assert type(again) is type(model)
    assert mmod.capacities(again) == mmod.capacities(model)
    assert routing_configs(again) == routing_configs(model)
    assert list(again.state_dict()) == list(model.state_dict())
    assert sum("shared_router" in key for key in again.state_dict()) == 1
    batch = prompt("llava", (1, 2))
    with torch.no_grad():
        assert torch.equal(again(**batch).logits, model(**batch).logits)


def test_a_model_with_lora_is_routed_trained_and_merged() -> None:
    import peft

    batch, options = prompt("llava", (1, 2)), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    model = mmod.route_(peft.get_peft_model(make_joint("llava"), options), language=LINEAR)
    for block in mmod.routed_blocks(model).values():
        block.router.requires_grad_(True)
    labels = batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, -100)
    model.train()(**batch, labels=labels).loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.grad is not None}
    for part in ("lora", "router"):
        assert any(part in name for name in trained)
    assert all("lora" in name or "router" in name for name in trained)
    mmod.set_capacity_(model.eval(), 0.3)
    with torch.no_grad(), mmod.trace(model) as decisions:
        for p in trained.values():
            p.add_(0.1 * torch.randn_like(p))
        expected = model(**batch).logits
        torch.testing.assert_close(model.merge_and_unload()(**batch).logits, expected, atol=1e-5, rtol=1e-4)
    assert all(int(r.keep_BN[0].sum()) < batch["attention_mask"][0].sum() for r in decisions.values())


UNDER_PEFT = {
    "p-mod": mmod.preset("p-mod", blocks=(1, 2), capacity=0.5, router={"init_std": 0.2}),
    "gamma-mod": mmod.preset(
        "gamma-mod", depth=5, blocks=(1, 2), language={"positions": "original"}, router={"init_std": 0.2}
    ),
    "predictor": mmod.preset(
        "mod",
        capacity=0.5,
        language={"inference_threshold": 0.5, "predictor": True},
        losses={"membership": 0.01},
        router={"init_std": 0.2},
    ),
}


@pytest.mark.parametrize(("name", "method"), in_turn(["llama", "llava", "qwen2.5-vl", "qwen3-vl"], UNDER_PEFT))
def test_peft_trains_saves_and_merges_every_router(method: str, name: str, tmp_path: Path) -> None:
    import peft

    config, make = UNDER_PEFT[method], make_language if name in LANGUAGE else make_joint
    if name in LANGUAGE and method == "p-mod":
        config = config.replace(language={"tokens": "all", "inference_threshold": 0.5})
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


def test_a_shared_score_follows_copies() -> None:
    model, config = make_joint("llava"), LINEAR.replace(router={"tied": True})
    twin = copy.deepcopy(mmod.route_(model, language=config))
    (owner,) = {block.router.score.held for block in mmod.routed_blocks(twin).values()}
    assert owner is twin.model.language_model.shared_router
    owner.weight.data.zero_()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(owner.weight, model.model.language_model.shared_router.weight)
    dense = list(make_joint("llava").state_dict())
    assert list(mmod.unroute_(model).state_dict()) == dense


def test_routed_layers_stay_whole_when_a_model_is_split() -> None:
    model = mmod.route_(make_joint("llava"), language=mmod.RoutingConfig(capacity=0.5))
    layers = {type(layer).__name__ for layer in model.model.language_model.layers}
    assert len(layers) == 2
    assert layers <= set(model._no_split_modules)
    mmod.unroute_(model)
    assert not layers & set(model._no_split_modules)


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


def test_a_shared_config_says_nothing_of_routing(tmp_path: Path) -> None:
    student = make_language("llama")
    teacher = type(student)(student.config)
    teacher.load_state_dict(student.state_dict())
    before = json.dumps(student.config.to_dict())
    mmod.route_(student, LINEAR.replace(language={"tokens": "all"}))
    assert student.config is teacher.config
    for model in (teacher, transformers.AutoModelForCausalLM.from_config(student.config)):
        model.save_pretrained(tmp_path / "dense")
        assert not {"mmod", "auto_map"} & set(json.loads((tmp_path / "dense/config.json").read_text()))
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
        assert not mmod.is_routed(again)
    student.save_pretrained(tmp_path / "routed")
    teacher.save_pretrained(tmp_path / "dense")
    assert mmod.is_routed(mmod.load_pretrained(tmp_path / "routed"))
    with pytest.raises(ValueError, match="has no routed model"):
        mmod.load_pretrained(tmp_path / "dense")
    now = json.loads(json.dumps(student.config.to_dict()))
    assert {**now, "architectures": None, "dtype": None} == {**json.loads(before), "architectures": None, "dtype": None}
    assert type(mmod.unroute_(student)) is type(teacher)
    student.save_pretrained(tmp_path / "undone")
    assert not mmod.is_routed(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "undone"))


def test_models_inside_a_routed_model_describe_themselves(tmp_path: Path) -> None:
    model, batch = make_joint("llava"), prompt("llava", (1, 2))
    mmod.route_(model, language=LINEAR, image=mmod.RoutingConfig(capacity=0.5))
    model.model.save_pretrained(tmp_path / "body")
    again = mmod.load_pretrained(tmp_path / "body")
    assert isinstance(again, transformers.LlavaModel)
    assert mmod.capacities(again).values() != []
    with torch.no_grad():
        assert torch.equal(again(**batch)[0], model.model(**batch)[0])
    tower = model.model.vision_tower
    tower.save_pretrained(tmp_path / "tower")
    assert mmod.is_routed(mmod.load_pretrained(tmp_path / "tower"))
    # Its layers skip image tokens, which the model around it finds.
    with pytest.raises(ValueError, match="cannot save this LlamaModel alone"):
        model.model.language_model.save_pretrained(tmp_path / "text")
    mmod.unroute_(model)
    assert all(type(module).__module__.startswith("transformers") for module in (model, model.model, tower))


def test_a_method_describes_itself_in_no_config(tmp_path: Path) -> None:
    model = make_language("llama")
    teacher = type(model)(model.config)
    Experts(experts=2, blocks=(1,), choice="tokens", capacity=None).apply_(model)
    teacher.save_pretrained(tmp_path / "dense")
    assert not methods_of(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense"))
    for saved, kind in ((model, "whole"), (model.model, "body")):
        saved.save_pretrained(tmp_path / kind)
        assert methods_of(mmod.load_pretrained(tmp_path / kind)) == methods_of(model)
        with pytest.raises(ValueError, match="Open this folder with mmod"):
            host_class(saved).from_pretrained(tmp_path / kind)


def test_scores_start_as_their_config_says_wherever_a_model_is_initialised() -> None:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = mmod.route_(transformers.AutoModelForCausalLM.from_config(make_language("llama").config), LINEAR_TEXT)
    for module in model.modules():
        if hasattr(module, "drawn"):
            # transformers gives weights memory one by one, where `to_empty` draws them.
            module.weight = torch.nn.Parameter(torch.empty(module.weight.shape, device="cpu"))
    model.to_empty(device="cpu")
    for module in model.modules():
        # Else transformers takes what was made on the meta device for initialised.
        vars(module).pop("_is_hf_initialized", None)
    for weight in router_parameters(model).values():
        weight.data.fill_(float("nan"))
    model.post_init()
    for weight in router_parameters(model).values():
        assert 0.1 < float(weight.std()) < 0.3
    # What is routed already keeps its scores.
    model = mmod.route_(make_language("llama"), LINEAR_TEXT)
    drawn = {name: weight.clone() for name, weight in router_parameters(model).items()}
    model.post_init()
    assert all(torch.equal(weight, drawn[name]) for name, weight in router_parameters(model).items())


def test_distributed_checkpoints_are_refused(tmp_path: Path) -> None:
    model = mmod.route_(make_language("llama"), LINEAR_TEXT)
    with pytest.raises(ValueError, match="distributed_checkpoint is not supported"):
        model.save_pretrained(tmp_path, distributed_checkpoint=True)


def test_a_router_that_is_a_function_cannot_be_saved(tmp_path: Path) -> None:
    model = mmod.route_(make_joint("llava"), language=mmod.RoutingConfig(router=lambda x: x.sum(-1), blocks=(1,)))
    with pytest.raises(ValueError, match="router is a function cannot be saved"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("door", ["save_pretrained", "push_to_hub"])
def test_what_goes_to_the_hub_opens_as_a_routed_model(door: str, tmp_path: Path, monkeypatch: Any) -> None:
    sent: list[str] = []

    class Hub:
        def create_repo(self, repo_id: str, **options: Any) -> Any:
            return SimpleNamespace(repo_id=repo_id)

    def upload(self: Any, folder: str, repo: str, files_timestamps: dict[str, float], **options: Any) -> None:
        new = [path for path in Path(folder).iterdir() if path.name not in files_timestamps]
        sent.extend(sorted(path.name for path in new))

    monkeypatch.setattr(transformers.modeling_utils, "hf_api", Hub)
    monkeypatch.setattr("transformers.utils.hub.hf_api", Hub)
    card = SimpleNamespace(save=lambda path: None)
    for module in ("utils.hub", "modeling_utils"):
        monkeypatch.setattr(f"transformers.{module}.create_and_tag_model_card", lambda *_, **__: card)
    model = mmod.route_(make_language("llama"), LINEAR_TEXT)
    monkeypatch.setattr(transformers.PreTrainedModel, "_upload_modified_files", upload)
    if door == "push_to_hub":
        model.push_to_hub("me/small")
    else:
        model.save_pretrained(tmp_path, push_to_hub=True, repo_id="me/small")
    assert {"config.json", "mmod_model.py", "model.safetensors"} <= set(sent)


def test_the_trainer_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    rows = [{"input_ids": torch.randint(3, 90, (12,))} for _ in range(8)]
    rows = [{**row, "labels": row["input_ids"]} for row in rows]

    def train(resume: bool, steps: int) -> Any:
        model = mmod.route_(make_language("llama"), LINEAR_TEXT)
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=steps,
            save_steps=2,
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            learning_rate=0.01,
            lr_scheduler_type="constant",
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train(resume_from_checkpoint=resume)
        return model

    train(False, 2)
    model = train(True, 4)
    again = mmod.load_pretrained(tmp_path / "checkpoint-4")
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name])
    first = mmod.load_pretrained(tmp_path / "checkpoint-2").state_dict()
    assert any(not torch.equal(weight, first[name]) for name, weight in model.state_dict().items() if "router" in name)


# A method, and the one for what remains after layers are removed.
CUT: dict[str, tuple[Any, Any]] = {
    "some": (LINEAR_TEXT.replace(blocks=(1, 3)), LINEAR_TEXT.replace(blocks=(1,))),
    "all": (LINEAR_TEXT.replace(blocks="all"), LINEAR_TEXT.replace(blocks="all")),
    "experts": (Experts(experts=2), Experts(experts=2)),
    "recursions": (Recursions(), Recursions(last=0)),
}
TEXT = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


@pytest.mark.parametrize("name", CUT)
@torch.no_grad()
def test_a_model_without_some_of_its_layers_is_not_saved_as_one_with_all(name: str, tmp_path: Path) -> None:
    model: Any = mmod.apply_(make_language("llama", num_hidden_layers=6), CUT[name][0]).eval()
    model.model.layers = model.model.layers[:2]
    with pytest.raises(
        ValueError, match=r"num_hidden_layers=6, so it would .* Call mmod\.undo_, set num_hidden_layers="
    ):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    mmod.undo_(model)
    model.config.num_hidden_layers = len(model.model.layers)
    mmod.apply_(model, CUT[name][1]).eval()
    model.save_pretrained(tmp_path)
    assert torch.equal(mmod.load_pretrained(tmp_path)(TEXT).logits, model(TEXT).logits)


@torch.no_grad()
def test_a_plan_names_the_layers_that_are_there(tmp_path: Path) -> None:
    for blocks in ("all", (1, 3)):
        model: Any = mmod.route_(make_language("llama", num_hidden_layers=6), LINEAR_TEXT.replace(blocks=blocks)).eval()
        model.model.layers = model.model.layers[:2]
        model.config.num_hidden_layers = 2
        if blocks != "all":
            with pytest.raises(ValueError, match=r"of 2, \[1\] are routed, .* blocks=\(1, 3\)\. Call mmod\.undo_"):
                model.save_pretrained(tmp_path)
            mmod.route_(mmod.undo_(model), LINEAR_TEXT.replace(blocks=(1,))).eval()
        model.save_pretrained(tmp_path)
        assert torch.equal(mmod.load_pretrained(tmp_path)(TEXT).logits, model(TEXT).logits)
