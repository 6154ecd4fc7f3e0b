"""Vision models with adapters (LoRA): routed before or after peft wraps them, trained, saved, loaded, merged."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mmod
from tests.kit.clip_zoo import make_clip
from tests.kit.clip_zoo import make_images as make_clip_images
from tests.kit.zoo import make_images, make_model

peft = pytest.importorskip("peft")
NAME = "vit_tiny_patch16_224"
LINEAR = mmod.RoutingConfig(router=mmod.score("linear", init_std=0.3), capacity=0.5, losses={"membership": 0.1})


def adapters(**options: Any) -> Any:
    return peft.LoraConfig(r=2, target_modules=["qkv"], init_lora_weights=False, **options)


def train(model: nn.Module, images: Tensor) -> set[str]:
    """Take a step and return the names of what it changed."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    (model(images).square().mean() + mmod.auxiliary_loss(model)).backward()
    optimizer.step()
    model.eval()
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


def check_trained(changed: set[str], learns: bool) -> None:
    assert any("lora" in name for name in changed)
    assert sum("router" in name for name in changed) == 2 * learns
    assert all("lora" in name or "router" in name for name in changed)


@pytest.mark.parametrize(
    ("method", "named", "told"),
    [
        (LINEAR, None, True),
        (mmod.preset("p-mod"), None, True),
        (LINEAR, ["router"], False),
        (mmod.preset("p-mod"), ["router"], False),
        (mmod.RoutingConfig(), None, False),
    ],
    ids=["linear", "tied", "linear trained", "tied trained", "nothing to train"],
)
def test_routers_that_adapters_leave_random_are_told_once_with_what_trains_them(
    method: mmod.RoutingConfig, named: list[str] | None, told: bool
) -> None:
    options = peft.LoraConfig(r=2, target_modules="all-linear", modules_to_save=named)
    model = peft.get_peft_model(mmod.route_(make_model(NAME), method), options).train()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            model(make_images(NAME, 1)).sum().backward()
    assert len([warning for warning in said if "modules_to_save=['router'" in str(warning.message)]) == told


def test_one_capacity_is_the_mean_of_a_plan_whose_routers_peft_wraps() -> None:
    options = adapters(modules_to_save=["router"])
    model = mmod.set_capacity_(peft.get_peft_model(mmod.route_(make_model(NAME), "p-mod"), options), 0.3)
    shares = list(mmod.capacities(model).values())
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) / len(shares) == pytest.approx(0.3, abs=1e-6)


def outputs(model: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return model(images)


def test_adapters_on_a_routed_vit_train_save_load_and_merge_with_its_routers(tmp_path: Path) -> None:
    images = make_images(NAME, 2)
    model = peft.get_peft_model(mmod.route_(make_model(NAME), LINEAR), adapters(modules_to_save=["router"]))
    check_trained(train(model, images), learns=True)
    expected = outputs(model, images)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(mmod.route_(make_model(NAME), LINEAR), tmp_path).eval()
    assert torch.equal(outputs(again, images), expected)
    merged = again.merge_and_unload()
    torch.testing.assert_close(outputs(merged, images), expected, atol=1e-5, rtol=1e-4)
    dense = mmod.unroute_(merged)
    assert dense.state_dict().keys() == make_model(NAME).state_dict().keys()


@pytest.mark.parametrize("context", ["kept", "all"])
@pytest.mark.parametrize("router", ["linear", "attention"])
def test_a_vit_with_adapters_is_routed_trained_merged_and_saved(router: str, context: str, tmp_path: Path) -> None:
    images = make_images(NAME, 2)
    config = (LINEAR if router == "linear" else mmod.RoutingConfig()).replace(context=context)
    model = peft.get_peft_model(make_model(NAME), adapters())
    plain = outputs(model, images)
    assert mmod.route_(model, config) is model
    mmod.set_capacity_(model, 1.0)
    if router == "attention":
        torch.testing.assert_close(outputs(model, images), plain)
    mmod.set_capacity_(model, 0.5)
    if router == "linear":
        check_trained(train(model, images), learns=True)
    expected = outputs(model, images)
    assert mmod.routing_config(model) == config
    with pytest.raises(ValueError, match="cannot save this PeftModel"):
        mmod.save_pretrained(model, tmp_path / "wrapped")
    merged = model.merge_and_unload()
    torch.testing.assert_close(outputs(merged, images), expected, atol=1e-5, rtol=1e-4)
    mmod.save_pretrained(merged, tmp_path / "merged")
    torch.testing.assert_close(outputs(mmod.load_pretrained(tmp_path / "merged"), images), outputs(merged, images))
    assert not mmod.is_routed(mmod.unroute_(merged))


def test_unrouting_leaves_the_adapters() -> None:
    images = make_images(NAME, 2)
    model = peft.get_peft_model(make_model(NAME), adapters())
    keys, plain = model.state_dict().keys(), outputs(model, images)
    mmod.unroute_(mmod.route_(model, LINEAR))
    assert model.state_dict().keys() == keys
    assert torch.equal(outputs(model, images), plain)


def test_flops_of_a_model_with_adapters_follow_its_routing() -> None:
    model = mmod.route_(peft.get_peft_model(make_model(NAME), adapters()), LINEAR)
    report = mmod.flops(model, (3, 64, 64))
    assert 0.65 < report.share < 0.85
    assert set(mmod.routed_blocks(model)) < {row.name for row in report.blocks}


def test_towers_of_a_clip_model_with_adapters_are_parts() -> None:
    options = peft.LoraConfig(r=2, target_modules=["c_fc"], init_lora_weights=False)
    model = peft.get_peft_model(make_clip("ViT-B-32"), options)
    mmod.route_(model, image=mmod.RoutingConfig(capacity=0.5))
    assert all("visual" in name for name in mmod.routed_blocks(model))
    assert model.get_base_model().encode_image(make_clip_images("ViT-B-32", 2)).isfinite().all()


def test_what_peft_wraps_is_named_where_it_cannot_be_routed() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(nn.Sequential(nn.Linear(2, 2)), peft.LoraConfig(r=1, target_modules=["0"]))
    with pytest.raises(ValueError, match="cannot route Sequential: it has no list of blocks"):
        mmod.route_(model, mmod.RoutingConfig())
