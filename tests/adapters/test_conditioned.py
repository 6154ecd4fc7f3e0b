"""Blocks that take more than tokens: values per image, text, and rows that the batch shares."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import diffusers
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import mmod
from mmod.adapters import find, find_stack, trial
from mmod.adapters.tokens import declared, find_blocks
from mmod.adapters.trial import ALONE, PATCHES, random_copy
from mmod.blocks.rows import Rows
from tests.kit.conditioned_zoo import (
    CONDITIONED,
    TEXT,
    TEXT_DIM,
    AdaLNBlock,
    make_conditioned,
    only,
    run,
    tokens_of,
)
from tests.kit.cover import in_turn

BLOCKS: dict[str, Any] = {"blocks": (1, 2, 3), "capacity": 0.5}
# As many slots as a text has words.
SLOTS = mmod.Threshold(0.5, max_tokens=TEXT)
LEARNED = mmod.score("linear", init_std=0.3)
WHOLE = mmod.score("linear", per="sequence", init_std=0.3)
CONFIGS: dict[str, mmod.RoutingConfig] = {
    "random": mmod.RoutingConfig(router="random", **BLOCKS),
    "learned": mmod.RoutingConfig(router=LEARNED, **BLOCKS),
    "gradual": mmod.preset("gradual"),
    "threshold": mmod.RoutingConfig(router=LEARNED, select=mmod.Threshold(0.5), blocks=(1, 2)),
    "slots": mmod.RoutingConfig(router=LEARNED, select=SLOTS, blocks=(1, 2)),
    "whole images": mmod.RoutingConfig(router=WHOLE, select=mmod.Threshold(0.5), gate="step", blocks=(1, 3)),
}


def apply(model: Any, name: str, config: Any) -> Any:
    return mmod.apply_(model, config, tokens=tokens_of(name))


@torch.no_grad()
def test_a_mask_of_tokens_that_no_example_had_is_narrowed() -> None:
    inputs = CONDITIONED["pixart"].inputs(3)
    inputs["attention_mask"] = (torch.arange(16) < torch.tensor([[16], [12], [9]])).long()
    for title in ("random", "slots", "gradual", "whole images"):
        torch.manual_seed(1)
        model = apply(make_conditioned("pixart"), "pixart", CONFIGS[title])
        with mmod.trace(model) as decisions:
            together = run(model, inputs)
        assert not all(routing.keep_BN.all() for routing in decisions.values())
        alone = torch.cat([run(model, only(inputs, image)) for image in range(3)])
        torch.testing.assert_close(together, alone, atol=1e-5 * float(alone.abs().max()), rtol=0)


def of_image(value: Any, image: int, batch: int, index_K: Tensor, tokens: int) -> Any:
    """Return an argument of a block for some tokens of an image, by its sizes, which all differ."""

    def select(leaf: Tensor) -> Tensor:
        if leaf.shape[0] == batch:
            leaf = leaf[image : image + 1]
        axes = [axis for axis, size in enumerate(leaf.shape) if size == tokens]
        for axis in axes:
            leaf = leaf.index_select(axis, index_K)
        return leaf

    return tree_map(lambda leaf: select(leaf) if isinstance(leaf, Tensor) else leaf, value)


@pytest.mark.parametrize(("name", "title"), in_turn(CONDITIONED, ["random", "slots", "threshold"]))
@torch.no_grad()
def test_kept_tokens_run_as_if_the_others_were_not_there(name: str, title: str) -> None:
    """A slow definition: a block's copy on each image's kept rows alone."""
    model = make_conditioned(name)
    block = find_stack_of(model, name).blocks[2]
    dense = copy.deepcopy(block)
    torch.manual_seed(5)
    apply(model, name, CONFIGS[title].replace(blocks=(2,), gate="identity"))
    seen: dict[str, Any] = {}
    block.register_forward_hook(lambda _, *call: seen.update(zip(("args", "kwargs", "y"), call)), with_kwargs=True)
    with mmod.trace(model) as decisions:
        run(model, CONDITIONED[name].inputs(4))
    (routing,) = decisions.values()
    assert routing.keep_BN.any()
    assert not routing.keep_BN.all()
    args = seen["args"]
    kwargs = seen["kwargs"]
    x = (*args, *kwargs.values())[0]
    for image, keep_N in enumerate(routing.keep_BN):
        index_K = keep_N.nonzero().flatten()
        if not len(index_K):
            continue
        narrow = functools.partial(of_image, image=image, batch=4, index_K=index_K, tokens=len(keep_N))
        expected = dense(*map(narrow, args), **{key: narrow(value) for key, value in kwargs.items()})
        actual = seen["y"][image : image + 1]
        torch.testing.assert_close(actual[:, index_K], expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
        assert torch.equal(actual[0, ~keep_N], x[image, ~keep_N])


def find_stack_of(model: Any, name: str) -> Any:
    """Return the blocks of a model, with what a user says of it."""
    with declared(model, tokens_of(name)):
        return find_stack(model)


@pytest.mark.parametrize("name", ["own dit", "own video", "rotary video"])
@torch.no_grad()
def test_blocks_that_pass_on_rows_get_the_arguments_of_these(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Rows] = []
    write_back = Rows.write_back
    monkeypatch.setattr(Rows, "write_back", lambda rows, y: written.append(rows) or write_back(rows, y))
    inputs = CONDITIONED[name].inputs(3)
    # The rotary blocks have a residual sum in their own forward, without a module of their attention.
    for title in ("random",) if name == "rotary video" else ("random", "gradual"):
        dense = make_conditioned(name)
        expected = run(apply(copy.deepcopy(dense), name, CONFIGS[title]), inputs)
        each = len(written)
        with monkeypatch.context() as patch:
            # Nothing is known of what code of one's own reads between blocks; here it is.
            patch.setattr(find, "find_blocks", lambda model: dataclasses.replace(find_blocks(model), host="tests"))
            actual = run(apply(dense, name, CONFIGS[title]), inputs)
        assert len(written) - each == 1 < each
        torch.testing.assert_close(actual, expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
        written.clear()


@pytest.mark.parametrize("name", ["pixart", "wan", "own video"])
@torch.no_grad()
def test_importance_is_read_from_the_attention_among_tokens_alone(name: str) -> None:
    """The first block attends to its tokens before it attends to the text."""
    model = apply(make_conditioned(name), name, mmod.RoutingConfig(router="attention", capacity=0.5, blocks=(1,)))
    inputs = CONDITIONED[name].inputs(2)
    text = "text" if name == "own video" else "encoder_hidden_states"
    scores = []
    for states in (inputs[text], inputs[text].flip(0)):
        with mmod.trace(model) as decisions:
            run(model, {**inputs, text: states})
        (routing,) = decisions.values()
        scores.append(routing.score_BN)
    assert torch.equal(*scores)


@pytest.mark.parametrize("name", CONDITIONED)
def test_routing_in_training_alone_is_dense_in_evaluation(name: str) -> None:
    inputs = CONDITIONED[name].inputs(2)
    model = make_conditioned(name)
    with torch.no_grad():
        expected = run(model, inputs)
    mmod.route_(model, "tread", training_only=True, tokens=tokens_of(name))
    run(model.train(), inputs).square().mean().backward()
    blocks = mmod.routed_blocks(model).values()
    assert all(parameter.grad is not None for block in blocks for parameter in block.parameters())
    with torch.no_grad():
        assert not torch.equal(run(model, inputs), expected)
        assert torch.equal(run(model.eval(), inputs), expected)


TOKENS = {"pixart": 16, "wan": 60, "wan, times of tokens": 60, "own video": 60}


def with_words(name: str, words: int) -> dict[str, Any]:
    """Return inputs of one image with a text of another length."""
    inputs = CONDITIONED[name].inputs(1)
    lengths = {key: value for key, value in inputs.items() if value.shape[1:2] == (TEXT,)}
    return {**inputs, **{key: value[:, :1].repeat_interleave(words, dim=1) for key, value in lengths.items()}}


def test_blocks_with_processors_of_their_own_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[nn.Module] = []
    monkeypatch.setattr(trial, "random_copy", lambda block: copies.append(block) or random_copy(block))
    find_stack_of(make_conditioned("dit"), "dit")
    assert len(copies) == 1


@pytest.mark.parametrize("name", TOKENS)
def test_roles_of_arguments_do_not_depend_on_sizes_that_agree(name: str) -> None:
    """As many words as tokens, as tokens of a trial, or as images; as many tokens as vectors of modulation."""
    model = make_conditioned(name)
    expected = find_stack_of(model, name).proof
    assert "rotary" in name or expected.images
    examples = [with_words(name, words) for words in (TOKENS[name], PATCHES, ALONE, 2)]
    if name == "wan":
        examples.append({**CONDITIONED[name].inputs(1), "hidden_states": torch.randn(1, 4, 1, 4, 6)})
    for example in examples:
        with declared(model, mmod.Tokens(example=example)):
            assert find_stack(model).proof == expected


def test_an_example_is_a_tensor_a_tuple_or_a_mapping() -> None:
    model = make_conditioned("own dit")
    inputs = CONDITIONED["own dit"].inputs(2)
    dense, outputs = run(model, inputs), []
    for example in (inputs, tuple(inputs.values()), dict(reversed(inputs.items()))):
        mmod.route_(model, mmod.RoutingConfig(), tokens=mmod.Tokens(example=example))
        outputs.append(run(model, inputs))
        mmod.undo_(model)
    assert not torch.allclose(outputs[0], dense)
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    video = make_conditioned("rotary video")
    mmod.route_(video, mmod.RoutingConfig(), tokens=mmod.Tokens(example=torch.zeros(1, 4, 3, 8, 10)))
    assert mmod.is_routed(video)


_IMAGES = CONDITIONED["own dit"].inputs(1)


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (
            None,
            r"missing .* 't' and 'y'.*Its forward takes \(x, t, y\): pass tokens=mmod.Tokens\('blocks', example=...\)",
        ),
        (_IMAGES["x"], r"input \(2, 4, 8, 8\): .*missing .*Its forward takes \(x, t, y\): the example must be these"),
        ({**_IMAGES, "text": _IMAGES["t"]}, r"unexpected keyword argument 'text'.*Its forward takes \(x, t, y\)"),
        ({**_IMAGES, "x": _IMAGES["x"][:, :3]}, r"x \(2, 3, 8, 8\).* 3 channels.*Its forward takes \(x, t, y\)"),
        ((*_IMAGES.values(), 1), r"takes 4 positional arguments but 5.*Its forward takes \(x, t, y\)"),
        ("images", r"Its forward takes \(x, t, y\): the example must be these, .* a tensor, a tuple, or a mapping"),
    ],
)
def test_a_wrong_example_ends_in_what_the_forward_takes(example: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mmod.route_(make_conditioned("own dit"), mmod.RoutingConfig(), tokens=mmod.Tokens(example=example))


def test_an_argument_that_no_trial_saw_is_refused_where_it_comes() -> None:
    model = make_conditioned("pixart")
    inputs = CONDITIONED["pixart"].inputs(2)
    mask = inputs.pop("encoder_attention_mask")
    mmod.route_(model, mmod.RoutingConfig(), tokens=mmod.Tokens(example=inputs))
    run(model, inputs)
    with pytest.raises(ValueError, match=r"got 'encoder_attention_mask', of which no trial.*Tokens\(example=...\)"):
        run(model, {**inputs, "encoder_attention_mask": mask})


_JOINT = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": TEXT_DIM}
_WORDS = {"encoder_hidden_states": torch.zeros(1, TEXT, TEXT_DIM), "timestep": torch.tensor([1])}
_POOLED = {**_WORDS, "pooled_projections": torch.zeros(1, 8)}
# Class -> its options, and what its forward takes.
DOUBLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "FluxTransformer2DModel": (
        {"in_channels": 4, "num_single_layers": 1, "pooled_projection_dim": 8, "axes_dims_rope": (4, 4, 8)},
        {
            "hidden_states": torch.zeros(1, 16, 4),
            **_POOLED,
            "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(7, 3),
        },
    ),
    "SD3Transformer2DModel": (
        {"sample_size": 8, "in_channels": 4, "caption_projection_dim": 32, "pooled_projection_dim": 8},
        {"hidden_states": torch.zeros(1, 4, 8, 8), **_POOLED},
    ),
    "QwenImageTransformer2DModel": (
        {"in_channels": 16, "axes_dims_rope": (4, 4, 8)},
        {
            "hidden_states": torch.zeros(1, 16, 16),
            **_WORDS,
            "encoder_hidden_states_mask": torch.ones(1, TEXT, dtype=torch.long),
            "img_shapes": [[(1, 4, 4)]] * 2,
        },
    ),
}


@pytest.mark.parametrize("name", DOUBLE)
def test_blocks_of_two_streams_are_refused_by_that(name: str) -> None:
    options, example = DOUBLE[name]
    model = getattr(diffusers, name)(**_JOINT, **options)
    with pytest.raises(ValueError, match=r"must return the tokens alone.* Double-stream blocks"):
        mmod.route_(model, mmod.RoutingConfig(), tokens=mmod.Tokens(example=example))


def test_stages_that_merge_patches_are_refused_by_that() -> None:
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4
    )
    with pytest.raises(ValueError, match=r"must return the tokens alone.* merge patches, as in Swin") as refusal:
        mmod.route_(transformers.SwinModel(config), mmod.RoutingConfig())
    assert "FLUX" not in str(refusal.value)


class PooledBlock(AdaLNBlock):
    """Every token gets the mean of all tokens, by a gate that the model passes."""

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return super().forward(x + c.unsqueeze(1) * x.mean(dim=1, keepdim=True), c)


class DrawingBlock(AdaLNBlock):
    """Conditions are dropped at random, also in evaluation."""

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return super().forward(x, c * (torch.rand(len(c), 1) < 0.5))


def test_a_gate_of_zeros_hides_nothing_and_draws_are_alike() -> None:
    for block, refusal in ((PooledBlock, "another way than attention"), (DrawingBlock, "")):
        model = make_conditioned("own dit")
        model.blocks = nn.ModuleList(block() for _ in range(3))
        for module in (model.times, model.labels):
            for parameter in module.parameters():
                nn.init.zeros_(parameter)
        if refusal:
            with pytest.raises(ValueError, match=refusal):
                apply(model, "own dit", CONFIGS["random"])
        else:
            assert find_stack_of(model, "own dit").proof.images == ("c",)
