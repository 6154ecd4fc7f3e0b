"""Optimisers: muon on a CPU has timm's steps but for rounding and leaves timm as it was; rates fall by layer or not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import open_clip
import pytest
import timm
import torch
from timm.optim import Muon
from timm.optim import muon as timm_muon

from mmod.training import OptimConfig
from mmod.training.engine.optim import create_optimizer, orthogonalise_in_fp32
from tests.kit.pairs_worker import MODEL


@pytest.mark.parametrize("shape", [(16, 16), (32, 8), (8, 32), (5,)])
def test_steps_are_nearer_to_float64_than_timms(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(shape, generator=generator), torch.randn(3, *shape, generator=generator)
    plain = timm_muon.zeropower_via_newtonschulz

    def train(dtype: torch.dtype, single: bool) -> torch.Tensor:
        weight = torch.nn.Parameter(start.to(dtype))
        optimizer = Muon([weight], lr=0.1, weight_decay=0.05)
        optimizer = orthogonalise_in_fp32(optimizer) if single else optimizer
        for gradient in gradients:
            weight.grad = gradient.to(dtype)
            optimizer.step()
        return weight.detach().double()

    with monkeypatch.context() as patch:
        patch.setattr(timm_muon, "zeropower_via_newtonschulz", partial(plain, dtype=torch.float64))
        exact = train(torch.float64, single=False)
    errors = [float((train(torch.float32, single) - exact).abs().max()) for single in (True, False)]
    assert errors[0] < 1e-4
    assert errors[0] <= errors[1]
    assert timm_muon.zeropower_via_newtonschulz is plain


def test_state_goes_from_one_to_the_other() -> None:
    weight = torch.nn.Parameter(torch.ones(8, 8))
    weight.grad = torch.ones(8, 8)
    saved = orthogonalise_in_fp32(Muon([weight], lr=0.1))
    saved.step()
    loaded = Muon([weight], lr=0.1)
    loaded.load_state_dict(saved.state_dict())
    assert torch.equal(loaded.state[weight]["momentum_buffer"], saved.state[weight]["momentum_buffer"])


def test_a_decay_by_layer_that_would_change_nothing_is_refused() -> None:
    config = OptimConfig("adamw", layer_decay=0.5)
    vit = timm.create_model("test_vit")
    assert len({group["lr_scale"] for group in create_optimizer(config, vit).param_groups}) > 2
    clip = open_clip.CLIP(**MODEL)
    with pytest.raises(ValueError, match=r"layer_decay=0\.5 would change nothing: timm finds no layers in CLIP"):
        create_optimizer(config, clip)
    create_optimizer(replace(config, layer_decay=1.0), clip)


def test_arguments_that_do_not_fit_are_named_with_their_optimiser() -> None:
    with pytest.raises(ValueError, match=r"cannot make the optimiser 'adamw' with optim\.args \{'betas': 3\}: "):
        create_optimizer(OptimConfig("adamw", args={"betas": 3}), timm.create_model("test_vit"))
