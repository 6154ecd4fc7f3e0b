"""The score "temporal" against loops over the frames of videos in float64, and against transformers' own EVS."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import mmod
from mmod.adapters.transformers.cache_base import CACHE, cache_of
from mmod.routing import TemporalScore
from tests.kit.counting import flop_counter
from tests.kit.cover import in_turn
from tests.kit.generation import check_cache_changes_nothing, generate, routed
from tests.kit.vlm_zoo import (
    FRAME,
    IMAGE,
    PATCHES,
    VIDEO,
    make_joint,
    make_language,
    merged_embeddings,
    prompt,
    sample_of,
    video,
)
from tests.kit.zoo import make_model

VIDEOS = mmod.RoutingConfig(router="temporal", capacity=0.5, blocks=(0, 1, 2))
IMAGES = VIDEOS.replace(router={"images": True})
FRAMES = 4


def distances(frames: list[Tensor]) -> list[Tensor]:
    """Return the cosine distance of each frame's tokens (P, D) to those of the frame before (P,), 2 in the first."""
    found = [torch.full((len(frames[0]),), 2.0, dtype=torch.float64)]
    for before, frame in itertools.pairwise(frames):
        row = []
        for one, other in zip(before.double(), frame.double(), strict=True):
            row.append(1 - (one @ other) / math.sqrt(float(one @ one) * float(other @ other)))
        found.append(torch.stack(row))
    return found


def videos_of(batch: dict[str, Any], values: Tensor, row: int, size: int) -> list[list[Tensor]]:
    """Return what a row (N, ...) holds at each frame of each video."""
    at_videos = values[row][batch["input_ids"][row] == VIDEO]
    # A newline follows each video of LLaVA-OneVision.
    clip = FRAMES * size + (len(at_videos) % (FRAMES * size) > 0)
    return [list(part[: FRAMES * size].split(size)) for part in at_videos.split(clip)]


@pytest.mark.parametrize("name", FRAME)
@torch.no_grad()
def test_it_is_the_distance_to_the_same_place_one_frame_earlier(name: str) -> None:
    batch = video(name, (1, 2), FRAMES)
    model = make_joint(name)
    x_BND = merged_embeddings(model, batch)
    mmod.route_(model, language=VIDEOS)
    with mmod.trace(model) as trace:
        model(**batch)
    for routing in trace.values():
        for row, count in enumerate((1, 2)):
            clips = videos_of(batch, x_BND, row, FRAME[name])
            assert len(clips) == count
            scored = videos_of(batch, routing.score_BN, row, FRAME[name])
            for frames, score in zip(clips, scored, strict=True):
                for actual, expected in zip(score, distances(frames), strict=True):
                    torch.testing.assert_close(actual.double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("name", "capacity"), in_turn(FRAME, [0.0, 0.25, 0.5, 1.0]))
@torch.no_grad()
def test_first_frames_stay_whole_and_the_rest_is_chosen_over_all_later_ones(name: str, capacity: float) -> None:
    batch = video(name, (1, 2), FRAMES)
    model = routed(name, VIDEOS.replace(capacity=capacity))
    with mmod.trace(model) as trace:
        model(**batch)
    size = FRAME[name]
    for routing in trace.values():
        keep_BN = routing.keep_BN
        real_BN = batch["attention_mask"].bool()
        assert bool(keep_BN[real_BN & (batch["input_ids"] != VIDEO)].all())
        for row, count in enumerate((1, 2)):
            later = []
            for frames in videos_of(batch, keep_BN, row, size):
                assert bool(frames[0].all())
                later += frames[1:]
            scores = [score for frames in videos_of(batch, routing.score_BN, row, size) for score in frames[1:]]
            kept = math.floor(capacity * count * (FRAMES - 1) * size)
            best = sorted(range(len(torch.cat(later))), key=lambda at: -float(torch.cat(scores)[at]))[:kept]
            assert torch.cat(later).nonzero().flatten().tolist() == sorted(best)


@torch.no_grad()
def test_it_keeps_what_the_retention_mask_of_transformers_keeps() -> None:
    evs = pytest.importorskip("transformers.models.nemotron_h_omni.modeling_nemotron_h_omni")
    generator = torch.Generator().manual_seed(0)
    frames, size = 5, 12
    x_TD = torch.randn(frames * size, 16, generator=generator)
    earlier_T = torch.arange(frames * size) - size
    score_T = TemporalScore()(x_TD[None], earlier_BN=earlier_T.clamp(min=-1)[None])[0]
    for share in (0.25, 0.5, 0.75):
        mask_T = evs.compute_retention_mask(x_TD, frames, 1 - size * (1 + share * (frames - 1)) / (frames * size))
        later = score_T[size:].topk(int(share * (frames - 1) * size)).indices + size
        assert sorted(later.tolist()) == mask_T[size:].nonzero().flatten().add(size).tolist()
        assert bool(mask_T[:size].all())


@pytest.mark.parametrize("name", ["llava", "llava-qwen2", "internvl", "smolvlm", "qwen3-vl"])
@torch.no_grad()
def test_images_of_a_prompt_are_frames_if_asked(name: str) -> None:
    batch = prompt(name, (3, 1))
    model = make_joint(name)
    x_BND = merged_embeddings(model, batch)
    mmod.route_(model, language=IMAGES)
    with mmod.trace(model) as trace:
        model(**batch)
    routing = next(iter(trace.values()))
    shown_BN = batch["input_ids"] == IMAGE
    frames = list(x_BND[0][shown_BN[0]].split(PATCHES))
    for actual, expected in zip(routing.score_BN[0][shown_BN[0]].split(PATCHES), distances(frames), strict=True):
        torch.testing.assert_close(actual.double(), expected, atol=1e-6, rtol=1e-5)
    keep = routing.keep_BN[0][shown_BN[0]]
    assert bool(keep[:PATCHES].all())
    assert int(keep[PATCHES:].sum()) == PATCHES
    # The image of another sample is no frame before.
    assert bool(routing.keep_BN[1][shown_BN[1]].all())


@pytest.mark.parametrize("name", FRAME)
@torch.no_grad()
def test_a_batch_equals_its_samples_and_full_capacity_the_dense_model(name: str) -> None:
    batch = video(name, (1, 2), FRAMES)
    real = batch["attention_mask"].bool()
    dense = make_joint(name)(**batch).logits[real]
    model = routed(name, VIDEOS)
    together = model(**batch).logits
    assert not torch.allclose(together[real], dense, atol=1e-3)
    for row in range(2):
        alone = model(**sample_of(batch, row, (1, 2))).logits[0]
        torch.testing.assert_close(alone, together[row][real[row]], atol=1e-5, rtol=1e-4)
    mmod.set_capacity_(model, 1.0)
    torch.testing.assert_close(model(**batch).logits[real], dense, atol=1e-5, rtol=1e-4)
    mmod.undo_(model)
    assert torch.equal(model(**batch).logits[real], dense)


@pytest.mark.parametrize("name", ["qwen2-vl", "llava-onevision"])
def test_it_generates_saves_and_loads(name: str, tmp_path: Any) -> None:
    batch = video(name, (1,), FRAMES)
    model = mmod.route_(make_joint(name), language="evs")
    if not name.startswith("qwen"):
        check_cache_changes_nothing(model, batch)
    words = generate(model, batch)
    model.save_pretrained(tmp_path)
    loaded = mmod.load_pretrained(tmp_path)
    assert mmod.routing_config(loaded) == mmod.preset("evs")
    assert torch.equal(generate(loaded, batch), words)
    assert torch.equal(generate(copy.deepcopy(model), batch), words)


@torch.no_grad()
def test_flops_count_the_first_frame_as_whole() -> None:
    model = mmod.route_(make_joint("llava", attention="eager"), language=IMAGES)
    batch = prompt("llava", (3,))
    tokens = batch["input_ids"].shape[1]
    report = mmod.flops(model, mmod.Prompt(tokens - 3 * PATCHES, (PATCHES,) * 3))
    with flop_counter() as counter:
        model(**batch, logits_to_keep=1)
    for row in report.blocks:
        assert row.routed == sum(counter.get_flop_counts()[f"{type(model).__name__}.{row.name}"].values()), row.name
    assert report.blocks[0].kept == tokens - PATCHES


@torch.no_grad()
def test_what_has_no_frame_before_it_is_refused() -> None:
    with pytest.raises(ValueError, match="remove router='temporal', which compares frames of videos"):
        mmod.route_(make_model("test_vit"), VIDEOS)
    with pytest.raises(ValueError, match=r"or set router\.images=True"):
        mmod.route_(make_joint("llava"), language=VIDEOS)
    with pytest.raises(ValueError, match=r"route with language=\{'tokens': 'image'\}"):
        mmod.route_(make_language("llama"), IMAGES)
    with pytest.raises(ValueError, match="needs the frames of a prompt"):
        TemporalScore()(torch.zeros(1, 2, 3))
    batch = video("qwen2-vl", (1,), FRAMES)
    model = routed("qwen2-vl", VIDEOS)
    masks = batch["input_ids"] == VIDEO
    with pytest.raises(ValueError, match="frames of a video are unknown: pass video_grid_thw"):
        model(inputs_embeds=merged_embeddings(make_joint("qwen2-vl"), batch), image_mask=2 * masks)
    model = routed("llava", IMAGES)
    batch = prompt("llava", (1,))
    cache = cache_of(model(**batch, use_cache=True))
    with pytest.raises(ValueError, match="an image follows cached tokens, which may hold the frame before it"):
        model(input_ids=batch["input_ids"], pixel_values=batch["pixel_values"], **{CACHE: cache})
