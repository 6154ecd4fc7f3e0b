"""The search for a plan: its costs are those of the routed model, its set the best, and it goes on where it stopped."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mmod
from mmod.planning.divergence import outputs
from mmod.planning.plan_search import BlockCosts, PlanSearch, best_choices, best_plan
from tests.kit import clip_zoo, folders
from tests.kit.fitted import count_once
from tests.kit.vlm_zoo import IMAGE, make_joint, make_language, prompt
from tests.kit.zoo import make_images, make_model

NAME = "vit_tiny_patch16_224"
FEW = (mmod.Option(0.5), mmod.Option(0.25, "mlp"))
STRIDE = mmod.score("stride")
# Blocks of a model whose scores are only stored and found, and of a batch in a search among these: each option in each.
SHALLOW = 2
TRIALS = len(FEW) * SHALLOW


@pytest.fixture(autouse=True)
def counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    count_once(monkeypatch)


@given(
    table=st.lists(
        st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20)), min_size=1, max_size=4), min_size=1, max_size=5
    ),
    room=st.integers(0, 40),
)
def test_the_best_set_is_that_of_trying_all(table: list[list[tuple[int, int]]], room: int) -> None:
    losses = [[float(loss) for loss, _ in row] for row in table]
    costs = [[float(cost) for _, cost in row] for row in table]
    budget = sum(min(row) for row in costs) + room
    chosen = best_choices(losses, costs, budget)
    assert sum(row[item] for row, item in zip(costs, chosen)) <= budget
    sets = itertools.product(*(range(len(row)) for row in losses))
    fitting = [one for one in sets if sum(row[item] for row, item in zip(costs, one)) <= budget]
    best = min(sum(row[item] for row, item in zip(losses, one)) for one in fitting)
    assert sum(row[item] for row, item in zip(losses, chosen)) == best
    if min(sum(min(row) for row in costs), 1):
        with pytest.raises(ValueError, match="out of reach"):
            best_choices(losses, costs, sum(min(row) for row in costs) - 1)


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store: searches of the same model and prompts, which differ in what is a budget, share their scores."""
    return tmp_path_factory.mktemp("scored") / "store.jsonl"


def prompts(name: str = "llava") -> list[dict[str, Any]]:
    return [prompt(name, (1, 2), seed=seed) for seed in (1, 2)]


@pytest.mark.parametrize("name", ["llava", "qwen3-vl"])
def test_language_models_cost_and_say_what_the_search_says(name: str, scored: Path) -> None:
    model, batches = make_joint(name), prompts(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    search = mmod.search_plan(model.train(), batches, 0.7, part="language", store=scored)
    assert model.training
    assert not mmod.is_routed(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert len(search.scores) == 4
    model.eval()
    for block, option in ((0, 1), (2, 3)):
        alone = search.options[option].config([block], search.router)
        score = mmod.plan_divergence(model, batches, alone, part="language")
        assert search.scores[block][option] == pytest.approx(score)
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    images = sum(int((batch["input_ids"] == IMAGE).sum()) for batch in batches)
    text, images = round(tokens / 4) - round(images / 4), round(images / 4)
    for budget in (0.7, search.costs.least_share):
        plan = search.plan_for(budget)
        report = mmod.flops(mmod.route_(model, language=plan), mmod.Prompt(text, images))
        mmod.unroute_(model)
        assert report.share == pytest.approx(search.share(plan))
        assert report.share <= budget + 1e-9
    # Nothing reads the image tokens that leave the last layer.
    assert search.scores[3][1] == 0


@given(st.lists(st.tuples(st.floats(1, 9), st.floats(1e-3, 0.99)), min_size=2, max_size=4), st.floats(0, 3))
def test_the_frontier_reaches_to_the_least(blocks: list[tuple[float, float]], remaining: float) -> None:
    dense = tuple(size for size, _ in blocks)
    costs = BlockCosts(tuple((size * share,) for size, share in blocks), dense, sum(dense) + remaining)
    plan, names = (
        best_plan([[0.1]] * len(dense), costs, FEW[:1], costs.least_share, STRIDE),
        tuple("abcd"[: len(dense)]),
    )
    search = PlanSearch(names, FEW[:1], ((0.1,),) * len(dense), costs, costs.least_share, "flops", 1, STRIDE, plan)
    shares = [share for share, _ in search.frontier()]
    assert shares[-1] == pytest.approx(costs.least_share)
    assert shares == sorted(shares, reverse=True)


def test_a_budget_of_the_cache(scored: Path) -> None:
    model, batches = make_joint("llava"), prompts()
    search = mmod.search_plan(model, batches, 0.6, part="language", cost="cache", store=scored)
    assert search.plan.context == "kept"
    assert (
        mmod.flops(mmod.route_(model, language=search.plan), mmod.Prompt(*(found_lengths(batches)))).cache_share <= 0.6
    )


def test_a_budget_of_what_image_tokens_add() -> None:
    # The second batch has longer prompts.
    model, batches = make_joint("llava"), [prompt("llava", (1, 2)), prompt("llava", (3, 3))]
    search = mmod.search_plan(model, batches, 0.5, part="language", cost="image_flops")
    text, images = found_lengths(batches)
    alone = mmod.flops(model, mmod.Prompt(text)).dense
    dense = mmod.flops(model, mmod.Prompt(text, images)).dense
    routed = mmod.flops(mmod.route_(model, language=search.plan), mmod.Prompt(text, images)).routed
    assert (routed - alone) / (dense - alone) == pytest.approx(search.share(search.plan))
    assert search.share(search.plan) <= 0.5


@pytest.mark.parametrize(
    ("name", "importance", "options"),
    [("llava", "last_token", None), (NAME, "mean", FEW), (NAME, "class_token", FEW)],
)
def test_tokens_that_importance_chooses(name: str, importance: str, options: Any) -> None:
    language = name == "llava"
    model, batches = (make_joint(name), prompts()) if language else (make_model(name), [make_images(name, 2)])
    part = "language" if language else None
    settings: dict[str, Any] = {
        "part": part,
        "router": {"name": "attention", "importance": importance},
        "options": options,
    }
    search = mmod.search_plan(model, batches, 0.8, **settings)
    assert search.plan.rows
    assert search.plan.blocks[0] > 0, "nothing is read before the first block"
    assert all(math.isinf(score) for score in search.scores[0])
    assert not any(math.isinf(score) for row in search.scores[1:] for score in row)
    assert search.plan.router == mmod.score("attention", importance=importance)
    assert {option.capacity for option in search.options} == ({0, 0.25} if language else {0.25, 0.5})
    # A score is what the choice does where the block before is dense and read.
    block, *choice = search.plan.rows[-1]
    option = mmod.Option(*choice)
    alone = option.config([block], search.router)
    expected = mmod.plan_divergence(model, batches, alone, part=part)
    assert search.scores[block][search.options.index(option)] == pytest.approx(expected)


def found_lengths(batches: list[dict[str, Any]]) -> tuple[int, int]:
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches) / 4
    images = sum(int((batch["input_ids"] == IMAGE).sum()) for batch in batches) / 4
    return round(tokens) - round(images), round(images)


def test_labels_say_which_tokens_count() -> None:
    model, batch = make_joint("llava"), prompt("llava", (1,))
    labels = torch.full_like(batch["input_ids"], -100)
    labels[:, -2:] = batch["input_ids"][:, -2:]
    with torch.no_grad():
        logits = model(**batch).logits
    assert torch.equal(outputs(model, {**batch, "labels": labels}, "language"), logits[0, -3:-1])
    text = batch["attention_mask"].bool() & (batch["input_ids"] != IMAGE)
    assert torch.equal(outputs(model, batch, "language"), logits[text])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        (NAME, {}),
        (NAME, {"router": "norm", "options": FEW}),
        ("vit_base_patch16_siglip_gap_224", {"divergence": "cosine", "options": FEW}),
    ],
)
def test_image_models(name: str, settings: dict[str, Any]) -> None:
    model, images = make_model(name), make_images(name, 4)
    search = mmod.search_plan(model, [images[:2], images[2:]], 0.8, **settings)
    report = mmod.flops(mmod.route_(model, search.plan), 64)
    mmod.unroute_(model)
    assert report.share == pytest.approx(search.share(search.plan), abs=1e-3)
    assert search.share(search.plan) <= 0.8
    shares, scores = zip(*search.frontier(6))
    assert list(shares) == sorted(shares, reverse=True)
    assert list(scores) == sorted(scores)


@pytest.mark.parametrize("name", ["vit", "dinov2", "siglip classifier"])
def test_vision_models_of_transformers(name: str) -> None:
    model = folders.make_image_model(name)
    images = torch.randn(3, 3, folders.SIDE, folders.SIDE)
    search = mmod.search_plan(model, [images[:2], images[2:]], 0.8, options=FEW)
    report = mmod.flops(mmod.route_(model, image=search.plan), folders.SIDE)
    assert report.share == pytest.approx(search.share(search.plan), abs=1e-3)


def test_clip_of_transformers_is_evaluated_by_its_image_features() -> None:
    model = folders.make_image_model("clip")
    batch = {"pixel_values": torch.randn(2, 3, folders.SIDE, folders.SIDE), "input_ids": torch.tensor([[5, 6], [7, 8]])}
    with torch.no_grad():
        expected = model(**batch).image_embeds
    torch.testing.assert_close(outputs(model, batch, "image"), expected)
    search = mmod.search_plan(model, [batch], 0.95, options=FEW)
    assert search.plan.depth == 4


def test_towers_of_clip_models() -> None:
    model = clip_zoo.make_clip("ViT-B-32")
    batch = {"image": clip_zoo.make_images("ViT-B-32"), "text": clip_zoo.make_captions("ViT-B-32")}
    for part in ("image", "text"):
        search = mmod.search_plan(model, [batch], 0.95, part=part, options=FEW)
        assert all(name in str(search) for name in search.names)
        assert search.plan.depth == len(search.names)
    with pytest.raises(ValueError, match="name a part of this CLIP, one of image, text"):
        mmod.search_plan(model, [batch], 0.9)


def test_an_interrupted_search_goes_on(tmp_path: Path) -> None:
    model, images, path = make_model(NAME, depth=SHALLOW), make_images(NAME, 6), tmp_path / "store.jsonl"
    batches = [images[:2], images[2:4], images[4:]]
    uninterrupted = mmod.search_plan(model, batches, 0.8, options=FEW)

    def interrupted() -> Iterator[Tensor]:
        yield batches[0]
        yield batches[1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mmod.search_plan(model, interrupted(), 0.8, options=FEW, store=path)
    # A header, and a line for each option in each block and batch.
    assert len(path.read_text().splitlines()) == 1 + 2 * TRIALS
    assert not mmod.is_routed(model)
    assert mmod.search_plan(model, batches, 0.8, options=FEW, store=path) == uninterrupted


def test_a_store_serves_searches_of_other_models_batches_and_options(tmp_path: Path) -> None:
    """Each finds the scores of its own model and batches alone, also those of another search."""
    model, images, path = make_model(NAME, depth=SHALLOW), make_images(NAME, 6), tmp_path / "store.jsonl"
    batches = list(images.split(2))
    mmod.search_plan(model, batches, 0.8, options=FEW, store=path)
    for changed, given_batches, options, added in (
        (model, batches[:2], FEW, 0),
        (model, [batches[0], batches[2], batches[1]], FEW, 0),
        (model, [batches[0], batches[1].flip(3)], FEW, 1),
        (model, [images[3:], images[:3]], FEW, 2),
        (make_model(NAME, seed=1, depth=SHALLOW), batches, FEW, 3),
        (model, batches, FEW[:1], 0),
    ):
        before = len(path.read_text().splitlines())
        search = mmod.search_plan(changed, given_batches, 0.8, options=options, store=path)
        assert search == mmod.search_plan(changed, given_batches, 0.8, options=options)
        assert len(path.read_text().splitlines()) == before + added * TRIALS


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_images_and_weights_that_are_not_finite_are_refused(bad: float) -> None:
    model, images = make_model(NAME), make_images(NAME, 2)
    broken = images.clone()
    broken[0, 0, 0, 0] = bad
    with pytest.raises(ValueError, match="outputs of this VisionTransformer must be finite"):
        mmod.search_plan(model, [images, broken], 0.8, options=FEW)
    with pytest.raises(ValueError, match="outputs of this VisionTransformer must be finite"):
        mmod.plan_divergence(model, [broken], mmod.RoutingConfig())
    with pytest.raises(ValueError, match="no calibration samples"):
        mmod.plan_divergence(model, [], mmod.RoutingConfig())
    for batches, got in ((images, "a Tensor alone: put it into a list"), ({"x": images}, "a dict alone"), (3, "a int")):
        with pytest.raises(TypeError, match=f"batches must be a list or a loader of batches, got {got}"):
            mmod.search_plan(model, batches, 0.8, options=FEW)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=f"batches must be a list or a loader of batches, got {got}"):
            mmod.plan_divergence(model, batches, mmod.RoutingConfig())  # type: ignore[arg-type]
    assert not mmod.is_routed(model)


@pytest.mark.parametrize(
    "router",
    ["stride", {"name": "attention", "importance": "class_token"}, mmod.score("random", seed=3)],
    ids=str,
)
def test_a_plan_keeps_the_score_that_it_was_searched_with(router: Any, tmp_path: Path) -> None:
    model, images = make_model(NAME), make_images(NAME, 4)
    batches = list(images.split(2))
    search = mmod.search_plan(model, batches, 0.8, options=FEW, router=router, rounds=1)
    expected = mmod.plan_divergence(model, batches, search.plan)
    assert search.divergence == pytest.approx(expected)
    assert search.plan.router == mmod.RoutingConfig(router=router).router
    search.plan.save(tmp_path / "plan.json")
    for plan in (search.plan, mmod.RoutingConfig.load(tmp_path / "plan.json")):
        assert mmod.plan_divergence(model, batches, plan) == expected
    routed = mmod.route_(model, search.plan)
    assert mmod.routing_config(routed) == search.plan
    for other in (search.plan_for(0.9), search.plan_for(0.75)):
        assert other.router == search.plan.router
    with pytest.raises(ValueError, match="this search has plans of"):
        search.score(search.plan.replace(router="norm"))


def plan_of_one(capacity: float, depth: int) -> mmod.RoutingConfig:
    return mmod.RoutingConfig(router="stride", blocks=(1,), capacity=(capacity,), depth=depth)


def test_a_picture(tmp_path: Path) -> None:
    search = mmod.search_plan(make_model(NAME), [make_images(NAME, 2)], 0.8, options=FEW)
    search.plot(tmp_path / "plan.png")
    with pytest.raises(FileExistsError, match="pass overwrite=True to replace it"):
        search.plot(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000
    for other in (plan_of_one(0.125, 4), plan_of_one(0.5, 9)):
        with pytest.raises(ValueError, match="this search has plans of"):
            search.score(other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": 1.0}, r"budget must be a number in \(0, 1\)"),
        ({"budget": 0.01}, "the range of these options"),
        ({"batches": []}, "no calibration samples"),
        ({"cost": "bytes"}, "cost must be one of"),
        ({"cost": "cache"}, "for language models"),
        ({"cost": "image_flops"}, "for language models"),
        ({"divergence": "l2"}, "divergence must be one of"),
        ({"router": "linear"}, "router 'linear' is learned"),
        ({"options": []}, "no options"),
        ({"options": [mmod.Option(0.5, "head")]}, "operator must be"),
        ({"part": "text"}, "one of image; got 'text'"),
        ({"budget": "0.5"}, "budget must be a number in"),
        ({"budget": math.nan}, "budget must be a number in"),
        ({"rounds": "1"}, "rounds must be an integer of at least 0"),
        ({"rounds": -1}, "rounds must be an integer of at least 0"),
        ({"rounds": 1, "batches": iter([make_images(NAME, 2)])}, "read the batches again"),
        ({"budget": -1.0, "cost": "milliseconds"}, "budget must be a number above 0"),
        ({"options": ["mlp"]}, "options must be several values, each an Option, got"),
        ({"options": "mlp"}, "options must be several values, each an Option, got"),
        ({"model": NAME}, "must be a torch.nn.Module"),
        (
            {"router": {"name": "attention", "importance": "first"}},
            "router.importance must be one of 'per_viewer', 'mean', 'class_token', 'last_token'",
        ),
        ({"router": "sturdy"}, "router .*'attention', .*'stride'"),
    ],
)
def test_what_cannot_be_searched_is_refused(changes: dict[str, Any], message: str) -> None:
    model, images = make_model(NAME), make_images(NAME, 1)
    with pytest.raises((TypeError, ValueError), match=message):
        mmod.search_plan(**{"model": model, "batches": [images], "budget": 0.8, "options": FEW, **changes})
    assert not mmod.is_routed(model)


def test_text_alone_takes_capacities_above_0() -> None:
    model, batch = make_language("llama"), {"input_ids": torch.randint(3, 90, (2, 12))}
    search = mmod.search_plan(model, [batch], 0.8, options=[mmod.Option(0.5, "mlp"), mmod.Option(0.5, "block", "all")])
    assert search.share(search.plan) <= 0.8
    assert {option.capacity for option in mmod.search_plan(model, [batch], 0.8).options} == {0.25, 0.5}
    with pytest.raises(ValueError, match="capacity 0 is for image tokens"):
        mmod.search_plan(model, [batch], 0.8, options=[mmod.Option(0.0, "block", "all")])
