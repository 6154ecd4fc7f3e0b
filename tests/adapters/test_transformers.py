"""Routed language and vision-language models: what stays as it was, who may be skipped, and what is saved."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import mmod
from mmod.adapters.transformers import load
from mmod.convert import routing_configs
from mmod.routing import RoleRouter, assign_roles, select_within
from tests.adapters.vlm_zoo import IMAGE, JOINT, LANGUAGE, PATCHES, VIDEO, make_joint, make_language, pad, prompt

LINEAR = mmod.RoutingConfig(router="linear", capacity=0.5, blocks=(1, 3), init_std=0.2)
EVERY_TOKEN = mmod.RoutingConfig(router="stride", capacity=1.0, blocks="all")
EVERY_TOKEN_CAUSAL = mmod.RoutingConfig(
    router="linear", capacity=1.0, blocks="all", tokens="all", inference_threshold=0.0, gate="sigmoid", gate_scale=2.0,
    init_std=0.0, bias=True,
)  # fmt: skip


def words(samples: int = 2, tokens: int = 20) -> dict[str, Tensor]:
    rows = torch.randint(3, IMAGE, (samples, tokens)).tolist()
    return pad([row[: tokens - 5 * place] for place, row in enumerate(rows)])


def outputs(model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    with torch.no_grad():
        out = model(**batch, use_cache=True)
        ids = model.generate(
            **batch, max_new_tokens=5, do_sample=False, suppress_tokens=[IMAGE, VIDEO], eos_token_id=None
        )
    return out.logits, ids, [(layer.keys, layer.values) for layer in out.past_key_values.layers]


def check_equal(model: Any, batch: dict[str, Any], config: mmod.RoutingConfig) -> None:
    keys, kind = list(model.state_dict()), {name: type(m) for name, m in model.named_modules()}
    dense = outputs(model, batch)
    mmod.route_(model, language=config)
    added = [key for key in model.state_dict() if key not in keys]
    assert [key for key in model.state_dict() if key not in added] == keys
    assert all(".router." in key for key in added)
    routed, real = outputs(model, batch), batch["attention_mask"].bool()
    torch.testing.assert_close(routed[0][real], dense[0][real], atol=1e-5, rtol=1e-4)
    assert torch.equal(routed[1], dense[1])
    for (key, value), (dense_key, dense_value) in zip(routed[2], dense[2]):
        for ours, theirs in ((key, dense_key), (value, dense_value)):
            for row, valid in enumerate(real):
                # A routed layer holds no padding; a window has forgotten the same tokens in both.
                own = theirs[row][:, valid[-theirs.shape[2] :]]
                count = min(ours.shape[2], int(own.shape[1]))
                held = ours[row][:, :count] if ours.shape[2] == int(real.sum(1).max()) else ours[row][:, -count:]
                torch.testing.assert_close(held, own[:, -count:], atol=1e-5, rtol=1e-4)
    mmod.unroute_(model)
    assert list(model.state_dict()) == keys
    assert {name: type(m) for name, m in model.named_modules()} == kind
    assert not hasattr(model.config, "mmod")
    assert torch.equal(outputs(model, batch)[0], dense[0])


@pytest.mark.parametrize("name", [name for name in LANGUAGE if name not in ("gemma2", "gemma3", "mistral-window")])
def test_capacity_1_is_the_dense_language_model(name: str) -> None:
    check_equal(make_language(name), words(), EVERY_TOKEN_CAUSAL)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "mistral-window"])
def test_capacity_1_is_the_dense_model_with_sliding_windows(name: str) -> None:
    batch = {key: value[:1] for key, value in words().items()}
    check_equal(make_language(name), batch, EVERY_TOKEN_CAUSAL)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", JOINT)
def test_capacity_1_is_the_dense_joint_model(name: str, attention: str) -> None:
    images = (2,) if "window" in name else (1, 0, 2)
    check_equal(make_joint(name, attention=attention), prompt(name, images), EVERY_TOKEN)


@torch.no_grad()
def test_bf16_is_bitwise_dense() -> None:
    model, batch = make_joint("llava").bfloat16(), prompt("llava", (2,))
    batch["pixel_values"] = batch["pixel_values"].bfloat16()
    dense = model(**batch).logits
    assert torch.equal(mmod.route_(model, language=EVERY_TOKEN)(**batch).logits, dense)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llava", "llava-onevision", "qwen2-vl"])
def test_skipped_image_tokens_pass_unchanged_and_text_never_does(name: str) -> None:
    model, batch = mmod.route_(make_joint(name), language=LINEAR), prompt(name, (1, 0, 3))
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = [
        block.register_forward_hook(lambda m, i, o, block=block_name: seen.update({block: (i[0], o)}))
        for block_name, block in mmod.routed_blocks(model).items()
    ]
    with mmod.trace(model) as decisions:
        model(**batch)
    for handle in handles:
        handle.remove()
    images, real = batch["input_ids"] == IMAGE, batch["attention_mask"].bool()
    for block_name, routing in decisions.items():
        kept = routing.keep_BN
        assert bool(kept[real & ~images].all())
        assert not bool(kept[~real].any())
        number = images.sum(1)
        assert torch.equal((kept & images).sum(1), number // 2)
        before, after = seen[block_name]
        assert torch.equal(before[~kept], after[~kept])
        assert not torch.equal(before[kept], after[kept])


@torch.no_grad()
def test_image_tokens_are_found_in_embeddings() -> None:
    model, batch = mmod.route_(make_joint("llava"), language=LINEAR), prompt("llava", (1, 2))
    expected = model(**batch).logits
    ids = batch.pop("input_ids")
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embeds, **batch).logits, expected)


@torch.no_grad()
def test_protected_tokens_are_kept() -> None:
    config = LINEAR.replace(tokens="all", capacity=0.25)
    model, batch = mmod.route_(make_joint("llava"), language=config), prompt("llava", (1, 2))
    real = batch["attention_mask"].bool()
    protected = torch.zeros_like(real)
    protected[:, -5:] = True
    with mmod.trace(model) as decisions:
        model(**batch, protected_mask=protected)
    for routing in decisions.values():
        assert bool(routing.keep_BN[:, -5:].all())
        free = (real & ~protected).sum(1)
        assert torch.equal(routing.keep_BN[:, :-5].sum(1), free // 4)
    with pytest.raises(ValueError, match="protected_mask has shape"):
        model(**batch, protected_mask=protected[:, 1:])


@torch.no_grad()
def test_frames_are_chosen_one_by_one() -> None:
    model, batch = make_joint("llava"), prompt("llava", (3, 1))
    images = batch["input_ids"] == IMAGE
    mmod.route_(model, language=mmod.preset("videollm-mod", capacity=1 / 3, init_std=0.2))
    with mmod.trace(model) as decisions:
        model(**batch)
    for routing in decisions.values():
        kept = (routing.keep_BN & images)[images].view(-1, PATCHES)
        assert kept.sum(1).tolist() == [PATCHES // 3] * 4
    mmod.unroute_(model)
    mmod.route_(model, language=LINEAR.replace(frames=3, capacity=0.67))
    with mmod.trace(model) as decisions:
        model(**batch)
    for routing in decisions.values():
        assert (routing.keep_BN & images)[images].view(-1, 3).sum(1).tolist() == [2] * 12
    mmod.unroute_(model)
    mmod.route_(model, language=LINEAR.replace(frames=4))
    with pytest.raises(ValueError, match="frames=4 does not divide"):
        model(**batch)


@given(data=st.data(), samples=st.integers(1, 3), tokens=st.integers(1, 12), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_selection_within_roles_equals_its_definition(data: Any, samples: int, tokens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    score = torch.randint(0, 4, (samples, tokens), generator=generator).float()
    valid = torch.rand(samples, tokens, generator=generator) < 0.8
    free = torch.rand(samples, tokens, generator=generator) < 0.6
    frames = data.draw(st.sampled_from([None, "span"]))
    capacity = mmod.config.rational(data.draw(st.sampled_from([0.25, 0.5, 1.0])))
    roles = assign_roles(free, free, valid, frames, strict=False)
    index, slot_valid = select_within(score, capacity, roles)
    for row in range(samples):
        expected = {place for place in range(tokens) if valid[row, place] and not free[row, place]}
        groups: dict[int, list[int]] = {}
        for place in range(tokens):
            if roles.group_BN[row, place] > 0:
                groups.setdefault(int(roles.group_BN[row, place]), []).append(place)
        for members in groups.values():
            number = max(1, len(members) * capacity.numerator // capacity.denominator)
            expected |= set(sorted(members, key=lambda place, row=row: (-score[row, place], place))[:number])
        kept = index[row] if slot_valid is None else index[row][slot_valid[row]]
        assert kept.tolist() == sorted(expected)
        assert len(set(index[row].tolist())) == index.shape[1]


@torch.no_grad()
def test_packed_samples_are_routed_apart() -> None:
    model = mmod.route_(make_language("llama"), LINEAR.replace(tokens="all"))
    first, second = torch.randint(3, IMAGE, (1, 9)), torch.randint(3, IMAGE, (1, 6))
    apart = [model(input_ids=ids, use_cache=False).logits for ids in (first, second)]
    place = torch.cat([torch.arange(9), torch.arange(6)]).unsqueeze(0)
    packed = model(input_ids=torch.cat([first, second], 1), position_ids=place, use_cache=False).logits
    torch.testing.assert_close(packed, torch.cat(apart, 1), atol=1e-5, rtol=1e-4)


def test_wrong_use_is_refused() -> None:
    model = make_joint("llava")
    model.config.image_token_id = None
    with pytest.raises(ValueError, match="says nothing of an image token"):
        mmod.route_(model, language=LINEAR)
    model = make_joint("llava")
    with pytest.raises(ValueError, match="do not exist"):
        mmod.route_(model, language=LINEAR.replace(blocks=(1, 9)))
    with pytest.raises(ValueError, match="no layer of a language model, so it takes no shared"):
        mmod.route_(model, vision=LINEAR.replace(shared=True))
    with pytest.raises(ValueError, match="has no part text"):
        mmod.route_(model, text=LINEAR)
    with pytest.raises(ValueError, match="says nothing of an image token"):
        mmod.route_(make_language("llama"), LINEAR.replace(tokens="image"))
    with pytest.raises(ValueError, match="compact"):
        mmod.route_(make_joint("qwen2-vl"), language=LINEAR.replace(positions="compact"))
    with pytest.raises(ValueError, match="has no part vision"):
        mmod.route_(make_joint("qwen2-vl"), vision=LINEAR)
    assert not mmod.is_routed(model)
    mmod.route_(model, language=LINEAR.replace(capacity=0.1))
    with pytest.raises(ValueError, match="keeps none of 9 image tokens"):
        model(**prompt("llava", (1,)))
    with pytest.raises(RuntimeError, match="call the model that was routed"):
        model.model.language_model(input_ids=torch.tensor([[3, 4]]))
    with pytest.raises(ValueError, match="already routed"):
        mmod.route_(model, language=LINEAR)


def test_unknown_families_are_refused() -> None:
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=IMAGE)
    with pytest.raises(ValueError, match="cannot route GPT2LMHeadModel: supported are"):
        mmod.route_(transformers.GPT2LMHeadModel(config))
    vision = make_joint("llava-onevision").config.vision_config
    text = {"model_type": "gemma", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 100}
    other = transformers.PaliGemmaConfig(text_config=text, vision_config=vision, projection_dim=16)
    with pytest.raises(ValueError, match="its image tokens are found in LlavaModel"):
        mmod.route_(transformers.PaliGemmaForConditionalGeneration(other), language=LINEAR)


def test_unmasked_attention_implementations_are_refused() -> None:
    model = mmod.route_(make_language("llama"), LINEAR.replace(blocks=(0,)))
    model.config._attn_implementation = "an attention of its own"
    with torch.no_grad(), pytest.raises(ValueError, match="no mask that can be narrowed"):
        model(**words())


@pytest.mark.parametrize(
    "wrong",
    [
        {"frames": 0}, {"frames": "span", "tokens": "all"}, {"frames": 2, "select": "threshold"}, {"tokens": "text"},
        {"shared": True, "router": "attention"}, {"gate_on": "mlp", "gate": "identity"}, {"inference_threshold": 1.0},
        {"inference_threshold": 0.5, "select": "threshold"}, {"predictor": True}, {"positions": "none"},
        {"normalize": "none"},
    ],
    ids=str,
)  # fmt: skip
def test_options_that_exclude_each_other(wrong: dict[str, Any]) -> None:
    (option, *_) = wrong
    with pytest.raises(ValueError, match=option):
        mmod.RoutingConfig(**{"router": "linear", **wrong})


def test_gradient_checkpointing_changes_no_gradient() -> None:
    batch = prompt("llava", (1, 2))
    gradients = []
    for reentrant in (None, False):
        model = make_joint("llava")
        mmod.route_(model, language=LINEAR.replace(losses={"membership": 0.1}, gate_on="branches"))
        model.train()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        labels = batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, -100)
        loss = model(**batch, labels=labels).loss + mmod.auxiliary_loss(model)
        loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert any("router" in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], msg=name)


def test_a_batch_without_images_trains_too() -> None:
    config = mmod.preset("p-mod", capacity=0.5, blocks=(1, 3), losses={"membership": 0.1})
    model = mmod.route_(make_joint("llava"), language=config).train()
    batch = prompt("llava", (0, 0))
    loss = model(**batch, labels=batch["input_ids"]).loss + mmod.auxiliary_loss(model)
    loss.backward()
    for block in mmod.routed_blocks(model).values():
        assert isinstance(block.router, RoleRouter)
        assert block.router.score.weight.grad is not None
        assert not block.router.score.weight.grad.any()


def test_predictor_sends_no_gradient_into_the_model() -> None:
    config = LINEAR.replace(
        tokens="all", predictor=True, inference_threshold=0.5, losses={"membership": 1.0}, gate="linear"
    )
    model = mmod.route_(make_language("llama"), config).train()
    model(**words())
    mmod.auxiliary_loss(model).backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert trained
    assert all(".predictor." in name for name in trained)


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
    assert sum("router_score" in key for key in again.state_dict()) == 1
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


def test_routed_layers_stay_whole_when_a_model_is_split() -> None:
    model = mmod.route_(make_joint("llava"), language=mmod.RoutingConfig(capacity=0.5))
    layers = {type(layer).__name__ for layer in model.model.language_model.layers}
    assert len(layers) == 2
    assert layers <= set(model._no_split_modules)
    mmod.unroute_(model)
    assert not layers & set(model._no_split_modules)


def test_hidden_states_have_all_tokens() -> None:
    model, batch = mmod.route_(make_joint("llava"), language=LINEAR), prompt("llava", (1, 2))
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states
    assert [state.shape[1] for state in states] == [batch["input_ids"].shape[1]] * 5


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_importance_is_the_mean_of_the_map(attention: str) -> None:
    config = mmod.RoutingConfig(capacity=0.5, blocks=(1,))
    batch = prompt("llava", (1, 2))
    model = make_joint("llava", attention="eager")
    maps = model(**batch, output_attentions=True).attentions[0]
    real = batch["attention_mask"].bool()
    model = mmod.route_(make_joint("llava", attention=attention), language=config)
    with mmod.trace(model) as decisions:
        model(**batch)
    (routing,) = decisions.values()
    for row in range(2):
        expected = maps[row][:, real[row]].mean(dim=(0, 1))
        torch.testing.assert_close(routing.score_BN[row][real[row]], expected[real[row]], atol=1e-6, rtol=1e-4)


@torch.no_grad()
def test_vision_tower_runs_on_fewer_patches() -> None:
    for name in ("llava", "llava-onevision"):
        model, batch = make_joint(name), prompt(name, (1, 2))
        dense = model(**batch).logits
        mmod.route_(model, vision=EVERY_TOKEN)
        torch.testing.assert_close(model(**batch).logits, dense, atol=1e-5, rtol=1e-4)
        mmod.unroute_(model)
        mmod.route_(model, vision=mmod.RoutingConfig(capacity=0.5), language=LINEAR)
        with mmod.trace(model) as decisions:
            assert not torch.equal(model(**batch).logits, dense)
        assert {name for name in decisions if "vision" in name}
        assert all(
            int(r.keep_BN.sum(1).max()) == r.score_BN.shape[1] // 2 for n, r in decisions.items() if "vision" in n
        )
    tower = transformers.CLIPVisionModel(make_joint("llava").config.vision_config)
    mmod.route_(tower.eval(), mmod.RoutingConfig(router="linear", select="threshold"))
    assert tower(torch.randn(2, 3, 12, 12)).last_hidden_state.shape == (2, 10, 16)


@torch.no_grad()
@pytest.mark.parametrize("gate_on", ["mlp", "branches"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3"])
def test_gates_on_branches_match_a_written_out_layer(name: str, gate_on: str) -> None:
    config = LINEAR.replace(tokens="all", gate="sigmoid", gate_scale=1.0, gate_on=gate_on, blocks=(1,), capacity=1.0)
    model, batch = mmod.route_(make_language(name), config), {"input_ids": torch.randint(3, IMAGE, (1, 8))}
    (block,) = mmod.routed_blocks(model).values()
    seen: dict[str, Tensor] = {}
    block.register_forward_hook(lambda module, inputs, output: seen.update(x=inputs[0], y=output))
    with mmod.trace(model) as decisions:
        model(**batch)
    (routing,) = decisions.values()
    gate = torch.sigmoid(routing.score_BN).unsqueeze(-1)
    first = gate if gate_on == "branches" else torch.ones_like(gate)
    dense: Any = mmod.unroute_(copy.deepcopy(model))
    expected = _written_out(dense.model.layers[1], seen["x"], dense, first, gate)
    torch.testing.assert_close(seen["y"], expected, atol=1e-5, rtol=1e-4)


def _written_out(layer: Any, x: Tensor, model: Any, first: Tensor, second: Tensor) -> Tensor:
    sandwich = hasattr(layer, "pre_feedforward_layernorm")
    tokens = x.shape[1]
    place = torch.arange(tokens).unsqueeze(0)
    rotary = model.model.rotary_emb
    kinds = getattr(model.config, "layer_types", None)
    embeddings = rotary(x, place, kinds[1]) if sandwich and kinds else rotary(x, place)
    attended = layer.self_attn(layer.input_layernorm(x), position_embeddings=embeddings, attention_mask=None)[0]
    if sandwich:
        h = x + first * layer.post_attention_layernorm(attended)
        return h + second * layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(h)))
    h = x + first * attended
    return h + second * layer.mlp(layer.post_attention_layernorm(h))
