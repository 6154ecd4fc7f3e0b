"""What skipped tokens miss and what kept ones see: each option against a slow definition, and through a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import mmod
from mmod.adapters.transformers.cache_base import RoutedCacheLayer, cache_of
from tests.kit.cover import in_turn
from tests.kit.generation import NO_IMAGES, check_cache_changes_nothing
from tests.kit.operators import Layers, weighed
from tests.kit.vlm_types import SMALL
from tests.kit.vlm_zoo import (
    APART,
    IMAGE,
    JOINT,
    LANGUAGE,
    MINISTRAL,
    lively,
    make_joint,
    make_language,
    prompt,
    words,
)

WAYS = [("block", "all"), ("attention", "kept"), ("attention", "all"), ("mlp", "kept")]
LINEAR = mmod.RoutingConfig(router=mmod.score("linear", init_std=0.2), blocks=(1, 3), capacity=0.5)
FROZEN = mmod.RoutingConfig(router="stride", blocks=(1, 2, 3), capacity=0, context="all")
# Their image tokens see each other.
SEEING = ("gemma3-vision", "paligemma")
# Of gates, Gemma's norms behind the branches leave the identity alone.
NORMED = ("gemma2", "gemma3")


def defined(layer: Any, x: Tensor, routing: mmod.Routing, way: tuple[str, str], arguments: dict[str, Any]) -> Tensor:
    """Return a routed layer's output by the definition: the dense layer with its mask, and a hook on a branch."""
    operator, context = way
    keep, tokens = routing.keep_BN, x.shape[1]
    mask = arguments["attention_mask"]
    if mask is None:
        mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril()
    pairs = mask if mask.dtype == torch.bool else mask == 0
    pairs = pairs & (routing.tokens.group_BN >= 0)[:, None, None, :]
    if context == "kept" and operator != "mlp":
        pairs = pairs & keep[:, None, None, :]
    bias = torch.zeros_like(pairs, dtype=x.dtype).masked_fill(~pairs, torch.finfo(x.dtype).min)
    branch = {"block": None, "attention": "self_attn"}.get(operator, operator)
    return weighed(layer, x, routing, branch, {**arguments, "attention_mask": bias})


def check_definition(model: Any, batch: dict[str, Any], way: tuple[str, str], error: float = 1e-9) -> None:
    layers = Layers(model)
    with torch.no_grad(), mmod.trace(model) as decisions:
        model(**batch, use_cache=False)
    mmod.unroute_(model)
    valid = batch["attention_mask"].bool()
    for name, (x, arguments, out) in layers.recorded.items():
        with torch.no_grad():
            expected = defined(model.get_submodule(name), x, decisions[name], way, arguments)
        torch.testing.assert_close(out[valid], expected[valid], rtol=100 * error, atol=error)


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}


@pytest.mark.parametrize(("name", "way"), in_turn([name for name in JOINT if name not in SEEING], WAYS))
def test_image_tokens_by_the_definition_in_every_family(name: str, way: tuple[str, str]) -> None:
    for capacity in (0.5, 0):
        config = LINEAR.replace(operator=way[0], context=way[1], capacity=capacity)
        model = mmod.route_(make_joint(name).double(), language=config)
        for images in ((1, 0, 2), (2,)):
            check_definition(model, doubled(prompt(name, images)), way)
            mmod.route_(model, language=config)


@pytest.mark.parametrize(("name", "way"), in_turn([*SEEING, *APART], [("block", "kept"), *WAYS]))
def test_image_tokens_by_the_dense_layer_in_every_family(name: str, way: tuple[str, str]) -> None:
    model = make_joint(name).double()
    gate = "sigmoid" if way[0] == "block" else "identity"
    config = LINEAR.replace(operator=way[0], context=way[1], gate=gate)
    if name == "kimi_k25" and way[1] == "all":
        with pytest.raises(ValueError, match=r"context='all' is not possible in \S+layers\.1, which supports kept"):
            mmod.route_(model, language=config)
        return
    for images in ((1, 0, 2), (2,)):
        mmod.route_(model, language=config)
        check_definition(model, doubled(prompt(name, images)), way)


@pytest.mark.parametrize(
    ("kind", "way"),
    in_turn(["cohere2", "granite", "mixtral", "olmo2", "ministral3", "glm4"], [("block", "kept"), *WAYS]),
)
def test_text_by_the_dense_layer_in_other_families(kind: str, way: tuple[str, str]) -> None:
    config = CONFIG_MAPPING[kind](**SMALL)
    config._experts_implementation = "eager"
    model = lively(transformers.AutoModelForCausalLM.from_config(config)).double()
    gate = "sigmoid" if way[0] == "block" else "identity"
    mmod.route_(model, language=LINEAR.replace(operator=way[0], context=way[1], gate=gate))
    check_definition(model, words(3), way)


def test_layers_without_a_norm_in_front_score_no_norm() -> None:
    model = lively(transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**SMALL)))
    with pytest.raises(ValueError, match="scored='norm' is not possible in a Olmo2DecoderLayer, which begins with no"):
        mmod.route_(model, language=LINEAR.replace(language={"scored": "norm"}))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma3-vision", {"sliding_window": 9}),
        ("gemma3-vision", {"sliding_window": 64}),
        ("paligemma", {}),
        ("llava-mistral-window", {"sliding_window": 64}),
        ("mistral3", MINISTRAL),
    ],
    ids=str,
)
@pytest.mark.parametrize("context", ["kept", "all"])
def test_samples_that_keep_different_numbers_attend_as_their_model_does(
    name: str, changes: dict[str, Any], context: str
) -> None:
    config = LINEAR.replace(select="threshold", gate="sigmoid", context=context)
    model = mmod.route_(make_joint(name, **changes).double(), language=config)
    check_definition(model, doubled(prompt(name, (1, 0, 2))), ("block", context))


@pytest.mark.parametrize(("name", "way"), in_turn(LANGUAGE, WAYS, times=2))
def test_text_by_the_definition_in_every_family(name: str, way: tuple[str, str]) -> None:
    config = LINEAR.replace(operator=way[0], context=way[1], gate="identity" if name in NORMED else None)
    model = mmod.route_(make_language(name).double(), language=config)
    # Eager attention, which Gemma 2 runs, takes its softmax in fp32, and gives NaN in fp64 where padding leads.
    eager = name == "gemma2"
    check_definition(model, words(1 if eager else 3), way, 1e-5 if eager else 1e-9)


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_text_alone_is_the_dense_model(way: tuple[str, str]) -> None:
    for name in ("llava", "qwen2-vl", "llava-mistral-window"):
        model, batch = make_joint(name), prompt(name, (0,))
        dense = model(**batch).logits
        mmod.route_(model, language=LINEAR.replace(operator=way[0], context=way[1], capacity=0))
        assert torch.equal(model(**batch).logits, dense)


@pytest.mark.parametrize(
    ("name", "config"),
    in_turn(
        ["llava", "qwen2-vl", "qwen3-vl", "gemma3-vision", "paligemma"],
        [FROZEN, *(LINEAR.replace(operator=o, context=c) for o, c in WAYS)],
    ),
)
def test_prefill_and_decode_equal_one_pass(name: str, config: mmod.RoutingConfig) -> None:
    gate = config.gate if config.operator == "block" or name != "gemma3-vision" else "identity"
    model = mmod.route_(make_joint(name), language=config.replace(gate=gate))
    for images in ((1, 0, 2), (1,)):
        check_cache_changes_nothing(model, prompt(name, images))


@pytest.mark.parametrize("way", WAYS)
def test_generation_by_beams_static_caches_and_without_a_cache(way: tuple[str, str]) -> None:
    config = LINEAR.replace(operator=way[0], context=way[1], capacity=(0, 0.5))
    model: Any = mmod.route_(make_joint("llava"), language=config)
    batch, options = prompt("llava", (1, 2)), {"max_new_tokens": 6, "pad_token_id": 0, **NO_IMAGES}
    for beams in (1, 3):
        cached = model.generate(**batch, **options, num_beams=beams, do_sample=False)
        plain = model.generate(**batch, **options, num_beams=beams, do_sample=False, use_cache=False)
        assert torch.equal(cached, plain)
    static = model.generate(**batch, **options, do_sample=False, cache_implementation="static")
    assert torch.equal(static, model.generate(**batch, **options, do_sample=False))


@pytest.mark.parametrize("way", [("block", "kept"), *WAYS])
def test_a_cache_holds_what_later_tokens_may_read(way: tuple[str, str]) -> None:
    config = FROZEN.replace(operator=way[0], context=way[1])
    model, batch = mmod.route_(make_joint("llava"), language=config), prompt("llava", (1,))
    text = int((batch["input_ids"] != IMAGE).sum())
    with torch.no_grad():
        cache = cache_of(model(**batch, use_cache=True))
    for index in config.blocks:
        layer = cache.layers[index]
        assert isinstance(layer, RoutedCacheLayer)
        assert layer.keys.shape[2] == (text if way[1] == "kept" and way[0] != "mlp" else batch["input_ids"].shape[1])
        assert layer.get_seq_length() == batch["input_ids"].shape[1]


def test_frozen_image_tokens_stay_as_they_are_and_are_read() -> None:
    model, batch = mmod.route_(make_joint("llava"), language=FROZEN), prompt("llava", (2,))
    image = batch["input_ids"] == IMAGE
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states
        blind = mmod.route_(mmod.unroute_(model), language=FROZEN.replace(context="kept"))(**batch).logits
        expected = mmod.route_(mmod.unroute_(model), language=FROZEN)(**batch).logits
    assert torch.equal(states[1][image], states[3][image])
    assert not torch.allclose(blind[~image], expected[~image], atol=1e-3)


@pytest.mark.parametrize("way", WAYS)
def test_recomputed_layers_have_the_same_gradients(way: tuple[str, str]) -> None:
    config = LINEAR.replace(operator=way[0], context=way[1])
    batch, grads = doubled(prompt("llava", (1, 2))), []
    for checkpointing in (False, True):
        model: Any = mmod.route_(make_joint("llava").double(), language=config).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(**batch, use_cache=False).logits.square().mean().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if "language" in name})
    assert all(grad is not None and bool(grad.abs().sum() > 0) for grad in grads[0].values())
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name])


def test_blocks_of_one_model_may_differ() -> None:
    config = mmod.RoutingConfig(
        router="stride",
        blocks=(0, 1, 2, 3),
        capacity=(0, 0.5, 0.5, 0),
        operator=("block", "attention", "mlp", "block"),
        context=("all", "all", "kept", "kept"),
    )
    assert mmod.RoutingConfig.from_dict(config.to_dict()) == config
    model = mmod.route_(make_joint("llava").double(), language=config)
    batch = doubled(prompt("llava", (1, 2)))
    layers, valid, plan = Layers(model), batch["attention_mask"].bool(), config.resolved(4)
    with torch.no_grad(), mmod.trace(model) as decisions:
        model(**batch, use_cache=False)
    mmod.unroute_(model)
    for (name, (x, arguments, out)), *way in zip(layers.recorded.items(), *list(zip(*plan.rows))[2:]):
        with torch.no_grad():
            expected = defined(model.get_submodule(name), x, decisions[name], (way[0], way[1]), arguments)
        torch.testing.assert_close(out[valid], expected[valid], rtol=1e-7, atol=1e-9)


def test_what_a_model_cannot_do_is_refused_before_it_is_changed() -> None:
    for name, changes, message in (
        ("gemma3", {"operator": "mlp"}, "norm after"),
        ("llama", {"capacity": 0}, "leaves|image tokens"),
        ("llama", {"operator": ("mlp", "block", "block")}, "one operator or as many"),
    ):
        model = make_language(name)
        with pytest.raises(ValueError, match=message):
            mmod.route_(model, LINEAR.replace(**changes))
        assert not mmod.is_routed(model)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma3"])
def test_text_decides_for_itself_while_it_is_decoded(name: str, way: tuple[str, str]) -> None:
    config = LINEAR.replace(
        operator=way[0],
        context=way[1],
        select="threshold",
        gate="identity" if name in NORMED else "sigmoid",
        language={"tokens": "all"},
    )
    check_cache_changes_nothing(mmod.route_(make_language(name), language=config), words(3))
