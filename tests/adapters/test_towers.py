"""Routed vision towers of all families of vision-language models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

import mmod
from mmod.adapters.probe import inputs_of_call
from mmod.blocks import Rows, Segments, read_segments
from mmod.methods import Merge, Prune, methods_of
from tests.kit.cover import in_turn
from tests.kit.towers import ALL, IN_SEQUENCE, UNEQUAL, by_image, images, make_deep, tower_of
from tests.kit.vlm_zoo import make_joint, prompt

HALF = mmod.RoutingConfig(router="norm", capacity=0.5, blocks=(1,))
CONFIGS: dict[str, Any] = {
    "gradual": "gradual",
    "importance": mmod.RoutingConfig(router="attention", capacity=0.5, blocks=(1,)),
    "change": mmod.RoutingConfig(router="change", capacity=0.5, blocks=(1,)),
    "threshold": HALF.replace(router=mmod.score("linear", init_std=0.2), select="threshold", blocks="all"),
    "sequence": HALF.replace(
        router=mmod.score("linear", init_std=0.2, per="sequence"),
        select="threshold",
        operator="attention",
        blocks="all",
    ),
    "attention": HALF.replace(operator="attention"),
    "mlp": HALF.replace(operator="mlp"),
    "merge": HALF.replace(router="redundancy", skipped="merge", blocks="all"),
    "follow": HALF.replace(router="redundancy", skipped="follow", blocks="all"),
}
GENERATION: dict[str, Any] = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False}


def classes(model: nn.Module) -> list[type]:
    """Return the classes of all modules."""
    return [type(module) for module in model.modules()]


def features(tower: Any, name: str, numbers: tuple[int, ...] = (0, 1, 2)) -> list[Tensor]:
    """Return a tower's tokens image by image."""
    return by_image(name, tower(**images(name, numbers)).last_hidden_state, numbers)


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_a_tower_that_keeps_all_equals_the_dense_one(name: str) -> None:
    model, batch = make_joint(name), prompt(name, (1, 2))
    dense = model(**batch).logits
    unequal = features(tower_of(model), name)
    keys, hosts = list(model.state_dict()), classes(model)
    mmod.route_(model, image=CONFIGS["importance"].replace(capacity=1.0))
    torch.testing.assert_close(model(**batch).logits, dense, atol=2e-5, rtol=0)
    for actual, expected in zip(features(tower_of(model), name), unequal):
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)
    mmod.undo_(model)
    assert torch.equal(model(**batch).logits, dense)
    assert (list(model.state_dict()), classes(model)) == (keys, hosts)


@pytest.mark.parametrize(("name", "config"), in_turn(ALL, CONFIGS))
@torch.no_grad()
def test_an_image_does_not_depend_on_others(name: str, config: str) -> None:
    model = make_joint(name)
    dense = features(tower_of(model), name)
    mmod.route_(model, image=CONFIGS[config])
    together = features(tower_of(model), name)
    if config != "sequence":
        assert any(not torch.allclose(actual, plain, atol=1e-3) for actual, plain in zip(together, dense))
    for number, expected in enumerate(together):
        torch.testing.assert_close(features(tower_of(model), name, (number,))[0], expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_gradual_keeps_the_grid_and_is_saved(name: str, tmp_path: Path) -> None:
    model, batch = make_joint(name), prompt(name, (1, 1))
    shape = tower_of(model)(**images(name)).last_hidden_state.shape
    mmod.route_(model, image="gradual")
    assert tower_of(model)(**images(name)).last_hidden_state.shape == shape
    logits = model(**batch).logits
    with_cache = model.generate(**batch, **GENERATION)
    assert torch.equal(model.generate(**batch, **GENERATION, use_cache=False), with_cache)
    model.save_pretrained(tmp_path)
    assert torch.equal(mmod.load_pretrained(tmp_path)(**batch).logits, logits)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", IN_SEQUENCE)
@torch.no_grad()
def test_a_layer_runs_on_the_kept_rows_of_each_image_and_window(name: str, number: int) -> None:
    model = make_joint(name).double()
    routed = copy.deepcopy(model)
    mmod.route_(routed, image=HALF.replace(blocks=(number,)))
    (place,) = mmod.routed_blocks(routed)
    seen: dict[str, Any] = {}

    def look(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        seen.update(options, x=args[0].view(-1, args[0].shape[-1]))

    layer = model.get_submodule(place)
    handle = layer.register_forward_pre_hook(look, with_kwargs=True)
    tower_of(model)(**double(images(name)))
    handle.remove()
    with mmod.trace(routed) as decisions:
        tokens = tower_of(routed)(**double(images(name)), output_hidden_states=True)
    after = by_image(name, tokens.hidden_states[number + 1])
    kept = decisions[place].keep_BN
    starts = [0, 9, 17]
    for image, expected_kept in enumerate((4, 4, 3)):
        index_K = kept[image].nonzero().flatten()
        assert len(index_K) == expected_kept
        rows_K = index_K + starts[image]
        expected = seen["x"][starts[image] : starts[image] + len(after[image])].clone()
        cosine, sine = (value[rows_K] for value in seen["position_embeddings"])
        z = seen["x"][rows_K]
        if name == "mistral3":
            y = layer(z[None], None, position_embeddings=(cosine, sine))[0]
        else:
            # The host's boundaries, of images or of windows, counted again among the kept rows.
            segment_K = torch.bucketize(rows_K, seen["cu_seqlens"], right=True)
            ends = segment_K.unique_consecutive(return_counts=True)[1].cumsum(0)
            y = layer(z, cu_seqlens=F.pad(ends, (1, 0)), position_embeddings=(cosine, sine))
        expected[index_K] = y
        torch.testing.assert_close(after[image], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("name", "config"), in_turn(IN_SEQUENCE, ["half", "merged", "threshold", "none"], times=2))
@torch.no_grad()
def test_a_layer_computes_no_empty_rows_for_images_that_keep_fewer(name: str, config: str) -> None:
    linear = mmod.score("linear", init_std=0.2)
    threshold = mmod.RoutingConfig(router=linear, select="threshold", blocks=(0,))
    configs = {
        "half": HALF.replace(blocks=(0,)),
        "merged": mmod.RoutingConfig(router="redundancy", capacity=0.5, skipped="merge", blocks=(0,)),
        "threshold": threshold,
        "none": threshold.replace(select={"threshold": 0.999}),
    }
    model = mmod.route_(make_joint(name), image=configs[config])
    ((place, layer),) = mmod.routed_blocks(model).items()
    computed: list[int] = []
    for module in layer.modules():
        if isinstance(module, nn.Linear) and module.in_features == 16:
            module.register_forward_pre_hook(lambda _, args: computed.append(args[0].shape[-2]))
    with mmod.trace(model) as decisions:
        together = features(tower_of(model), name)
    counts = [int(kept.sum()) for kept in decisions[place].keep_BN]
    assert set(computed) <= {sum(counts)}
    assert bool(computed) == (config != "none")
    for number, expected in enumerate(together):
        torch.testing.assert_close(features(tower_of(model), name, (number,))[0], expected, atol=5e-6, rtol=0)


def double(arguments: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return arguments in float64."""
    return {name: value.double() if value.is_floating_point() else value for name, value in arguments.items()}


@torch.no_grad()
def test_importance_is_read_within_images() -> None:
    model, eager = make_joint("mistral3"), make_joint("mistral3", attention="eager")
    map_HNN = tower_of(eager)(**images("mistral3"), output_attentions=True).attentions[0][0]
    expected = [map_HNN[:, :9, :9], map_HNN[:, 9:17, 9:17], map_HNN[:, 17:, 17:]]
    mmod.route_(model, image=CONFIGS["importance"])
    with mmod.trace(model) as decisions:
        tower_of(model)(**images("mistral3"))
    (routing,) = decisions.values()
    for score_N, pairs_HNN in zip(routing.score_BN, expected):
        torch.testing.assert_close(score_N[: pairs_HNN.shape[-1]], pairs_HNN.mean((0, 1)), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("name", "config"), in_turn(IN_SEQUENCE, ["gradual", "importance"]))
@torch.no_grad()
def test_rows_are_passed_on_where_nothing_reads_between_layers(
    name: str, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Qwen3-VL reads the tokens after layer 2.
    changes = {"qwen3-vl": {"deepstack_visual_indexes": [2]}, "qwen2.5-vl": {"fullatt_block_indexes": [1, 3, 5]}}
    model, batch = make_deep(name, **changes.get(name, {})), prompt(name, (1, 2))
    mmod.route_(model, image="gradual" if config == "gradual" else CONFIGS[config].replace(blocks=(1, 2, 3, 4)))
    written: list[Rows] = []
    write_back = Rows.write_back

    def count(rows: Rows, y_BKD: Tensor) -> Tensor:
        written.append(rows)
        return write_back(rows, y_BKD)

    monkeypatch.setattr(Rows, "write_back", count)
    logits = model(**batch).logits
    # Where groups go on from all tokens, attention writes back too.
    expected = 2 + (config == "gradual")
    assert len(written) == (expected if name == "qwen3-vl" else 1)
    written.clear()
    layers = mmod.routed_blocks(model).values()
    handles = [layer.register_forward_hook(lambda *args: None) for layer in layers]
    torch.testing.assert_close(model(**batch).logits, logits, atol=5e-6, rtol=0)
    assert len(written) >= len(layers)
    for handle in handles:
        handle.remove()
    states = tower_of(model)(**images(name), output_hidden_states=True).hidden_states
    assert len({tuple(state.shape) for state in states}) == 1


class GridsByPosition(Qwen2_5_VisionTransformerPretrainedModel):
    """A tower whose grids have a name that says nothing."""

    def forward(self, pixel_values: Tensor, sizes: Tensor) -> Any:  # type: ignore[override]
        return super().forward(pixel_values, sizes)


def test_windows_of_unknown_images_are_refused() -> None:
    tower = tower_of(make_joint("qwen2.5-vl"))
    tower.__class__ = GridsByPosition
    x = torch.randn(32, 48)
    message = "blocks that attend within windows of 4: .*the module that runs the blocks must take grid_thw"
    with pytest.raises(Exception, match=message):
        inputs_of_call(tower, "blocks", {"pixel_values": x, "sizes": torch.tensor([[1, 4, 4], [1, 4, 4]])})
    block: Any = tower_of(mmod.route_(make_joint("qwen2.5-vl"), image="gradual")).blocks[2]
    with pytest.raises(ValueError, match="2 windows of 32 tokens, and the images that they are of are unknown"):
        block(x[:, :16], cu_seqlens=torch.tensor([0, 16, 32]), position_embeddings=(x[:, :8], x[:, :8]))


@pytest.mark.parametrize(("name", "config"), in_turn(IN_SEQUENCE, ["gradual", "importance"]))
def test_gradients_are_those_without_checkpointing(name: str, config: str) -> None:
    gradients = []
    for checkpointed in (False, True):
        model = mmod.route_(make_deep(name), image=CONFIGS[config]).train()
        tower = tower_of(model)
        if checkpointed:
            tower.gradient_checkpointing_enable({"use_reentrant": False})
        tower(**images(name)).last_hidden_state.square().mean().backward()
        gradients.append([weight.grad for weight in tower.parameters() if weight.grad is not None])
    assert len(gradients[0]) > 10
    for plain, again in zip(*gradients):
        torch.testing.assert_close(plain, again)


@torch.no_grad()
def test_a_compiled_tower_equals_the_eager_one() -> None:
    name = "qwen2.5-vl"
    # What is traced grows with the depth.
    model = mmod.route_(make_deep(name, layers=2, fullatt_block_indexes=[1]), image="gradual")
    expected = features(tower_of(model), name)
    compiled = torch.compile(tower_of(model), backend="eager")
    for actual, eager in zip(features(compiled, name), expected):
        torch.testing.assert_close(actual, eager, atol=5e-6, rtol=0)
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("name", "method"),
    in_turn(ALL, [Prune(keep=0.5, blocks=(0,)), Prune(keep=0.5, blocks=(0,), fuse=True), Merge(r=2)]),
)
@torch.no_grad()
def test_towers_are_pruned_and_merged(name: str, method: Any) -> None:
    model, batch = make_joint(name), prompt(name, (1, 1))
    dense = model(**batch).logits
    tower = tower_of(model)
    mmod.apply_(tower, method)
    together = model(**batch).logits
    assert not torch.allclose(together, dense, atol=1e-3)
    if name in UNEQUAL:
        with pytest.raises(ValueError, match="which hides padding: pass images of one size"):
            tower(**images(name))
    mmod.undo_(tower)
    assert torch.equal(model(**batch).logits, dense)


@pytest.mark.parametrize("name", IN_SEQUENCE)
@torch.no_grad()
def test_other_attention_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="computes attention without scaled_dot_product_attention"):
        mmod.route_(make_deep(name, attention="eager"), image="gradual")
    model = mmod.route_(make_joint(name), image="gradual")
    tower_of(model).set_attn_implementation("eager")
    with pytest.raises(ValueError, match="'eager' cannot tell routed images in one sequence apart"):
        tower_of(model)(**images(name))


@pytest.mark.parametrize("lengths", [(3, 3), (1, 4, 2), (5,)])
def test_a_sequence_and_a_batch_hold_the_same_rows(lengths: tuple[int, ...]) -> None:
    image_T = torch.tensor([image for image, length in enumerate(lengths) for _ in range(length)])
    mask = (image_T == image_T.unsqueeze(1))[None, None]
    bias = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    for boundaries in (mask, bias, ends, ends.int()):
        segments = read_segments(boundaries)
        assert segments == Segments(lengths)
        x_TD = torch.randn(sum(lengths), 4)
        x_BND = segments.split(x_TD)
        assert x_BND.shape == (len(lengths), max(lengths), 4)
        assert torch.equal(segments.join(x_BND), x_TD)
    with pytest.raises(ValueError, match="not block-diagonal"):
        read_segments(torch.ones(1, 1, 4, 4, dtype=torch.bool).tril())


def test_a_tower_and_the_language_model_are_undone_one_by_one_or_together() -> None:
    """Each holds the record of its own methods."""
    model = make_deep("llava")
    classes = [type(module) for module in model.modules()]
    for undo in (mmod.undo_, mmod.unroute_):
        mmod.route_(tower_of(model), "gradual")
        mmod.route_(model, language=mmod.RoutingConfig(router="random", capacity=0.5))
        assert len(methods_of(model)) == 2
        undo(model)
        assert methods_of(model) == ()
        assert [type(module) for module in model.modules()] == classes
