"""Routed language and vision-language models: what they compute, against the dense model and written-out layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmod
from tests.kit.cover import cover, in_turn
from tests.kit.threads import assert_right_in_threads
from tests.kit.vlm_zoo import (
    APART,
    IMAGE,
    LANGUAGE,
    LINEAR,
    OTHERS,
    SLIDING,
    make_joint,
    make_language,
    prompt,
)
from tests.kit.zoo import make_model

ATTENTION = ("sdpa", "eager")
EVERY_TOKEN = mmod.RoutingConfig(router="stride", capacity=1.0, blocks="all")
# Types whose layers are like those of others, but for two that no table takes.
ALIKE = [name for name in OTHERS if name not in APART or name in ("qwen3_5", "molmo2")]


# tests/test_every_host.py has the others.
@torch.no_grad()
@pytest.mark.parametrize(("name", "attention"), in_turn(ALIKE, ATTENTION))
def test_capacity_1_is_the_dense_joint_model(name: str, attention: str) -> None:
    images = (2,) if name.endswith(SLIDING) else (1, 0, 2)
    # Layer 2 of Qwen3.5 has linear attention.
    config = EVERY_TOKEN.replace(blocks=(0, 1, 3)) if name.startswith("qwen3_5") else EVERY_TOKEN
    model, batch = make_joint(name, attention=attention), prompt(name, images)
    real = batch["attention_mask"].bool()
    dense = model(**batch).logits
    mmod.route_(model, language=config)
    torch.testing.assert_close(model(**batch).logits[real], dense[real], atol=1e-5, rtol=1e-4)
    assert torch.equal(mmod.unroute_(model)(**batch).logits, dense)


@torch.no_grad()
def test_bf16_is_bitwise_dense() -> None:
    model, batch = make_joint("llava").bfloat16(), prompt("llava", (2,))
    batch["pixel_values"] = batch["pixel_values"].bfloat16()
    dense = model(**batch).logits
    assert torch.equal(mmod.route_(model, language=EVERY_TOKEN)(**batch).logits, dense)


def test_gradient_checkpointing_changes_no_gradient() -> None:
    batch = prompt("llava", (1, 2))
    gradients = []
    for reentrant in (None, False):
        model = make_joint("llava")
        mmod.route_(model, language=LINEAR.replace(losses={"membership": 0.1}, language={"gate_on": "branches"}))
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


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma2", "llava", "llava-onevision", "qwen2.5-vl", "qwen3-vl"])
def test_attention_maps_have_the_index_of_their_layer(name: str) -> None:
    model: Any = make_language(name) if name in LANGUAGE else make_joint(name, attention="eager")
    model.set_attn_implementation("eager")
    batch = {"input_ids": torch.randint(3, IMAGE, (1, 12))} if name in LANGUAGE else prompt(name, (1, 2))
    config = LINEAR.replace(
        language={"tokens": "all"},
        select={"name": "threshold", "threshold": 0.5},
        gate="sigmoid",
        router={"bias": True},
    )
    mmod.route_(model, language=config)
    nothing, _ = mmod.routed_blocks(model).values()
    nothing.router.score.bias.fill_(-1e9)
    with mmod.trace(model) as decisions:
        maps = model(**batch, output_attentions=True).attentions
    samples, tokens = batch["input_ids"].shape
    kept = list(decisions.values())[1].keep_BN.sum(1)
    assert 0 < int(kept.max()) < tokens
    lengths = [tokens, 0, tokens, int(kept.max())]
    assert [tuple(attention_map.shape) for attention_map in maps] == [
        (samples, 4, length, length) for length in lengths
    ]
    for row, count in enumerate(kept.tolist()):
        attention = maps[3][row, :, :count, :count]
        torch.testing.assert_close(attention.sum(-1), torch.ones(4, count))
        assert not attention.triu(1).any()


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "importance", "side", "attention"),
    cover(
        ["llava", "llava-qwen2", "llava-mistral-window"],
        ["mean", "per_viewer", "last_token"],
        ["left", "right"],
        ["sdpa", "eager"],
    ),
)
def test_importance_is_read_from_the_map(name: str, importance: str, side: str, attention: str) -> None:
    config = mmod.RoutingConfig(capacity=0.5, blocks=(1, 2), router={"name": "attention", "importance": importance})
    batch = prompt(name, (1, 2), side=side)
    maps = make_joint(name, attention="eager")(**batch, output_attentions=True).attentions[0]
    real = batch["attention_mask"].bool()
    model = mmod.route_(make_joint(name, attention=attention), language=config)
    with mmod.trace(model) as decisions:
        model(**batch)
    first, second = decisions.values()
    # A span decides once.
    assert torch.equal(first.keep_BN, second.keep_BN)
    for row in range(2):
        attention_map = maps[row][:, real[row]][:, :, real[row]]
        if importance == "last_token":
            attention_map = attention_map[:, -1:]
        if importance == "per_viewer":
            sees = attention_map > 0
            attention_map = attention_map * sees.sum(-1, keepdim=True) / sees.sum(1, keepdim=True)
        torch.testing.assert_close(first.score_BN[row][real[row]], attention_map.mean(dim=(0, 1)), atol=1e-6, rtol=1e-4)


def test_importance_of_the_last_token_costs_one_query_and_is_for_language_models() -> None:
    last = mmod.RoutingConfig(router=mmod.score("attention", importance="last_token"), capacity=0.5, blocks=(2, 3))
    costs = []
    for importance in ("last_token", "mean"):
        model = mmod.route_(make_joint("llava"), language=last.replace(router={"importance": importance}))
        costs.append(mmod.flops(model, mmod.Prompt(5, 9)).importance)
    assert costs[0] * 14 == costs[1]
    with pytest.raises(ValueError, match=r"is no layer of a language model: remove router\.importance='last_token'"):
        mmod.route_(make_model("test_vit"), last)


@pytest.mark.parametrize("name", ["gamma-mod", "p-mod", "a-mod"])
def test_a_pool_of_threads_computes_what_one_thread_does(name: str) -> None:
    config = mmod.preset(name, depth=6, **({"blocks": "late"} if name == "a-mod" else {}))
    model = mmod.route_(make_joint("llava", num_hidden_layers=6), language=config)
    batches = [prompt("llava", (1, 2), seed=seed) for seed in range(4)]
    assert_right_in_threads(lambda batch: model(**batch).logits, batches)


@torch.no_grad()
@pytest.mark.parametrize("gate_on", ["mlp", "branches"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3"])
def test_gates_on_branches_weigh_what_the_dense_layer_adds(name: str, gate_on: str) -> None:
    config = LINEAR.replace(
        language={"tokens": "all", "gate_on": gate_on},
        gate={"name": "sigmoid", "scale": 1.0},
        blocks=(1,),
        capacity=1.0,
    )
    model, batch = mmod.route_(make_language(name), config), {"input_ids": torch.randint(3, IMAGE, (1, 8))}
    (block,) = mmod.routed_blocks(model).values()
    calls: list[Any] = []
    handle = block.register_forward_hook(lambda _, *call: calls.append(call), with_kwargs=True)
    with mmod.trace(model) as decisions:
        model(**batch, use_cache=False)
    handle.remove()
    ((args, kwargs, actual),) = calls
    (routing,) = decisions.values()
    gate = torch.sigmoid(routing.score_BN).unsqueeze(-1)

    def weigh(module: Any, args: Any, output: Any) -> Any:
        return (gate * output[0], *output[1:]) if isinstance(output, tuple) else gate * output

    layer: Any = mmod.unroute_(model).model.layers[1]
    branches = ["self_attn", "mlp"]
    if hasattr(layer, "pre_feedforward_layernorm"):
        # Norms stand behind the branches.
        branches = ["post_attention_layernorm", "post_feedforward_layernorm"]
    for branch in branches if gate_on == "branches" else branches[1:]:
        layer.get_submodule(branch).register_forward_hook(weigh)
    torch.testing.assert_close(actual, layer(*args, **kwargs), atol=1e-5, rtol=1e-4)
