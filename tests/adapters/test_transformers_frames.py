"""Frames: videos and images chosen one by one, in a prompt and behind a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mmod
from mmod.adapters.transformers.cache_base import CACHE, cache_of
from mmod.adapters.transformers.images import IMAGE as SHOWS_IMAGE
from mmod.adapters.transformers.images import VIDEO as SHOWS_VIDEO
from mmod.adapters.transformers.images import ImageTokens
from tests.kit.cover import in_turn
from tests.kit.generation import routed
from tests.kit.vlm_zoo import FRAME, IMAGE, JOINT, PATCHES, VIDEO, make_joint, pad, prompt, sample_of, video

BY_FRAME = mmod.preset("videollm-mod", capacity=0.5, blocks=(1, 3), router={"init_std": 0.2})
TOGETHER = mmod.RoutingConfig(router=mmod.score("linear", init_std=0.2), capacity=0.5, blocks=(0, 1, 3))

BY_MAP = mmod.RoutingConfig(router="attention", capacity=0.5, blocks=(1, 3))
SECOND_TURN = {
    "attention": BY_MAP,
    "linear": TOGETHER,
    "distilled": mmod.preset("distilled", blocks=(1, 3), router={"init_std": 0.2}),
}
EVERY_TOKEN = mmod.RoutingConfig(router="stride", capacity=1.0, blocks=(0, 1, 3))


def kept(model: Any, batch: dict[str, Any]) -> list[Tensor]:
    with torch.no_grad(), mmod.trace(model) as decisions:
        model(**batch)
    return [routing.keep_BN for routing in decisions.values()]


@pytest.mark.parametrize(("name", "frames"), in_turn(FRAME, ["span", "number"]))
def test_videos_are_chosen_frame_by_frame(name: str, frames: str) -> None:
    size = FRAME[name]
    config = BY_FRAME.replace(language={"tokens": "span" if frames == "span" else size})
    batch = video(name, (1, 2))
    for keep in kept(routed(name, config), batch):
        for row, videos in zip(range(2), (1, 2)):
            kept_of_videos = keep[row][batch["input_ids"][row] == VIDEO].view(videos, -1)
            # The newline behind a video of LLaVA-OneVision belongs to no frame.
            assert bool(kept_of_videos[:, 4 * size :].all())
            assert kept_of_videos[:, : 4 * size].reshape(-1, size).sum(1).tolist() == [size // 2] * (4 * videos)


@pytest.mark.parametrize("name", ["llava", "llava-qwen2"])
def test_images_side_by_side_are_frames_of_their_own(name: str) -> None:
    batch = prompt(name, (2,))
    batch["input_ids"] = batch["input_ids"].sort(stable=True).values
    for keep in kept(routed(name, BY_FRAME), batch):
        kept_of_images = keep[batch["input_ids"] == IMAGE].view(2, PATCHES)
        assert kept_of_images.sum(1).tolist() == [PATCHES // 2] * 2


def test_grids_count_merged_patches() -> None:
    class Config:
        image_token_id, video_token_id = IMAGE, VIDEO
        vision_config = type("Vision", (), {"spatial_merge_size": 2})

    tokens, row = ImageTokens(Config()), [5, *[VIDEO] * 12, 6, *[IMAGE] * 4, 0]
    ids = torch.tensor([row, [0] * 13 + [7, *[IMAGE] * 5]])
    inputs = {"input_ids": ids, "video_grid_thw": torch.tensor([[3, 4, 4]])}
    kind = tokens.kinds(nn.Identity(), inputs, None)
    assert sorted(set(kind.flatten().tolist())) == [0, SHOWS_IMAGE, SHOWS_VIDEO]
    actual = tokens.frames(inputs, kind, ids != 0)
    assert actual.first_BN.nonzero().tolist() == [[0, 1], [0, 5], [0, 9], [0, 14], [1, 14]]
    assert actual.complete
    assert not tokens.frames(inputs, kind, (ids != 0) & (ids != 7)).complete
    inputs["video_grid_thw"] = torch.tensor([[2, 4, 4]])
    with pytest.raises(ValueError, match="video_grid_thw describes 8 tokens, the prompt has 12"):
        tokens.frames(inputs, kind, ids != 0)


def test_images_and_videos_of_one_id_are_told_apart_by_text() -> None:
    ids = torch.tensor([[5, *[IMAGE] * 9, 6, *[IMAGE] * 4, 7, *[IMAGE] * 4, 8]])
    inputs = {
        "input_ids": ids,
        "image_grid_thw": torch.tensor([[1, 3, 3]]),
        "video_grid_thw": torch.tensor([[2, 2, 2]]),
    }
    tokens = ImageTokens(make_joint("glm4v").config)
    actual = tokens.frames(inputs, tokens.kinds(nn.Identity(), inputs, None), ids > 0)
    assert actual.first_BN.nonzero().tolist() == [[0, 1], [0, 11], [0, 16]]


def places(start: int, tokens: int, qwen: bool, samples: int = 1) -> dict[str, Tensor]:
    """Return positions as given: Qwen would count those behind a cache by what it has seen in its last prompt."""
    place = torch.arange(start, start + tokens).expand(samples, -1)
    return {"position_ids": place.expand(3, -1, -1) if qwen else place}


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "frames"), in_turn(["llava", "llava-qwen2", "qwen3-vl", "qwen2.5-vl"], ["span", PATCHES])
)
def test_a_stream_of_frames_equals_the_whole_prompt(name: str, frames: Any) -> None:
    model, qwen = routed(name, BY_FRAME.replace(language={"tokens": frames})), name.startswith("qwen")
    images = prompt(name, (3,))
    pieces: list[list[int]] = [[1, 5, 6], [IMAGE] * PATCHES, [IMAGE] * PATCHES, [7], [8, 9, *[IMAGE] * PATCHES, 10]]
    ids = torch.tensor([[token for piece in pieces for token in piece]])
    pictures = {key: images[key] for key in ("pixel_values", "image_grid_thw") if key in images}
    kinds = {"mm_token_type_ids": (ids == IMAGE).long()} if qwen else {}
    expected = model(input_ids=ids, **pictures, **kinds, **places(0, ids.shape[1], qwen)).logits
    logits, cache, position, shown = [], None, 0, 0
    for piece in pieces:
        inputs: dict[str, Any] = {}
        if IMAGE in piece:
            patches = len(images["pixel_values"]) // 3
            inputs["pixel_values"] = images["pixel_values"][shown * patches : (shown + 1) * patches]
            if qwen:
                inputs |= {"image_grid_thw": images["image_grid_thw"][:1]}
            shown += 1
        inputs |= places(position, len(piece), qwen)
        out = model(input_ids=torch.tensor([piece]), **{CACHE: cache}, use_cache=True, **inputs)
        logits.append(out.logits)
        cache, position = cache_of(out), position + len(piece)
    torch.testing.assert_close(torch.cat(logits, 1), expected, atol=1e-5, rtol=1e-4)
    assert cache.layers[1].keys.shape[2] == ids.shape[1] - 3 * (PATCHES - PATCHES // 2)


@torch.no_grad()
# Text in front of an image sees it in PaliGemma.
@pytest.mark.parametrize(
    ("name", "cached"),
    in_turn([name for name in JOINT if name != "paligemma"], ["by itself", "before it was routed"]),
)
def test_an_image_behind_cached_text_equals_the_whole_prompt(name: str, cached: str) -> None:
    qwen, batch = name.startswith("qwen"), prompt(name, (1,))
    model: Any = make_joint(name)
    if cached == "by itself":
        mmod.route_(model, language=TOGETHER)
    text = torch.tensor([[1, 5, 6, 7]])
    cache = cache_of(model(input_ids=text, use_cache=True, **places(0, 4, qwen)))
    if cached == "before it was routed":
        mmod.route_(model, language=TOGETHER)
    ids = batch.pop("input_ids")
    del batch["attention_mask"]
    tokens = ids.shape[1]
    if "token_type_ids" in batch:
        batch["token_type_ids"] = nn.functional.pad(batch["token_type_ids"], (4, 0))
    later = model(input_ids=ids, **{CACHE: cache}, use_cache=True, **batch, **places(4, tokens, qwen)).logits
    if qwen:
        batch["mm_token_type_ids"] = nn.functional.pad(batch["mm_token_type_ids"], (4, 0))
    expected = model(input_ids=torch.cat([text, ids], 1), **batch, **places(0, 4 + tokens, qwen)).logits
    torch.testing.assert_close(later, expected[:, 4:], atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="cannot be split over calls"):
        model(input_ids=ids, **{CACHE: cache}, **batch, **places(4 + tokens, tokens, qwen))


@torch.no_grad()
@pytest.mark.parametrize(
    "config", [BY_FRAME, mmod.RoutingConfig(capacity=0.5, blocks=(1, 3))], ids=["span", "attention"]
)
def test_images_that_go_on_from_the_cache_are_refused(config: mmod.RoutingConfig) -> None:
    model, batch = routed("llava", config), prompt("llava", (1,))
    cache = cache_of(model(input_ids=torch.tensor([[3, 4]]), use_cache=True))
    problem = "a partly cached frame" if config is BY_FRAME else "all queries of the prompt"
    embeds = model.get_input_embeddings()(torch.full((1, 4), IMAGE))
    with pytest.raises(ValueError, match=problem):
        model(inputs_embeds=embeds, **{CACHE: cache})
    with pytest.raises(ValueError, match="pass the full prompt at once"):
        model.generate(**batch, max_new_tokens=2, prefill_chunk_size=5)


@pytest.mark.parametrize(
    ("name", "config"),
    in_turn(["llava", "llava-mistral-window", "llava-onevision"], [TOGETHER, BY_FRAME, EVERY_TOKEN]),
    ids=["together", "by frame", "all"],
)
def test_images_behind_a_prefix_that_peft_has_tuned(name: str, config: mmod.RoutingConfig) -> None:
    import peft

    options = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    batch = prompt(name, (1, 2))
    torch.manual_seed(0)
    dense = peft.get_peft_model(make_joint(name), options)
    model = peft.get_peft_model(routed(name, config), options)
    peft.set_peft_model_state_dict(model, peft.get_peft_model_state_dict(dense))
    labels = batch["input_ids"].masked_fill(batch["input_ids"] == IMAGE, -100)
    out = model(**batch, labels=labels)
    out.loss.backward()
    assert model.prompt_encoder.default.embedding.weight.grad.abs().sum() > 0
    real = batch["attention_mask"].bool()
    same = torch.allclose(out.logits[real], dense(**batch).logits[real], atol=1e-5)
    assert same == (config is EVERY_TOKEN)
    with torch.no_grad():
        alone = model(**sample_of(batch, 1, (1, 2)))
    torch.testing.assert_close(alone.logits, out.logits[1:].detach(), atol=1e-5, rtol=1e-4)
    assert model.generate(**batch, max_new_tokens=3, pad_token_id=0).shape[1] >= 3


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "way"),
    in_turn(
        ["llava", "llava-qwen2", "qwen2.5-vl", "qwen3-vl"],
        [("attention", "left"), ("linear", "right"), ("distilled", "left"), ("attention", "right")],
    ),
    ids=str,
)
def test_a_second_turn_of_a_padded_chat_equals_its_samples(name: str, way: tuple[str, str]) -> None:
    method, side = way
    model, qwen = routed(name, SECOND_TURN[method]), name.startswith("qwen")
    first, turns = prompt(name, (1, 2)), pad([[5, 6, 7], [8, 9, 10, 11, 12]], side)

    def chat(batch: dict[str, Any], turn: dict[str, Tensor]) -> Tensor:
        mask = torch.cat([batch["attention_mask"], turn["attention_mask"]], 1)
        place_BN = (mask.cumsum(1) - 1).clamp(min=0)
        first_BN, later_BN = place_BN.split([batch["input_ids"].shape[1], turn["input_ids"].shape[1]], dim=1)
        if qwen:
            first_BN, later_BN = first_BN.expand(3, -1, -1), later_BN.expand(3, -1, -1)
        cache = cache_of(model(**batch, use_cache=True, position_ids=first_BN))
        inputs = {**turn, "attention_mask": mask, "position_ids": later_BN}
        logits: Tensor = model(**inputs, **{CACHE: cache}).logits
        return logits

    together = chat(first, turns)
    for row in range(2):
        alone = sample_of(first, row, (1, 2))
        said = turns["attention_mask"][row].bool()
        turn = {key: value[row : row + 1, said] for key, value in turns.items()}
        torch.testing.assert_close(together[row][said], chat(alone, turn)[0], atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "copies"), in_turn(FRAME, [{}, {"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}])
)
def test_generation_chooses_frame_by_frame_as_a_forward_pass_does(name: str, copies: dict[str, Any]) -> None:
    model, batch = routed(name, BY_FRAME), video(name, (1, 2))
    expected = kept(model, batch)
    with mmod.trace(model) as decisions:
        model.generate(**batch, max_new_tokens=1, pad_token_id=0, **copies)
    for routing, keep in zip(decisions.values(), expected, strict=True):
        assert torch.equal(routing.keep_BN, keep.repeat_interleave(2 if copies else 1, dim=0))
