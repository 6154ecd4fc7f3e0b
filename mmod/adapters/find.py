"""The library of a model, and its parts that can be routed."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import Tensor, nn

from mmod.adapters.base import BlockStack, Part, Wrapper
from mmod.adapters.tokens import Tokens, declared, find_blocks, is_declared
from mmod.values import check_module

# Top-level packages of the host libraries. The adapter is the module of that name in this folder. It defines
# `find_parts(model) -> dict[str, Part]`, and `SAVING`, which describes models in saved folders, or is None if the host
# library saves them.
ADAPTERS = ("open_clip", "timm", "transformers")


def find_parts(model: nn.Module) -> dict[str, Part]:
    """Return the parts of a model that can be routed separately, by name: "image", "text", "language", ..."""
    check_module(model)
    library = find_library(model)
    inner = adapted_model(model)
    # A wrapper or a layer of torch is no model, but a Sequential may hold one.
    is_of_torch = _packages(inner)[0] == "torch" and not isinstance(inner, nn.Sequential)
    if library is None and is_of_torch:
        raise ValueError(
            f"cannot route a {type(model).__module__}.{type(model).__qualname__}: supported are models of "
            f"{', '.join(ADAPTERS)}, and classes of your own with a list of blocks. Pass the model inside a "
            "wrapper (model.module) or a compiled one (model._orig_mod); route it before it is wrapped"
        )
    if library is None:
        parts: dict[str, Part] = {"image": functools.partial(find_blocks, inner)}
    else:
        with _naming_compiled(model):
            parts = load_adapter(library).find_parts(inner)
    path = next(name for name, module in model.named_modules() if module is inner)
    return {name: functools.partial(_find_below, model, path, part) for name, part in parts.items()}


def _find_below(model: nn.Module, path: str, part: Part) -> BlockStack:
    """Return the blocks of a part of a wrapped model, with their names in the wrapper."""
    with _naming_compiled(model):
        stack = part().below(path)
    # Some hosts look at a block when it is changed.
    return dataclasses.replace(stack, call_of=_naming_compiled(model)(stack.call_of))


@contextmanager
def _naming_compiled(model: nn.Module) -> Iterator[None]:
    """Say of a model whose blocks are not found which of its blocks is compiled, and so hides its class."""
    try:
        yield
    except ValueError as error:
        for name, module in model.named_modules():
            # The item of a list, as blocks are: a compiled head or tower is no fault.
            within = model.get_submodule(name.rpartition(".")[0])
            is_item = isinstance(within, (nn.ModuleList, nn.Sequential))
            if is_item and type(module).__module__.startswith("torch._dynamo"):
                raise ValueError(
                    f"cannot change this {type(model).__name__}: its {name} is compiled. Route or change a model "
                    "first, then compile it"
                ) from error
        raise


def find_library(model: nn.Module) -> str | None:
    """Return the name of the supported library of a model's class, or None."""
    return next((package for package in _packages(adapted_model(model)) if package in ADAPTERS), None)


P = ParamSpec("P")
R = TypeVar("R")
_OfBatches = Callable[Concatenate[nn.Module, Iterable[object], P], R]


def by_first_batch(function: _OfBatches[P, R]) -> _OfBatches[P, R]:
    """Find the blocks of a user's own model, by the images of the first batch where it may run on no other size.

    Args:
        function: It takes a model, batches of what that reads, and more.
    """

    @functools.wraps(function)
    def of_batches(model: nn.Module, batches: Iterable[object], *args: P.args, **options: P.kwargs) -> R:
        tokens = None
        # Of an iterator, the first batch would be missing afterwards. Other things are refused by the function.
        can_begin = isinstance(batches, Iterable) and not isinstance(batches, (str, Tensor, Mapping, Iterator))
        is_own = isinstance(model, nn.Module) and find_library(model) is None
        if can_begin and is_own and not is_declared(model):
            if isinstance(batches, Sequence):
                image = next(iter(batches), None)
            else:
                batches = begun = _Begun(batches)
                image = begun.first
            # Images, or images and labels.
            if isinstance(image, (tuple, list)) and image:
                image = image[0]
            if isinstance(image, Tensor) and image.ndim == 4 and not has_blocks(model):
                tokens = Tokens(example=image[:1].float().cpu())
        with declared(model, tokens):
            return function(model, batches, *args, **options)

    return of_batches


class _Begun:
    """Batches of which the first is known: the first time they are read, that reading goes on.

    Reading them once more would draw another order, or miss a batch of what goes on where it stopped.

    Attributes:
        first: The first batch; None without any.
    """

    def __init__(self, batches: Iterable[object]) -> None:
        self._batches = batches
        begun = iter(batches)
        batch = list(itertools.islice(begun, 1))
        self.first = next(iter(batch), None)
        self._begun: Iterator[object] | None = itertools.chain(batch, begun)

    def __iter__(self) -> Iterator[object]:
        begun, self._begun = self._begun, None
        if begun is None:
            return iter(self._batches)
        return begun


def adapted_model(model: nn.Module) -> nn.Module:
    """Return the model inside a `Wrapper` or a wrapper of peft, or else the model itself."""
    while True:
        inner: Any = model
        if isinstance(model, Wrapper):
            model = inner.inner
        elif "peft" not in _packages(model):
            return model
        elif hasattr(inner, "get_base_model"):
            model = inner.get_base_model()
        else:
            # The module that holds a model's adapters, inside the one that users have.
            model = inner.model


def used_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's parameters by name, without the originals that peft keeps of modules whose copies it trains."""
    named = module.named_parameters()
    return {name: parameter for name, parameter in named if "original_module" not in name.split(".")}


def _packages(model: nn.Module) -> list[str]:
    return [base.__module__.partition(".")[0] for base in type(model).__mro__]


def load_adapter(library: str) -> ModuleType:
    """Return the adapter of a library."""
    return importlib.import_module(f"mmod.adapters.{library}")


def find_stack(model: nn.Module) -> BlockStack:
    """Return the blocks of a model with a single part."""
    return find_part(model)[1]


def find_part(model: nn.Module, part: str | None = None) -> tuple[str, BlockStack]:
    """Return the name and the blocks of one part of a model.

    Args:
        part: The name; None takes the only part.
    """
    stacks = find_stacks(model)
    if part is None and len(stacks) == 1:
        (part,) = stacks
    if part is None or part not in stacks:
        raise ValueError(f"name a part of this {type(model).__name__}, one of {', '.join(stacks)}; got {part!r}")
    return part, stacks[part]


def find_stacks(model: nn.Module) -> dict[str, BlockStack]:
    """Return the blocks of all parts of a model that can be routed, by name."""
    stacks: dict[str, BlockStack] = {}
    refusals: list[ValueError] = []
    for name, part in find_parts(model).items():
        try:
            stacks[name] = part()
        except ValueError as refusal:
            refusals.append(refusal)
    if not stacks:
        raise refusals[0]
    return stacks


def has_blocks(model: nn.Module) -> bool:
    """Return whether a model has blocks that can be routed, unlike one of convolutions."""
    try:
        return bool(find_stacks(model))
    except ValueError:
        return False
