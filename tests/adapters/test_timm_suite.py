"""What timm and torch do to a model, done to routed ones: checkpointing, copies, precision, groups, processes."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.layers import set_reentrant_ckpt, use_reentrant_ckpt
from timm.models import create_feature_extractor, get_graph_node_names
from timm.optim import param_groups_layer_decay
from timm.utils import ModelEmaV3
from torch import Tensor, nn

import mmod
from mmod import RoutingConfig
from tests.kit.processes import run_processes
from tests.kit.zoo import make_model

NAME = "vit_tiny_patch16_224"
LEARNED = RoutingConfig(
    router=mmod.score("linear", init_std=0.3), capacity=0.5, losses={"importance": 1.0, "membership": 0.1}
)
ROUTINGS = {
    "attention": RoutingConfig(capacity=0.5),
    "learned": LEARNED,
    "threshold": RoutingConfig(select=mmod.Threshold(1.0)),
    "p-mod": mmod.preset("p-mod", depth=4, router={"init_std": 0.3}),
}


def routed(routing: str = "learned", name: str = NAME) -> nn.Module:
    return mmod.route_(make_model(name), ROUTINGS[routing])


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 64, 64)


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    loss = model(x).square().mean()
    if mmod.routing_config(model).losses:
        loss = loss + mmod.auxiliary_loss(model)
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.fixture
def reentrant() -> Iterator[None]:
    before = use_reentrant_ckpt()
    set_reentrant_ckpt(True)
    yield
    set_reentrant_ckpt(before)


def check_checkpointing(plain: nn.Module, x: Tensor) -> None:
    saving = copy.deepcopy(plain)
    saving.set_grad_checkpointing()
    expected, actual = gradients(plain, x), gradients(saving, x)
    assert expected.keys() == actual.keys()
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, atol=1e-6, rtol=1e-4)


@pytest.mark.usefixtures("reentrant")
@pytest.mark.parametrize("routing", ["attention", "p-mod", "threshold"])
def test_reentrant_checkpointing_changes_no_gradient(routing: str) -> None:
    check_checkpointing(routed(routing).train(), images().requires_grad_())


@pytest.mark.parametrize(
    "method",
    [mmod.preset("distilled"), mmod.lab.Experts(choice="tokens"), mmod.lab.Recursions(choice="tokens")],
    ids=["routing", "experts", "recursions"],
)
def test_checkpointing_records_the_losses_of_two_passes_once(method: Any) -> None:
    plain = mmod.apply_(make_model(NAME), method).train()
    saving = copy.deepcopy(plain)
    saving.set_grad_checkpointing()
    views = [images(), images(3)]
    for model in (plain, saving):
        outputs = [model(x) for x in views]
        (sum(output.square().mean() for output in outputs) + mmod.auxiliary_loss(model)).backward()
        with pytest.raises(RuntimeError, match="since its loss was last collected"):
            mmod.auxiliary_loss(model)
    for actual, expected in zip(saving.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.usefixtures("reentrant")
def test_auxiliary_loss_refuses_reentrant_checkpointing() -> None:
    model = routed().train()
    model.set_grad_checkpointing()
    model(images().requires_grad_())
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        mmod.auxiliary_loss(model)


def test_checkpointing_compiles() -> None:
    torch.compiler.reset()
    plain, x = mmod.route_(make_model(NAME, depth=2), ROUTINGS["learned"]).train(), images()
    saving = copy.deepcopy(plain)
    saving.set_grad_checkpointing()
    # A decision is recorded in the forward pass alone, which is what this switch of torch says.
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        out = torch.compile(saving, fullgraph=True, backend="aot_eager")(x)
        (out.square().mean() + mmod.auxiliary_loss(saving)).backward()
    expected = gradients(plain, x)
    for name, parameter in saving.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5, rtol=1e-3)


def train_in_a_process(folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model, x = routed().train(), images(4)
    parallel = nn.parallel.DistributedDataParallel(model)
    part = x[rank * 2 : rank * 2 + 2]
    (parallel(part).square().mean() + mmod.auxiliary_loss(parallel)).backward()
    if rank == 0:
        torch.save({name: parameter.grad for name, parameter in model.named_parameters()}, folder / "gradients.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_have_the_gradients_of_one(tmp_path: Path) -> None:
    assert run_processes(train_in_a_process, tmp_path, world=2) == [0, 0]
    actual = torch.load(tmp_path / "gradients.pt", weights_only=True)
    torch.manual_seed(0)
    model, x = routed().train(), images(4)
    for part in x.split(2):
        ((model(part).square().mean() + mmod.auxiliary_loss(model)) / 2).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(actual[name], parameter.grad, atol=1e-6, rtol=1e-4)


def test_moving_average_follows_routers() -> None:
    model = routed().train()
    average = ModelEmaV3(model, decay=0.5)
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    average.update(model)
    assert list(mmod.routed_blocks(average.module)) == list(mmod.routed_blocks(model))
    key = "blocks.1.router.score.weight"
    torch.testing.assert_close(average.module.state_dict()[key], before[key] + 0.5)


def test_layer_decay_gives_a_router_the_rate_of_its_block() -> None:
    model = routed()
    groups = param_groups_layer_decay(model, layer_decay=0.5)
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    assert len(scale) == len(list(model.parameters()))
    for block in mmod.routed_blocks(model).values():
        assert scale[id(block.router.score.weight)] == scale[id(block.mlp.fc1.weight)]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_bf16_autocast_trains(routing: str) -> None:
    model, x = routed(routing).train(), images()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    with mmod.trace(model) as decisions, torch.autocast("cpu", torch.bfloat16):
        model(x)
    assert all(routing.score_BN.dtype == torch.float32 for routing in decisions.values())
    out.float().square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_fx_sees_a_routed_block_as_one_node(routing: str) -> None:
    model, x = routed(routing), images()
    assert "blocks.1" in get_graph_node_names(model)[1]
    features = create_feature_extractor(model, {"blocks.1": "after", "head": "logits"})(x)
    assert torch.equal(features["logits"], model(x))
    (after,) = model.forward_intermediates(x, indices=[1], intermediates_only=True, output_fmt="NLC")
    assert torch.equal(features["after"][:, model.num_prefix_tokens :], after)


def test_features_only_is_routed_before_it_is_cut() -> None:
    importlib.import_module("mmod.registry.timm")
    full = timm.create_model("test_vit_mod", router="linear").eval()
    features = timm.create_model("test_vit_mod", router="linear", features_only=True, out_indices=(1, 3)).eval()
    features.model.load_state_dict(full.state_dict(), strict=False)
    x = torch.randn(1, 3, 160, 160)
    expected = full.forward_intermediates(x, indices=(1, 3), intermediates_only=True)
    for one, other in zip(features(x), expected):
        assert torch.equal(one, other)
