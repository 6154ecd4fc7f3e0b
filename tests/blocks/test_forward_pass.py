from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import mmod
from mmod import RoutingConfig
from tests.kit.cover import cover, in_turn
from tests.kit.threads import assert_right_in_threads
from tests.kit.zoo import make_images, make_model

NAME = "test_vit"


class TestCheckpointing:
    @pytest.mark.parametrize(("router", "size", "reentrant"), cover(["attention", "random"], [1, 2, 6], [False, True]))
    def test_each_pass_recomputes_with_its_own_decisions(self, router: str, size: int, reentrant: bool) -> None:
        """Two passes before the backward ones, which run in another thread, in segments of any length."""
        images = [make_images(NAME, 2, seed=seed) for seed in (1, 2)]
        gradients = []
        for checkpointing in (False, True):
            model = mmod.route_(make_model(NAME), RoutingConfig(router=router, blocks="late", capacity=0.25)).train()
            if checkpointing:
                run_in_segments(model, size, reentrant)
            losses = [model(image).square().sum() for image in images]
            with ThreadPoolExecutor(1) as pool:
                for loss in losses:
                    pool.submit(loss.backward).result()
            gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        assert gradients[0].keys() == gradients[1].keys()
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-6)

    def test_an_input_that_was_never_seen_is_refused(self) -> None:
        model = mmod.route_(make_model(NAME), mmod.RoutingConfig()).train()
        model.set_grad_checkpointing()
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda saved: saved):
            loss = model(make_images(NAME, 2)).sum()
        with pytest.raises(RuntimeError, match="runs a routed block again on an input that it never had"):
            loss.backward()


def run_in_segments(model, size: int, reentrant: bool) -> None:
    """Checkpoint a model's blocks in segments of some of them."""
    blocks = list(model.blocks)

    def forward(x, **options):
        x = model._pos_embed(model.patch_embed(x))
        for start in range(0, len(blocks), size):
            x = checkpoint(torch.nn.Sequential(*blocks[start : start + size]), x, use_reentrant=reentrant)
        return model.norm(model.norm_pre(x))

    model.forward_features = forward


class TestThreads:
    @pytest.mark.parametrize(("router", "blocks"), in_turn(["attention", "random", "linear"], ["late", "every_other"]))
    def test_a_pool_of_threads_computes_what_one_thread_does(self, router: str, blocks: str) -> None:
        model = mmod.route_(make_model(NAME), RoutingConfig(router=router, blocks=blocks)).eval()
        assert_right_in_threads(model, [make_images(NAME, 2, seed=seed) for seed in range(4)])

    def test_a_model_compiled_in_several_graphs_serves_threads(self) -> None:
        torch._dynamo.reset()
        model = mmod.route_(make_model(NAME, depth=2), RoutingConfig(blocks=(1,), select=mmod.Threshold(1.0))).eval()
        images = [make_images(NAME, 2, seed=seed) for seed in range(2)]
        compiled = torch.compile(model, backend="eager")
        with torch.no_grad():
            for image in images:
                compiled(image)
        assert_right_in_threads(compiled, images)

    def test_each_thread_traces_its_own_passes(self) -> None:
        model = mmod.route_(make_model(NAME), mmod.RoutingConfig()).eval()
        images = [make_images(NAME, 2, seed=seed) for seed in range(2)]
        with mmod.trace(model) as decisions, torch.no_grad():
            model(images[0])
            mine = decisions["blocks.1"].score_BN
            with ThreadPoolExecutor(1) as pool:
                pool.submit(model, images[1]).result()
            assert torch.equal(decisions["blocks.1"].score_BN, mine)


@torch.no_grad()
def test_copies_that_are_made_in_a_call_know_nothing_of_it() -> None:
    model = mmod.route_(make_model(NAME), RoutingConfig(blocks="late")).eval()
    images, others = make_images(NAME, 2), make_images(NAME, 3, seed=2)
    expected, features = model(others), model.forward_features(others)
    twins: list[torch.nn.Module] = []

    def copy_all(*_: object) -> None:
        handle.remove()
        twins.extend((copy.deepcopy(model), pickle.loads(pickle.dumps(model))))

    handle = model.blocks[4].mlp.register_forward_hook(copy_all)
    model(images)
    for twin in twins:
        x = twin._pos_embed(twin.patch_embed(others))
        for block in twin.blocks:
            x = block(x)
        torch.testing.assert_close(twin.norm(x), features)
        assert torch.equal(twin(others), expected)


@pytest.mark.parametrize("router", ["attention", "random"])
def test_nothing_is_left_when_the_pass_has_ended(router: str) -> None:
    model = mmod.route_(make_model(NAME), RoutingConfig(router=router, blocks="late")).eval()
    states = [block.mod_state for block in mmod.routed_blocks(model).values()]
    (calls,) = {state.span.calls for state in states}
    with torch.no_grad():
        model(make_images(NAME, 1))
    assert calls.value.running.outer is None
    assert not calls.value.running.passes
    assert not states[0].span._by_address
    for state in states:
        assert state.inner.value.normed is None
        assert not state.inner.value.runners


@pytest.mark.parametrize("blocks", ["late", "every_other"])
@pytest.mark.parametrize("router", ["attention", "random"])
def test_a_pass_inside_a_block_and_one_that_stops_early_change_nothing(router: str, blocks: str) -> None:
    model = mmod.route_(make_model(NAME), RoutingConfig(router=router, blocks=blocks)).eval()
    images, others = make_images(NAME, 2), make_images(NAME, 3, seed=2)
    with torch.no_grad():
        expected = model(images)
        model.forward_intermediates(others, indices=[2], stop_early=True)
        assert torch.equal(model(images), expected)
        inside: list[torch.Tensor] = []

        def nest(*_: object) -> None:
            if not inside:
                inside.append(images)
                model(others)

        model.blocks[3].mlp.register_forward_hook(nest)
        assert torch.equal(model(images), expected)
        assert inside
