"""Which tokens are padding and which samples share a row: read from every argument, used by every method."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import mmod
from mmod.adapters.transformers.structure import read_structure
from mmod.lab import Experts, Recursions
from tests.kit.cover import cover, in_turn
from tests.kit.vlm_zoo import IMAGE, PATCHES, make_joint, make_language

SCORE = mmod.score("linear", init_std=0.3)
LENGTHS = (7, 4, 10)
METHODS = {
    "linear": mmod.RoutingConfig(router=SCORE, capacity=0.5, blocks=(1, 3)),
    "sigmoid": mmod.RoutingConfig(router=SCORE, gate="sigmoid", skipped="scale", capacity=0.5, blocks=(1, 3)),
    "threshold": mmod.RoutingConfig(router=SCORE, select="threshold", blocks=(1, 3)),
    "attention": mmod.RoutingConfig(router="attention", capacity=0.5, blocks=(1, 2, 3)),
    "mean attention": mmod.RoutingConfig(
        router=mmod.score("attention", importance="mean"), capacity=0.5, blocks=(2, 3)
    ),
    "attention above average": mmod.RoutingConfig(router="attention", select="threshold", blocks=(1, 3)),
    "norm": mmod.RoutingConfig(router="norm", capacity=0.5, blocks=(1, 3)),
    "stride": mmod.RoutingConfig(router="stride", capacity=0.5, blocks=(1, 3)),
    "diversity": mmod.RoutingConfig(router="diversity", capacity=0.5, blocks=(1, 3)),
    "all": mmod.RoutingConfig(router=SCORE, capacity=0.5, blocks=(1, 3), context="all"),
    "mlp": mmod.RoutingConfig(router=SCORE, capacity=0.5, blocks=(1, 3), operator="mlp"),
}


def blocks_of(lengths: tuple[int, ...]) -> Tensor:
    """Return the causal block-diagonal mask (1, 1, N, N) of packed samples."""
    blocks = [torch.ones(length, length, dtype=torch.bool).tril() for length in lengths]
    return torch.block_diag(*blocks).bool()[None, None]


def as_bias(mask: Tensor, hidden: float = torch.finfo(torch.float32).min) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, hidden)


def packed_by(how: str, lengths: tuple[int, ...] = LENGTHS) -> dict[str, Any]:
    """Return arguments that say in one way how rows are packed."""
    place = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    mask = blocks_of(lengths)
    ways: dict[str, dict[str, Any]] = {
        "positions": {"position_ids": place, "use_cache": False},
        "boundaries": {
            "position_ids": place,
            "use_cache": False,
            "cu_seq_lens_q": torch.tensor([0, *lengths]).cumsum(0).int(),
        },
        "bool": {"attention_mask": mask, "position_ids": place},
        "float": {"attention_mask": as_bias(mask), "position_ids": place},
        "infinite": {"attention_mask": as_bias(mask, -torch.inf), "position_ids": place, "use_cache": False},
        "positions left": {"attention_mask": mask},
    }
    return ways[how]


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "how"),
    in_turn(METHODS, ["positions", "boundaries", "bool", "float", "infinite", "positions left"]),
)
def test_packed_samples_are_routed_as_if_alone(name: str, how: str) -> None:
    model = mmod.route_(make_language("llama"), METHODS[name].replace(language={"tokens": "all"}))
    samples = [torch.randint(3, IMAGE, (1, length)) for length in LENGTHS]
    alone = torch.cat([model(ids, use_cache=False).logits for ids in samples], 1)
    packed = model(torch.cat(samples, 1), **packed_by(how)).logits
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize(
    ("method", "labelled", "form"),
    cover(["p-mod", "videollm-mod", "a-mod"], [False, True], [lambda mask: mask, as_bias]),
)
def test_images_of_packed_samples_compete_apart(method: str, labelled: bool, form: Any) -> None:
    model = mmod.route_(make_joint("llava"), language=mmod.preset(method, blocks=(1, 2), capacity=0.5))
    for block in mmod.routed_blocks(model).values():
        if method != "a-mod":
            block.router.score.weight.normal_(std=0.2)
    image, pixels = torch.full((1, PATCHES), IMAGE), torch.randn(3, 3, 12, 12)
    words = torch.randint(3, IMAGE, (3, 1, 4))
    # The second sample begins with an image where the first one ends with one.
    samples = [
        torch.cat(parts, 1)
        for parts in ((words[0], image, words[1]), (image, words[1], image, words[0]), (words[2], words[0]))
    ]
    answers = [torch.nn.functional.pad(ids[:, -3:], (ids.shape[1] - 3, 0), value=-100) for ids in samples]
    counts, lengths = (1, 2, 0), tuple(sample.shape[1] for sample in samples)
    alone, begun = [], 0
    for ids, images in zip(samples, counts):
        pictures = {"pixel_values": pixels[begun : begun + images]} if images else {}
        if labelled:
            pictures["labels"] = answers[len(alone)]
        alone.append(model(input_ids=ids, **pictures, use_cache=False).logits)
        begun += images
    mask, place = form(blocks_of(lengths)), torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    ids = torch.cat(samples, 1)
    labels = {"labels": torch.cat(answers, 1)} if labelled else {}
    packed = model(input_ids=ids, pixel_values=pixels, attention_mask=mask, position_ids=place, **labels).logits
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", ["linear", "attention", "diversity"])
def test_rows_may_pack_different_samples_in_any_order_beside_padding(name: str) -> None:
    model = mmod.route_(make_language("llama"), METHODS[name].replace(language={"tokens": "all"}))
    first, second, third = (torch.randint(3, IMAGE, (length,)) for length in (6, 5, 8))
    # Row 0 interleaves two samples; row 1 holds one behind padding.
    owner = torch.tensor([[0, 1, 0, 1, 1, 0, 0, 1, 0, 1, 0], [-1, -1, -1, 2, 2, 2, 2, 2, 2, 2, 2]])
    ids, place = torch.zeros(2, 2, 11, dtype=torch.long)
    for number, sample in enumerate((first, second, third)):
        ids[owner == number], place[owner == number] = sample, torch.arange(len(sample))
    pairs = (owner.unsqueeze(1) == owner.unsqueeze(2)) & (owner >= 0).unsqueeze(1)
    mask = (pairs & torch.ones(11, 11, dtype=torch.bool).tril()).unsqueeze(1)
    packed = model(ids, attention_mask=mask, position_ids=place).logits
    for number, sample in enumerate((first, second, third)):
        alone = model(sample.unsqueeze(0), use_cache=False).logits[0]
        torch.testing.assert_close(packed[owner == number], alone, atol=1e-5, rtol=1e-4)


LLAMA: Any = make_language("llama").config


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=9),
    st.lists(st.booleans(), min_size=9, max_size=9),
    st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_samples_are_the_components_of_a_mask(pairs: list[tuple[int, int]], valid: list[bool], bias: bool) -> None:
    mask = torch.diag(torch.tensor(valid))
    for query, key in pairs:
        mask[query, key] = valid[query] and valid[key]
    links = {(q, k) for q, k in itertools.product(range(9), repeat=2) if mask[q, k] or mask[k, q]}
    component = list(range(9))
    for _ in range(9):
        component = [min(component[k] for k in range(9) if k == q or (q, k) in links) for q in range(9)]
    expected = [component[token] for token in range(9) if valid[token]]
    mask_of_pairs = (as_bias(mask) if bias else mask)[None, None]
    structure = read_structure({"attention_mask": mask_of_pairs}, torch.zeros(1, 9, dtype=torch.long), 0, LLAMA)
    assert structure.valid_BN[0].tolist() == valid
    if len(set(expected)) <= 1:
        assert structure.segment_BN is None
        return
    assert structure.segment_BN is not None
    segments = [int(structure.segment_BN[0, token]) for token in range(9) if valid[token]]
    numbers = sorted(set(expected))
    assert segments == [numbers.index(first) for first in expected]


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["prefix", "tree"])
def test_a_prefix_and_a_tree_are_one_sample(kind: str, attention: str) -> None:
    model = make_language("llama", attn_implementation=attention)
    model.set_attn_implementation(attention)
    ids, mask = torch.randint(3, IMAGE, (1, 12)), torch.ones(12, 12, dtype=torch.bool).tril()
    if kind == "prefix":
        mask[:, :5] = True
    else:
        mask[9, 8] = mask[10, 8] = mask[11, 10] = False
    bias = as_bias(mask)[None, None]
    dense = model(ids, attention_mask=bias).logits
    mmod.route_(model, METHODS["linear"].replace(capacity=1.0, gate="identity", language={"tokens": "all"}))
    assert torch.equal(model(ids, attention_mask=bias).logits, dense)
    mmod.set_capacity_(model, 0.5)
    with mmod.trace(model) as decisions:
        model(ids, attention_mask=bias)
    assert {int(routing.keep_BN.sum()) for routing in decisions.values()} == {6}


@torch.no_grad()
def test_other_packings_are_refused_and_the_advice_works() -> None:
    config = METHODS["linear"].replace(language={"tokens": "all"})
    model = mmod.route_(make_language("llama"), config)
    samples = [torch.randint(3, IMAGE, (1, length)) for length in LENGTHS]
    alone, ids = torch.cat([model(sample, use_cache=False).logits for sample in samples], 1), torch.cat(samples, 1)
    place, mask = packed_by("positions")["position_ids"], blocks_of(LENGTHS)
    numbers = torch.tensor([1, 2, 3]).repeat_interleave(torch.tensor(LENGTHS)).unsqueeze(0)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    wrong: dict[str, dict[str, Any]] = {
        "position_ids restart.*pass use_cache=False": {"position_ids": place},
        "attention_mask has values up to 3": {"attention_mask": numbers},
        "cu_seq_lens_q separates.*pass position_ids": {"cu_seq_lens_q": ends, "use_cache": False},
    }
    for message, arguments in wrong.items():
        with pytest.raises(ValueError, match=message):
            model(ids, **arguments)
    right: list[dict[str, Any]] = [
        {"position_ids": place, "use_cache": False},
        {"attention_mask": mask},
        {"cu_seq_lens_q": ends, "position_ids": place, "use_cache": False},
    ]
    for arguments in right:
        torch.testing.assert_close(model(ids, **arguments).logits, alone, atol=1e-5, rtol=1e-4)
    # One long text whose positions leap forward is no packing.
    leaping = torch.arange(21) + 50 * (torch.arange(21) > 9)
    assert model(ids, position_ids=leaping.unsqueeze(0)).logits.shape == alone.shape
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match="eager attention adds a bool mask"):
        model(ids, attention_mask=mask)
    torch.testing.assert_close(model(ids, attention_mask=as_bias(mask)).logits, alone, atol=1e-5, rtol=1e-4)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(model(ids, attention_mask=mask).logits, alone, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_packed_rows_have_no_last_token_and_frames_of_a_size_fit_each_sample() -> None:
    image = torch.full((1, PATCHES), IMAGE)
    ids, pixels = torch.cat([torch.tensor([[5, 6]]), image, torch.tensor([[7]]), image], 1), torch.randn(2, 3, 12, 12)
    mask = blocks_of((2 + PATCHES, 1 + PATCHES))
    last = mmod.score("attention", importance="last_token")
    model = mmod.route_(make_joint("llava"), language=METHODS["attention"].replace(router=last))
    with pytest.raises(ValueError, match="pass one sample per row, or choose importance='per_viewer'"):
        model(input_ids=ids, pixel_values=pixels, attention_mask=mask)
    model(input_ids=ids, pixel_values=pixels)
    mmod.unroute_(model)
    mmod.route_(model, language=METHODS["attention"])
    model(input_ids=ids, pixel_values=pixels, attention_mask=mask)
    mmod.unroute_(model)
    mmod.route_(model, language=METHODS["linear"].replace(language={"tokens": 6}))
    with pytest.raises(ValueError, match=r"frames=6 does not divide the image tokens .*, \[\[9, 9\]\]"):
        model(input_ids=ids, pixel_values=pixels, attention_mask=mask)


@torch.no_grad()
@pytest.mark.parametrize("how", ["positions", "bool", "float"])
@pytest.mark.parametrize("kind", ["experts", "recursions"])
def test_mixtures_that_choose_together_refuse_packed_samples(kind: str, how: str) -> None:
    def made(choice: str) -> Any:
        method: Any = Recursions(recursions=2, choice=choice)
        if kind == "experts":
            method = Experts(experts=2, idle=1, choice=choice, capacity=None if choice == "tokens" else 0.5)
        return mmod.apply_(make_language("llama"), method)

    samples = [torch.randint(3, IMAGE, (1, length)) for length in LENGTHS]
    ids, packing = torch.cat(samples, 1), packed_by(how)
    model = made("topk")
    with pytest.raises(ValueError, match="pass one sample per row, or apply the method with choice='tokens'"):
        model(ids, **packing)
    for sample in samples:
        model(sample, use_cache=False)
    model = made("tokens")
    alone = torch.cat([model(sample, use_cache=False).logits for sample in samples], 1)
    torch.testing.assert_close(model(ids, **packing).logits, alone, atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize(
    "changes",
    [{"select": "threshold"}, {"context": "all"}, {"operator": "attention", "select": "threshold"}],
    ids=["kept", "all", "attention"],
)
def test_bidirectional_attention_stays_bidirectional(changes: dict[str, Any], use_cache: bool) -> None:
    config = mmod.RoutingConfig(**{"router": SCORE, "blocks": (1, 3), "gate": "sigmoid", "capacity": 0.5, **changes})
    model = mmod.route_(make_language("llama", is_causal=False), config)
    ids = torch.randint(3, IMAGE, (2, 12))
    logits = model(ids, use_cache=use_cache).logits
    alone = torch.cat([model(row.unsqueeze(0), use_cache=use_cache).logits for row in ids])
    torch.testing.assert_close(logits, alone, atol=1e-5, rtol=1e-4)
    everything = torch.ones(1, 1, 12, 12, dtype=torch.bool)
    with_mask = model(ids, attention_mask=everything, use_cache=use_cache).logits
    torch.testing.assert_close(logits, with_mask, atol=1e-5, rtol=1e-4)
