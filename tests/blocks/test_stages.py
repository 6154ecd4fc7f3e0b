"""Batches that pass a model in stages, as in pipelines and in loops over blocks: each is routed as if it were alone."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mmod
from mmod import RoutingConfig
from tests.kit.cover import in_turn
from tests.kit.interrupts import Interrupt
from tests.kit.own_vits import OwnBlock, OwnViT, make_own_images
from tests.kit.zoo import make_images, make_model

NAME = "vit_tiny_patch16_224"
DEPTH = 6
CONFIGS = {
    "attention": RoutingConfig(router="attention", capacity=0.4, blocks=(2, 3, 4, 5)),
    "change": RoutingConfig(router="change", capacity=0.4, blocks=(2, 3, 4, 5)),
    "random": RoutingConfig(router="random", capacity=0.4, blocks=(1, 2, 3, 4, 5)),
    "stride": RoutingConfig(router="stride", capacity=0.4, blocks=(1, 2, 3, 4, 5)),
    "redundancy": RoutingConfig(
        router="redundancy", capacity=(0.8, 0.6, 0.6, 0.4), blocks=(2, 3, 4, 5), skipped="merge"
    ),
    "gradual": mmod.preset("gradual", depth=DEPTH),
    "shared": RoutingConfig(router=mmod.score("linear", init_std=0.3, shared=True), capacity=0.4, blocks=(2, 3, 4, 5)),
}
# What stands between two blocks: nothing, or code that makes a new tensor.
Between = Callable[[Tensor], Tensor]


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "route": lambda model: mmod.route_(model, CONFIGS["attention"]),
    "merge": lambda model: mmod.apply_(model, mmod.methods.Merge(r=2)),
    "prune": lambda model: mmod.apply_(model, mmod.methods.Prune(keep=0.6, blocks=(1, 3))),
}


def make_routed(config: str) -> nn.Module:
    model = make_model(NAME, depth=DEPTH)
    return WAYS[config](model) if config in WAYS else mmod.route_(model, CONFIGS[config])


def embed(model: nn.Module, images: Tensor) -> Tensor:
    return model.norm_pre(model._pos_embed(model.patch_embed(images)))


def run(blocks: Sequence[nn.Module], x: Tensor, between: Between = lambda x: x) -> Tensor:
    for block in blocks:
        x = between(block(x))
    return x


def in_stages(model: nn.Module, batches: list[Tensor], split: int, between: Between = lambda x: x) -> list[Tensor]:
    """Run all batches through the first blocks, then all of them through the others."""
    blocks = list(model.blocks)
    halfway = [run(blocks[:split], embed(model, images), between) for images in batches]
    return [run(blocks[split:], x, between) for x in halfway]


def alone(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    return [run(list(model.blocks), embed(model, images)) for images in batches]


MODES = (torch.no_grad, torch.inference_mode, contextlib.nullcontext)


@pytest.mark.parametrize(("config", "mode"), in_turn([*CONFIGS, "merge", "prune"], MODES))
def test_batches_in_stages_do_not_mix(config: str, mode: Callable[[], contextlib.AbstractContextManager]) -> None:
    model = make_routed(config)
    batches = [make_images(NAME, 2, seed=seed) for seed in (1, 2, 3)]
    with mode():
        expected = alone(model, batches)
        for split in range(1, DEPTH):
            for output, baseline in zip(in_stages(model, batches, split), expected, strict=True):
                torch.testing.assert_close(output, baseline)


@pytest.mark.parametrize("config", CONFIGS)
@torch.no_grad()
def test_new_tensors_between_blocks_are_right_or_refused(config: str) -> None:
    model = make_routed(config)
    batches = [make_images(NAME, 2, seed=seed) for seed in (1, 2)]
    expected = alone(model, batches)
    for split in range(1, DEPTH):
        try:
            outputs = in_stages(model, batches, split, between=torch.clone)
        except RuntimeError as error:
            assert "forward passes are unfinished at this routed block" in str(error)  # noqa: PT017
        else:
            for output, baseline in zip(outputs, expected, strict=True):
                torch.testing.assert_close(output, baseline)
        # A refused pass is in nobody's way.
        for images, baseline in zip(batches, expected):
            torch.testing.assert_close(run(list(model.blocks), embed(model, images), torch.clone), baseline)


@pytest.mark.parametrize("config", ["attention", "random", "redundancy", "gradual"])
@torch.no_grad()
def test_interleaved_batches_that_were_copied_between_stages_are_refused(config: str) -> None:
    model = make_routed(config)
    halfway = [run(list(model.blocks)[:4], embed(model, make_images(NAME, 2, seed=seed))) for seed in (1, 2)]
    with pytest.raises(RuntimeError, match=r"2 forward passes are unfinished .* pass the tensors on unchanged"):
        model.blocks[4](halfway[0].clone())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("attention", "importance of a block before this one: run the whole model"),
        ("random", r"decides by the scores that blocks\.1 computes.*run the whole model, or begin at blocks\.1"),
        ("redundancy", r"decides by the scores that blocks\.2 computes"),
        ("gradual", r"decides by the scores that blocks\.1 computes"),
        ("shared", "needs the scores or the importance of a block before this one: run the whole model"),
    ],
)
@torch.no_grad()
def test_a_later_stage_alone_is_refused(config: str, message: str) -> None:
    model = make_routed(config)
    x = run(list(model.blocks)[:4], embed(model, make_images(NAME, 2)))
    # Copies know no tensor of a pass.
    for later in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(ValueError, match=message):
            run(list(later.blocks)[4:], x)


@pytest.mark.parametrize(("config", "error"), in_turn(CONFIGS, [RuntimeError, KeyboardInterrupt]))
@torch.no_grad()
def test_a_loop_that_failed_leaves_nothing_behind(config: str, error: type[BaseException]) -> None:
    model = make_routed(config)
    batches = [make_images(NAME, 2, seed=seed) for seed in (1, 2)]
    expected = alone(model, batches)

    def fail(*_: object) -> None:
        raise error

    for number in (2, 3, 5):
        handle = model.blocks[number].mlp.register_forward_hook(fail)
        with pytest.raises(error):
            run(list(model.blocks), embed(model, batches[0]))
        with pytest.raises(error):
            model(batches[0])
        handle.remove()
        for images, baseline in zip(batches, expected):
            for between in (torch.clone, lambda x: x):
                torch.testing.assert_close(run(list(model.blocks), embed(model, images), between), baseline)


# What is traced grows with the depth.
SHALLOW = CONFIGS["attention"].replace(blocks=(1,))


@torch.no_grad()
def test_compiled_stages_are_right_or_refused() -> None:
    torch.compiler.reset()
    model = mmod.route_(make_model(NAME, depth=2), SHALLOW)
    batches = [make_images(NAME, 2, seed=seed) for seed in (1, 2)]
    expected = alone(model, batches)
    blocks = list(model.blocks)
    first = torch.compile(lambda x: run(blocks[:1], x), backend="eager")
    second = torch.compile(lambda x: run(blocks[1:], x), backend="eager")
    for images, baseline in zip(batches, expected):
        torch.testing.assert_close(second(first(embed(model, images))), baseline)
    halfway = [first(embed(model, images)) for images in batches]
    with pytest.raises(RuntimeError, match="2 forward passes are unfinished"):
        second(halfway[0])
    torch.compiler.reset()


class Streams(OwnViT):
    """Images and their mirror images through the same blocks, in step or one after the other."""

    def __init__(self, in_step: bool) -> None:
        super().__init__(lambda _: OwnBlock(), prefix=0, depth=DEPTH)
        self.in_step = in_step

    def tokens(self, images: Tensor) -> Tensor:
        return self.patchify(images).flatten(2).transpose(1, 2) + self.places

    def forward(self, images: Tensor) -> Tensor:
        streams = [self.tokens(images), self.tokens(images.flip(-1))]
        if not self.in_step:
            return torch.stack([run(list(self.stages), x) for x in streams])
        for stage in self.stages:
            streams = [stage(x) for x in streams]
        return torch.stack(streams)


@pytest.mark.parametrize(("way", "in_step"), [("route", True), ("prune", False)])
@torch.no_grad()
def test_streams_of_one_call_are_counted_exported_and_compiled(way: str, in_step: bool) -> None:
    torch.manual_seed(0)
    dense = Streams(in_step).eval()
    model = WAYS[way](dense) if way in WAYS else mmod.route_(dense, CONFIGS[way])
    images = make_own_images(2)
    expected = torch.stack([run(list(model.stages), model.tokens(x)) for x in (images, images.flip(-1))])
    torch.testing.assert_close(model(images), expected)
    torch.testing.assert_close(torch.export.export(model, (images,), strict=False).module()(images), expected)
    model.in_step = False
    size = tuple(images.shape[1:])
    share = mmod.flops(model, size).share
    model.in_step = in_step
    assert mmod.flops(model, size).share == share
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    if in_step:
        with pytest.raises(RuntimeError, match="concatenate to one batch what runs in step"):
            compiled(images)
    else:
        torch.testing.assert_close(compiled(images), expected)
    torch.compiler.reset()


@torch.no_grad()
def test_the_end_of_a_model_runs_again_from_tokens_that_were_kept() -> None:
    model = make_routed("attention")
    images = make_images(NAME, 2)
    x = run(list(model.blocks)[:4], embed(model, images))
    first = run(list(model.blocks)[4:], x)
    alone(model, [make_images(NAME, 2, seed=5)])
    assert torch.equal(run(list(model.blocks)[4:], x), first)


@pytest.mark.parametrize(("config", "mode"), in_turn(CONFIGS, MODES[:2]))
def test_a_buffer_between_stages_belongs_to_the_batch_that_it_holds(config: str, mode: Callable[[], Any]) -> None:
    model = make_routed(config)
    blocks = list(model.blocks)
    batches = [make_images(NAME, 2, seed=seed) for seed in (1, 2, 3)]
    with mode():
        buffer = torch.empty_like(embed(model, batches[0]))
        for images, baseline in zip(batches, alone(model, batches)):
            buffer.copy_(run(blocks[:4], embed(model, images)))
            torch.testing.assert_close(run(blocks[4:], buffer), baseline)


@pytest.mark.parametrize("config", ["attention", "random", "redundancy", "gradual", "merge", "prune"])
@torch.no_grad()
def test_images_that_leave_between_blocks_are_refused(config: str) -> None:
    model = make_routed(config)
    x = run(list(model.blocks)[:4], embed(model, make_images(NAME, 3)))
    with pytest.raises(
        ValueError, match=r"got \(images, tokens\) = \(2, 17\), and the pass that it continues has \(3, 17\)"
    ):
        run(list(model.blocks)[4:], x[:2])


@torch.no_grad()
def test_an_interrupted_compiled_call_leaves_nothing_behind() -> None:
    torch.compiler.reset()
    model = mmod.route_(make_model(NAME, depth=2), CONFIGS["stride"].replace(blocks=(0, 1)))
    images = make_images(NAME, 2)
    expected = model(images), alone(model, [images])[0]
    left = [-1]

    @torch.compiler.disable
    def maybe_interrupt(*_: object) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    # The hook ends a graph in each block; torch compiles blocks alike, whatever their hooks.
    for block in model.blocks:
        block.mlp.register_forward_pre_hook(maybe_interrupt)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(compiled(images), expected[0])
    left[0] = 2
    with pytest.raises(KeyboardInterrupt):
        compiled(images)
    assert model.blocks[1].mod_state.span.calls.value.running.outer is None
    for output, baseline in zip((alone(model, [images])[0], compiled(images)), reversed(expected), strict=True):
        torch.testing.assert_close(output, baseline)
    torch.compiler.reset()


INTERRUPTED = {
    **WAYS,
    "merged": lambda model: mmod.route_(model, CONFIGS["redundancy"]),
    "gradual": lambda model: mmod.route_(model, CONFIGS["gradual"]),
    "exit": lambda model: mmod.apply_(model, mmod.methods.Exit(0.2, (1, 3))),
}


@pytest.mark.parametrize("way", INTERRUPTED)
@torch.no_grad()
def test_a_call_may_be_interrupted_between_any_modules(way: str) -> None:
    model = INTERRUPTED[way](make_model(NAME, depth=DEPTH))
    images = make_images(NAME, 2)
    fresh = copy.deepcopy(model)
    expected = fresh(images), fresh.forward_features(images), alone(fresh, [images])[0]
    with Interrupt() as counted:
        model(images)
    for at in range(1, counted.places + 1, 43):
        with pytest.raises(KeyboardInterrupt), Interrupt(at):
            model(images)
        # A loop over the blocks comes first: it would continue a pass that was left behind.
        actual = alone(model, [images])[0], model(images), model.forward_features(images)
        for output, baseline in zip(actual, (expected[2], *expected[:2]), strict=True):
            assert torch.equal(output, baseline), at
    assert model.mod_owner.calls.value.running.outer is None


PLACES = ("blocks.0", "blocks.0.mlp", "blocks.3.mlp", "blocks.3.norm1", "blocks.4.attn")


@pytest.mark.parametrize(("place", "way"), in_turn(PLACES, WAYS, times=2))
@torch.no_grad()
def test_hooks_that_run_the_blocks_get_all_tokens_and_disturb_nothing(way: str, place: str) -> None:
    model = WAYS[way](make_model(NAME, depth=DEPTH))
    images, others = make_images(NAME, 2), make_images(NAME, 2, seed=5)
    fresh = copy.deepcopy(model)
    expected = fresh(images)
    inside = alone(fresh, [others])[0]
    seen: list[Tensor] = []

    def nest(*_: object) -> None:
        if not seen:
            seen.append(others)
            seen.append(alone(model, [others])[0])

    model.get_submodule(place).register_forward_hook(nest)
    torch.testing.assert_close(model(images), expected)
    torch.testing.assert_close(seen[1], inside)


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_passes_outside_calls_are_not_kept(way: str) -> None:
    model = WAYS[way](make_model(NAME, depth=DEPTH))
    for seed in range(4):
        alone(model, [make_images(NAME, 2, seed=seed)])
        model.forward_intermediates(make_images(NAME, 2, seed=seed), indices=[2], stop_early=True)
    assert not model.blocks[3].mod_state.span._by_address


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("config", ["attention", "random", "redundancy"])
def test_a_model_that_is_recomputed_as_a_whole_may_have_hooks_that_copy(config: str, reentrant: bool) -> None:
    model = make_routed(config).double().train()
    for block in model.blocks:
        block.register_forward_hook(lambda _, args, output: output.clone())
    images = make_images(NAME, 2).double().requires_grad_()
    gradients = []
    for call in (model, lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        model.zero_grad()
        call(images).square().sum().backward()
        gradients.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
    torch.testing.assert_close(*gradients)
