"""A `forward` on the instance hides a module's class, which alone a method changes."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor, nn

import mmod
from mmod import RoutingConfig
from mmod.blocks import host_class, is_converted
from mmod.lab import Experts
from mmod.methods import Exit, Merge, Method, Prune, Resize
from tests.kit.clip_zoo import make_clip
from tests.kit.cover import in_turn
from tests.kit.own_vits import make_own
from tests.kit.vlm_zoo import make_language
from tests.kit.zoo import make_model

LINEAR = RoutingConfig(router=mmod.score("linear", init_std=0.5), capacity=0.5)
# The change, and a module whose class it changes.
CHANGES: dict[str, tuple[RoutingConfig | Method, str]] = {
    "routing": (LINEAR, "blocks.1"),
    "attention routing": (RoutingConfig(router="attention", blocks=(1,), capacity=0.5), "blocks.0"),
    "attention alone": (LINEAR.replace(operator="attention", blocks=(1,)), "blocks.1.attn"),
    "MLP alone": (LINEAR.replace(operator="mlp", blocks=(1,)), "blocks.1.mlp"),
    "merging inside": (mmod.preset("gradual", depth=2, blocks=(0, 1), capacity=0.5), "blocks.1"),
    "merge": (Merge(3), "blocks.0"),
    "prune": (Prune(0.6, (0, 1)), "blocks.1"),
    "exit": (Exit(0.2, (0,)), "blocks.0"),
    "experts": (Experts(experts=2), "blocks.1.mlp"),
    "resize": (Resize(32), "patch_embed"),
}


OTHERS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "own": (partial(make_own, "own softmax"), "image", "stages.1"),
    "open_clip": (partial(make_clip, "ViT-B-32"), "image", "visual.transformer.resblocks.1"),
    "open_clip's text": (partial(make_clip, "ViT-B-32"), "text", "transformer.resblocks.1"),
    "language model": (partial(make_language, "llama"), "language", "model.layers.1"),
}


def make() -> nn.Module:
    return make_model("vit_tiny_patch16_224", depth=2, dynamic_img_size=True).eval()


def images() -> Tensor:
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def by_accelerate(module: nn.Module) -> None:
    accelerate.hooks.add_hook_to_module(module, accelerate.hooks.ModelHook())


def by_closure(module: nn.Module) -> None:
    before = module.forward

    def timed(*args: Any, **kwargs: Any) -> Any:
        return before(*args, **kwargs)

    module.forward = timed  # type: ignore[method-assign]


def by_lookup(module: nn.Module) -> None:
    module.forward = types.MethodType(lambda self, *args, **kwargs: type(self).forward(self, *args, **kwargs), module)


def by_adapter(module: nn.Module) -> None:
    """Call another module inside before the forward of the block."""
    before = module.forward
    module.adapter = nn.Identity()

    def adapted(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return before(module.adapter(x), *args, **kwargs)

    module.forward = adapted  # type: ignore[method-assign]


def by_copied_code(module: nn.Module) -> None:
    """Replace the forward, as kernels for a class of layers do."""
    module.forward = partial(host_class(module).forward, module)  # type: ignore[method-assign]


CALLING = [by_accelerate, by_closure, by_lookup, by_adapter]


@pytest.mark.parametrize(("name", "put"), in_turn(CHANGES, [by_accelerate, by_closure, by_copied_code]))
def test_a_forward_on_the_instance_is_refused_before_anything_changes(
    name: str, put: Callable[[nn.Module], None]
) -> None:
    change, path = CHANGES[name]
    model = make()
    put(model.get_submodule(path))
    with torch.no_grad():
        expected = model(images())
    keys = list(model.state_dict())
    hooks = [(len(module._forward_pre_hooks), len(module._forward_hooks)) for module in model.modules()]
    with pytest.raises(ValueError, match=rf"^{path} .*`forward` on the instance.*Route first, then"):
        mmod.apply_(model, change)
    assert not any(map(is_converted, model.modules()))
    assert list(model.state_dict()) == keys
    assert [(len(module._forward_pre_hooks), len(module._forward_hooks)) for module in model.modules()] == hooks
    with torch.no_grad():
        assert torch.equal(model(images()), expected)
    del model.get_submodule(path).forward
    mmod.apply_(model, change)


@pytest.mark.parametrize("name", OTHERS)
def test_models_of_other_libraries_refuse_it_too(name: str) -> None:
    make_other, part, path = OTHERS[name]
    model = make_other()
    by_accelerate(model.get_submodule(path))
    config = RoutingConfig(router="stride", blocks=(1,), capacity=0.5)
    if part == "language":
        config = config.replace(language={"tokens": "all"}, select={"threshold": 0.5}, router="linear")
    with pytest.raises(ValueError, match=rf"^{path} .*on the instance"):
        mmod.route_(model, **{part: config})


def test_modules_that_keep_their_class_may_have_one() -> None:
    plain, model = mmod.route_(make(), LINEAR), make()
    for path in ("blocks.0", "blocks.1.attn", "blocks.1.norm1", "patch_embed", "head", ""):
        by_accelerate(model.get_submodule(path))
    mmod.route_(model, LINEAR)
    model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(model(images()), plain(images()))
    attention = make()
    # The attention that is observed is read from around its block.
    by_closure(attention.get_submodule("blocks.0.attn"))
    config = RoutingConfig(router="attention", blocks=(1,), capacity=0.5)
    mmod.route_(attention, config)
    with torch.no_grad():
        assert torch.equal(attention(images()), mmod.route_(make(), config)(images()))


@pytest.mark.parametrize(("name", "put"), in_turn(CHANGES, CALLING, times=2))
@torch.no_grad()
def test_one_that_calls_the_method_changes_nothing(name: str, put: Callable[[nn.Module], None]) -> None:
    change, path = CHANGES[name]
    torch.manual_seed(0)
    model = mmod.apply_(make(), change).eval()
    expected = copy.deepcopy(model)(images())
    put(model.get_submodule(path))
    for _ in range(2):
        torch.testing.assert_close(model(images()), expected)


@pytest.mark.parametrize("name", [name for name in CHANGES if name != "attention routing"])
@torch.no_grad()
def test_one_that_replaces_the_method_is_refused_at_the_first_call(name: str) -> None:
    change, path = CHANGES[name]
    model = mmod.apply_(make(), change).eval()
    by_copied_code(model.get_submodule(path))
    with pytest.raises(ValueError, match=rf"{path or 'the model'} .*does not run that method"):
        model(images())
    del model.get_submodule(path).forward
    model(images())


@pytest.mark.parametrize(("change", "inside"), [(Merge(3), "attn"), (Prune(0.6, (0, 1)), "attn"), (LINEAR, "norm1")])
def test_one_on_a_module_that_the_method_works_without_changes_nothing(change: Any, inside: str) -> None:
    model = mmod.apply_(make(), change)
    # A model of its own, because the first call of this one sees no forward on the instance.
    with torch.no_grad():
        expected = copy.deepcopy(model)(images())
    replaced = 0
    for block in model.blocks:
        module = block.get_submodule(inside)
        if is_converted(module):
            module.forward = types.MethodType(host_class(module).forward, module)
            replaced += 1
    assert replaced
    with torch.no_grad():
        assert torch.equal(model(images()), expected)


@torch.no_grad()
def test_several_methods_see_one_forward() -> None:
    model: Any = mmod.route_(mmod.apply_(make(), Experts(experts=2)), LINEAR).eval()
    expected, classes = copy.deepcopy(model)(images()), list(map(type, model.modules()))
    by_closure(model.blocks[1])
    for _ in range(2):
        torch.testing.assert_close(model(images()), expected)
    assert list(map(type, model.modules())) == classes
    model = mmod.route_(mmod.apply_(make(), Experts(experts=2)), LINEAR).eval()
    by_copied_code(model.blocks[1])
    with pytest.raises(ValueError, match=r"blocks\.1 .*does not run that method"):
        model(images())
    assert list(map(type, model.modules())) == classes


@torch.no_grad()
def test_a_block_that_was_not_called_is_no_fault() -> None:
    model = mmod.route_(make(), LINEAR)
    expected = model.forward_intermediates(images(), indices=[0], intermediates_only=True, stop_early=True)
    by_copied_code(model.blocks[1])
    model.forward = partial(  # type: ignore[method-assign]
        model.forward_intermediates, indices=[0], intermediates_only=True, stop_early=True
    )
    torch.testing.assert_close(model(images()), expected)


@torch.no_grad()
def test_nothing_is_left_after_the_first_call() -> None:
    model = mmod.route_(make(), LINEAR)
    for seen in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        by_accelerate(seen.blocks[1])
        seen(images())
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in seen.modules())


def test_it_adds_no_break_to_a_compiled_graph() -> None:
    model = make()
    del model.blocks[1:]
    mmod.route_(model, LINEAR.replace(blocks=(0,)))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(images()), model(images()))


@pytest.mark.parametrize("put", CALLING)
def test_undoing_needs_it_removed(put: Callable[[nn.Module], None]) -> None:
    model = make()
    expected = model(images())
    mmod.route_(model, LINEAR)
    put(model.blocks[1])
    with pytest.raises(ValueError, match=r"blocks\.1 has a `forward` on the instance.*remove it before"):
        mmod.undo_(model)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    vars(model.blocks[1]).pop("forward", None)
    assert torch.equal(mmod.undo_(model)(images()), expected)


@torch.no_grad()
def interrupted() -> nn.Module:
    """Return a model whose first call did not end, and whose block has its own forward again."""
    model = mmod.route_(make(), LINEAR)
    by_closure(model.blocks[1])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.norm.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(images())
    handle.remove()
    del model.blocks[1].forward
    return model


@torch.no_grad()
def test_an_interrupted_call_leaves_nothing_to_an_undone_model() -> None:
    model = interrupted()
    expected = make()(images())
    copied = copy.deepcopy(model)
    mmod.undo_(model)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    copied(images())
    for seen in (model, pickle.loads(pickle.dumps(model))):
        for _ in range(2):
            assert torch.equal(seen(images()), expected)
    merging = mmod.apply_(make(), Merge(3))
    mmod.apply_(model, Merge(3))
    for _ in range(2):
        assert torch.equal(model(images()), merging(images()))


@torch.no_grad()
def test_the_call_after_one_that_did_not_end_is_the_first() -> None:
    model = interrupted()
    failed = mmod.route_(make(), LINEAR)
    by_copied_code(failed.blocks[1])

    def hook_behind(module: nn.Module, args: tuple[Any, ...]) -> None:
        module.register_forward_hook(lambda *_: None)

    failed.register_forward_pre_hook(hook_behind)
    with pytest.raises(AssertionError, match="Input height"):
        failed(torch.randn(1, 3, 10, 10))
    for seen in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), failed):
        by_copied_code(seen.blocks[1])
        with pytest.raises(ValueError, match=r"blocks\.1 .*does not run that method"):
            seen(images())
        assert type(seen.blocks[1]) is type(mmod.route_(make(), LINEAR).blocks[1])
        del seen.blocks[1].forward
        seen(images())
        assert not any(module._forward_pre_hooks for module in seen.blocks.modules())
