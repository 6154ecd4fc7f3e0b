"""What models of every host say of their images, and what they return for them."""

from __future__ import annotations

import pytest
import timm
import torch
import transformers
from torch import nn

import mmod
from mmod.adapters import image_facts, image_output, patch_grid
from mmod.methods.route import routing_configs
from tests.kit.folders import CLASSIFIERS, NAMES, make_image_model, side_of

HALF = mmod.RoutingConfig(router="norm", capacity=0.5)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers_of_transformers_say_what_they_take_and_answer(name: str) -> None:
    model = make_image_model(name)
    facts = image_facts(model)
    side = side_of(name)
    patch = 16 if name == "timm wrapper" else 8
    assert facts.classes == 2
    assert facts.names == {label: number for number, label in NAMES.items()}
    assert facts.patch == (patch, patch)
    assert facts.channels == 3
    # DINOv2 and timm's test_vit resample their position embeddings.
    assert facts.size == (None if name in ("dinov2", "timm wrapper") else (side, side))
    weights = [key for key in model.state_dict() if key.startswith(facts.head)]
    assert {model.get_parameter(key).shape[0] for key in weights} == {2}
    assert patch_grid(model, (side, side)) == (side // patch, side // patch)
    images = torch.randn(2, 3, side, side)
    torch.testing.assert_close(image_output(model, images), model(images).logits)
    assert image_facts(mmod.route_(model, HALF)) == facts


@pytest.mark.parametrize("name", ["headless", "clip", "siglip"])
def test_models_without_a_classifier_return_features(name: str) -> None:
    model, images = make_image_model(name), torch.randn(2, 3, 32, 32)
    assert image_facts(model).classes == 0
    if name == "headless":
        expected = model(images).pooler_output
    else:
        expected = model.get_image_features(images).pooler_output
    torch.testing.assert_close(image_output(model, images), expected)


def test_made_up_names_are_none() -> None:
    config = transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_labels=3)
    facts = image_facts(transformers.ViTForImageClassification(config))
    assert facts.classes == 3
    assert facts.names is None


def test_classes_of_models_that_do_not_say_are_unknown() -> None:
    assert image_facts(nn.Linear(2, 2)).classes is None
    assert image_facts(timm.create_model("test_vit", num_classes=0)).classes == 0


def test_outputs_without_a_tensor_are_refused() -> None:
    class Empty(nn.Module):
        def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
            return {}

    with pytest.raises(TypeError, match="output of this Empty must be a tensor, got dict"):
        image_output(Empty(), torch.zeros(1, 3, 8, 8))


@pytest.mark.parametrize("name", ["vit", "clip"])
def test_image_names_the_only_part_of_a_model(name: str) -> None:
    by_part, whole = make_image_model(name), make_image_model(name)
    mmod.route_(by_part, image=HALF)
    mmod.route_(whole, HALF)
    assert routing_configs(by_part) == routing_configs(whole) == {"image": HALF}
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(image_output(by_part, images), image_output(whole, images))
    read = mmod.methods.read_method({"kind": "routing", "parts": {"image": HALF.to_dict()}})
    assert routing_configs(mmod.apply_(make_image_model(name), read)) == {"image": HALF}


@pytest.mark.parametrize("name", ["vit", "siglip classifier"])
def test_flops_count_a_classifier_of_transformers_from_its_image_size(name: str) -> None:
    model = make_image_model(name)
    assert mmod.flops(model, 32).routed == mmod.flops(model, {"pixel_values": torch.zeros(1, 3, 32, 32)}).routed
