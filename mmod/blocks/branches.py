"""What a running block tells modules inside it: how they run, as branches that are gated, silenced or narrowed.

Axes: B images or samples, N tokens, K slots per image or sample, D channels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from mmod.blocks.call import BlockCall, Halves
from mmod.blocks.conversion import Mixin, convert, is_converted
from mmod.threads import PerThread

ModuleRunner = Callable[[Callable[..., object], tuple[object, ...], Mapping[str, object]], object]
"""Runs a module of the running block otherwise than its host does, from the host's forward and a call's arguments."""


class Inner:
    """What a running block tells its modules, in one thread.

    Attributes:
        runners: What runs in the place of modules, by their names in the block; the others run as in the host.
        expects_batch: A module that runs otherwise, or what reads the attention, expects all images in a batch.
        normed: Rows and their first norm, if the kernel that gathered them computed it.
    """

    def __init__(self) -> None:
        self.runners: Mapping[str, ModuleRunner] = {}
        self.expects_batch = False
        self.normed: tuple[Tensor, Tensor] | None = None


@contextmanager
def running(inner: PerThread[Inner], runners: Mapping[str, ModuleRunner], expects_batch: bool = True) -> Iterator[None]:
    """Context in which some modules of a block run in another way, and the others as around it."""
    current = inner.value
    # A hook inside the block may call the model again.
    outer = current.runners
    in_batch = current.expects_batch
    current.runners = {**outer, **runners}
    current.expects_batch = in_batch or expects_batch
    try:
        yield
    finally:
        current.runners = outer
        current.expects_batch = in_batch


GATED = ""
"""The name that all branches of a block share whose outputs one gate weighs."""


def weigh_branch(
    gate_BK: Tensor | None, forward: Callable[..., Any], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> object:
    """Run a branch whose output is weighed (B, K) before the residual sum, the first one of a tuple; None for 1."""
    output = forward(*args, **kwargs)
    if gate_BK is None:
        return output
    # Attention of a decoder layer also returns its map.
    in_tuple = isinstance(output, tuple)
    update = output[0] if in_tuple else output
    update = update * gate_BK.unsqueeze(-1).to(update.dtype)
    if in_tuple:
        return (update, *output[1:])
    return update


class BranchState(NamedTuple):
    """Plain state of a branch, or of another module of a block that can be silenced; `name` is its name there."""

    inner: PerThread[Inner]
    name: str


class Branch(Mixin):
    """Mixin of a module that runs as the running block wants; compilers cannot trace a hook for one call."""

    mod_state: BranchState

    def forward(self, *args: object, **kwargs: object) -> object:
        """Return the module's output."""
        state = self.mod_state
        runner = state.inner.value.runners.get(state.name)
        if runner is None:
            return super().forward(*args, **kwargs)
        return runner(super().forward, args, kwargs)


class ObservedBranch(Branch):
    """A branch that is only observed, and is observed from around the block where its forward is replaced."""

    mod_optional = True


def make_branch(block: nn.Module, name: str, inner: PerThread[Inner], mixin: type[Branch] = Branch) -> None:
    """Let a module of a block run as the block wants; one that does already stays as it is."""
    module = block.get_submodule(name)
    if not isinstance(module, Branch):
        convert(module, mixin, BranchState(inner, name))


def make_observed(block: nn.Module, call: BlockCall, inner: PerThread[Inner]) -> None:
    """Let the attention of a block be read alone; one that another method has changed is read from around the block."""
    name = call.operators.get("attention")
    if name is not None and not is_converted(block.get_submodule(name)):
        make_branch(block, name, inner, ObservedBranch)


def make_halves(block: nn.Module, call: BlockCall, inner: PerThread[Inner]) -> None:
    """Let the halves of a block run separately."""
    assert call.halves is not None
    for name in call.halves.modules:
        make_branch(block, name, inner)


class MethodWarning(UserWarning):
    """A method was applied that saves little in this model; not repeated where it is loaded."""


# The lists that note warnings in place of giving them, the innermost last.
_noting: PerThread[list[list[str]]] = PerThread(list)


@contextmanager
def noting_methods() -> Iterator[list[str]]:
    """Note each `MethodWarning` in place of giving it, for who says it once of many models."""
    noted: list[str] = []
    _noting.value.append(noted)
    try:
        yield noted
    finally:
        _noting.value.pop()


def warn_of_halves(halved: Mapping[str, BlockCall], depth: int, remedy: str = "") -> None:
    """Warn if most blocks of a model run their halves separately, and compute attention in both.

    Args:
        halved: The blocks that run their halves separately, by name.
        depth: Number of blocks of the model.
        remedy: What else to do, behind a comma.
    """
    twice = [name for name, call in halved.items() if call.halves is not None and call.halves.attends_twice]
    if 2 * len(twice) < depth:
        return
    message = (
        f"{twice[0]} and {len(twice) - 1} other blocks compute their attention in their own forward, so that it runs "
        "twice where a block decides between attention and MLP, which saves few FLOPs (see mmod.flops): give the "
        f"attention a module of its own{remedy}"
    )
    if _noting.value:
        _noting.value[-1].append(message)
    else:
        warnings.warn(message, MethodWarning, stacklevel=7)


def return_zeros(
    channels: int,
    others: int | None,
    forward: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
) -> object:
    """Return zeros instead of an update of tokens.

    Args:
        channels: Number of channels of the update.
        others: Number of further outputs in a tuple, all None; None if the module returns the update alone.
    """
    x = _first_tensor(args, kwargs)
    zeros = x.new_zeros((*x.shape[:-1], channels))
    if others is None:
        return zeros
    return (zeros, *[None] * others)


def return_input(forward: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> Tensor:
    """Return a module's input, where nothing reads the module's output."""
    return _first_tensor(args, kwargs)


def _first_tensor(args: tuple[object, ...], kwargs: Mapping[str, object]) -> Tensor:
    values = (*args, *kwargs.values())
    return next(value for value in values if isinstance(value, Tensor))


@dataclass(frozen=True)
class SilencedHalves(Halves):
    """The halves of a block whose host's forward runs with one residual branch silenced, so that nothing is copied.

    Args:
        attention: What runs in the place of modules, by name, to silence the attention.
        mlp: The same for the MLP.
        required: The block's arguments without a default, which a silenced attention does not read.
        fed: See `Halves`.
        attends_twice: The attention is computed in both halves, see `warn_of_halves`.
    """

    attention: Mapping[str, ModuleRunner]
    mlp: Mapping[str, ModuleRunner]
    required: tuple[str, ...] = ()
    fed: tuple[str, ...] = ()
    attends_twice: bool = False

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules that can be silenced."""
        return (*self.attention, *self.mlp)

    def attend(self, block: Any, x_BND: Tensor, arguments: Mapping[str, object]) -> Tensor:
        """Return tokens (B, N, D) after the block's attention."""
        with running(block.mod_state.inner, self.mlp, expects_batch=False):
            return block.mod_run_host(x_BND, **arguments)

    def feed(self, block: Any, x_BND: Tensor, arguments: Mapping[str, object]) -> Tensor:
        """Return tokens (B, N, D) after the block's MLP."""
        read = {name: arguments[name] for name in self.fed if name in arguments}
        with running(block.mod_state.inner, self.attention, expects_batch=False):
            return block.mod_run_host(x_BND, **{**dict.fromkeys(self.required), **read})
