"""Static caches and compiled decoding: the same words as with the default cache, in tensors that keep their shape."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import mmod
from mmod.adapters.transformers.cache_base import CACHE
from tests.kit.cover import in_turn
from tests.kit.generation import EVERYTHING, IMAGES_ONLY, NO_IMAGES, routed
from tests.kit.vlm_zoo import APART, IMAGE, JOINT, PATCHES, SLIDING, make_joint, make_language, pad, prompt

PRESETS = {
    "p-mod": mmod.preset("p-mod", blocks=(1, 2), capacity=(0.8, 0.3), router={"init_std": 0.2}),
    "gamma-mod": mmod.preset(
        "gamma-mod", depth=5, blocks=(1, 2), language={"inference_threshold": 0.5}, router={"init_std": 0.2}
    ),
    "videollm-mod": mmod.preset("videollm-mod", capacity=0.34, blocks=(1, 3), router={"init_std": 0.2}),
    "a-mod": mmod.preset("a-mod", capacity=0.5, blocks=(1, 3)),
    "mod": mmod.preset(
        "mod", capacity=0.5, language={"inference_threshold": 0.5}, blocks=(0, 2), router={"init_std": 0.2}
    ),
    "mod-image": mmod.preset(
        "mod", capacity=0.25, language={"tokens": "image"}, blocks=(0, 1, 3), router={"init_std": 0.2}
    ),
}
ROOM = 48
IMAGES = ((2, 1), (0, 0), (1,))


def words(batch: dict[str, Any], steps: int) -> Tensor:
    return torch.randint(3, IMAGE, (steps, len(batch["input_ids"]), 1), generator=torch.Generator().manual_seed(3))


def text(seed: int = 0) -> dict[str, Any]:
    row = torch.randint(3, IMAGE, (30,), generator=torch.Generator().manual_seed(seed)).tolist()
    return dict(pad([row[:17], row[17:24]]))


@torch.no_grad()
def logits(model: Any, batch: dict[str, Any], cache: Any, step: Any = None, steps: int = 5) -> list[Tensor]:
    """Return the logits of a prompt's real tokens and of some decoded ones, which `step` may compute."""
    real, mask = batch["attention_mask"].bool(), batch["attention_mask"]
    out = [model(**batch, **{CACHE: cache}, use_cache=True).logits[real]]
    for word in words(batch, steps):
        mask = torch.cat([mask, torch.ones_like(word)], 1)
        place = mask.sum(1, keepdim=True) - 1
        if "mm_token_type_ids" in batch:
            place = (place + model.model.rope_deltas).expand(3, -1, -1)
        # A mask of constant width, as compiled decoding wants it.
        wide = (
            nn.functional.pad(mask, (0, ROOM - mask.shape[1])) if isinstance(cache, transformers.StaticCache) else mask
        )
        inputs = {"input_ids": word, "attention_mask": wide, "position_ids": place, CACHE: cache}
        out.append((step or model)(**inputs, use_cache=True).logits)
    return out


def static(model: Any, room: int = ROOM) -> transformers.StaticCache:
    return transformers.StaticCache(config=model.config, max_cache_len=room)


def same(actual: list[Tensor], expected: list[Tensor]) -> None:
    for here, there in zip(actual, expected, strict=True):
        torch.testing.assert_close(here, there, atol=1e-5, rtol=1e-4)


def generated(model: Any, batch: dict[str, Any], **options: Any) -> Tensor:
    options_of_both = {
        "max_new_tokens": 4,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
        **NO_IMAGES,
        **options,
    }
    result: Tensor = model.generate(**batch, **options_of_both)
    return result


@pytest.mark.parametrize(("method", "side"), in_turn(PRESETS, ["left", "right"]))
def test_static_caches_change_nothing(method: str, side: str) -> None:
    attention = "eager" if side == "right" else "sdpa"
    model, batch = routed("llava", PRESETS[method], attention), prompt("llava", (1, 0, 2), side=side)
    same(logits(model, batch, static(model)), logits(model, batch, transformers.DynamicCache(config=model.config)))
    if side == "left":
        for options in ({}, {"num_beams": 3}):
            ids = generated(model, batch, **options)
            assert torch.equal(generated(model, batch, cache_implementation="static", **options), ids)


@pytest.mark.parametrize(("name", "images"), in_turn([*JOINT, *APART], IMAGES), ids=str)
def test_static_caches_change_nothing_in_every_family(name: str, images: tuple[int, ...]) -> None:
    model, batch = routed(name, IMAGES_ONLY["linear"]), prompt(name, images)
    # Two words tell nothing of a sliding window that did not follow the beams.
    options = {"num_beams": 2, "max_new_tokens": 4 if name in SLIDING else 2}
    ids = generated(model, batch, **options)
    assert torch.equal(generated(model, batch, cache_implementation="static", **options), ids)


@pytest.mark.parametrize(("method", "name"), in_turn(EVERYTHING, ["llama", "gemma3", "mistral-window"], times=2))
def test_static_caches_of_text_that_decides_for_itself(name: str, method: str) -> None:
    # Gemma 3 has positions of two kinds, which cannot be compact.
    name = "gemma2" if (name, method) == ("gemma3", "compact") else name
    model, batch = routed(name, EVERYTHING[method]), text()
    same(logits(model, batch, static(model)), logits(model, batch, transformers.DynamicCache(config=model.config)))


@torch.no_grad()
@pytest.mark.parametrize("name", ["llava", "llava-mistral-window", "qwen2.5-vl", "qwen3-vl"])
def test_capacity_one_equals_the_dense_model_with_a_static_cache(name: str) -> None:
    model: Any = make_joint(name)
    batch = prompt(name, (1, 0, 2))
    expected, ids = logits(model, batch, static(model)), generated(model, batch, cache_implementation="static")
    mmod.route_(model, language=mmod.RoutingConfig(router="norm", gate="identity", capacity=1.0, blocks=(0, 1, 3)))
    same(logits(model, batch, static(model)), expected)
    assert torch.equal(generated(model, batch, cache_implementation="static"), ids)


@torch.no_grad()
def test_a_static_cache_has_room_for_kept_tokens_alone() -> None:
    capacities = (0.6, 0.25)
    model = routed("llava", mmod.RoutingConfig(router="linear", capacity=capacities, blocks=(1, 3)))
    batch, cache = prompt("llava", (2,)), static(model)
    layers: Any = cache.layers
    dense, tokens = ROOM * 2 * 2 * 8 * 4, batch["input_ids"].shape[1]
    before = None
    for word in (batch["input_ids"], *words(batch, 4)):
        pictures = batch if word.shape[1] > 1 else {}
        model(**{**pictures, "input_ids": word, "attention_mask": None}, **{CACHE: cache}, use_cache=True)
        addresses = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in layers]
        assert before in (None, addresses)
        before = addresses
    assert [int(layer.get_seq_length()) for layer in layers] == [tokens + 4] * 4
    for index, capacity in zip((1, 3), capacities):
        slots = ROOM - 2 * PATCHES + int(2 * PATCHES * capacity)
        assert layers[index].keys.nbytes + layers[index].values.nbytes == dense * slots // ROOM
        assert int((layers[index].position_BS >= 0).sum()) == tokens + 4 - (ROOM - slots)
    assert layers[0].keys.nbytes + layers[0].values.nbytes == dense


@pytest.mark.parametrize("name", ["llava", "llava-mistral-window"])
def test_a_static_cache_is_used_again(name: str) -> None:
    model = routed(name, IMAGES_ONLY["linear"])
    prompts, cache = [prompt(name, images, seed=seed) for seed, images in enumerate([(2, 1), (0, 1), (1, 2)])], None
    for batch in prompts:
        again = generated(model, batch, cache_implementation="static")
        assert torch.equal(again, generated(model, batch))
        cache = static(model) if cache is None else cache
        cache.reset()
        expected = logits(model, batch, transformers.DynamicCache(config=model.config))
        same(logits(model, batch, cache), expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral-window"])
def test_text_goes_on_in_chunks(name: str) -> None:
    model = routed(name, EVERYTHING["inference"])
    ids = torch.randint(3, IMAGE, (2, 31), generator=torch.Generator().manual_seed(1))
    expected, cache = model(input_ids=ids).logits, static(model)
    cuts = (0, 13, 17, 18, 29, 31)
    actual = [model(input_ids=ids[:, a:b], **{CACHE: cache}).logits for a, b in pairwise(cuts)]
    torch.testing.assert_close(torch.cat(actual, 1), expected, atol=1e-5, rtol=1e-4)


# Text that decides for itself is compiled below. What is traced grows with the depth.
def test_decoding_compiles_to_one_graph() -> None:
    torch._dynamo.reset()
    model = routed("llava", PRESETS["p-mod"].replace(blocks=(1,), capacity=0.3), num_hidden_layers=2)
    counter = CompileCounterWithBackend("eager")
    step = torch.compile(model.__call__, backend=counter, fullgraph=True)
    for seed in range(2):
        batch = prompt("llava", (1, 2), seed=seed)
        expected = logits(model, batch, transformers.DynamicCache(config=model.config), steps=4)
        same(logits(model, batch, static(model), step, steps=4), expected)
        # Another number of kept tokens is another shape of the cache: from the second on one graph serves them all.
        assert 1 <= counter.frame_count <= 1 + (seed > 0)


@torch.no_grad()
def test_decoding_without_mutation_is_the_same() -> None:
    """AOT autograd makes values of what a cache writes in place, of text that runs above a threshold."""
    torch._dynamo.reset()
    config = mmod.preset("modification", blocks=(0,), language={"tokens": "all"}, router={"init_std": 0.2})
    model: Any = mmod.route_(make_language("llama", num_hidden_layers=1), language=config)
    step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    expected = logits(model, text(), transformers.DynamicCache(config=model.config), steps=1)
    same(logits(model, text(), static(model), step, steps=1), expected)


def test_generate_compiles_decoding_by_itself() -> None:
    torch._dynamo.reset()
    model = routed("llava", IMAGES_ONLY["linear"].replace(blocks=(1,)), num_hidden_layers=2)
    batch = prompt("llava", (1, 0, 2))
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiling: Any = transformers.CompileConfig(fullgraph=True, backend=count)
    compiling.mode, compiling._compile_all_devices = None, True
    actual = generated(model, batch, cache_implementation="static", compile_config=compiling)
    assert torch.equal(actual, generated(model, batch))
    assert len(graphs) == 1


def test_models_compiled_by_the_user_generate_the_same() -> None:
    torch._dynamo.reset()
    importance = mmod.score("attention", importance="vision_tower")
    config = mmod.RoutingConfig(router=importance, capacity=0.3, blocks=(0,))
    model, batch = routed("llava", config, num_hidden_layers=1), prompt("llava", (1, 0))
    expected = generated(model, batch, max_new_tokens=2)
    model.compile(backend="eager")
    assert torch.equal(generated(model, batch, max_new_tokens=2, cache_implementation="static"), expected)


def test_drafts_are_refused() -> None:
    model = routed("llama", EVERYTHING["threshold"])
    batch = {"input_ids": torch.randint(3, IMAGE, (1, 4)).repeat(1, 4)}
    with pytest.raises(ValueError, match=r"requires a cache that can be cropped|not supported with Static cache"):
        generated(model, batch, cache_implementation="static", prompt_lookup_num_tokens=3)


def test_wrong_use_is_refused() -> None:
    model, batch = routed("llava", IMAGES_ONLY["linear"]), prompt("llava", (1,))
    filled = static(model)
    make_joint("llava")(**batch, **{CACHE: filled}, use_cache=True)
    with pytest.raises(ValueError, match="filled by a dense model"):
        model(input_ids=torch.tensor([[5]]), **{CACHE: filled}, use_cache=True)
    cache = static(model)
    model(**batch, **{CACHE: cache}, use_cache=True)
    with pytest.raises(ValueError, match="cannot be cropped"):
        cache.crop(-1)
    model.model.language_model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="flash attention has no mask"):
        model.model.language_model.layers[1].mod_state.call.open_cache({CACHE: static(model)})
