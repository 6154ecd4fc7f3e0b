"""Routed models are differentiable twice and run under torch.func's transforms, as dense ones do."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import mmod
from mmod.lab import Experts, Recursions
from mmod.methods import Exit, Method
from tests.kit.zoo import make_images, make_model

NAME = "vit_tiny_patch16_224"
CONFIGS = {
    "linear": mmod.RoutingConfig(router=mmod.score("linear", init_std=0.3), capacity=0.5),
    "attention": mmod.RoutingConfig(capacity=0.5),
    "distilled": mmod.RoutingConfig(
        router=mmod.score("linear", init_std=0.3), capacity=0.5, losses={"importance": 0.1}
    ),
    "threshold": mmod.RoutingConfig(
        router=mmod.score("linear", init_std=0.3), select=mmod.Threshold(0.5), gate="sigmoid"
    ),
}


def routed(config: str) -> nn.Module:
    return mmod.route_(make_model(NAME, depth=3), CONFIGS[config]).train()


def loss_of(model: nn.Module) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    return lambda values, images: functional_call(model, values, (images,)).square().mean()


@pytest.fixture
def written_out() -> Iterator[None]:
    """Torch's fused attention cannot be differentiated twice; a user who asks for that turns it off."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


@pytest.mark.usefixtures("written_out")
@pytest.mark.parametrize("config", CONFIGS)
def test_a_gradient_penalty_is_the_one_of_finite_differences(config: str) -> None:
    model, images = routed(config).double(), make_images(NAME, 2).double()
    values = dict(model.named_parameters())

    def penalty(scale: Tensor) -> Tensor:
        images_of = (images * scale).requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(model)(values, images_of), images_of, create_graph=True)
        return gradient.square().sum()

    one = torch.ones((), dtype=torch.float64, requires_grad=True)
    (actual,) = torch.autograd.grad(penalty(one), one)
    # Scores are fp32 whatever the model is, which finite differences feel.
    step = 1e-5
    expected = (penalty(one.detach() + step) - penalty(one.detach() - step)) / (2 * step)
    torch.testing.assert_close(actual, expected.detach(), rtol=1e-3, atol=1e-9)


@pytest.mark.usefixtures("written_out")
@pytest.mark.parametrize("config", CONFIGS)
def test_second_derivatives_in_fp32_are_those_in_fp64(config: str) -> None:
    results = []
    for dtype in (torch.float32, torch.float64):
        model, images = routed(config).to(dtype), make_images(NAME, 2).to(dtype)
        parameters = list(model.blocks.parameters())
        loss = model(images).square().mean()
        first = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        norm = sum(g.square().sum() for g in first if g is not None)
        results.append([g.double() for g in torch.autograd.grad(norm, parameters, allow_unused=True) if g is not None])
    for single, double in zip(*results, strict=True):
        torch.testing.assert_close(single, double, rtol=1e-2, atol=1e-4 * float(double.abs().max()))


@pytest.mark.parametrize("config", CONFIGS)
def test_gradients_of_samples_are_those_of_a_loop(config: str) -> None:
    model, images = routed(config), make_images(NAME, 3)
    values = {name: p.detach() for name, p in model.named_parameters()}
    loss = loss_of(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some operations have no fast rule under vmap
        gradients = vmap(grad(lambda v, image: loss(v, image[None])), (None, 0))(values, images)
        outputs = vmap(lambda image: functional_call(model, values, (image[None],)))(images)
    for place, image in enumerate(images):
        torch.testing.assert_close(outputs[place], model(image[None]), rtol=1e-4, atol=1e-5)
        alone = torch.autograd.grad(
            loss(dict(model.named_parameters()), image[None]), model.parameters(), allow_unused=True
        )
        for name, gradient in zip(values, alone, strict=True):
            if gradient is not None:
                torch.testing.assert_close(gradients[name][place], gradient, rtol=1e-3, atol=1e-6)


# Numbers of rows follow from values, which nothing reads inside vmap: there every token has a slot.
COUNTED: dict[str, Method] = {
    "threshold": mmod.RoutingConfig(router=mmod.score("linear", init_std=0.3), select=mmod.Threshold(0.5)),
    "importance": mmod.RoutingConfig(select=mmod.Threshold(1.0)),
    "context": mmod.RoutingConfig(router="norm", select=mmod.Threshold(1.0), context="all"),
    "mlp": mmod.RoutingConfig(router="norm", select=mmod.Threshold(1.0), operator="mlp"),
    "images": mmod.preset("mindskip", router={"name": "linear", "per": "sequence", "init_std": 5.0}),
    "depths": Recursions(recursions=3, first=0, last=0, choice="tokens"),
}
UNCOUNTED: dict[str, tuple[Method, str]] = {
    "exit": (Exit(0.2, (0,)), "early exits"),
    "experts": (Experts(experts=2, choice="tokens", capacity=None), "experts without slots"),
}


@pytest.mark.parametrize("name", COUNTED)
@torch.no_grad()
def test_an_ensemble_and_single_images_are_those_of_a_loop(name: str) -> None:
    models = [mmod.apply_(make_model(NAME, seed, depth=3), COUNTED[name]).eval() for seed in range(2)]
    images = make_images(NAME, 3)
    values, buffers = stack_module_state(models)
    ensemble = vmap(lambda v, b: functional_call(models[0], (v, b), (images,)))(values, buffers)
    torch.testing.assert_close(ensemble, torch.stack([model(images) for model in models]), rtol=1e-4, atol=1e-5)
    alone = vmap(lambda image: models[0](image[None])[0])(images)
    torch.testing.assert_close(alone, models[0](images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", UNCOUNTED)
@torch.no_grad()
def test_counts_that_vmap_cannot_read_are_refused_by_name(name: str) -> None:
    method, what = UNCOUNTED[name]
    model = mmod.apply_(make_model(NAME, depth=3), method).eval()
    with pytest.raises(ValueError, match=rf"{what} cannot .* run under torch\.func\.vmap: .* in a loop"):
        vmap(lambda image: model(image[None])[0])(make_images(NAME, 3))
