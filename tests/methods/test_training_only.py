"""Methods for training alone: in evaluation a model is dense, bit for bit and class for class."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import timm
import torch
from torch import Tensor, nn

import mmod
from mmod.analysis.modes import in_mode
from mmod.lab import Experts
from mmod.methods import Merge, Prune, Resize, methods_of
from mmod.methods.base import as_evaluated
from tests.kit import clip_zoo
from tests.kit.cover import in_turn
from tests.kit.own_vits import make_own, make_own_images
from tests.kit.vision_zoo import make_pixels, make_vision, output_of
from tests.kit.vlm_zoo import make_language
from tests.kit.zoo import make_images, make_model

RANDOM = mmod.RoutingConfig(router="random", blocks=(1, 2), training_only=True)


class Host(NamedTuple):
    """A model, and its output for inputs of its own."""

    make: Callable[[], Any]
    run: Callable[[Any], Tensor]


def run_clip(model: Any) -> Tensor:
    name = "coca_ViT-B-32"
    embedded = clip_zoo.embed(model, clip_zoo.make_images(name), clip_zoo.make_captions(name))
    return torch.cat(embedded, dim=1)


HOSTS = {
    "timm": Host(lambda: make_model("vit_tiny_patch16_224"), lambda m: m(make_images("vit_tiny_patch16_224", 2))),
    "rotary": Host(lambda: make_model("eva02_tiny_patch14_224"), lambda m: m(make_images("eva02_tiny_patch14_224", 2))),
    "transformers": Host(lambda: make_vision("dinov2"), lambda m: output_of(m(**make_pixels("dinov2", 2)))),
    "language": Host(lambda: make_language("llama"), lambda m: m(torch.arange(40).reshape(2, 20)).logits),
    "open_clip": Host(lambda: clip_zoo.make_clip("coca_ViT-B-32"), run_clip),
    "plain": Host(lambda: make_own("own softmax"), lambda m: m(make_own_images(2))),
}
GRADUAL = mmod.preset("gradual", training_only=True)
METHODS: dict[str, Any] = {"random": RANDOM, "gradual": GRADUAL, "merge": Merge(3, training_only=True)}
# Tokens of text are not grouped.
GROUPED = [host for host in HOSTS if host not in ("language", "open_clip")]
CASES = [*((host, "random") for host in HOSTS), *in_turn(GROUPED, ["gradual", "merge"])]


def without_drops(model: nn.Module) -> nn.Module:
    """Return a model that draws nothing in training."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


@pytest.mark.parametrize(("host", "method"), CASES)
def test_a_model_is_changed_in_training_and_dense_in_evaluation(host: str, method: str) -> None:
    make, run = HOSTS[host]
    change = METHODS[method]
    dense = without_drops(make())
    model = mmod.apply_(copy.deepcopy(dense), change)
    assert model.state_dict().keys() == dense.state_dict().keys()
    lasting = change.replace(training_only=False) if isinstance(change, mmod.RoutingConfig) else Merge(3)
    changed = mmod.apply_(copy.deepcopy(dense), lasting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        # Outputs are equal to the last bit, before and after training.
        assert torch.equal(run(model.eval()), run(dense.eval()))
        assert [type(module) for module in model.modules()][1:] == [type(module) for module in dense.modules()][1:]
        assert methods_of(model) == ()
        trained = run(model.train())
        assert torch.equal(trained, run(changed.train()))
        assert not torch.equal(trained, run(dense.train()))
        assert methods_of(model)
        trained.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        dense.load_state_dict(model.state_dict())
        changed.load_state_dict(model.state_dict())
    again = pickle.loads(pickle.dumps(copy.deepcopy(model.eval())))
    assert torch.equal(run(again), run(dense.eval()))
    assert torch.equal(run(again.train()), run(model.train()))
    mmod.undo_(model)
    assert type(model) is type(dense)
    assert vars(model).keys() == vars(dense).keys()


@pytest.mark.parametrize("host", ["timm", "transformers"])
def test_checkpointing_changes_no_gradient(host: str) -> None:
    make, run = HOSTS[host]
    model = mmod.route_(without_drops(make()), RANDOM).eval().train()
    gradients = []
    for is_on in (False, True):
        if is_on and host == "timm":
            model.set_grad_checkpointing(True)
        elif is_on:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        run(model).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_what_reads_a_model_in_evaluation_sees_the_dense_one() -> None:
    dense = make_model("vit_tiny_patch16_224", depth=2).eval()
    images = make_images("vit_tiny_patch16_224", 2)
    model = mmod.route_(copy.deepcopy(dense), RANDOM.replace(blocks=(1,)))
    assert mmod.flops(model, 64) == mmod.flops(dense, 64)
    assert mmod.flops(model.train(), 64).share < 0.9
    model.eval()
    exported, expected = (torch.export.export(one, (images,)).graph for one in (model, dense))
    assert [node.target for node in exported.nodes] == [node.target for node in expected.nodes]
    torch.testing.assert_close(torch.jit.trace(model, images)(images), dense(images))
    readers: list[Callable[[nn.Module], object]] = [
        mmod.routed_blocks,
        mmod.auxiliary_loss,
        lambda model: mmod.trace(model).__enter__(),
    ]
    for read in readers:
        with pytest.raises(ValueError, match=r"evaluation: routing is for training alone, call model\.train\(\) first"):
            read(model)


def test_a_compiled_model_follows_the_mode() -> None:
    dense = make_model("vit_tiny_patch16_224", depth=1)
    images = make_images("vit_tiny_patch16_224", 2)
    model = mmod.route_(copy.deepcopy(dense), RANDOM.replace(blocks=(0,)))
    compiled: Any = torch.compile(model, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(compiled.eval()(images), dense.eval()(images))
        torch.testing.assert_close(compiled.train()(images), model(images))
        assert mmod.is_routed(compiled)


def test_a_model_saved_in_training_opens_dense(tmp_path: Path) -> None:
    model = mmod.route_(make_vision("dinov2"), RANDOM).train()
    model.save_pretrained(tmp_path / "transformers")
    dense = make_vision("dinov2")
    loaded = type(dense).from_pretrained(tmp_path / "transformers")
    assert (type(loaded), methods_of(loaded)) == (type(dense), ())
    assert loaded.config.architectures == [type(dense).__name__]
    inputs = make_pixels("dinov2", 2)
    assert torch.equal(output_of(loaded.eval()(**inputs)), output_of(model.eval()(**inputs)))
    vit = mmod.route_(timm.create_model("test_vit"), RANDOM)
    with pytest.raises(ValueError, match="methods of this VisionTransformer are for training alone: save it as the"):
        mmod.save_pretrained(vit, tmp_path / "timm")
    # Methods that stay are saved, and those for training alone are in place afterwards.
    both = mmod.route_(mmod.apply_(timm.create_model("test_vit"), Experts(experts=2)), RANDOM)
    mmod.save_pretrained(both, tmp_path / "both")
    assert [method.kind for method in methods_of(both)] == ["experts", "routing"]
    assert [method.kind for method in methods_of(mmod.load_pretrained(tmp_path / "both"))] == ["experts"]


def test_modes_are_followed_wherever_they_are_set() -> None:
    model = mmod.route_(make_model("vit_tiny_patch16_224"), RANDOM).train()
    with in_mode(False, model):
        assert not mmod.is_routed(model)
    assert mmod.is_routed(model)
    with as_evaluated(model):
        assert model.training
        assert not mmod.is_routed(model)
    assert mmod.is_routed(model)
    wrapped = nn.Sequential(model)
    assert not mmod.is_routed(wrapped.eval())
    assert mmod.is_routed(wrapped.train())
    # A model in evaluation is changed when it trains.
    other = mmod.route_(make_model("vit_tiny_patch16_224").eval(), RANDOM)
    assert not mmod.is_routed(other)
    assert mmod.is_routed(other.train())


def test_a_forward_on_the_model_stays_and_one_on_a_block_is_told() -> None:
    model = mmod.route_(make_model("vit_tiny_patch16_224"), RANDOM).train()
    images = make_images("vit_tiny_patch16_224", 2)
    expected = model(images)
    # As accelerate wraps a model for half precision, and blocks of a model on several devices.
    forward = model.forward
    model.forward = lambda *args: forward(*args)
    evaluated = model.eval()(images)
    assert torch.equal(evaluated, make_model("vit_tiny_patch16_224").eval()(images))
    torch.testing.assert_close(model.train()(images), expected)
    block = model.blocks[1]
    block.forward = block.forward
    with pytest.raises(ValueError, match=r"blocks.1 has a `forward` on the instance, put there since"):
        model.eval()


def test_capacities_that_were_set_are_kept() -> None:
    model = mmod.route_(make_model("vit_tiny_patch16_224"), RANDOM).train()
    mmod.set_capacity_(model, [0.25, 0.75])
    assert list(mmod.capacities(model.eval().train()).values()) == [0.25, 0.75]
    mmod.unroute_(model)
    assert not mmod.is_routed(model.eval().train())


def test_parts_are_routed_one_after_the_other() -> None:
    model = clip_zoo.make_clip("coca_ViT-B-32")
    mmod.route_(model, image=RANDOM)
    mmod.route_(model, text=RANDOM)
    assert not mmod.is_routed(model)
    assert sorted(mmod.methods.methods_of(model.train())[0].parts) == ["image", "text"]
    assert len(mmod.routed_blocks(model)) == 4
    mmod.undo_(model.eval())
    assert not mmod.is_routed(model.train())


def test_tread_is_one_draw_of_half_of_the_tokens_that_leaves_the_others_in_place() -> None:
    model = mmod.route_(make_model("vit_tiny_patch16_224", depth=8), "tread").train()
    assert list(mmod.routed_blocks(model)) == [f"blocks.{index}" for index in (2, 3, 4, 5)]
    images = make_images("vit_tiny_patch16_224", 3)
    states: list[Tensor] = []
    for name in ("blocks.2", "blocks.6"):
        model.get_submodule(name).register_forward_pre_hook(lambda _, args: states.append(args[0]))
    with mmod.trace(model) as decisions:
        model(images)
    before_BND, after_BND = states
    keep_BN = decisions["blocks.2"].keep_BN
    assert keep_BN.sum(1).tolist() == [keep_BN.shape[1] // 2] * 3
    assert not torch.equal(keep_BN[0], keep_BN[1])
    assert all(torch.equal(routing.keep_BN, keep_BN) for routing in decisions.values())
    # Skipped tokens leave the span as they came, in their places.
    assert torch.equal((before_BND == after_BND).all(-1), ~keep_BN)
    assert mmod.presets(needs_training=True) == tuple(n for n in mmod.presets() if n not in mmod.presets(None, False))
    assert mmod.is_routed(mmod.route_(make_vit(), "tread", training_only=False).eval())
    with pytest.raises(ValueError, match="depth must be at least 5, got 4"):
        mmod.preset("tread", depth=4)


def make_vit() -> nn.Module:
    return timm.create_model("test_vit", dynamic_img_size=True)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "weights": (
        lambda: mmod.route_(make_vit(), mmod.RoutingConfig(router="linear"), training_only=True),
        "router 'linear' adds some, which the dense model cannot keep",
    ),
    "a type": (lambda: mmod.route_(make_vit(), RANDOM, training_only="yes"), "training_only must be true or false"),
    "a method that stays": (
        lambda: mmod.apply_(mmod.route_(make_vit(), RANDOM), Experts(experts=2)),
        "methods for training alone (routing), which come last",
    ),
    "two that do not fit": (
        lambda: mmod.apply_(mmod.apply_(make_vit().eval(), Merge(3, training_only=True)), Prune(training_only=True)),
        "already changed by merge, which 'prune' cannot follow",
    ),
    "other parts": (
        lambda: mmod.route_(clip_zoo.make_clip("coca_ViT-B-32"), image=RANDOM, text=mmod.RoutingConfig()),
        "training_only must be the same for all parts, image, text",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_for_training_alone_is_refused(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises((ValueError, TypeError)) as refused:
        call()
    assert message in str(refused.value)


@pytest.mark.parametrize("method", [Resize(80, training_only=True), Prune(0.5, (1,), training_only=True)], ids=str)
def test_a_refused_method_leaves_the_model_as_it_was(method: Any) -> None:
    model = mmod.apply_(make_vit(), method)
    images = torch.randn(2, 3, 160, 160)
    expected = {mode: model.train(mode)(images) for mode in (False, True)}
    for mode, output in expected.items():
        with pytest.raises(ValueError, match=r"training alone|cannot follow"):
            mmod.apply_(model.train(mode), Merge(3, training_only=True))
        assert torch.equal(model(images), output)
