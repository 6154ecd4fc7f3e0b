"""A block that keeps nothing changes nothing, and still runs where gradients are recorded: others wait for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import mmod
from tests.kit.cover import cover
from tests.kit.processes import run_processes
from tests.kit.starved_worker import NAME, loss_of, save_gradients, starved
from tests.kit.vlm_zoo import make_language
from tests.kit.zoo import make_images, make_model

NONE = mmod.RoutingConfig(router=mmod.score("linear", init_std=0.3), select=mmod.Threshold(1.0), blocks="all")


def check_starved(model: torch.nn.Module, inputs: torch.Tensor, layers: torch.nn.Module) -> None:
    with mmod.trace(model) as decisions:
        out = model(inputs)
    assert not any(routing.keep_BN.any() for routing in decisions.values())
    out = getattr(out, "logits", out)
    with torch.no_grad():
        again = model(inputs)
    assert torch.equal(getattr(again, "logits", again), out)
    out.square().sum().backward()
    for name, parameter in layers.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@pytest.mark.parametrize("context", ["kept", "all"])
@pytest.mark.parametrize("name", [NAME, "vit_base_patch16_siglip_224", "aimv2_large_patch14_224"])
def test_every_parameter_of_a_starved_vit_has_a_gradient(name: str, context: str) -> None:
    model = mmod.route_(make_model(name, depth=2), NONE.replace(context=context))
    check_starved(model, make_images(name, 2), model.blocks)


@pytest.mark.parametrize("gate", ["linear", "sigmoid", "tanh"])
def test_where_no_image_is_kept_any_gate_runs(gate: str) -> None:
    score = mmod.score("linear", per="sequence", init_std=0.3)
    model = mmod.route_(make_model(NAME, depth=2), NONE.replace(router=score, gate=gate)).train()
    check_starved(model, make_images(NAME, 2), model.blocks)


@pytest.mark.parametrize(
    ("name", "gate", "operator"),
    cover(
        [NAME, "vit_small_patch16_dinov3", "vit_base_patch16_siglip_224"],
        mmod.config.GATES,
        ["block", "mlp", "attention"],
    ),
)
def test_a_batch_of_which_no_image_is_kept_is_not_changed(name: str, gate: str, operator: str) -> None:
    config = NONE.replace(router=mmod.score("linear", per="sequence"), gate=gate, operator=operator)
    model, dense, images = make_model(name, depth=2), make_model(name, depth=2), make_images(name, 2)
    for block in dense.blocks:
        if operator == "block":
            block.register_forward_hook(lambda _, args, output: args[0])
        else:
            branch = block.mlp if operator == "mlp" else block.attn
            branch.register_forward_hook(lambda _, args, output: torch.zeros_like(output))
    mmod.route_(model, config)
    with torch.no_grad():
        assert torch.equal(model(images), dense(images))
    assert torch.equal(model(images), dense(images))


@pytest.mark.parametrize("gate_on", ["update", "branches"])
def test_every_parameter_of_a_starved_language_model_has_a_gradient(gate_on: str) -> None:
    model = mmod.route_(make_language("llama"), NONE.replace(language={"gate_on": gate_on})).train()
    check_starved(model, torch.arange(3, 15).view(2, 6), model.model.layers)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_process_that_keeps_nothing_does_not_hold_the_others_up(way: str, tmp_path: Path) -> None:
    assert run_processes(save_gradients, tmp_path, way, world=2) == [0, 0]
    actual, expected = torch.load(tmp_path / f"{way}.pt"), {}
    for rank in (0, 1):
        model = starved(rank)
        (loss_of(model, rank) / 2).backward()
        for name, parameter in model.named_parameters():
            expected[name] = parameter.grad + expected.get(name, 0)
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("operator", ["attention", "mlp"])
@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_a_vision_tower_runs_without_a_kept_image(kind: str, operator: str) -> None:
    options = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = getattr(transformers, f"{kind}VisionConfig")(**options, image_size=8, patch_size=4)
    model = getattr(transformers, f"{kind}VisionModel")(config).eval()
    mmod.route_(model, NONE.replace(router=mmod.score("coin"), gate="identity", operator=operator))
    with torch.no_grad(), mmod.trace(model) as decisions:
        assert model(pixel_values=torch.randn(2, 3, 8, 8)).last_hidden_state.isfinite().all()
    assert not any(routing.keep_BN.any() for routing in decisions.values())
