"""Generation with routed layers: a cache of kept tokens must change nothing but memory."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import UnbatchedClassifierFreeGuidanceLogitsProcessor

import mmod
from mmod.adapters.transformers.cache_base import CACHE, cache_of
from mmod.lab import Experts, Recursions
from tests.kit.cover import cover, in_turn
from tests.kit.generation import EVERYTHING, IMAGES_ONLY, SCORE, check_cache_changes_nothing, generate, routed
from tests.kit.interrupts import Interrupt
from tests.kit.vlm_zoo import (
    APART,
    IMAGE,
    JOINT,
    OTHERS,
    PATCHES,
    WITHOUT_PIXELS,
    make_joint,
    make_language,
    merged_embeddings,
    pad,
    prompt,
    sample_of,
)

BY_ATTENTION = {
    average: IMAGES_ONLY["attention"].replace(router={"importance": average}) for average in ("mean", "last_token")
}


@pytest.mark.parametrize(
    ("method", "way"),
    in_turn([*IMAGES_ONLY, *BY_ATTENTION], [("left", False), ("right", True), ("left", True), ("right", False)]),
    ids=str,
)
def test_prefill_and_decode_equal_one_pass(method: str, way: tuple[str, bool]) -> None:
    side, trains = way
    model = routed("llava", {**IMAGES_ONLY, **BY_ATTENTION}[method]).train(trains)
    check_cache_changes_nothing(model, prompt("llava", (1, 0, 2), side=side))


# Tests of pixels generate with and without a cache in all others.
@pytest.mark.parametrize("name", [*JOINT, *APART, *(name for name in OTHERS if name in WITHOUT_PIXELS)])
def test_prefill_and_decode_equal_one_pass_in_every_family(name: str) -> None:
    check_cache_changes_nothing(routed(name, IMAGES_ONLY["linear"]), prompt(name, (2, 1)))


@pytest.mark.parametrize(
    ("name", "attention"),
    in_turn(
        ["llava-mistral-window", "llava-next", "smolvlm", "qwen2-vl", "gemma3-vision", "paligemma"], ["sdpa", "eager"]
    ),
)
def test_importance_is_that_of_the_prompt_where_answers_are_labelled(name: str, attention: str) -> None:
    check_cache_changes_nothing(routed(name, IMAGES_ONLY["attention"], attention), prompt(name, (2, 1)))


@torch.no_grad()
def test_a_prompt_ends_at_the_first_label_behind_the_last_image() -> None:
    model, batch = routed("llava", IMAGES_ONLY["attention"]), prompt("llava", (1, 2))
    ids = batch["input_ids"]
    places = torch.arange(ids.shape[1])
    last = places.where(ids == IMAGE, 0).amax(1, keepdim=True)
    everything = ids.masked_fill(ids == IMAGE, -100)
    question = everything.where(places > last, -100)
    logits = model(**batch).logits
    for labels in (torch.full_like(ids, -100), everything.where(places < last, -100)):
        assert torch.equal(model(**batch, labels=labels).logits, logits)
    changed = model(**batch, labels=question).logits
    assert not torch.equal(changed, logits)
    assert torch.equal(model(**batch, labels=everything).logits, changed)
    # A pass that failed leaves no labels behind.
    with pytest.raises(
        ValueError, match=r"labels have shape .*: pass inputs_embeds, image_mask and labels of one length"
    ):
        model(**batch, labels=question[:, 1:])
    assert torch.equal(model(**batch).logits, logits)
    linear = routed("llava", IMAGES_ONLY["linear"])
    assert torch.equal(linear(**batch, labels=everything).logits, linear(**batch).logits)


@pytest.mark.parametrize("name", ["llava", "gemma3-vision"])
@torch.no_grad()
def test_an_interrupted_pass_leaves_no_labels_behind(name: str) -> None:
    model: Any = routed(name, IMAGES_ONLY["attention"])
    batch = prompt(name, (1, 2))
    ids = batch["input_ids"]
    labels = ids.masked_fill(ids == IMAGE, -100)
    fresh: Any = copy.deepcopy(model)
    expected = fresh.model(**batch).last_hidden_state, fresh(**batch).logits, fresh(**batch, labels=labels).logits
    assert not torch.equal(*expected[1:])
    with Interrupt() as counted:
        model(**batch, labels=labels)
    for at in range(1, counted.places + 1, counted.places // 4):
        with pytest.raises(KeyboardInterrupt), Interrupt(at):
            model(**batch, labels=labels)
        # The model inside comes first: it gets no labels of its own.
        actual = model.model(**batch).last_hidden_state, model(**batch).logits, model(**batch, labels=labels).logits
        for output, baseline in zip(actual, expected, strict=True):
            assert torch.equal(output, baseline), at


@pytest.mark.parametrize(
    ("name", "config"), [("llava", IMAGES_ONLY["change"]), ("llama", EVERYTHING["predictor"])], ids=["images", "text"]
)
@torch.no_grad()
def test_generation_may_be_interrupted_between_any_modules(name: str, config: mmod.RoutingConfig) -> None:
    model = routed(name, config)
    batch = prompt(name, (1, 2)) if name == "llava" else {"input_ids": torch.arange(3, 15).view(2, 6)}
    expected = generate(model, batch, max_new_tokens=3), model(**batch).logits
    with Interrupt() as counted:
        generate(model, batch, max_new_tokens=3)
    for at in range(5, counted.places + 1, counted.places // 5):
        with pytest.raises(KeyboardInterrupt), Interrupt(at):
            generate(model, batch, max_new_tokens=3)
        for output, baseline in zip((model(**batch).logits, generate(model, batch, max_new_tokens=3)), expected[::-1]):
            assert torch.equal(output, baseline), at


@pytest.mark.parametrize("method", EVERYTHING)
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-window"])
def test_text_decides_for_itself(name: str, method: str) -> None:
    if name == "gemma3" and method == "compact":
        name = "gemma2"
    model = mmod.route_(make_language(name), language=EVERYTHING[method])
    words = torch.randint(3, IMAGE, (30,)).tolist()
    with mmod.trace(model) as decisions:
        check_cache_changes_nothing(model, pad([words[:17], words[17:24]]))
    assert decisions


def test_compact_positions_are_embedded_once_for_all_layers_and_steps() -> None:
    model = routed("llama", EVERYTHING["compact"].replace(blocks="all"))
    calls: list[nn.Module] = []
    model.model.rotary_emb.register_forward_hook(lambda module, args, output: calls.append(module))
    generate(model, pad([list(range(3, 12)), list(range(3, 8))]), max_new_tokens=6, min_new_tokens=6)
    # The host embeds the original positions of each of six passes.
    assert len(calls) == 6 + 1


@torch.no_grad()
@pytest.mark.parametrize(
    ("method", "side", "attention"),
    cover(["linear", "p-mod", "random", "attention"], ["left", "right"], ["sdpa", "eager"]),
)
def test_batch_equals_single_samples(method: str, side: str, attention: str) -> None:
    model = routed("llava", IMAGES_ONLY[method], attention)
    images = (1, 0, 3, 2, 0, 1, 1, 2)
    batch = prompt("llava", images, side=side)
    together = model(**batch).logits
    for row in range(len(images)):
        keep = batch["attention_mask"][row].bool()
        alone = model(**sample_of(batch, row, images)).logits[0]
        torch.testing.assert_close(together[row, keep], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "options"),
    in_turn(
        ["llava", "llava-mistral-window", "qwen2.5-vl", "qwen3-vl"],
        [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2, "top_k": 0}],
    ),
    ids=str,
)
def test_generation_equals_generation_without_cache(name: str, options: dict[str, Any]) -> None:
    model, batch = routed(name, IMAGES_ONLY["linear"]), prompt(name, (1, 2))
    torch.manual_seed(0)
    cached = generate(model, batch, **options)
    torch.manual_seed(0)
    assert torch.equal(cached, generate(model, batch, use_cache=False, **options))


@pytest.mark.parametrize("name", ["llava", "llava-mistral-window"])
def test_assisted_generation_equals_plain_generation(name: str) -> None:
    model, batch = routed(name, IMAGES_ONLY["linear"]), prompt(name, (1,))
    plain = generate(model, batch, max_new_tokens=12)
    assert torch.equal(plain, generate(model, batch, max_new_tokens=12, prompt_lookup_num_tokens=3))


@torch.no_grad()
@pytest.mark.parametrize(
    ("method", "options", "words", "given"),
    [
        ("linear", {}, 1, "marked embeddings"),
        ("linear", {"num_beams": 3}, 4, "embeddings and ids"),
        ("attention", {}, 40, "marked ids"),
        ("frames", {}, 1, "ids"),
        ("change", {"num_beams": 2}, 40, "marked embeddings"),
    ],
)
def test_a_second_prompt_is_routed_by_its_own_tokens(
    method: str, options: dict[str, Any], words: int, given: str
) -> None:
    model, batch = routed("llava", IMAGES_ONLY[method]), prompt("llava", (1, 1))
    embeds, image_mask = merged_embeddings(model, batch), batch["input_ids"] == IMAGE
    ids, mask = batch["input_ids"], batch["attention_mask"]
    inputs: dict[str, Any] = {
        "marked embeddings": {"inputs_embeds": embeds, "attention_mask": mask, "image_mask": image_mask},
        "embeddings and ids": {"inputs_embeds": embeds, "input_ids": ids, "attention_mask": mask},
        "marked ids": {**batch, "image_mask": image_mask},
        "ids": batch,
    }[given]
    negative = torch.randint(3, 80, (2, words)).repeat_interleave(options.get("num_beams", 1), dim=0)
    results = []
    # Passes of a copy know nothing of the prompt.
    for other in (model, copy.deepcopy(model)):
        guidance = UnbatchedClassifierFreeGuidanceLogitsProcessor(2.0, other, negative)
        results.append(generate(model, inputs, logits_processor=[guidance], max_new_tokens=3, **options))
    assert torch.equal(*results)


TWO_WAYS: dict[str, tuple[str, Any]] = {
    "threshold": ("llama", EVERYTHING["inference"]),
    "predictor": ("llama", EVERYTHING["predictor"]),
    "images": ("llava", IMAGES_ONLY["linear"].replace(language={"inference_threshold": 0.5})),
    "experts": ("llama", Experts(choice="score")),
    "recursions": ("llama", Recursions(choice="score")),
}


@pytest.mark.parametrize(
    ("method", "options"), in_turn(TWO_WAYS, [{}, {"use_cache": False}, {"num_beams": 2}]), ids=str
)
def test_what_decides_otherwise_in_training_generates_in_evaluation_alone(method: str, options: dict[str, Any]) -> None:
    name, config = TWO_WAYS[method]
    batch = prompt("llava", (1, 1)) if name == "llava" else {"input_ids": torch.randint(3, 80, (2, 8))}
    if isinstance(config, mmod.RoutingConfig):
        model: Any = routed(name, config)
    else:
        model = mmod.apply_(make_language(name), config).eval()
    expected = generate(model, batch, **options)
    model.train()
    with pytest.raises(ValueError, match=r"generated in training mode.* Call model\.eval\(\) before generate"):
        generate(model, batch, **options)
    assert torch.equal(generate(model.eval(), batch, **options), expected)
    # Step by step too, where text decides.
    model.train()
    if name == "llama":
        cache = cache_of(model(**batch, use_cache=True))
        with pytest.raises(ValueError, match=r"cannot be generated .*model\.eval\(\)"):
            model(input_ids=torch.tensor([[5], [6]]), **{CACHE: cache})


@pytest.mark.parametrize("method", ["linear", "frames", "threshold"])
def test_what_decides_in_one_way_generates_in_training_mode(method: str) -> None:
    model = routed("llava", {**IMAGES_ONLY, "threshold": EVERYTHING["threshold"]}[method])
    batch = prompt("llava", (1, 2))
    expected = generate(model, batch)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    assert torch.equal(generate(model, batch), expected)


def cut_out(model: Any, places: tuple[int, ...]) -> Any:
    """Cut layers out of a language model; return it, as the model that holds them."""
    text = model.model.language_model if hasattr(model.model, "language_model") else model.model
    text.layers = nn.ModuleList(layer for place, layer in enumerate(text.layers) if place not in places)
    return text


CACHES: tuple[dict[str, Any], ...] = ({}, {"cache_implementation": "static"})
CUT = [(0,), (1,), (2,), (3,), (0, 1), (2, 3)]


@pytest.mark.parametrize(
    ("places", "name", "options"),
    [
        (places, name, options)
        for (places, name), options in zip(
            in_turn(CUT, ["llama", "mistral-window", "llava", "gemma3"]), itertools.cycle(CACHES)
        )
    ],
    ids=str,
)
def test_a_model_without_some_layers_caches_by_their_new_numbers(
    places: tuple[int, ...], name: str, options: dict[str, Any]
) -> None:
    method = IMAGES_ONLY["linear"] if name == "llava" else EVERYTHING["threshold"]
    batch = prompt("llava", (1, 2)) if name == "llava" else pad([torch.randint(3, 80, (n,)).tolist() for n in (9, 5)])
    model = routed(name, method)
    text = cut_out(model, places)
    for number, layer in enumerate(text.layers):
        layer.self_attn.layer_idx = number
    expected = generate(model, batch, use_cache=False)
    # Masks of Gemma 3's full attention are made by the cache layer of the first such layer in the config.
    if name != "gemma3":
        assert torch.equal(generate(model, batch, **options), expected)
    text.config.num_hidden_layers = len(text.layers)
    assert torch.equal(generate(model, batch, **options), expected)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
@pytest.mark.parametrize("way", ["without the first", "fewer in the config", "repeated"])
def test_layers_whose_numbers_fit_no_cache_are_refused(way: str, options: dict[str, Any]) -> None:
    model, batch = routed("llava", IMAGES_ONLY["linear"]), prompt("llava", (1,))
    text = cut_out(model, (0,) if way == "without the first" else (2,))
    if way == "fewer in the config":
        text.config.num_hidden_layers = len(text.layers)
    if way == "repeated":
        text.layers.append(copy.deepcopy(text.layers[1]))
    for call in (lambda: generate(model, batch, **options), lambda: model(**batch)):
        with pytest.raises(
            ValueError, match=r"were cut out, moved or repeated.* attention, \d.*, do not fit a cache of \d.*use_cache"
        ):
            call()
    expected = generate(model, batch, use_cache=False)
    for number, layer in enumerate(text.layers):
        layer.self_attn.layer_idx = number
    assert torch.equal(generate(model, batch, **options), expected)


@torch.no_grad()
def test_cache_bytes_are_the_kept_share() -> None:
    capacities = (0.6, 0.25)
    config = mmod.RoutingConfig(router="linear", capacity=capacities, blocks=(1, 3))
    model, batch = routed("llava", config), prompt("llava", (2,))
    layers = cache_of(model(**batch, use_cache=True)).layers
    tokens = batch["input_ids"].shape[1]
    dense = layers[0].keys.nbytes + layers[0].values.nbytes
    assert dense == 2 * tokens * 2 * 8 * 4
    for index, capacity in zip((1, 3), capacities):
        kept = tokens - 2 * PATCHES + int(2 * PATCHES * capacity)
        assert layers[index].keys.nbytes + layers[index].values.nbytes == dense * kept // tokens
        assert layers[index].get_seq_length() == tokens


def test_wrong_caches_are_refused() -> None:
    model, batch = routed("llava", IMAGES_ONLY["linear"]), prompt("llava", (1,))
    with pytest.raises(ValueError, match="Fp8QuantizedLayer does not support"):
        model(**batch, **{CACHE: transformers.QuantizedCache("fp8", model.config)}, use_cache=True)
    with pytest.raises(ValueError, match="DynamicCache"):
        model(
            **batch,
            **{CACHE: transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())},
        )


@pytest.mark.parametrize("name", ["llava", "llava-gemma2"])
def test_unrouted_models_have_their_own_classes(name: str) -> None:
    model, batch = make_joint(name, attention="eager"), prompt(name, (1,))
    classes = [type(module) for module in model.modules()]
    for gate_on in ("mlp", "branches"):
        mmod.route_(model, language=IMAGES_ONLY["p-mod"].replace(language={"gate_on": gate_on}))
        with torch.no_grad():
            copy.deepcopy(model)(**batch)
        assert [type(module) for module in mmod.unroute_(model).modules()] == classes


@pytest.mark.parametrize("name", ["llama", "llava", "qwen2.5-vl", "qwen3-vl"])
def test_continuous_batching_is_refused_before_it_starts(name: str) -> None:
    model: Any = make_language(name) if name == "llama" else make_joint(name)
    config = EVERYTHING["threshold"] if name == "llama" else IMAGES_ONLY["linear"]
    for routed_model in (mmod.route_(model, language=config), copy.deepcopy(model)):
        with pytest.raises(ValueError, match=r"does not support continuous batching \(generate_batch\)"):
            routed_model.generate_batch([[3, 4, 5]], max_new_tokens=2)
        with pytest.raises(ValueError, match="does not support continuous batching"):
            routed_model.init_continuous_batching()
    assert "init_continuous_batching" not in vars(mmod.unroute_(model))


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_that_would_need_the_future_is_refused(beams: int) -> None:
    for config in (
        mmod.RoutingConfig(router="linear", language={"tokens": "all"}),
        mmod.RoutingConfig(router="attention", language={"tokens": "all"}),
        mmod.RoutingConfig(router="random", language={"tokens": "all"}, select="threshold"),
    ):
        model = mmod.route_(make_language("llama"), language=config)
        with pytest.raises(ValueError, match="text cannot be generated"):
            generate(model, {"input_ids": torch.randint(3, 80, (1, 8))}, num_beams=beams)


def test_chunked_prefill_is_exact_where_tokens_are_decided_alone() -> None:
    model = mmod.route_(make_language("llama"), language=EVERYTHING["inference"])
    batch = {"input_ids": torch.randint(3, 80, (1, 13))}
    expected = generate(model, batch, suppress_tokens=None)
    assert torch.equal(expected, generate(model, batch, suppress_tokens=None, prefill_chunk_size=5))


def _like_flash(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
    """Attend as flash attention is asked to: causally from the end of the keys, with a mask of keys alone."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    queries, keys = query.shape[2], key.shape[2]
    pairs = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)[None, None]
    if mask is not None:
        assert mask.shape == (len(query), keys)
        sees = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries).triu(keys - queries)
        pairs = (pairs & mask[:, None, None, :].bool()) | sees
    # Positions with gaps would be taken for packed samples.
    assert options.get("position_ids") is None or queries == 1
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, pairs, scale=options["scaling"])
    return out.transpose(1, 2).contiguous(), None


@pytest.fixture
def flash_like(monkeypatch: pytest.MonkeyPatch) -> str:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "like_flash", _like_flash)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "like_flash", flash_attention_mask)
    return "like_flash"


@pytest.mark.parametrize("images", [(1,), (1, 0, 2)])
def test_attention_with_a_mask_of_keys_alone(images: tuple[int, ...], flash_like: str) -> None:
    config = mmod.RoutingConfig(router=SCORE, capacity=0.5, blocks="all")
    model, batch = routed("llava", config), prompt("llava", images)
    with torch.no_grad():
        expected, ids = model(**batch).logits, generate(model, batch)
        model.model.language_model.config._attn_implementation = flash_like
        real = batch["attention_mask"].bool()
        torch.testing.assert_close(model(**batch).logits[real], expected[real], atol=1e-5, rtol=1e-4)
    assert torch.equal(generate(model, batch), ids)


@torch.no_grad()
def test_flash_attention_is_refused_beyond_its_window() -> None:
    model = mmod.route_(make_language("mistral-window"), language=EVERYTHING["threshold"])
    words = torch.randint(3, IMAGE, (1, 10))
    cache = cache_of(model(input_ids=words[:, :9]))
    model.config._attn_implementation = "flash_attention_2"
    for options in ({"input_ids": words}, {"input_ids": words[:, 9:], CACHE: cache}):
        with pytest.raises(ValueError, match=r"sliding window of 9 among kept tokens .* this sequence has 10"):
            model(**options)


@torch.no_grad()
def test_flash_attention_slides_over_tokens_that_all_run(flash_like: str) -> None:
    model = routed("llava-mistral-window", IMAGES_ONLY["linear"])
    words = torch.randint(3, IMAGE, (1, 12))
    cache = cache_of(model(input_ids=words))
    model.model.language_model.config._attn_implementation = flash_like
    assert cache_of(model(input_ids=words[:, :1], **{CACHE: cache})).get_seq_length() == 13


def test_a_wrapper_may_replace_generate_on_the_model() -> None:
    """FSDP wraps `generate` of a model this way, with the attribute that it finds."""
    model, batch = routed("llava", IMAGES_ONLY["linear"]), prompt("llava", (1,))
    ids = generate(model, batch)
    host_generate = model.generate
    model.generate = lambda *args, **options: host_generate(*args, **options).flip(1)
    assert torch.equal(generate(model, batch), ids.flip(1))
    del model.generate
    assert torch.equal(generate(model, batch), ids)
