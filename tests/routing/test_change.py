"""The score "change" against float64 distances between the states around a block of the dense model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mmod
from tests.kit.cover import in_turn
from tests.kit.vlm_zoo import make_joint, make_language, prompt, words
from tests.kit.zoo import ZOO, make_images, make_model

CONFIG = mmod.RoutingConfig(router="change", capacity=0.5, blocks=(1, 2))
NAME = "vit_tiny_patch16_224"


class Moved:
    """The distance, in float64, by which a module of a dense model moves each token, in the passes inside."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.distance_BN = torch.zeros(0)

    def __enter__(self) -> Moved:
        self.handle = self.module.register_forward_hook(self._read, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.remove()

    def _read(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        after = output[0] if isinstance(output, tuple) else output
        self.distance_BN = (after.double() - before.double()).square().sum(-1).sqrt()


def scores(model: nn.Module, **inputs: Any) -> list[Tensor]:
    with mmod.trace(model) as trace:
        model(**inputs)
    assert all(torch.equal(routing.keep_BN, trace[next(iter(trace))].keep_BN) for routing in trace.values())
    return [routing.score_BN.double() for routing in trace.values()]


@pytest.mark.parametrize("name", ZOO)
@torch.no_grad()
def test_it_is_how_far_the_block_before_moves_a_token(name: str) -> None:
    model = make_model(name)
    images = make_images(name, 2)
    with Moved(model.blocks[0]) as moved:
        model(images)
    mmod.route_(model, CONFIG)
    for score_BN in scores(model, x=images):
        torch.testing.assert_close(score_BN, moved.distance_BN, rtol=1e-4, atol=1e-5)


# One of each kind of layers.
FAMILIES = ("llava", "llava-mistral-window", "smolvlm", "qwen3-vl", "gemma3-vision")


@pytest.mark.parametrize(("name", "side"), in_turn(FAMILIES, ["left", "right"]))
@torch.no_grad()
def test_it_scores_the_image_tokens_of_a_prompt(name: str, side: str) -> None:
    batch = prompt(name, (1, 2), side=side)
    model = make_joint(name)
    with Moved(model.model.get_submodule("language_model" if name != "smolvlm" else "text_model").layers[0]) as moved:
        model(**batch)
    mmod.route_(model, language=CONFIG)
    real = batch["attention_mask"].bool()
    for score_BN in scores(model, **batch):
        torch.testing.assert_close(score_BN[real], moved.distance_BN[real], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_it_scores_by_the_attention_of_a_block_that_merges_inside() -> None:
    model = make_model(NAME)
    images = make_images(NAME, 2)
    updates: list[Tensor] = []
    handle = model.blocks[0].attn.register_forward_hook(lambda *call: updates.append(call[2].double()))
    model(images)
    handle.remove()
    mmod.route_(model, CONFIG.replace(blocks="all", skipped=mmod.Merged("mlp")))
    with mmod.trace(model) as trace:
        model(images)
    expected = updates[0].square().sum(-1).sqrt()
    torch.testing.assert_close(trace["blocks.0"].score_BN.double(), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_half_precision_is_measured_in_single() -> None:
    model = mmod.route_(make_model(NAME), CONFIG)
    images = make_images(NAME, 2)
    expected = scores(model, x=images)[0]
    with torch.autocast("cpu", torch.bfloat16), mmod.trace(model) as trace:
        model(images)
    actual = trace["blocks.1"].score_BN
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_blocks_decide_as_before(reentrant: bool) -> None:
    model = mmod.route_(make_model(NAME), CONFIG).train()
    images = make_images(NAME, 2).requires_grad_()
    gradients = []
    for recomputes in (False, True):
        model.zero_grad()
        x = model._pos_embed(model.patch_embed(images))
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant) if recomputes else block(x)
        x.square().mean().backward()
        gradients.append({name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None})
    assert len(gradients[0]) > len(model.blocks)
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected)


@torch.no_grad()
def test_packed_samples_are_scored_as_if_alone() -> None:
    model = mmod.route_(make_language("llama"), CONFIG.replace(language={"tokens": "all"}))
    ids = words(1, 12)["input_ids"]
    positions = torch.tensor([[*range(5), *range(7)]])
    with mmod.trace(model) as trace:
        model(input_ids=ids, position_ids=positions, use_cache=False)
    packed = trace["model.layers.1"].score_BN
    for part in (slice(0, 5), slice(5, 12)):
        with mmod.trace(model) as trace:
            model(input_ids=ids[:, part], use_cache=False)
        torch.testing.assert_close(packed[:, part], trace["model.layers.1"].score_BN)


@torch.no_grad()
def test_it_needs_no_attention_map_and_costs_no_product() -> None:
    model = mmod.route_(make_model(NAME), CONFIG)
    assert mmod.flops(model, 64).blocks[0].importance == 0
    joint = mmod.route_(make_joint("llava"), language=CONFIG)
    assert mmod.flops(joint, mmod.Prompt(5, 9)).importance == 0
    # Nothing is seen of this attention.
    for block in model.blocks:
        block.attn.forward = lambda x, *_, **__: 0.1 * x
    assert model(make_images(NAME, 2)).isfinite().all()
