"""Hooks of methods around a forward: every argument reaches it as it was passed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mmod
from mmod.blocks import Arguments, ModelHook, attach
from mmod.methods import Exit, Resize
from tests.kit.vision_zoo import make_vision
from tests.kit.vlm_zoo import make_language, words


def of_images(method: Any) -> tuple[Any, Tensor]:
    return mmod.apply_(make_vision("vit"), method), torch.randn(2, 3, 64, 64)


def of_tokens() -> tuple[Any, Tensor]:
    model: Any = mmod.route_(make_language("llama"), mmod.RoutingConfig(router="linear", capacity=0.5))
    return model.model, words()["input_ids"]


# A changed model with its input, the name of the input, and other arguments.
TWICE: list[tuple[Callable[[], tuple[Any, Tensor]], str, dict[str, Any]]] = [
    (partial(of_images, Resize(32)), "pixel_values", {}),
    (partial(of_images, Exit(0.9, (0,))), "pixel_values", {}),
    (partial(of_images, Exit(0.9, (0,))), "pixel_values", {"labels": torch.tensor([0, 1])}),
    (of_tokens, "input_ids", {}),
]


@pytest.mark.parametrize(("make", "name", "others"), TWICE)
def test_an_argument_given_twice_is_refused_as_python_refuses_it(
    make: Callable[[], tuple[Any, Tensor]], name: str, others: dict[str, Any]
) -> None:
    model, value = make()
    with pytest.raises(TypeError, match=rf"got multiple values for argument '{name}'"):
        model(value, **{name: value}, **others)
    assert torch.equal(model.eval()(value)[0], model(**{name: value})[0])


class Lists(nn.Module):
    """A module that returns its arguments, of which it takes any number in order."""

    def forward(self, *values: int, size: int = 1, **others: int) -> Any:
        return values, size, others


@pytest.mark.parametrize("change", [None, {"size": 7}], ids=["reads", "changes"])
def test_arguments_of_any_number_keep_their_places(change: Arguments | None) -> None:
    module: Any = Lists()
    seen: list[Arguments] = []

    def before(module: nn.Module, arguments: Arguments) -> Arguments | None:
        seen.append(arguments)
        return None if change is None else {**arguments, **change}

    attach(module, ModelHook(before))
    size = 4 if change is None else 7
    assert module(1, 2, 3, size=4, values=5) == ((1, 2, 3), size, {"values": 5})
    assert seen == [{"*values": 1, "size": 4, "values": 5}]
