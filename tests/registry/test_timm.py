"""Routed entries of timm's registry."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import timm
import torch
from timm.models import get_arch_pretrained_cfgs, get_pretrained_cfg, list_models, load_state_dict, save_for_hf

import mmod
from mmod import RoutingConfig
from mmod.config import ROUTING_FIELDS
from mmod.registry.timm import ROUTED_MODELS, routed_name
from tests.kit.scripts import run_script

NAME = "test_vit_mod"
WANTED = {
    *(f"deit_{size}_patch16_mod_224" for size in ("tiny", "small", "base")),
    *(f"vit_{size}_patch16_mod_224" for size in ("tiny", "small", "base", "large")),
    "deit3_small_patch16_mod_224",
    "vit_small_patch16_mod_dinov3",
    *(f"vit_{size}_patch14_mod{tokens}_dinov2" for size in ("small", "base", "large") for tokens in ("", "_reg4")),
}


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def source(weights: dict[str, torch.Tensor]) -> dict[str, object]:
    return {"pretrained": True, "pretrained_cfg_overlay": {"state_dict": weights}}


def test_registry_knows_them() -> None:
    assert set(ROUTED_MODELS) >= WANTED
    assert set(ROUTED_MODELS) <= set(list_models())
    assert "deit_small_patch16_mod_224" in list_models("deit*", module="deit")
    assert "vit_small_patch16_mod_dinov3" in list_models(module="eva")


@pytest.mark.parametrize(
    "dense",
    [
        *("deit_small_patch16_224", "vit_base_patch16_224", "vit_small_patch16_dinov3"),
        *("vit_small_patch14_dinov2", "vit_small_patch14_reg4_dinov2"),
    ],
)
def test_published_weights_are_those_of_the_dense_entry(dense: str) -> None:
    routed = routed_name(dense)
    dense_cfgs = get_arch_pretrained_cfgs(dense)
    routed_cfgs = get_arch_pretrained_cfgs(routed)
    assert {name.replace(routed, dense) for name in routed_cfgs} == set(dense_cfgs)
    assert get_pretrained_cfg(routed).hf_hub_id == get_pretrained_cfg(dense).hf_hub_id
    assert get_pretrained_cfg(routed).architecture == routed


def test_options_are_arguments() -> None:
    model = timm.create_model(NAME, router="linear", capacity=0.25, blocks=(2, 4), losses={"membership": 0.1}, depth=5)
    expected = RoutingConfig(router="linear", capacity=0.25, blocks=(2, 4), losses={"membership": 0.1})
    assert mmod.routing_config(model) == expected
    assert list(mmod.routed_blocks(model)) == ["blocks.2", "blocks.4"]


def test_default_is_the_default_config() -> None:
    assert mmod.routing_config(timm.create_model(NAME)) == RoutingConfig()


def test_preset_knows_the_depth() -> None:
    model = timm.create_model(NAME, preset="p-mod", gate={"scale": 0.1})
    assert mmod.routing_config(model) == mmod.preset("p-mod", depth=6, gate={"scale": 0.1})


def test_options_hide_no_argument_of_a_model() -> None:
    for host in (timm.models.vision_transformer.VisionTransformer, timm.models.eva.Eva):
        assert not set(inspect.signature(host).parameters) & {*ROUTING_FIELDS, "preset"}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"routers": "linear"}, TypeError, "routers"),
        ({"router": "lienar"}, ValueError, "'lienar'"),
        ({"preset": "a-mood"}, ValueError, "'a-mood'"),
        ({"blocks": (7,)}, ValueError, "0 to 5"),
    ],
)
def test_wrong_arguments_raise(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        timm.create_model(NAME, **arguments)


def test_dense_weights_load_and_new_routers_stay() -> None:
    dense = timm.create_model("test_vit")
    torch.manual_seed(1)
    model = timm.create_model(NAME, router={"name": "linear", "init_std": 0.5}, **source(state(dense)))
    for name, value in dense.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert model.blocks[1].router.score.weight.std() > 0.1


def test_routed_weights_load_with_their_routers() -> None:
    trained = timm.create_model(NAME, router={"name": "linear", "init_std": 0.5})
    model = timm.create_model(NAME, router="linear", **source(state(trained)))
    for name, value in trained.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)


@pytest.mark.parametrize("lost", ["blocks.0.attn.qkv.weight", "blocks.3.router.score.weight"])
def test_incomplete_weights_are_refused(lost: str) -> None:
    weights = state(timm.create_model(NAME, router="linear"))
    del weights[lost]
    with pytest.raises(RuntimeError, match=lost):
        timm.create_model(NAME, router="linear", **source(weights))


def test_new_head_for_other_classes() -> None:
    model = timm.create_model(NAME, num_classes=3, **source(state(timm.create_model("test_vit"))))
    assert model(torch.randn(1, 3, 160, 160)).shape == (1, 3)


def test_folder_of_timm_keeps_the_options(tmp_path: Path) -> None:
    model = timm.create_model(
        NAME, router={"name": "linear", "init_std": 0.3}, capacity=(0.5, 0.25), blocks=(2, 4), num_classes=3
    )
    save_for_hf(model, str(tmp_path), safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert mmod.routing_config(again) == mmod.routing_config(model)
    x = torch.randn(2, 3, 160, 160)
    assert torch.equal(again.eval()(x), model.eval()(x))


def test_launcher_runs_a_script_with_the_registry(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    (tmp_path / "beside.py").write_text("ANSWER = 42\n")
    script.write_text(
        "import sys, timm, beside\n"
        "if __name__ == '__main__':\n"
        "    print(timm.is_model('test_vit_mod'), beside.ANSWER, sys.argv[1:])\n"
    )
    out = run_script("-m mmod.registry.timm", str(script), "--model", "x")
    assert out.stdout.strip() == "True 42 ['--model', 'x']"


def test_launcher_says_how_to_use_it() -> None:
    out = run_script("-m mmod.registry.timm")
    assert out.returncode == 1
    assert "usage" in out.stderr


def test_trained_weights_read_back_by_timm(tmp_path: Path) -> None:
    model = timm.create_model(NAME, router={"name": "linear", "init_std": 0.5})
    torch.save({"state_dict": model.state_dict()}, tmp_path / "checkpoint.pth.tar")
    again = timm.create_model(NAME, router="linear", checkpoint_path=str(tmp_path / "checkpoint.pth.tar"))
    weights = load_state_dict(str(tmp_path / "checkpoint.pth.tar"))
    assert all(torch.equal(again.state_dict()[name], value) for name, value in weights.items())
