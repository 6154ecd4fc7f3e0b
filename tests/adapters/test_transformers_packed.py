"""Kept tokens of a ragged batch run as one sequence while a prompt is read; that must change nothing but time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mmod
from mmod.adapters.base import NamedArguments
from mmod.adapters.transformers.cache import RoutedLayer
from mmod.adapters.transformers.cache_base import cache_of
from mmod.adapters.transformers.layers import DecoderLayerCall
from tests.kit.cover import in_turn
from tests.kit.generation import EVERYTHING, IMAGES_ONLY
from tests.kit.vlm_zoo import APART, JOINT, LANGUAGE, LINEAR, SLIDING, make_joint, make_language, prompt, words

SIDES = ("left", "right")
# What stays padded: a window shorter than the prompt hides more than padding, and tokens of images see each other.
PADDED = (*SLIDING, "paligemma", "molmo2")


class Counted:
    """Count the layers that ran packed, or keep all of them from it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host: type = DecoderLayerCall) -> None:
        self.calls, self.allowed = 0, True
        can_pack = host.can_pack

        def counted(host: Any, block: nn.Module, arguments: dict[str, Any]) -> bool:
            packed = self.allowed and can_pack(host, block, arguments)
            self.calls += packed
            return packed

        monkeypatch.setattr(host, "can_pack", counted)


def both_ways(model: Any, batch: dict[str, Any], counted: Counted) -> list[list[Tensor]]:
    """Return logits of valid tokens, cached keys and values and gradients, packed and padded."""
    results, valid = [], batch["attention_mask"].bool()
    for counted.allowed in (True, False):
        with torch.no_grad():
            out = model(**batch, use_cache=True)
        held = [
            cached.transpose(1, 2) if layer.position_BL is None else cached.transpose(1, 2)[layer.position_BL >= 0]
            for layer in cache_of(out).layers
            if isinstance(layer, RoutedLayer) and layer.keys is not None
            for cached in (layer.keys, layer.values)
        ]
        logits = model(**batch, use_cache=False).logits[valid]
        parameters = [p for name, p in model.named_parameters() if p.requires_grad and "vision" not in name]
        gradients = torch.autograd.grad(logits.square().mean(), parameters, allow_unused=True)
        results.append([out.logits[valid], *held, logits, *(g for g in gradients if g is not None)])
    return results


def check_alike(results: list[list[Tensor]], error: float = 1e-9) -> None:
    for packed, padded in zip(*results, strict=True):
        torch.testing.assert_close(packed, padded, atol=error, rtol=100 * error)


@pytest.mark.parametrize(("name", "side"), in_turn([*JOINT, *APART], SIDES))
def test_packed_equals_padded_in_every_family(name: str, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    model = mmod.route_(make_joint(name), language=LINEAR).double()
    batch = prompt(name, (1, 0, 2), side=side)
    batch = {key: value.double() if value.is_floating_point() else value for key, value in batch.items()}
    # Linear attention computes its state in fp32.
    check_alike(both_ways(model, batch, counted), 1e-7 if name.startswith("qwen3_5") else 1e-9)
    assert (counted.calls > 0) == (not name.endswith(PADDED))


@pytest.mark.parametrize(("method", "training"), in_turn([*IMAGES_ONLY, *EVERYTHING], [False, True]))
def test_packed_equals_padded_by_every_method(method: str, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    config = {**IMAGES_ONLY, **EVERYTHING}[method]
    model = mmod.route_(make_joint("llava"), language=config).double().train(training)
    batch = prompt("llava", (2, 0, 1))
    check_alike(both_ways(model, {**batch, "pixel_values": batch["pixel_values"].double()}, counted))
    assert counted.calls


# Gemma 2 runs eager attention, which stays padded, and gives NaN in fp64 where padding leads, dense or routed.
@pytest.mark.parametrize("name", [name for name in LANGUAGE if name != "gemma2"])
def test_packed_equals_padded_without_images(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    model = mmod.route_(make_language(name), language=EVERYTHING["threshold"]).double()
    check_alike(both_ways(model, words(3), counted))
    assert (counted.calls > 0) == (not name.endswith(PADDED))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llava", "llava-onevision"])
def test_images_of_a_tower_run_packed(name: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = mmod.RoutingConfig(
        router=mmod.score("linear", init_std=0.3), select="threshold", gate="sigmoid", blocks=(1, 2)
    )
    model = mmod.route_(make_joint(name, attention=attention), image=config).double()
    batch = prompt(name, (3,))
    batch["pixel_values"] = batch["pixel_values"].double()
    counted, results = Counted(monkeypatch, NamedArguments), []
    for counted.allowed in (True, False):
        logits = model(**batch, use_cache=False).logits
        parameters = [p for p in model.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(logits.square().mean(), parameters, allow_unused=True)
        results.append([logits, *(g for g in gradients if g is not None)])
    check_alike(results)
    assert (counted.calls > 0) == (attention == "sdpa")


def test_other_masks_stay_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    model = mmod.route_(make_language("llama"), language=EVERYTHING["threshold"])
    batch = words(2)
    tokens = batch["input_ids"].shape[1]
    pairs = torch.ones(tokens, tokens, dtype=torch.bool).tril().expand(2, 1, -1, -1).clone()
    pairs[:, :, :, 5:7] &= torch.eye(tokens, dtype=torch.bool)[:, 5:7]
    model(input_ids=batch["input_ids"], attention_mask=pairs)
    assert not counted.calls
