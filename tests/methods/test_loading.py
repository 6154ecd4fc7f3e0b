"""Models that were made and changed on the meta device, which holds no values, and load dense weights then."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mmod
from mmod.lab import Experts, Recursions
from mmod.methods import Exit, Method
from tests.kit.vlm_zoo import make_language
from tests.kit.zoo import make_images, make_model

NAME = "vit_tiny_patch16_224"
LINEAR = mmod.score("linear", init_std=0.3)
# Methods with the name fragments of the weights that they draw.
ADDING: dict[str, tuple[Method, tuple[str, ...]]] = {
    "linear": (mmod.RoutingConfig(router=LINEAR, gate="linear"), ("router",)),
    "threshold": (mmod.RoutingConfig(router=LINEAR, select=mmod.Threshold(0.5)), ("router",)),
    "experts": (Experts(experts=2), ("router",)),
    "experts-tokens": (Experts(experts=2, choice="tokens", capacity=None), ("router",)),
    "exit": (Exit(0.2, (0, 2)), ()),
}


def make_on_meta(method: Method) -> nn.Module:
    with torch.device("meta"):
        model = make_model(NAME)
    return mmod.apply_(model, method)


def load(model: nn.Module, dense: dict[str, Tensor], how: str) -> None:
    if how == "to_empty":
        model.to_empty(device="cpu")
    model.load_state_dict(dense, strict=False, assign=how == "assign")


@pytest.mark.parametrize("how", ["assign", "to_empty"])
@pytest.mark.parametrize("name", ADDING)
@torch.no_grad()
def test_added_weights_get_the_values_that_they_begin_with(name: str, how: str) -> None:
    method, drawn = ADDING[name]
    dense = make_model(NAME)
    model = make_on_meta(method)
    load(model, dense.state_dict(), how)
    expected = mmod.apply_(dense, method).state_dict()
    assert model.state_dict().keys() == expected.keys()
    for key, actual in model.state_dict().items():
        if any(fragment in key for fragment in drawn):
            assert actual.isfinite().all(), key
            torch.testing.assert_close(actual.std(correction=0), expected[key].std(correction=0), atol=0.0, rtol=0.9)
        else:
            assert torch.equal(actual, expected[key]), key
    model.eval()(make_images(NAME, 2))


@pytest.mark.parametrize("how", ["assign", "to_empty"])
def test_saved_weights_are_not_drawn_again(how: str) -> None:
    saved = mmod.apply_(make_model(NAME), ADDING["experts"][0]).state_dict()
    model = make_on_meta(ADDING["experts"][0])
    names = list(saved)
    # In two files, as large models are saved.
    for part in (names[: len(names) // 2], names[len(names) // 2 :]):
        load(model, {name: saved[name] for name in part}, how if part[0] == names[0] else "assign")
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("how", ["assign", "to_empty"])
def test_dense_weights_are_refused_where_they_have_no_place(how: str) -> None:
    method = Recursions(recursions=2, first=0, last=0)
    dense = make_model(NAME)
    with pytest.raises(
        ValueError, match=r"blocks\.1\.\S+ has no place .* blocks\.0, made on .* before mmod\.apply_, or"
    ):
        load(make_on_meta(method), dense.state_dict(), how)
    # As the error advises.
    model = make_on_meta(method)
    load(model, mmod.apply_(dense, method).state_dict(), how)
    torch.testing.assert_close(model.eval()(make_images(NAME, 2)), dense.eval()(make_images(NAME, 2)))


@pytest.mark.parametrize("name", ["linear", "threshold", "experts"])
@torch.no_grad()
def test_weights_without_values_are_refused_by_name(name: str) -> None:
    """Torch multiplies with weights on the meta device as if their values were what is in memory."""
    model = make_on_meta(ADDING[name][0])
    dense = make_model(NAME).state_dict()
    for module_name, module in model.named_modules():
        for key in list(module._parameters):
            weight = dense.get(f"{module_name}.{key}".removeprefix("."))
            if weight is not None:
                setattr(module, key, nn.Parameter(weight))
    with pytest.raises(ValueError, match=r"weights of this \w+, .* on the meta device and have no values: load"):
        model.eval()(make_images(NAME, 2))


def test_a_predictor_of_a_language_model_is_drawn_with_its_router() -> None:
    config = mmod.RoutingConfig(
        router=LINEAR,
        losses={"membership": 0.01},
        language={"tokens": "all", "predictor": True, "inference_threshold": 0.5},
    )
    dense = make_language("llama")
    with torch.device("meta"):
        model = make_language("llama")
    mmod.route_(model, config).load_state_dict(dense.state_dict(), strict=False, assign=True)
    added = [weight for name, weight in model.named_parameters() if "router" in name]
    assert len(added) > 2
    assert all(weight.isfinite().all() for weight in added)


def test_undoing_leaves_no_hook() -> None:
    model = make_model(NAME)
    before = len(model._load_state_dict_post_hooks)
    mmod.undo_(mmod.apply_(model, ADDING["linear"][0]))
    assert len(model._load_state_dict_post_hooks) == before
