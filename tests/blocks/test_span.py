"""Blocks of a span hand kept rows on where nobody looks, and all tokens to whoever does."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import open_clip
import pytest
import timm
import torch
from torch import Tensor, nn

import mmod
from mmod import RoutingConfig
from mmod.blocks.rows import KeptTokens, Rows
from tests.kit.cover import in_turn
from tests.kit.threads import assert_right_in_threads
from tests.kit.zoo import make_images, make_model

NAMES = [
    "vit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "vit_base_patch16_siglip_224",
    "vit_small_patch16_dinov3",
    "beit_base_patch16_224",
    "naflexvit_base_patch16_gap",
]
PLAIN = NAMES[:3]
PAIRS = [*((name, "attention") for name in NAMES), *((NAMES[0], router) for router in ("random", "stride"))]
FIRST = 2


def make_routed(name: str, router: str = "attention") -> nn.Module:
    config = RoutingConfig(router=router, capacity=0.4, blocks=tuple(range(FIRST, 6)))
    return mmod.route_(make_model(name, depth=6), config)


class Watch(nn.Module):
    """Changes nothing, and keeps what passes."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Tensor] = []

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        self.recorded.append(x.clone())
        return x


@functools.cache
def outputs_of_blocks(name: str, router: str) -> tuple[list[Tensor], Tensor]:
    """Return what torch's own hooks see behind each block, and the model's output."""
    model, recorded = make_routed(name, router), []
    for block in model.blocks:
        block.register_forward_hook(lambda _, args, output: recorded.append(output.clone()))
    with torch.no_grad():
        return recorded, model(make_images(name, 2))


def watch_by_insertion(model: nn.Module) -> list[Tensor]:
    watch, blocks = Watch(), list(model.blocks)
    model.blocks = type(model.blocks)(*_wrapped(model.blocks, [m for block in blocks for m in (block, watch)]))
    return watch.recorded


def _wrapped(host: nn.Module, modules: list[nn.Module]) -> tuple[object, ...]:
    return tuple(modules) if isinstance(host, nn.Sequential) else (modules,)


def watch_by_wrapping(model: nn.Module) -> list[Tensor]:
    watch = Watch()

    class Wrapper(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, *args: object, **kwargs: object) -> Tensor:
            return watch(self.block(*args, **kwargs))

    for index, block in enumerate(list(model.blocks)):
        model.blocks[index] = Wrapper(block)
    return watch.recorded


def watch_by_forward(model: nn.Module) -> list[Tensor]:
    watch = Watch()

    def replace(block: nn.Module) -> None:
        host_forward = block.forward

        @functools.wraps(host_forward)
        def forward(*args: object, **kwargs: object) -> Tensor:
            return watch(host_forward(*args, **kwargs))

        block.forward = forward

    for block in model.blocks:
        replace(block)
    return watch.recorded


def watch_by_class(model: nn.Module) -> list[Tensor]:
    watch = Watch()
    for block in model.blocks:

        class Watched(type(block)):
            def forward(self, *args: object, **kwargs: object) -> Tensor:
                return watch(super().forward(*args, **kwargs))

        block.__class__ = Watched
    return watch.recorded


def watch_by_hooks(model: nn.Module) -> list[Tensor]:
    recorded: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, args, output: recorded.append(output.clone()))
    return recorded


def watch_by_list(model: nn.Module) -> list[Tensor]:
    watch = Watch()

    class Watching(type(model.blocks)):
        def __iter__(self):
            for block in self._modules.values():
                yield lambda *args, block=block, **kwargs: watch(block(*args, **kwargs))

        def forward(self, x: Tensor) -> Tensor:
            for run in self:
                x = run(x)
            return x

    model.blocks.__class__ = Watching
    return watch.recorded


WAYS: dict[str, Callable[[nn.Module], list[Tensor]]] = {
    way.__name__: way
    for way in (
        watch_by_insertion,
        watch_by_wrapping,
        watch_by_forward,
        watch_by_class,
        watch_by_hooks,
        watch_by_list,
    )
}


@pytest.mark.parametrize(("pair", "way"), in_turn(PAIRS, WAYS, times=3))
def test_whoever_looks_between_blocks_sees_all_tokens(pair: tuple[str, str], way: str) -> None:
    name, router = pair
    expected, output = outputs_of_blocks(name, router)
    model = make_routed(name, router)
    recorded = WAYS[way](model)
    with torch.no_grad():
        torch.testing.assert_close(model(make_images(name, 2)), output)
    assert len(recorded) == len(expected)
    for actual, reference in zip(recorded, expected):
        torch.testing.assert_close(actual, reference)


def collect(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Do what the usual backbone of segmentation does."""
    x = model.norm_pre(model._pos_embed(model.patch_embed(x)))
    features = []
    for block in model.blocks:
        x = block(x)
        features.append(x.clone())
    return features


@pytest.mark.parametrize("place", ["subclass", "instance", "decorated"])
@pytest.mark.parametrize("function", ["forward", "forward_features"])
@pytest.mark.parametrize("name", PLAIN)
def test_a_model_with_a_forward_that_collects_sees_all_tokens(name: str, function: str, place: str) -> None:
    expected, _ = outputs_of_blocks(name, "attention")
    model = make_routed(name)
    host, features = type(model), []

    def collecting_forward(self: nn.Module, x: Tensor, **options: object) -> Tensor:
        features.extend(collect(self, x))
        return features[-1]

    if place == "subclass":
        model.__class__ = type("Backbone", (host,), {function: collecting_forward})
    else:
        wraps = functools.wraps(getattr(host, function)) if place == "decorated" else lambda inner: inner
        setattr(model, function, wraps(functools.partial(collecting_forward, model)))
    if function == "forward_features":
        model.forward_head = lambda x: x
    with torch.no_grad():
        model(make_images(name, 2))
    for actual, reference in zip(features, expected, strict=True):
        torch.testing.assert_close(actual, reference)


@pytest.mark.parametrize("cut", ["prune", "slice"])
@pytest.mark.parametrize(("name", "router"), PAIRS)
def test_a_model_that_lost_its_last_blocks_ends_with_all_tokens(name: str, cut: str, router: str) -> None:
    expected, _ = outputs_of_blocks(name, router)
    model = make_routed(name, router)
    if cut == "prune":
        model.prune_intermediate_layers([3])
    else:
        model.blocks = model.blocks[:4]
    last = []
    model.norm = nn.Identity()
    model.norm.register_forward_hook(lambda _, args, output: last.append(output))
    with torch.no_grad():
        model(make_images(name, 2))
    torch.testing.assert_close(last[0], expected[3])
    assert not model.blocks[FIRST].mod_state.span.calls.value.running.passes


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("name", NAMES[:2])
def test_a_pass_that_failed_leaves_nothing_behind(name: str, error: type[BaseException]) -> None:
    images, tokens = make_images(name, 2), torch.randn(2, 18, 64)
    model = make_routed(name, "stride")
    expected = copy.deepcopy(model)

    def fail(*_: object) -> None:
        raise error

    handle = model.blocks[4].mlp.register_forward_hook(fail)
    with torch.no_grad():
        with pytest.raises(error):
            model(images)
        handle.remove()
        for index in (3, 4, 5):
            assert torch.equal(model.blocks[index](tokens), expected.blocks[index](tokens))
        assert torch.equal(model(images), expected(images))
        for actual, reference in zip(collect(model, images), collect(expected, images)):
            assert torch.equal(actual, reference)


def test_importance_of_a_pass_that_failed_is_not_read_again() -> None:
    model = make_routed("vit_tiny_patch16_224")
    handle = model.blocks[3].mlp.register_forward_hook(lambda *_: 1 / 0)
    with torch.no_grad():
        with pytest.raises(ZeroDivisionError):
            model(make_images("vit_tiny_patch16_224", 2))
        handle.remove()
        with pytest.raises(ValueError, match="importance"):
            model.blocks[3](torch.randn(2, 17, 64))


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_handed_on_in_the_hosts_own_forward_of_the_model_and_its_copies(name: str) -> None:
    model, images = make_routed(name), make_images(name, 2)
    watched = copy.deepcopy(model)
    watch_by_hooks(watched)
    for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert entered(copied, images) == 1
        with torch.no_grad():
            torch.testing.assert_close(copied(images), watched(images))
    assert entered(watched, images) == 4


def entered(model: nn.Module, images: Tensor) -> int:
    """Return in how many blocks rows are gathered from all tokens."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        calls, make_rows = [], KeptTokens.make_rows
        patch.setattr(KeptTokens, "make_rows", lambda *args: calls.append(args) or make_rows(*args))
        model(images)
    return len(calls)


def test_open_clip_hands_rows_on_and_shows_all_tokens() -> None:
    torch.manual_seed(0)
    tower = {"layers": 5, "width": 64, "head_width": 32, "patch_size": 8, "image_size": 32}
    model = open_clip.model.CLIP(
        32, tower, {"context_length": 8, "vocab_size": 50, "width": 32, "heads": 2, "layers": 2}
    )
    mmod.route_(model.eval(), image=RoutingConfig(blocks=(1, 2, 3, 4), capacity=0.4))
    images = torch.randn(2, 3, 32, 32)
    assert entered(model.visual, images) == 1
    with torch.no_grad():
        output = model.visual(images)
        features = model.visual.forward_intermediates(images, output_fmt="NLC", output_extra_tokens=True)
        hooked = copy.deepcopy(model)
        recorded = []
        for block in hooked.visual.transformer.resblocks:
            block.register_forward_hook(lambda _, args, out: recorded.append(out.clone()))
        torch.testing.assert_close(hooked.visual(images), output)
    assert len(features["image_intermediates"]) == 5
    for feature, expected in zip(features["image_intermediates"], recorded, strict=True):
        torch.testing.assert_close(feature, expected[:, 1:])
    for block in (model.visual.transformer.resblocks[index] for index in (2, 3)):
        block.forward = functools.partial(type(block).forward, block)
    assert entered(model.visual, images) == 4


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch16_dinov3"])
def test_wrappers_of_features_see_all_tokens(name: str) -> None:
    expected, _ = outputs_of_blocks(name, "attention")
    model, images = make_routed(name), make_images(name, 2)
    prefix = model.num_prefix_tokens
    getter = timm.models._features.FeatureGetterNet(model, out_indices=(2, 3, 4), output_fmt="NLC", norm=False)
    with torch.no_grad():
        for index, feature in zip((2, 3, 4), getter(images), strict=True):
            torch.testing.assert_close(feature, expected[index][:, prefix:])


@pytest.mark.parametrize("router", ["attention", "linear"])
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch16_dinov3"])
def test_graphs_of_torchvision_see_all_tokens(name: str, router: str) -> None:
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    expected, _ = outputs_of_blocks(name, router)
    graph = extraction.create_feature_extractor(make_routed(name, router), ["blocks.2", "blocks.3"])
    with torch.no_grad():
        features = graph(make_images(name, 2))
    for block, reference in (("blocks.2", expected[2]), ("blocks.3", expected[3])):
        torch.testing.assert_close(features[block], reference)


def test_threads_that_look_and_threads_that_do_not_see_the_same() -> None:
    name = "vit_tiny_patch16_224"
    model = make_routed(name)

    def run(batch: tuple[str, Tensor]) -> Tensor:
        way, images = batch
        return model(images) if way == "whole" else collect(model, images)[-1]

    batches = [(way, make_images(name, 2, seed=seed)) for seed in range(2) for way in ("whole", "between")]
    assert_right_in_threads(run, batches)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize(
    "config",
    [
        RoutingConfig(router="redundancy", skipped="merge", capacity=0.5, blocks="late"),
        RoutingConfig(router=mmod.config.score("linear", shared=True), capacity=0.5, blocks="late"),
        mmod.preset("gradual", depth=6),
    ],
    ids=["merged", "learned", "gradual"],
)
def test_gradients_are_those_of_blocks_that_return_all_tokens(config: RoutingConfig, checkpointed: bool) -> None:
    model = mmod.route_(make_model(PLAIN[0], depth=6).double(), config).train()
    model.set_grad_checkpointing(checkpointed)
    images = make_images(PLAIN[0], 2).double()

    def step() -> tuple[int, list[Tensor]]:
        model.zero_grad()
        with pytest.MonkeyPatch.context() as patch:
            write_back, written = Rows.write_back, []
            patch.setattr(Rows, "write_back", lambda *args: (written.append(1), write_back(*args))[1])
            model(images).square().sum().backward()
        return len(written), [weight.grad for weight in model.parameters() if weight.grad is not None]

    once, observed = step()
    last = model.blocks[-1]
    (last.register_forward_hook if checkpointed else last.register_full_backward_hook)(lambda *args: None)
    often, expected = step()
    assert (once < often) == (not checkpointed)
    assert len(observed) == len(expected)
    for a, b in zip(observed, expected):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("skipped", ["merge", "follow"])
@pytest.mark.parametrize("thresholds", [(0.3, 0.5, 0.7, 0.5), (0.1, 0.3, 0.6, 0.3)])
@torch.no_grad()
def test_a_threshold_that_falls_again_chooses_among_the_rows_before(thresholds: Any, skipped: Any) -> None:
    """It is that of an earlier block, whose rows are no longer there. Hooked blocks pass on all tokens."""
    select = mmod.Threshold(thresholds)
    for count in (1, 3):
        config = mmod.RoutingConfig(router="redundancy", select=select, blocks=(1, 2, 3, 4), skipped=skipped)
        model = mmod.route_(make_model("test_vit").double(), config)
        images = make_images("test_vit", count).double()
        passed_on = model(images)
        for block in model.blocks:
            block.register_forward_hook(lambda *_: None)
        torch.testing.assert_close(model(images), passed_on, rtol=0, atol=1e-12)
