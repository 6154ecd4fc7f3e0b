"""What a model runs behind its blocks, as a head that turns the tokens of any block into logits.

The model's own forward runs on a copy of the modules around the blocks, in which those before the head return the
tokens: no norm, pooling or classifier is guessed.

Axes: B images, N tokens, D channels, C classes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mmod.adapters.base import BlockStack, NamedArguments
from mmod.adapters.find import find_library
from mmod.adapters.probe import first_that_runs, light_copy, split_inputs
from mmod.blocks import Arguments, host_class, parameters_of
from mmod.routing.added import Added

# The modules behind the blocks of timm's models, of which `forward_head` makes logits.
_TIMM_HEAD = ("norm", "fc_norm", "head", "head_dist")


@dataclass(frozen=True)
class Head:
    """What a model runs around its blocks.

    Args:
        model: The model.
        blocks: Name of the list of blocks.
        in_tuple: A block returns a tuple that begins with the tokens.
        ahead: Names of modules that run before the blocks alone.
        behind: Names of modules that run after them.
    """

    model: nn.Module
    blocks: str
    in_tuple: bool
    ahead: tuple[str, ...]
    behind: tuple[str, ...]

    def run(self, behind: Mapping[str, nn.Module], x_BND: Tensor, args: tuple[object, ...], kwargs: Arguments) -> Any:
        """Return what the model returns if its last block returns these tokens.

        Args:
            behind: Modules that run instead of the model's own, by name.
            args: The arguments of the model for the same images.
        """
        model = self.model
        path = self.blocks.split(".")
        stand_ins: dict[str, nn.Module] = {name: _HandsOn(model.get_submodule(name), x_BND) for name in self.ahead}
        stand_ins |= behind
        block_list: Any = model.get_submodule(self.blocks)
        handing_on = _HandsOn(block_list[0], _as_block(x_BND, self.in_tuple))
        inner: Any = nn.ModuleList([handing_on])
        if isinstance(block_list, nn.Sequential):
            inner = nn.Sequential(handing_on)
        # From the module that holds the blocks outwards: each module around is copied with the copy inside it.
        for depth in reversed(range(len(path))):
            module = model.get_submodule(".".join(path[:depth]))
            replaced: dict[str, nn.Module] = {path[depth]: inner}
            for name, stand_in in stand_ins.items():
                if name.split(".")[:-1] == path[:depth]:
                    replaced[name.rpartition(".")[2]] = stand_in
            inner = _with_modules(module, replaced)
            if depth == len(path) - 1 and hasattr(inner, "forward_head"):
                vars(inner)["forward"] = functools.partial(_head_of_timm, inner, x_BND)
        return inner.forward(*args, **kwargs)


class HeadCopy(Added):
    """A model's head with weights of its own: copies of the modules that run behind the blocks.

    Args:
        head: The model's own head.
    """

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.mod_head = head
        self.copy_modules(head.behind)

    def copy_modules(self, names: Iterable[str]) -> None:
        """Copy modules of the model."""
        for name in names:
            self.add_module(_inside(name), copy.deepcopy(self.mod_head.model.get_submodule(name)))

    def mod_fill(self, device: torch.device) -> None:
        """Copy the model's modules again."""
        self.copy_modules(self.mod_head.behind)
        self.mod_emptied = False

    def forward(self, x_BND: Tensor, args: tuple[object, ...], kwargs: Arguments) -> object:
        """Return what the model returns for the tokens after a block.

        Args:
            args: The model's arguments for the same images.
        """
        behind = {name: self.get_submodule(_inside(name)) for name in self.mod_head.behind}
        output = self.mod_head.run(behind, x_BND, args, kwargs)
        has_others = isinstance(output, tuple) and len(output) > 1
        if has_others or not isinstance(logits_of(output), Tensor):
            raise ValueError("early exit supports heads with one output: call model.set_distilled_training(False)")
        return output


def _inside(name: str) -> str:
    """Return the name of a model's module inside a copy of its head."""
    return name.replace(".", "_")


class _HandsOn(nn.Module):
    """Stands for a module ahead of a head, and returns the tokens; all attributes are the module's.

    It is no copy of the module: layers of transformers may checkpoint whatever they call.
    """

    def __init__(self, module: nn.Module, output: object) -> None:
        super().__init__()
        vars(self)["module"] = module
        vars(self)["output"] = output

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module, which its model may read."""
        return getattr(vars(self)["module"], name)

    def forward(self, *args: object, **kwargs: object) -> object:
        """Return the tokens."""
        return vars(self)["output"]


def _head_of_timm(model: Any, x_BND: Tensor, *args: object, **kwargs: object) -> object:
    """Return what a timm model's head makes of tokens; it runs instead of a forward that adds tokens of its own."""
    return model.forward_head(model.norm(x_BND))


def _with_modules(module: nn.Module, replaced: Mapping[str, nn.Module]) -> object:
    """Return a module of the host's class with a module's attributes and weights, and without its hooks."""
    host = host_class(module)
    clone = host.__new__(host)
    for name, value in vars(module).items():
        if name == "forward":
            continue
        if isinstance(value, dict) and "_hooks" in name:
            value = type(value)()
        vars(clone)[name] = value
    vars(clone)["_modules"] = {**module._modules, **replaced}
    return clone


def _as_block(x_BND: Tensor, in_tuple: bool) -> object:
    """Return tokens as the model's blocks return them."""
    if in_tuple:
        return x_BND, None
    return x_BND


def logits_of(output: object) -> Any:
    """Return the logits in a model's output."""
    if isinstance(output, Mapping):
        return output.get("logits")
    if isinstance(output, tuple) and output:
        return output[0]
    return output


def find_head(model: nn.Module, stack: BlockStack) -> Head:
    """Return what a classifier runs around its blocks.

    Raises:
        ValueError: The model returns no logits (B, C), or its head cannot run on tokens alone.
    """
    title = host_class(model).__name__
    name = stack.block_list
    owner = model.get_submodule(stack.owner)
    # timm's own count; classifiers around a timm model have another.
    classes = getattr(owner, "num_classes", 0)
    is_of_timm = hasattr(owner, "forward_head")
    reads_text = find_library(model) == "open_clip" or "input_ids" in parameters_of(model)
    if reads_text or (is_of_timm and not classes):
        raise ValueError(f"this {title} is no classifier of images: early exit needs class probabilities")
    if is_of_timm:
        present = [module for module in _TIMM_HEAD if isinstance(getattr(owner, module, None), nn.Module)]
        return Head(model, name, False, (), tuple(f"{stack.owner}.{module}".strip(".") for module in present))
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        trial, reasons = first_that_runs(model, lambda inputs: _Trial(model, stack, name, inputs))
        if trial is None:
            raise ValueError(f"no input reached the head of this {title} ({reasons})")
        return replace(trial.head(title), model=model)


class _Trial:
    """A call of a copy of a model without its blocks."""

    def __init__(self, model: nn.Module, stack: BlockStack, name: str, inputs: Arguments) -> None:
        torch.manual_seed(0)
        call = stack.call_of(stack.blocks[0], None)
        self.in_tuple = isinstance(call, NamedArguments) and call.in_tuple
        self.name = name
        self.inputs = inputs
        block_list = model.get_submodule(name)
        self.x: Tensor | None = None
        self.model = light_copy(model, block_list)
        for block in self.model.get_submodule(name):
            vars(block)["forward"] = self._pass_on
        self.ahead: list[str] = []
        self.behind: list[str] = []
        path = name.split(".")
        for depth, child in enumerate(path):
            prefix = ".".join(path[:depth])
            for other, module in self.model.get_submodule(prefix).named_children():
                if other != child:
                    module.register_forward_pre_hook(self._note(f"{prefix}.{other}".strip(".")))
        args, named = split_inputs(inputs)
        self.output = self.model(*args, **named)

    def _pass_on(self, x: Tensor, *args: object, **kwargs: object) -> object:
        """Run instead of each block: return its tokens, and keep them."""
        self.x = x
        return _as_block(x, self.in_tuple)

    def _note(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[object, ...]) -> None:
            if self.x is None:
                self.ahead.append(name)
            else:
                self.behind.append(name)

        return note

    def head(self, title: str) -> Head:
        """Return the head, after a trial on the tokens of one image."""
        logits = logits_of(self.output)
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            got = "no logits"
            if isinstance(logits, Tensor):
                got = f"logits {tuple(logits.shape)}"
            raise ValueError(f"this {title} is no classifier: early exit needs class probabilities, it returns {got}")
        behind = tuple(dict.fromkeys(self.behind))
        ahead = tuple(name for name in dict.fromkeys(self.ahead) if name not in behind)
        # The model's own code may compute with what the embedding returns, which then has to run.
        heads = [Head(self.model, self.name, self.in_tuple, names, behind) for names in (ahead, ())]
        head = next((head for head in heads if self._is_equal(head, logits)), None)
        if head is None:
            raise ValueError(
                f"the head of this {title} reads more than the tokens after its blocks, but an exit has only these"
            )
        return head

    def _is_equal(self, head: Head, logits: Tensor) -> bool:
        """Return whether a head returns the logits of an image from its tokens, whatever its pixels are."""
        assert self.x is not None
        # The other image stays the same: a mask of both would be equal.
        one = {name: value[1:] for name, value in self.inputs.items()}
        pixels = next(iter(one))
        one[pixels] = torch.randn_like(one[pixels])
        args, named = split_inputs(one)
        try:
            actual = logits_of(head.run({}, self.x[1:], args, named))
        # A model may raise anything for tokens instead of what it embeds.
        except Exception:
            return False
        return torch.allclose(actual, logits[1:], rtol=1e-4, atol=1e-5)
