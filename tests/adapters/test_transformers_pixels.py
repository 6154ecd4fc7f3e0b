"""The score "duplicate" in language models: image tokens whose patches all equal one that is kept do not run."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

import mmod
from mmod.adapters.transformers.cache_base import CACHE, cache_of
from mmod.blocks.grid import picture_sizes, spread_rows
from tests.kit.cover import in_turn
from tests.kit.generation import check_cache_changes_nothing, generate
from tests.kit.oracle import duplicates_by_loop
from tests.kit.towers import make_deep, tower_of
from tests.kit.vlm_types import FAMILIES
from tests.kit.vlm_zoo import (
    IMAGE,
    JOINT,
    MERGED,
    OTHERS,
    VIDEO,
    WITHOUT_PIXELS,
    lively,
    make_joint,
    make_language,
    merged_embeddings,
    prompt,
    sample_of,
    type_of,
    video,
)

CONFIG = mmod.RoutingConfig(router="duplicate", select="threshold", blocks="all")
# Their image tokens are the patches, in order, or squares of 2 x 2 of them.
PLAIN = ("llava", "qwen2-vl", "qwen2.5-vl", "qwen3-vl", "gemma3-vision", "internvl", "smolvlm", "idefics3")
HOSTS = (*PLAIN, "paligemma", "aya_vision", "vipllava", "glm4v", "video_llama_3", "qwen2_5_omni_thinker")


def picture(rows: int, columns: int, seed: int, patch: int = 4) -> Tensor:
    """Return a picture (3, Y, X) whose patches have one of two colours, but one with a pixel of its own."""
    generator = torch.Generator().manual_seed(seed)
    colours = torch.randint(0, 2, (3, rows, columns), generator=generator).float()[:1].expand(3, -1, -1)
    pixels = colours.repeat_interleave(patch, 1).repeat_interleave(patch, 2).clone()
    pixels[1, -1, -1] = 0.5
    return pixels


def cut(pixels: Tensor, patch: int = 4) -> Tensor:
    """Return the pixels of patches (R, C, H, E), by loops."""
    rows, columns = pixels.shape[1] // patch, pixels.shape[2] // patch
    patches = []
    for row in range(rows):
        for column in range(columns):
            patches.append(pixels[:, patch * row :, patch * column :][:, :patch, :patch].reshape(len(pixels), -1))
    return torch.stack(patches).view(rows, columns, len(pixels), -1)


def drawn(name: str, images: tuple[int, ...], seed: int = 0) -> dict[str, Any]:
    """Return a prompt whose pictures repeat patches."""
    batch = prompt(name, images)
    key = FAMILIES[type_of(name)[0]].pictures.name
    pixels = batch[key]
    if pixels.ndim == 2:
        pictures = [cut(picture(3, 3, seed + number)).flatten(2).flatten(0, 1) for number in range(len(pixels) // 9)]
        batch[key] = torch.cat(pictures)
        return batch
    *leading, _, height, width = pixels.shape
    count = int(torch.tensor(leading).prod())
    pictures = [picture(height // 4, width // 4, seed + number) for number in range(count)]
    batch[key] = torch.stack(pictures).view_as(pixels)
    return batch


def differing(pixels: Tensor, side: int, cell: int | None = 4) -> list[bool]:
    """Return which squares of patches hold one that is no duplicate, by the slow rule, in cells of whole squares."""
    patches = cut(pixels).double()
    cell = None if cell is None else side * max(2, math.ceil(cell / side))
    _, stands = duplicates_by_loop(patches.unsqueeze(0), 0.0, cell, (255.0,) * 3)
    own = torch.tensor([place == stand for place, stand in enumerate(stands)]).view(patches.shape[:2])
    rows, columns = (extent // side for extent in own.shape)
    squares = []
    for row in range(rows):
        for column in range(columns):
            squares.append(bool(own[side * row :, side * column :][:side, :side].any()))
    return squares


@torch.no_grad()
def route(model: Any, **changes: Any) -> Any:
    return mmod.route_(model, language=CONFIG.replace(**changes))


@torch.no_grad()
def kept_images(model: Any, batch: dict[str, Any]) -> list[list[bool]]:
    """Return which image tokens of each sample run, in every layer alike."""
    with mmod.trace(model) as trace:
        model(**batch)
    first, *others = [routing.keep_BN for routing in trace.values()]
    assert all(torch.equal(first, other) for other in others)
    assert bool(first[(batch["input_ids"] != IMAGE) & batch["attention_mask"].bool()].all())
    return [keep_N[row == IMAGE].tolist() for keep_N, row in zip(first, batch["input_ids"])]


@pytest.mark.parametrize(("name", "cell"), in_turn(PLAIN, [3, 4, None]))
def test_a_token_is_dropped_if_all_of_its_patches_are_duplicates(name: str, cell: int | None) -> None:
    side = 2 if name in MERGED or name == "idefics3" else 1
    rows = 6 if side == 2 else 3
    dropped, model = 0, route(make_joint(name), router={"cell": cell})
    for seed in range(3):
        batch = drawn(name, (1, 2), seed=10 * seed)
        expected = [differing(picture(rows, rows, 10 * seed + number), side, cell) for number in range(3)]
        actual = kept_images(model, batch)
        assert actual == [expected[0], expected[1] + expected[2]]
        dropped += sum(kept.count(False) for kept in actual)
    assert dropped


@torch.no_grad()
def test_tokens_of_as_many_patches_as_a_cell_are_dropped_too() -> None:
    config = make_joint("smolvlm").config
    config.scale_factor = 3
    model = route(lively(transformers.AutoModelForImageTextToText.from_config(config)))
    ids = torch.tensor([[1, 5, *[IMAGE] * 4, 6]])
    dropped = 0
    for seed in range(6):
        pixels = picture(2, 2, seed, patch=12)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels[None, None]}
        (kept,) = kept_images(model, batch)
        assert kept == differing(pixels, 3)
        dropped += kept.count(False)
    assert dropped


# What keeps every token, and what drops some: a threshold and a number of tokens, which no host tells apart.
ALL_KEPT = ({"router": {"tolerance": -1.0}}, {"select": "topk", "capacity": 1.0})
SOME_KEPT = ({}, {"select": "topk", "capacity": 0.6})


@pytest.mark.parametrize(("name", "way"), in_turn(HOSTS, [0, 1]))
@torch.no_grad()
def test_it_keeps_all_below_0_and_a_batch_equals_its_samples(name: str, way: int) -> None:
    batch = drawn(name, (1, 2))
    real = batch["attention_mask"].bool()
    model = make_joint(name)
    dense = model(**batch).logits
    route(model, **ALL_KEPT[way])
    torch.testing.assert_close(model(**batch).logits[real], dense[real], atol=1e-5, rtol=1e-4)
    mmod.undo_(model)
    route(model, **SOME_KEPT[1 - way])
    together = model(**batch).logits
    assert not torch.allclose(together[real], dense[real], atol=1e-4)
    alone = model(**sample_of(batch, 0, (1, 2))).logits[0]
    torch.testing.assert_close(alone, together[0][real[0]], atol=1e-5, rtol=1e-4)
    mmod.undo_(model)
    assert torch.equal(model(**batch).logits, dense)


def answer(model: Any, batch: dict[str, Any]) -> Tensor:
    """Return the words of the first sample's best beam."""
    return generate(model, batch, num_beams=2)[0, batch["input_ids"].shape[1] :]


@pytest.mark.parametrize("name", ["llava", "qwen2-vl", "qwen2.5-vl", "qwen3-vl", "internvl", "smolvlm"])
def test_a_cache_changes_nothing_and_a_saved_model_is_the_same(name: str, tmp_path: Path) -> None:
    batch = drawn(name, (1, 2))
    model = route(make_joint(name), router={"cell": 3})
    check_cache_changes_nothing(model, batch)
    words = generate(model, batch)
    assert torch.equal(generate(copy.deepcopy(model), batch), words)
    assert torch.equal(answer(model, sample_of(batch, 0, (1, 2))), answer(model, batch))
    model.save_pretrained(tmp_path)
    loaded = mmod.load_pretrained(tmp_path)
    assert mmod.routing_config(loaded).router == mmod.score("duplicate", cell=3)
    assert torch.equal(generate(loaded, batch), words)


SEEN = [name for name in (*JOINT, *OTHERS) if name not in WITHOUT_PIXELS]
IMPORTANCE = mmod.score("attention", importance="vision_tower")


@pytest.mark.parametrize(
    ("name", "router"),
    [*((name, "duplicate") for name in SEEN), *((name, IMPORTANCE) for name in ("llava", "qwen2.5-vl"))],
    ids=str,
)
@torch.no_grad()
def test_features_that_generate_computes_once_serve_all_of_its_passes(name: str, router: Any) -> None:
    if name not in (*JOINT, *OTHERS):
        pytest.skip("the installed version of transformers has no such type")
    batch = drawn(name, (1, 2))
    model = route(
        make_joint(name), router=router, select="threshold" if router == "duplicate" else "topk", capacity=0.5
    )
    # The prompt, and a word behind it.
    short = {"max_new_tokens": 2}
    assert torch.equal(generate(model, batch, use_cache=False, **short), generate(model, batch, **short))
    # Not all types have beams and chunks that equal plain generation when they are dense.
    if name in PLAIN[:2]:
        short["num_beams"] = 2
        assert torch.equal(generate(model, batch, use_cache=False, **short), generate(model, batch, **short))
        # The first chunk has no image token.
        if router == "duplicate":
            assert torch.equal(generate(model, batch, prefill_chunk_size=3), generate(model, batch))


@torch.no_grad()
def test_a_conversation_is_generated_behind_a_cache_with_another_picture() -> None:
    model = route(make_joint("llava"))
    first, second = drawn("llava", (1,)), drawn("llava", (1,), seed=7)
    before = generate(model, first, return_dict_in_generate=True)
    ids = torch.cat([before.sequences, second["input_ids"]], dim=1)
    more = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": second["pixel_values"]}
    whole = {**more, "pixel_values": torch.cat([first["pixel_values"], second["pixel_values"]])}
    assert torch.equal(generate(model, more, **{CACHE: cache_of(before)}), generate(model, whole))


@pytest.mark.parametrize("name", ["llava", "internvl", "smolvlm", "paligemma"])
@torch.no_grad()
def test_tower_and_language_model_make_the_same_decision(name: str) -> None:
    batch = drawn(name, (1, 2))
    model = make_joint(name)
    alone = kept_images(route(model), batch)
    mmod.undo_(model)
    mmod.route_(model, language=CONFIG, image="pixelprune")
    with mmod.trace(model) as trace:
        model(**batch)
    image_BN = batch["input_ids"] == IMAGE
    together = next(routing.keep_BN for place, routing in trace.items() if "layers" in place and "vision" not in place)
    assert [keep_N[row].tolist() for keep_N, row in zip(together, image_BN)] == alone
    in_tower = next(routing.keep_BN for place, routing in trace.items() if "vision" in place)
    if name in ("llava", "paligemma"):
        prefix = in_tower.shape[1] - 9
        assert torch.equal(in_tower[:, prefix:].flatten(), together[image_BN])
    # A second layout is followed through the routed tower too.
    assert torch.isfinite(model(**sample_of(batch, 0, (1, 2))).logits).all()


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "video_llama_3"])
@torch.no_grad()
def test_what_stands_still_in_a_video_is_shown_once(name: str) -> None:
    batch = video(name, (1, 1), frames=3)
    films = [[picture(3, 3, seed=number) for _ in range(3)] for number in range(2)]
    # A patch of the second frame changes, and changes back in the third.
    films[0][1] = films[0][1].clone()
    films[0][1][:, 0, 5] = 0.25
    cuts = [torch.stack([cut(frame) for frame in film]) for film in films]
    batch["pixel_values_videos"] = torch.cat([film.flatten(3).flatten(0, 2) for film in cuts])
    model = make_joint(name)
    dense = model(**batch).logits
    route(model)
    with mmod.trace(model) as trace:
        together = model(**batch).logits
    assert not torch.allclose(together, dense, atol=1e-4)
    keep_BN = next(iter(trace.values())).keep_BN
    for row, film in enumerate(cuts):
        _, stands = duplicates_by_loop(film.double(), 0.0, 4, (255.0,) * 3)
        expected = [place == stand for place, stand in enumerate(stands)]
        assert keep_BN[row][batch["input_ids"][row] == VIDEO].tolist() == expected
        # The third frame differs from what was kept where the second one changed.
        assert sum(expected[9:18]) == (row == 0)


@torch.no_grad()
def test_a_conversation_goes_on_with_another_picture_behind_a_cache() -> None:
    model = route(make_joint("llava"))
    first, second = drawn("llava", (1,)), drawn("llava", (1,), seed=7)
    ids = torch.cat([first["input_ids"], second["input_ids"]], dim=1)
    pixels = torch.cat([first["pixel_values"], second["pixel_values"]])
    expected = model(input_ids=ids, pixel_values=pixels).logits
    out = model(**first, use_cache=True)
    more = {"input_ids": second["input_ids"], "pixel_values": second["pixel_values"]}
    actual = model(**more, attention_mask=torch.ones_like(ids), **{CACHE: cache_of(out)}).logits
    torch.testing.assert_close(actual, expected[:, -actual.shape[1] :], atol=1e-5, rtol=1e-4)


def rows_of(pictures: list[Tensor], side: int) -> dict[str, Tensor]:
    """Return the arguments of a tower that gets patches as rows, those of a token one after another, by loops."""
    rows = []
    for pixels in pictures:
        patches = cut(pixels)
        for top in range(0, patches.shape[0], side):
            for left in range(0, patches.shape[1], side):
                rows.append(patches[top : top + side, left : left + side].flatten(2).flatten(0, 1))
    grid = torch.tensor([[1, pixels.shape[1] // 4, pixels.shape[2] // 4] for pixels in pictures])
    return {"hidden_states": torch.cat(rows), "grid_thw": grid}


SIZES = ((4, 6), (6, 4), (2, 8))
# Sides in patches of the windows in which some towers put their rows.
WINDOW = 4
ROWS = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "video_llama_3", "qwen2_5_omni_thinker", "exaone4_5")


def in_rows(value_RC: Tensor, side: int, window: int) -> Tensor:
    """Return values of patches in the order of a tower's rows: window by window, and in these token by token."""
    rows, columns = value_RC.shape
    values = []
    for top in range(0, rows, window):
        for left in range(0, columns, window):
            inside = value_RC[top : top + window, left : left + window]
            for y in range(0, inside.shape[0], side):
                for x in range(0, inside.shape[1], side):
                    values.append(inside[y : y + side, x : x + side].flatten())
    return torch.cat(values)


def deep_tower(name: str, side: int = 1, layers: int = 3) -> tuple[Any, Any]:
    """Return a model with a tower that gets rows, and the tower; the second layer alone sees whole pictures."""
    windows = {"window_size": 4 * WINDOW, "fullatt_block_indexes": [1]}
    merging = {"spatial_merge_size": side, "deepstack_visual_indexes": [0], "intermediate_size": 128}
    model = make_deep(name, layers=layers, **merging, **windows)
    return model, tower_of(model)


@pytest.mark.parametrize(("name", "side"), in_turn(["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "glm4v"], [1, 2]))
@torch.no_grad()
def test_a_tower_that_gets_rows_decides_by_the_grids_of_its_pictures(name: str, side: int) -> None:
    pictures = [picture(*size, seed=number) for number, size in enumerate(SIZES)]
    model, tower = deep_tower(name, side)
    dense = tower(**rows_of(pictures, side)).last_hidden_state
    for skipped in ("merge", "follow", "pass"):
        mmod.route_(model, image=mmod.preset("pixelprune", skipped=skipped, router={"tolerance": -1.0}))
        torch.testing.assert_close(tower(**rows_of(pictures, side)).last_hidden_state, dense, atol=2e-5, rtol=2e-5)
        mmod.undo_(model)
        mmod.route_(model, image=mmod.preset("pixelprune", skipped=skipped))
        with mmod.trace(model) as trace:
            together = tower(**rows_of(pictures, side)).last_hidden_state
        assert together.shape == dense.shape
        assert not torch.allclose(together, dense, atol=1e-4)
        alone = torch.cat([tower(**rows_of([pixels], side)).last_hidden_state for pixels in pictures])
        torch.testing.assert_close(together, alone, atol=2e-5, rtol=2e-5)
        mmod.undo_(model)
        assert len(trace) == 3
        for routing in trace.values():
            for keep_N, pixels, (rows, columns) in zip(routing.keep_BN, pictures, SIZES):
                own = torch.tensor(differing(pixels, 1)).view(rows, columns)
                window = WINDOW if name == "qwen2.5-vl" else max(rows, columns)
                assert torch.equal(keep_N[: rows * columns], in_rows(own, side, window))
                assert not bool(keep_N[rows * columns :].any())


@torch.no_grad()
def test_a_tower_with_windows_equals_a_slow_one_on_the_kept_rows() -> None:
    pixels = picture(6, 10, seed=1)
    model, tower = deep_tower("qwen2.5-vl")
    tower.double()
    arguments = rows_of([pixels], 1)
    arguments["hidden_states"] = arguments["hidden_states"].double()
    seen: list[dict[str, Any]] = []

    def look(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        seen.append({"x": args[0], **options})

    handles = [block.register_forward_pre_hook(look, with_kwargs=True) for block in tower.blocks]
    tower(**arguments)
    for handle in handles:
        handle.remove()
    dense = copy.deepcopy(tower.blocks)
    mmod.route_(model, image="pixelprune")
    with mmod.trace(model) as trace:
        actual = tower(**arguments).last_hidden_state
    first, *others = trace.values()
    assert len(others) == 2
    # Layers with windows and without decide together, once.
    assert all(routing is first or torch.equal(routing.keep_BN, first.keep_BN) for routing in others)
    index_K = first.keep_BN[0].nonzero().flatten()
    slot_N = first.joined.slot_BN[0]
    assert 0 < len(index_K) < len(slot_N)
    x_ND = seen[0]["x"]
    size_K = slot_N.bincount().double()
    z_KD = torch.zeros(len(index_K), x_ND.shape[1]).double().index_add(0, slot_N, x_ND) / size_K.unsqueeze(1)
    y_KD = z_KD
    for block, options in zip(dense, seen):
        cosine, sine = (value[index_K].double() for value in options["position_embeddings"])
        segment_K = torch.bucketize(index_K, options["cu_seqlens"], right=True)
        y_KD = slow_block(block, y_KD, cosine, sine, segment_K, size_K)
    torch.testing.assert_close(actual, x_ND + (y_KD - z_KD)[slot_N], atol=1e-6, rtol=0)


def slow_block(
    block: Any, x_KD: Tensor, cosine_KE: Tensor, sine_KE: Tensor, segment_K: Tensor, size_K: Tensor
) -> Tensor:
    """Return the rows after a block of Qwen2.5-VL's tower, whose attention is masked by window and counts tokens."""
    q, k, v = block.attn.qkv(block.norm1(x_KD)).unflatten(1, (3, block.attn.num_heads, -1)).permute(1, 2, 0, 3)
    half = q.shape[-1] // 2
    q, k = (a * cosine_KE + torch.cat([-a[..., half:], a[..., :half]], -1) * sine_KE for a in (q, k))
    logit = q @ k.transpose(1, 2) * block.attn.scaling + size_K.log()
    logit = logit.masked_fill(segment_K.unsqueeze(1) != segment_K, -math.inf)
    x_KD = x_KD + block.attn.proj((logit.softmax(-1) @ v).transpose(0, 1).flatten(1))
    y_KD: Tensor = x_KD + block.mlp(block.norm2(x_KD))
    return y_KD


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl"])
@torch.no_grad()
def test_frames_are_pictures_of_their_own_in_a_tower(name: str) -> None:
    frames = rows_of([picture(6, 4, seed=number) for number in range(2)], 1)
    model, tower = deep_tower(name)
    mmod.route_(model, image="pixelprune")
    apart = tower(**frames).last_hidden_state
    together = tower(hidden_states=frames["hidden_states"], grid_thw=torch.tensor([[2, 6, 4]])).last_hidden_state
    assert torch.equal(together, apart)


@pytest.mark.parametrize("name", ROWS)
@torch.no_grad()
def test_a_model_of_rows_is_routed_as_a_whole(name: str, tmp_path: Path) -> None:
    batch = drawn(name, (1, 2))
    real = batch["attention_mask"].bool()
    model = make_joint(name)
    mmod.route_(model, language=CONFIG, image="pixelprune")
    together = model(**batch).logits
    torch.testing.assert_close(
        model(**sample_of(batch, 0, (1, 2))).logits[0], together[0][real[0]], atol=1e-5, rtol=1e-4
    )
    model.save_pretrained(tmp_path)
    loaded = mmod.load_pretrained(tmp_path)
    short = {"max_new_tokens": 2}
    assert torch.equal(generate(loaded, batch, **short), generate(model, batch, **short))
    assert torch.equal(loaded(**batch).logits[real], together[real])


class OwnOrder(Qwen2_5_VisionTransformerPretrainedModel):
    """A tower whose code does not show in which order rows are."""

    def forward(self, hidden_states: Tensor, grid_thw: Tensor, **kwargs: Any) -> Any:
        return super().forward(hidden_states, grid_thw, **kwargs)


@pytest.mark.parametrize("name", ["qwen2.5-vl", "paddleocr_vl", "mistral3"])
def test_a_tower_whose_rows_are_in_another_order_is_refused(name: str) -> None:
    model = make_joint(name)
    if name == "qwen2.5-vl":
        tower_of(model).__class__ = OwnOrder
    with pytest.raises(ValueError, match=r"in an order that the tower does not tell, by a spatial_merge_size"):
        mmod.route_(model, image="pixelprune")
    assert not mmod.is_routed(model)


def test_rows_are_spread_as_the_processor_of_qwen_cut_the_picture() -> None:
    processing = pytest.importorskip("transformers.models.qwen2_vl.image_processing_qwen2_vl")
    pixels = torch.randint(0, 256, (3, 6 * 14, 8 * 14), dtype=torch.uint8)
    given = processing.Qwen2VLImageProcessor()(
        images=pixels, do_resize=False, do_normalize=False, do_rescale=False, return_tensors="pt"
    )
    size, *_ = picture_sizes(given, 2, "image_")
    (spread,) = spread_rows(given["pixel_values"], size, 3)
    # A still picture is two equal frames.
    expected = cut(pixels, 14).unsqueeze(3).expand(-1, -1, -1, 2, -1).flatten(3)
    torch.testing.assert_close(spread, expected.to(spread.dtype))


def unordered() -> nn.Module:
    return make_joint("paddleocr_vl")


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda: make_language("llama"), {}, "for image tokens: .* a model that has a tower, got a Llama"),
        (lambda: make_joint("mistral3"), {}, "stand for squares of patches, which is not known of a Mistral3Model"),
        (unordered, {}, "which is not known of a PaddleOCRVLModel"),
        (lambda: make_joint("llava"), {"language": {"tokens": "all"}}, "for image tokens: route with tokens='image'"),
        (lambda: make_joint("llava"), {"router": {"tolerance": 6.0}}, r"in grey levels.*set router\.std"),
        (lambda: make_joint("qwen2-vl"), {"router": {"tolerance": 6.0}}, r"in grey levels.*set router\.std"),
        (lambda: make_joint("qwen2-vl"), {"router": {"std": (0.5, 0.5)}}, "one for each of 3 channels"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_changes(
    make: Any, options: dict[str, Any], message: str
) -> None:
    model = make()
    with pytest.raises(ValueError, match=message):
        route(model, **options)
    assert not mmod.is_routed(model)


@torch.no_grad()
def test_images_without_pixels_are_refused_and_the_next_pass_is_not() -> None:
    for name in ("llava", "qwen2-vl"):
        batch = drawn(name, (1,))
        embeds = merged_embeddings(make_joint(name), batch)
        model = route(make_joint(name))
        expected = model(**batch).logits
        with pytest.raises(ValueError, match="pass pixel_values"):
            model(inputs_embeds=embeds, image_mask=batch["input_ids"] == IMAGE)
        assert torch.equal(model(**batch).logits, expected)
