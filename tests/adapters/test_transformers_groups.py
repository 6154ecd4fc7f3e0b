"""Routed language and vision-language models: who may be skipped, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import mmod
from mmod.routing import DecoderRouter, assign_groups, select_within
from tests.kit.cover import cover, in_turn
from tests.kit.vlm_types import SMALL
from tests.kit.vlm_zoo import (
    IMAGE,
    LANGUAGE,
    LINEAR,
    make_joint,
    make_language,
    merged_embeddings,
    prompt,
    words,
)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llava", "llava-onevision", "qwen3-vl"])
def test_skipped_image_tokens_pass_unchanged_and_text_never_does(name: str) -> None:
    model, batch = mmod.route_(make_joint(name), language=LINEAR), prompt(name, (1, 0, 3))
    recorded: dict[str, tuple[Tensor, Tensor]] = {}
    handles = [
        block.register_forward_hook(lambda m, i, o, block=block_name: recorded.update({block: (i[0], o)}))
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
        before, after = recorded[block_name]
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
@pytest.mark.parametrize(
    ("name", "way"),
    in_turn(
        ["llava", "llava-next", "llava-onevision", "qwen2-vl", "qwen2.5-vl"],
        [("p-mod", "image_mask"), ("videollm-mod", "mm_token_type_ids"), ("a-mod", "image_mask")],
    ),
    ids=str,
)
def test_merged_embeddings_say_where_images_are_or_are_refused(name: str, way: tuple[str, str]) -> None:
    method, mask_name = way
    model, batch = make_joint(name), prompt(name, (1, 0, 2))
    ids = batch["input_ids"]
    if name.startswith("qwen"):
        batch["position_ids"] = torch.arange(ids.shape[1]).expand(3, len(ids), -1)
    embeds = merged_embeddings(model, batch)
    mmod.route_(model, language=mmod.preset(method, blocks=(1, 2), capacity=0.5))
    for block in mmod.routed_blocks(model).values():
        if method != "a-mod":
            block.router.score.weight.normal_(std=0.2)
    expected = model(**batch).logits
    inputs = {key: batch[key] for key in ("attention_mask", "position_ids") if key in batch}
    with pytest.raises(ValueError, match="the image tokens are unknown: pass input_ids or image_mask"):
        model(inputs_embeds=embeds, **inputs)
    real = batch["attention_mask"].bool()
    logits = model(inputs_embeds=embeds, **{mask_name: (ids == IMAGE).long()}, **inputs).logits
    torch.testing.assert_close(logits[real], expected[real], atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=f"{mask_name} has shape"):
        model(inputs_embeds=embeds, **{mask_name: (ids == IMAGE)[:, 1:]}, **inputs)
    words = model.get_input_embeddings()(torch.randint(3, IMAGE, (2, 7)))
    nothing = torch.zeros(2, 7, dtype=torch.bool)
    with mmod.trace(model) as decisions:
        model(inputs_embeds=words, image_mask=nothing)
    assert not decisions


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "router", "training"),
    cover(
        ["llama", "gemma3", "llava", "llava-onevision", "qwen2.5-vl", "qwen3-vl"],
        ["linear", "attention"],
        [False, True],
    ),
)
def test_an_empty_batch_fares_as_in_the_dense_model(name: str, router: str, training: bool) -> None:
    model = (make_language(name) if name in LANGUAGE else make_joint(name)).train(training)

    def outcome(**mask: Tensor) -> str:
        inputs = {"input_ids": torch.empty(0, 7, dtype=torch.long), **mask}
        if name.startswith("qwen2"):
            inputs["position_ids"] = torch.empty(3, 0, 7, dtype=torch.long)
        # Attention layers of transformers 5 cannot be reshaped without a sample.
        with pytest.raises(RuntimeError) as raised:
            model(**inputs)
        return str(raised.value)

    masks: list[dict[str, Tensor]] = [{}, {"attention_mask": torch.empty(0, 7, dtype=torch.long)}]
    dense = [outcome(**mask) for mask in masks]
    mmod.route_(
        model,
        language=mmod.RoutingConfig(router=router, capacity=0.5, blocks=(0, 1, 3) if router == "linear" else (1, 3)),
    )
    assert [outcome(**mask) for mask in masks] == dense


@torch.no_grad()
def test_protected_tokens_are_kept() -> None:
    config = LINEAR.replace(language={"tokens": "all"}, capacity=0.25)
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
def test_frames_of_a_size_are_chosen_one_by_one() -> None:
    model, batch = make_joint("llava"), prompt("llava", (3, 1))
    images = batch["input_ids"] == IMAGE
    mmod.route_(model, language=LINEAR.replace(language={"tokens": 3}, capacity=0.67))
    with mmod.trace(model) as decisions:
        model(**batch)
    for routing in decisions.values():
        assert (routing.keep_BN & images)[images].view(-1, 3).sum(1).tolist() == [2] * 12
    mmod.unroute_(model)
    mmod.route_(model, language=LINEAR.replace(language={"tokens": 4}))
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
    groups = assign_groups(free, free, valid, frames, strict=False)
    index, slot_valid, total, *_ = select_within(score, capacity, groups)
    assert total == (index.numel() if slot_valid is None else int(slot_valid.sum()))
    for row in range(samples):
        expected = {place for place in range(tokens) if valid[row, place] and not free[row, place]}
        places: dict[int, list[int]] = {}
        for place in range(tokens):
            if groups.group_BN[row, place] > 0:
                places.setdefault(int(groups.group_BN[row, place]), []).append(place)
        for members in places.values():
            number = max(1, len(members) * capacity.numerator // capacity.denominator)
            expected |= set(sorted(members, key=lambda place, row=row: (-score[row, place], place))[:number])
        kept = index[row] if slot_valid is None else index[row][slot_valid[row]]
        assert kept.tolist() == sorted(expected)
        assert len(set(index[row].tolist())) == index.shape[1]


def test_a_batch_without_images_trains_too() -> None:
    config = mmod.preset("p-mod", capacity=0.5, blocks=(1, 3), losses={"membership": 0.1})
    model = mmod.route_(make_joint("llava"), language=config).train()
    batch = prompt("llava", (0, 0))
    loss = model(**batch, labels=batch["input_ids"]).loss + mmod.auxiliary_loss(model)
    loss.backward()
    for block in mmod.routed_blocks(model).values():
        assert isinstance(block.router, DecoderRouter)
        assert block.router.score.weight.grad is not None
        assert not block.router.score.weight.grad.any()


def test_predictor_sends_no_gradient_into_the_model() -> None:
    config = LINEAR.replace(
        language={"tokens": "all", "predictor": True, "inference_threshold": 0.5},
        losses={"membership": 1.0},
        gate="linear",
    )
    model = mmod.route_(make_language("llama"), config).train()
    model(**words())
    mmod.auxiliary_loss(model).backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert trained
    assert all(".predictor." in name for name in trained)


# By the host's name and the part: its routing, and what the message says.
REFUSED: list[tuple[str, str, mmod.RoutingConfig, str]] = [
    ("llava", "image", LINEAR.replace(language={"scored": "norm"}), r"no layer .*: remove language\.scored"),
    ("llava", "image", LINEAR.replace(router={"tied": True}), r"no layer of a language model: remove router\.tied"),
    ("llava", "language", LINEAR.replace(router={"shared": True}), r"shared is for images and captions, .* generates"),
    ("llava", "language", LINEAR.replace(select=mmod.Threshold(0.5, min_tokens=1)), "threshold takes neither"),
    ("qwen2-vl", "language", LINEAR.replace(language={"positions": "compact"}), "compact"),
    ("llama", "language", mmod.preset("mindskip", depth=4), r"router\.per='sequence' is for images and captions"),
    ("llama", "image", LINEAR, "has no part image"),
]


@pytest.mark.parametrize(("host", "part", "config", "message"), REFUSED)
def test_a_routing_that_does_not_fit_is_refused_before_anything_changes(
    host: str, part: str, config: mmod.RoutingConfig, message: str
) -> None:
    model = make_language(host) if host == "llama" else make_joint(host)
    with pytest.raises(ValueError, match=message):
        mmod.route_(model, **{part: config})
    assert not mmod.is_routed(model)


def test_wrong_calls_are_refused() -> None:
    model = make_joint("llava")
    model.config.image_token_id = None
    with pytest.raises(ValueError, match="names no image token"):
        mmod.route_(model, language=LINEAR)
    model = mmod.route_(make_joint("llava"), language=LINEAR.replace(capacity=0.1))
    with pytest.raises(ValueError, match="keeps none of 9 image tokens"):
        model(**prompt("llava", (1,)))
    with pytest.raises(RuntimeError, match="call the routed model"):
        model.model.language_model(input_ids=torch.tensor([[3, 4]]))


def test_unknown_families_are_refused() -> None:
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=IMAGE)
    with pytest.raises(ValueError, match="cannot route GPT2LMHeadModel: supported are"):
        mmod.route_(transformers.GPT2LMHeadModel(config), mmod.RoutingConfig())
    text = transformers.Llama4TextConfig(**SMALL)
    with pytest.raises(ValueError, match="cannot route Llama4ForCausalLM: supported are"):
        mmod.route_(transformers.Llama4ForCausalLM(text), language=LINEAR)


@torch.no_grad()
def test_layers_that_share_keys_are_refused() -> None:
    model, batch = make_joint("gemma4", num_kv_shared_layers=1), prompt("gemma4", (1, 2))
    valid = batch["attention_mask"].bool()
    expected = model(**batch).logits[valid]
    # The last layer takes the keys of the second.
    for block in (1, 3):
        with pytest.raises(ValueError, match="Gemma4TextDecoderLayer: it takes shared_kv_states, whose part for kept"):
            mmod.route_(model, language=LINEAR.replace(blocks=(block,)))
    mmod.route_(model, language=mmod.RoutingConfig(router="stride", blocks=(0,), capacity=1.0))
    torch.testing.assert_close(model(**batch).logits[valid], expected, atol=2e-5, rtol=1e-4)


def test_attention_that_counts_positions_is_refused() -> None:
    class Counting(transformers.models.llama.modeling_llama.LlamaAttention):
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
            place = torch.arange(hidden_states.shape[1])
            return super().forward(hidden_states * torch.log1p(place)[:, None], **kwargs)

    model: Any = make_language("llama")
    model.model.layers[1].self_attn.__class__ = Counting
    with pytest.raises(ValueError, match="its attention counts positions itself, and would count among kept tokens"):
        mmod.route_(model, language=LINEAR)


class Mixing(nn.Module):
    """A module that mixes tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.ones(8, 1, 3))


@pytest.mark.parametrize("place", ["", "self_attn"])
def test_layers_with_modules_of_their_own_are_refused(place: str) -> None:
    model: Any = make_language("llama")
    model.model.layers[3].get_submodule(place).add_module("conv", Mixing())
    reason = "its attention has the module conv" if place else "it has the module conv"
    with pytest.raises(ValueError, match=f"cannot route a LlamaDecoderLayer: {reason}, which may mix tokens"):
        mmod.route_(model, language=LINEAR)
    mmod.route_(model, language=LINEAR.replace(blocks=(1,)))


def test_models_that_keep_keywords_to_themselves_are_refused() -> None:
    class Closed(type(make_joint("llava").model)):  # type: ignore[misc]
        def forward(self, input_ids: Any, pixel_values: Any = None, attention_mask: Any = None) -> Any:
            return super().forward(input_ids=input_ids, pixel_values=pixel_values, attention_mask=attention_mask)

    model: Any = make_joint("llava")
    model.model.__class__ = Closed
    with pytest.raises(ValueError, match="language model of a Closed: its forward passes no keywords on"):
        mmod.route_(model, language=LINEAR)


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_linear_attention_sees_every_token(name: str) -> None:
    model: Any = make_joint(name)
    for operator in ("block", "attention"):
        config = LINEAR.replace(blocks=(1, 2), operator=operator)
        with pytest.raises(ValueError, match=r"layers with attention, which are blocks=\(0, 1, 3\)"):
            mmod.route_(model, language=config)
    attention = mmod.RoutingConfig(router="attention", blocks=(3,))
    with pytest.raises(ValueError, match=r"the linear attention of \S+layers\.2 has no map"):
        mmod.route_(model, language=attention)
    mmod.route_(model, language=LINEAR.replace(blocks=(2,), operator="mlp", gate="identity"))
    layer: Any = model.model.language_model.layers[2]
    recorded: dict[str, Tensor] = {}
    layer.linear_attn.register_forward_hook(lambda module, args, update: recorded.update(update=update))
    layer.register_forward_hook(lambda module, args, output: recorded.update(x=args[0], y=output))
    with mmod.trace(model) as decisions:
        model(**prompt(name, (1, 2)))
    (routing,) = decisions.values()
    middle = recorded["x"] + recorded["update"]
    mmod.unroute_(model)
    updated = middle + layer.mlp(layer.post_attention_layernorm(middle))
    expected = torch.where(routing.keep_BN.unsqueeze(-1), updated, middle)
    torch.testing.assert_close(recorded["y"], expected, atol=1e-5, rtol=1e-4)


def test_unmasked_attention_implementations_are_refused() -> None:
    model = mmod.route_(make_language("llama"), LINEAR.replace(blocks=(0,)))
    model.config._attn_implementation = "an attention of its own"
    with torch.no_grad(), pytest.raises(ValueError, match="no mask that can be narrowed"):
        model(**words())
