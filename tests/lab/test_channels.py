"""Channels routed around blocks of ResNets: against a loop, by hand, undone, saved, counted, trained."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mmod
from mmod.analysis import flops
from mmod.lab import Channels
from mmod.lab.channels import ChannelBlock
from mmod.methods import methods_of, read_method, undo_
from mmod.training import evaluate
from mmod.training.engine.start import create_models
from mmod.training.image.kind import ImageKind
from tests.kit.cover import in_turn
from tests.kit.engine_worker import TensorStream, run, tiny_config

SMALL: dict[str, Any] = {"layers": (2, 3, 1, 4), "channels": (16, 32, 32, 64), "num_classes": 7}
# Names of timm to what they are made with and a divisor: both kinds of block, wide ones, other stems, dilation.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "resnet18": (SMALL, 8),
    "resnet50": (SMALL, 4),
    "wide_resnet50_2": (SMALL, 16),
    "resnet26d": ({**SMALL, "output_stride": 8, "drop_path_rate": 0.1}, 2),
    "resnet34": ({**SMALL, "act_layer": "silu"}, 1),
}
WAYS: list[dict[str, Any]] = [
    {},
    {"into": "own"},
    {"adds": "change", "squeeze": 4},
    {"into": "own", "adds": "change", "squeeze": 1},
    {"into": "own", "chosen": "first"},
    {"into": "own", "chosen": "random"},
]


def make_model(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return lively(timm.create_model(name, **MODELS[name][0])).eval()


def lively(model: nn.Module) -> Any:
    """Make norms, which timm initialises with zeros and ones, matter."""
    generator = torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for value in (module.weight.data, module.bias.data, module.running_mean, module.running_var):
                assert value is not None
                value += 0.5 * torch.rand(value.shape, generator=generator, dtype=value.dtype)
    return model


def make_images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 40, 40, generator=torch.Generator().manual_seed(5))


def routed(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, ChannelBlock)}


def convolved(x: Tensor, conv: Any, norm: Any) -> Tensor:
    x = F.conv2d(x, conv.weight, None, conv.stride, conv.padding, conv.dilation)
    return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias)


def defined(block: Any, config: Channels, x_BCHW: Tensor) -> Tensor:
    """Return what a block makes of its input, image by image and channel by channel."""
    out = x_BCHW.clone()
    act = block.act1
    for image, x_CHW in enumerate(x_BCHW):
        first, _, second = block.selector
        hidden = (first.weight @ x_CHW.flatten(1).mean(1) + first.bias).clamp(min=0)
        score = torch.sigmoid(second.weight @ hidden + second.bias)
        count = len(score) // config.divisor
        drawn = block.mod_state.draw(x_CHW.flatten(1)[None])[0]
        by = {"score": score, "random": drawn, "first": -torch.arange(len(score))}[config.chosen]
        chosen = sorted(range(len(score)), key=lambda c: -float(by[c]))[:count]
        chosen.sort()
        z = x_CHW[chosen][None]
        y = act(convolved(z, block.conv1, block.bn1))
        y = convolved(y, block.conv2, block.bn2)
        if hasattr(block, "conv3"):
            y = convolved(act(y), block.conv3, block.bn3)
        y = act(y + z)
        for slot, channel in enumerate(chosen):
            added = y[0, slot] - z[0, slot] if config.adds == "change" else y[0, slot]
            out[image, channel if config.into == "own" else slot] += score[channel] * added
    return out


@pytest.mark.parametrize(("way", "name"), in_turn(WAYS, MODELS, times=2), ids=str)
def test_every_narrow_block_by_its_definition(way: dict[str, Any], name: str) -> None:
    model = lively(mmod.apply_(make_model(name), Channels(divisor=MODELS[name][1], **way))).double()
    generator = torch.Generator().manual_seed(7)
    for block in routed(model).values():
        height, width = torch.randint(1, 7, (2,), generator=generator).tolist()
        x = torch.randn(3, block.selector[0].in_features, height, width, generator=generator).double()
        with torch.no_grad():
            actual = block(x)
            torch.testing.assert_close(actual, defined(block, methods_of(model)[0], x), rtol=1e-9, atol=1e-10)
            torch.testing.assert_close(actual[1:2], block(x[1:2]), rtol=1e-12, atol=1e-12)
        if "into" not in way:
            count = x.shape[1] // MODELS[name][1]
            assert torch.equal(actual[:, count:], x[:, count:])


@pytest.mark.parametrize("name", MODELS)
def test_every_second_block_is_narrow_and_undoing_gives_the_wide_ones_back(name: str) -> None:
    images, model, divisor = make_images(), make_model(name), MODELS[name][1]
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        expected = model(images)
        mmod.apply_(model, Channels(divisor=divisor))
        assert list(routed(model)) == ["layer1.1", "layer2.1", "layer4.1", "layer4.3"]
        assert set(before) <= set(model.state_dict())
        assert model(images).shape == expected.shape
        assert methods_of(copy.deepcopy(model))[0] == Channels(divisor)
        torch.testing.assert_close(copy.deepcopy(model)(images), model(images), rtol=0, atol=0)
        undo_(model)
        assert not methods_of(model)
        assert {key: value.shape for key, value in before.items()} == {
            key: value.shape for key, value in model.state_dict().items()
        }
        assert torch.equal(model(images), expected)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_all_channels_at_full_weight_are_the_dense_model(name: str) -> None:
    """Narrow blocks of all channels, with the wide ones' weights and a score of 1, change what these do."""
    dense = make_model(name).double()
    model = mmod.apply_(make_model(name).double(), Channels(divisor=1, into="own", adds="change"))
    wide = dense.state_dict()
    model.load_state_dict({**model.state_dict(), **wide})
    for block in routed(model).values():
        block.selector[2].bias.data.fill_(50.0)
        block.selector[2].weight.data.zero_()
    with torch.no_grad():
        torch.testing.assert_close(model(make_images().double()), dense(make_images().double()))


@pytest.mark.parametrize(("name", "kernels"), [("resnet18", (9, 9)), ("resnet50", (1, 9, 1))])
def test_flops_are_those_of_the_narrow_blocks(name: str, kernels: tuple[int, ...]) -> None:
    size, divisor = 64, MODELS[name][1]
    dense, model = make_model(name), mmod.apply_(make_model(name), Channels(divisor=divisor))
    saved = 0
    for wide, side in ((16, 16), (32, 8), (64, 2), (64, 2)):
        channels = wide if len(kernels) == 2 else 4 * wide
        for kernel in kernels:
            product = wide * wide if kernel == 9 else wide * channels
            saved += 2 * side**2 * kernel * (product - product // divisor**2)
        saved -= 4 * channels * max(1, channels // 16)
    report = flops(model, size)
    assert flops(dense, size).routed - report.routed == saved
    assert report.blocks == ()
    assert report.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_training_goes_on_from_a_run(tmp_path: Path) -> None:
    method = {"kind": "channels", "divisor": 4}
    args = {"layers": [2, 1, 1, 1], "channels": [8, 8, 8, 8], "in_chans": 1, "num_classes": 4}
    model = {"name": "resnet18", "args": args}
    run(tiny_config(output=tmp_path / "dense", epochs=1, model=model))
    narrow = tiny_config(output=tmp_path / "run", epochs=1, model=model, methods=[method])
    result = run(narrow)
    for folder, is_changed in (("dense", False), ("run", True)):
        start = replace(narrow, model=narrow.model.started_from(str(tmp_path / folder)))
        changed, teacher = create_models(ImageKind(start))
        assert methods_of(changed)[0] == read_method(method)
        assert (teacher is None) == is_changed
    assert evaluate(changed, TensorStream(8, seed=None)) == result.evaluation
    asked = replace(start, distill=replace(start.distill, teacher="dense"))
    with pytest.raises(ValueError, match="holds no dense model"):
        create_models(ImageKind(asked))
