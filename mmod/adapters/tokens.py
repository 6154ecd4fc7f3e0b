"""Blocks of models that no adapter knows: the list is found by structure, and each block is tried."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from mmod.adapters.base import BlockStack, Proof
from mmod.adapters.probe import Example, read_inputs
from mmod.adapters.proven import stack_of
from mmod.adapters.trial import drop_rate, prove, settings_of
from mmod.blocks import host_class
from mmod.plain import from_plain
from mmod.random_state import kept_random_state
from mmod.values import brief, check_value

# Attributes that store, on a list of blocks, how they are called, and on a model, what its user just said of it.
_PROOF = "mod_proof"
_TOKENS = "mod_tokens"


class _Proven(NamedTuple):
    """A proof, and what it holds for: what was said of the model, and what its blocks were."""

    said: tuple[object, ...]
    blocks: tuple[object, ...]
    proof: Proof


# By list of dense blocks, the last proof: many functions ask for the blocks of a model.
_PROVEN: WeakKeyDictionary[nn.Module, _Proven] = WeakKeyDictionary()


@dataclass(frozen=True)
class Tokens:
    """Where the blocks of a model are and which tokens it always keeps, for `mmod.route_` on a model of your own.

    It is needed where the structure of the model does not show this.

    Args:
        blocks: Name of the list of blocks, such as "encoder.layers"; empty for the list with the most weights.
        prefix: Number of leading tokens that are always kept; None for those that no image changes.
        example: What the model's forward takes: a tensor, a tuple, or a mapping of arguments by name. Images
            come first, and only their shape counts; None tries common shapes.

    Example:
        >>> import torch, mmod
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.patches = torch.nn.Conv2d(3, 16, 8, 8)
        ...         layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        ...         self.layers = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).layers
        ...
        ...     def forward(self, x):
        ...         x = self.patches(x).flatten(2).transpose(1, 2)
        ...         for layer in self.layers:
        ...             x = layer(x)
        ...         return x
        >>> model = mmod.route_(Model().eval(), "a-mod", tokens=Tokens(example=torch.zeros(1, 3, 64, 64)))
        >>> list(mmod.routed_blocks(model))
        ['layers.1', 'layers.3']
    """

    blocks: str = ""
    prefix: int | None = None
    example: Example | None = None


@contextmanager
def declared(model: nn.Module, tokens: Tokens | None) -> Iterator[None]:
    """Context in which `find_blocks` knows what a user says of a model; None says nothing."""
    if tokens is not None and not isinstance(tokens, Tokens):
        raise TypeError(f"tokens must be a mmod.Tokens, got {brief(tokens)}")
    if tokens is None:
        yield
        return
    packages = {base.__module__.partition(".")[0] for base in type(model).__mro__}
    libraries = packages & {"open_clip", "transformers"}
    if libraries:
        raise ValueError(
            f"tokens= is for models that no adapter knows: this {type(model).__name__} is one of "
            f"{', '.join(libraries)}, whose blocks are found without it; leave it out"
        )
    vars(model)[_TOKENS] = tokens
    try:
        yield
    finally:
        del vars(model)[_TOKENS]


def said_of(model: nn.Module) -> str:
    """Return the argument `tokens=...`, as Python, that declares the example of a model; empty where it has none."""
    said = vars(model).get(_TOKENS)
    return "" if said is None else f"tokens=mmod.Tokens(example=torch.zeros{tuple(said.example.shape)})"


def is_declared(model: nn.Module) -> bool:
    """Return whether the user says where the blocks of a model are, or said it of one that methods changed."""
    return _TOKENS in vars(model) or any(_PROOF in vars(module) for module in model.modules())


def find_blocks(model: nn.Module, host: str = "") -> BlockStack:
    """Return the blocks of a model as their structure shows, after a trial of each; `host` is as in `BlockStack`.

    Raises:
        ValueError: No list of blocks is found, or a block lacks a property that routing needs.
    """
    known = [name for name, module in model.named_modules() if _PROOF in vars(module)]
    if known:
        return stack_of(vars(model.get_submodule(known[0]))[_PROOF], model, host)
    tokens: Tokens = vars(model).get(_TOKENS, Tokens())
    if tokens.blocks:
        names = [tokens.blocks]
    else:
        # Attention and MLP have a matrix each; a list of single layers is a stack only where there is no other.
        names = _lists(model, 2) or _lists(model, 1)
    title = host_class(model).__name__
    if not names:
        raise ValueError(
            f"cannot route {title}: it has no list of blocks, a ModuleList or Sequential of modules with weights whose "
            "first argument is the tokens (B, N, D)"
        )
    return stack_of(_prove(model, names[0], tokens, title), model, host)


def _prove(model: nn.Module, name: str, tokens: Tokens, title: str) -> Proof:
    block_list = dict(model.named_modules()).get(name)
    if not isinstance(block_list, (nn.ModuleList, nn.Sequential)) or not len(block_list):
        raise ValueError(f"cannot route {title}: {name!r} is no ModuleList or Sequential of blocks")
    # Two tensors cannot be compared as one value.
    shapes = [str(getattr(leaf, "shape", leaf)) for leaf in tree_leaves(tokens.example)]
    # Weights outside the blocks, such as one more class token, change what the blocks get.
    outside = [(key, tuple(weight.shape)) for key, weight in model.named_parameters() if not key.startswith(f"{name}.")]
    said = (name, tokens.prefix, *shapes, *outside)
    blocks = _settings_of_all(block_list)
    known = _PROVEN.get(block_list)
    if known is not None and known[:2] == (said, blocks):
        return known.proof
    with _on_cpu(), kept_random_state():
        inputs = read_inputs(model, name, tokens.example)
        if tokens.prefix is not None:
            most = inputs.seen.prefix + inputs.patches - 1
            check_value(f"prefix, of the {most + 1} tokens that {name} gets,", tokens.prefix, int, f"[0, {most}]")
            inputs = inputs.with_seen(prefix=tokens.prefix)
        proof = prove(inputs, block_list._modules, title)
    _PROVEN[block_list] = _Proven(said, blocks, proof)
    return proof


def _on_cpu() -> AbstractContextManager[object]:
    """Return a context for trials: libraries build models on the meta device, where nothing could be compared."""
    cpu = torch.device("cpu")
    # A device context costs more than a trial's sums.
    if torch.get_default_device() == cpu:
        return nullcontext()
    return cpu


def _settings_of_all(block_list: nn.Module) -> tuple[object, ...]:
    # `children()` would leave out a block that stands twice.
    blocks = block_list._modules.values()
    return tuple((settings_of(block), drop_rate(block)) for block in blocks if block is not None)


def share_proofs(model: nn.Module, copied: nn.Module) -> None:
    """Let a fresh copy of a model, which may lie on another device, have its proofs: blocks are not tried again."""
    for blocks, twins in zip(model.modules(), copied.modules()):
        known = _PROVEN.get(blocks)
        # What an attribute holds may be copied with the module, and then it differs.
        if known is not None and known.blocks == _settings_of_all(blocks):
            _PROVEN[twins] = known._replace(blocks=_settings_of_all(twins))


def _lists(model: nn.Module, least: int) -> list[str]:
    """Return the lists of blocks, those with the most weights first, without lists inside blocks.

    Args:
        least: Matrices that each block has at least.
    """
    found: dict[str, int] = {}
    for name, module in model.named_modules():
        if not name or not isinstance(module, (nn.ModuleList, nn.Sequential)) or not len(module):
            continue
        if any(name.startswith(f"{outer}.") for outer in found):
            continue
        matrices = [sum(weight.ndim > 1 for weight in block.parameters()) for block in module]
        if min(matrices) >= least:
            found[name] = sum(weight.numel() for weight in module.parameters())
    return sorted(found, key=found.__getitem__, reverse=True)


def remember(model: nn.Module, stack: BlockStack) -> None:
    """Store how the blocks of a stack are called on their list, while methods change them."""
    if stack.proof is not None:
        vars(model.get_submodule(stack.block_list))[_PROOF] = stack.proof


def forget(model: nn.Module) -> None:
    """Forget how the blocks of a model are called, when no method changes it any more."""
    for module in model.modules():
        vars(module).pop(_PROOF, None)


def proofs_of(model: nn.Module) -> dict[str, dict[str, object]]:
    """Return how the blocks of a changed model are called, as values that JSON takes, by the name of their list."""
    known = {name: vars(module)[_PROOF] for name, module in model.named_modules() if _PROOF in vars(module)}
    return {name: dataclasses.asdict(proof) for name, proof in known.items()}


def restore_proofs(model: nn.Module, proofs: object) -> None:
    """Store how blocks are called on a model that is built from a saved folder, without a trial.

    The blocks of a model without such a list are tried anew, as those of a base model from a classifier's folder.

    Raises:
        ValueError: The values are no proofs.
        TypeError: The only mistake is a value of another type.
    """
    if not isinstance(proofs, Mapping):
        raise ValueError(f"the proofs of a saved model must be a mapping by list of blocks, got {proofs!r}")
    lists = dict(model.named_modules())
    for name, values in proofs.items():
        proof = from_plain(Proof, values, f"proofs.{name}")
        if isinstance(lists.get(name), (nn.ModuleList, nn.Sequential)):
            setattr(lists[name], _PROOF, proof)
