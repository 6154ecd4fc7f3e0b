"""The residual branches of a block, found by silencing its modules one by one.

A branch is silent if its module returns zeros and the block then adds nothing for it: no norm, scale or residual sum is
guessed. Axes: B images, N tokens, D channels.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmod.blocks import Arguments, ModuleRunner, SilencedHalves, parameters_of_block, return_input, return_zeros
from mmod.ops.intercept import AttentionCall, AttentionIntercept

TOLERANCE = 1e-4
# From a module's arguments to what it returns instead of its output.
_Replacement = Callable[..., object]


@dataclass(frozen=True, kw_only=True)
class Branches:
    """The residual branches of a block, by the names of its modules.

    Args:
        attention: Name of the attention branch; empty if no module is silent alone.
        attention_in_tuple: Number of values in the tuple that the attention branch returns; 0 for the update alone.
        mlp: Name of the MLP branch; empty for none.
        silent_attention: Modules that return zeros while the attention is silent.
        idle_attention: Modules whose output nothing reads then.
        silent_mlp: Modules that return zeros while the MLP is silent.
        idle_mlp: Modules whose output nothing reads then.
        halves: The block is its attention half followed by its MLP half.
        fed: Arguments that the MLP half reads.
        attends_twice: The block computes its attention itself, so that a silent attention runs in vain.
    """

    attention: str = ""
    attention_in_tuple: int = 0
    mlp: str = ""
    silent_attention: tuple[str, ...] = ()
    idle_attention: tuple[str, ...] = ()
    silent_mlp: tuple[str, ...] = ()
    idle_mlp: tuple[str, ...] = ()
    halves: bool = False
    fed: tuple[str, ...] = ()
    attends_twice: bool = False

    def options(self, block: nn.Module, dim: int) -> dict[str, Any]:
        """Return what is known of a block's branches as keyword arguments of `NamedArguments`.

        Args:
            block: A block of the kind that was tried.
            dim: Channels of a token.
        """
        silence = partial(return_zeros, dim, None)
        silent_attention: dict[str, ModuleRunner] = dict.fromkeys(self.idle_attention, return_input)
        silent_attention |= dict.fromkeys(self.silent_attention, silence)
        silent_mlp: dict[str, ModuleRunner] = dict.fromkeys(self.idle_mlp, return_input)
        silent_mlp |= dict.fromkeys(self.silent_mlp, silence)
        tuples: tuple[str, ...] = ()
        if self.attention_in_tuple:
            tuples = ("attention",)
        if self.attention_in_tuple and self.attention in self.silent_attention:
            # Of the modules of a branch, the attention alone returns a tuple.
            silent_attention[self.attention] = partial(return_zeros, dim, self.attention_in_tuple - 1)
        operators = {"attention": self.attention, "mlp": self.mlp}
        halves = None
        if self.halves:
            required = _required_arguments(block)
            halves = SilencedHalves(silent_attention, silent_mlp, required, self.fed, self.attends_twice)
        return {
            "operators": {operator: name for operator, name in operators.items() if name},
            "tuples": tuples,
            "halves": halves,
        }


class _Output(NamedTuple):
    """What a module of a block got and returned.

    Args:
        got: Shape of the first tensor that it got.
        others: Number of further values in the tuple that it returned; None if it returned no tuple.
        channels: Channels of its output.
    """

    got: tuple[int, ...]
    others: int | None
    channels: int


def find_branches(
    block: nn.Module, x_BND: Tensor, arguments: Arguments, rows: Sequence[str] = (), cross: Sequence[int] = ()
) -> Branches:
    """Return a block's branches; empty names where nothing silences them.

    Args:
        block: A dense copy with random weights.
        x_BND: Tokens of a trial, or those of one sequence (T, D).
        arguments: The block's further arguments for them.
        rows: Those with a row for each token.
        cross: Numbers of the calls of attention over other keys. Their branch runs with the attention.
    """
    search = _Search(block, x_BND, arguments, cross)
    without_halves = None
    for attention in search.attention_candidates():
        for mlp in search.mlp_candidates(attention):
            for cross_modules in search.cross_candidates(attention, mlp):
                silenced = search.attempt(search.zeros(attention, mlp, *cross_modules))
                if silenced is None or not is_close(silenced, search.x_BND):
                    continue
                # Silent together, they add nothing. That the block is one behind the other is another question.
                branches = search.describe(attention, mlp, cross_modules, rows)
                if branches.halves:
                    return branches
                without_halves = without_halves or branches
    return without_halves or Branches()


def shapes_inside(block: nn.Module, x: Tensor, arguments: Arguments, names: Sequence[str]) -> list[object]:
    """Return the shapes of a block's attention, and of what some of its modules get: None for those that do not run."""
    search = _Search(block, x, arguments, ())
    shapes: list[object] = list(search.attended)
    for name in names:
        shape = None
        if name in search.outputs:
            shape = search.outputs[name].got
        shapes.append(shape)
    return shapes


class _Search:
    """Runs a block with some of its modules replaced."""

    def __init__(self, block: nn.Module, x_BND: Tensor, arguments: Arguments, cross: Sequence[int]) -> None:
        self.block = block
        self.cross = cross
        generator = torch.Generator().manual_seed(3)
        self.x_BND = torch.randn(x_BND.shape, generator=generator, dtype=torch.float32)
        self.arguments = arguments
        self.outputs: dict[str, _Output] = {}
        self.attended: list[tuple[int, ...]] = []
        self.around_attention: list[str] = []
        self.around_cross: list[str] = []
        self._record()

    @torch.no_grad()
    def run(
        self,
        replaced: Mapping[str, _Replacement],
        x_BND: Tensor | None = None,
        without: Collection[str] = (),
    ) -> Tensor:
        """Return the block's tokens with some modules replaced.

        Args:
            without: Arguments that are left out, or None where they have no default, see `SilencedHalves.feed`.
        """
        arguments = {name: value for name, value in self.arguments.items() if name not in without}
        missing = dict.fromkeys(name for name in _required_arguments(self.block) if name not in arguments)
        if x_BND is None:
            x_BND = self.x_BND
        torch.default_generator.manual_seed(0)
        # Inside a mode, `nn.TransformerEncoderLayer` calls its modules instead of one kernel.
        with _replacing(self.block, replaced), watch_attention([]):
            output = self.block(x_BND, **arguments, **missing)
        if isinstance(output, tuple):
            output = output[0]
        return output

    def attempt(
        self, replaced: Mapping[str, _Replacement], x_BND: Tensor | None = None, without: Collection[str] = ()
    ) -> Tensor | None:
        """Return what `run` does; None if the block does not run so."""
        try:
            return self.run(replaced, x_BND, without)
        # A host may raise anything on an output that its module would not return.
        except Exception:
            return None

    def _record(self) -> None:
        """Run the block once, and note what its modules return and which of them contain its attention."""
        stack: list[str] = []
        seen: list[Attended] = []
        handles = []
        for name, module in self.block.named_modules():
            if name:
                handles.append(module.register_forward_pre_hook(lambda *_, name=name: stack.append(name)))
                handles.append(module.register_forward_hook(self._keep(name, stack), with_kwargs=True))
        with watch_attention(seen, stack), torch.no_grad():
            self.block(self.x_BND, **self.arguments)
        for handle in handles:
            handle.remove()
        self.attended = [attended.shape for attended in seen]
        for number, attended in enumerate(seen):
            around = self.around_attention
            if number in self.cross:
                around = self.around_cross
            around += attended.modules

    def _keep(self, name: str, stack: list[str]) -> Callable[..., None]:
        def keep(module: nn.Module, args: tuple[object, ...], kwargs: Arguments, output: object) -> None:
            stack.pop()
            tokens = output
            others = None
            if isinstance(output, tuple):
                tokens = output[0]
                others = len(output) - 1
            first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
            if isinstance(tokens, Tensor) and tokens.ndim == self.x_BND.ndim and first is not None:
                self.outputs[name] = _Output(tuple(first.shape), others, tokens.shape[-1])

        return keep

    def _updates(self) -> list[str]:
        """Return the modules whose output has the shape of tokens, the outermost first, in the order of their calls."""
        channels = self.x_BND.shape[-1]
        names = [name for name, output in self.outputs.items() if output.channels == channels]
        return sorted(names, key=lambda name: name.count("."))

    def attention_candidates(self) -> Iterator[str]:
        """Return modules that may be the attention branch: those around the attention, then all others."""
        updates = self._updates()
        yield from [name for name in updates if name in self.around_attention]
        # A norm behind the attention, or its projection where the block itself attends.
        yield from [name for name in updates if name not in self.around_attention]

    def mlp_candidates(self, attention: str) -> Iterator[str]:
        """Return modules that may be the MLP branch: those with the most weights first."""
        around = {*self.around_attention, *self.around_cross}
        updates = [name for name in self._updates() if name not in around]
        others = [name for name in updates if not _overlap(name, attention) and self._weights(name)]
        # A branch that takes the tokens can run on some of them.
        yield from sorted(others, key=lambda name: (self._takes_tokens(name), self._weights(name)), reverse=True)

    def cross_candidates(self, attention: str, mlp: str) -> Iterator[tuple[str, ...]]:
        """Return what may be a branch of attention over other keys: nothing, or a module around it."""
        yield ()
        for name in self._updates():
            if name in self.around_cross and not _overlap(name, attention) and not _overlap(name, mlp):
                yield (name,)

    def _takes_tokens(self, name: str) -> bool:
        """Return whether a module gets the tokens of the block, and could get some of them."""
        return self.outputs[name].got == tuple(self.x_BND.shape)

    def _weights(self, name: str) -> int:
        return sum(weight.numel() for weight in self.block.get_submodule(name).parameters())

    def zeros(self, *names: str) -> dict[str, _Replacement]:
        """Return what silences modules."""
        return {name: _zeros(self.outputs[name]) for name in names}

    def describe(self, attention: str, mlp: str, cross_modules: tuple[str, ...], rows: Sequence[str]) -> Branches:
        """Return branches that are silent together."""
        silent_attention = self._silent((attention, *cross_modules), (mlp,))
        silent_mlp = self._silent((mlp,), (attention, *cross_modules))
        attended = self.run(self._replacements(silent_mlp))
        feed = self._replacements(silent_attention)
        seen: list[Attended] = []
        with watch_attention(seen):
            expected = self.run(feed, attended)
        left_out: list[str] = []
        for name in self.arguments:
            actual = self.attempt(feed, attended, (*left_out, name))
            if actual is not None and torch.equal(actual, expected):
                left_out.append(name)
        fed = tuple(name for name in self.arguments if name not in left_out)
        output = self.outputs[attention]
        is_attention = attention in self.around_attention and attention not in self.around_cross
        # Rows that are read elsewhere too cannot be those of kept tokens while the block runs on all.
        if not is_attention or not self._takes_tokens(attention) or {*rows} & {*fed}:
            attention = ""
        if not self._takes_tokens(mlp):
            mlp = ""
        in_tuple = 0
        if output.others is not None:
            in_tuple = output.others + 1
        return Branches(
            attention=attention,
            attention_in_tuple=in_tuple,
            mlp=mlp,
            silent_attention=_named(silent_attention, zero=True),
            idle_attention=_named(silent_attention, zero=False),
            silent_mlp=_named(silent_mlp, zero=True),
            idle_mlp=_named(silent_mlp, zero=False),
            halves=is_close(expected, self.run({})),
            fed=fed,
            attends_twice=bool(seen),
        )

    def _silent(self, silent: tuple[str, ...], others: tuple[str, ...]) -> dict[str, bool]:
        """Return the modules that need not run while some are silent: True for those that return zeros."""
        expected = self.run(self.zeros(*silent))
        modules = dict.fromkeys(silent, True)
        for name in [child for child, _ in self.block.named_children() if child in self.outputs]:
            if any(_overlap(name, other) for other in (*silent, *others)):
                continue
            idle = {**modules, name: False}
            actual = self.attempt(self._replacements(idle))
            if actual is not None and torch.equal(actual, expected):
                modules = idle
        return modules

    def _replacements(self, modules: Mapping[str, bool]) -> dict[str, _Replacement]:
        replacements: dict[str, _Replacement] = {}
        for name, zero in modules.items():
            replacements[name] = _zeros(self.outputs[name]) if zero else _poisoned
        return replacements


class Attended(NamedTuple):
    """One attention of a block.

    Args:
        shape: Shape of the map: that of the queries without their channels, and the number of keys.
        fused: It is a call of `scaled_dot_product_attention`, and no map of the host's own softmax.
        modules: Names of the modules that ran around it.
    """

    shape: tuple[int, ...]
    fused: bool
    modules: tuple[str, ...]


def watch_attention(seen: list[Attended], running: Sequence[str] = ()) -> AttentionIntercept:
    """Return a context manager that notes how a block attends.

    Args:
        seen: Where to note each attention, in order.
        running: Names of the modules that run.
    """

    def attend(call: AttentionCall) -> Tensor:
        shape = (*call.query.shape[:-1], call.key.shape[-2])
        seen.append(Attended(shape, True, tuple(running)))
        return call.run()

    def observe(score: Tensor, attention: Tensor) -> None:
        seen.append(Attended(tuple(attention.shape), False, tuple(running)))

    return AttentionIntercept(attend, after_softmax=observe)


def _named(modules: Mapping[str, bool], zero: bool) -> tuple[str, ...]:
    return tuple(name for name, value in modules.items() if value is zero)


def _zeros(output: _Output) -> _Replacement:
    """Return what a branch runs instead of a silent module."""
    return lambda *args, **kwargs: return_zeros(output.channels, output.others, _poisoned, args, kwargs)


def _poisoned(*args: object, **kwargs: object) -> Tensor:
    """Return values that no module would, so that a block that reads them gives another result."""
    tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    return 2 * next(tensors) + 1


@contextmanager
def _replacing(block: nn.Module, replaced: Mapping[str, _Replacement]) -> Iterator[None]:
    modules = {name: block.get_submodule(name) for name in replaced}
    for name, module in modules.items():
        vars(module)["forward"] = replaced[name]
    try:
        yield
    finally:
        for module in modules.values():
            del vars(module)["forward"]


def _overlap(first: str, second: str) -> bool:
    """Return whether one module contains the other."""
    return f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}.")


def is_close(actual: Tensor, expected: Tensor) -> bool:
    """Return whether two outputs of a trial are the same, up to rounding."""
    if actual.shape != expected.shape:
        return False
    largest = float(expected.abs().max())
    return torch.allclose(actual, expected, atol=TOLERANCE * largest, rtol=0.0)


def _required_arguments(block: nn.Module) -> tuple[str, ...]:
    """Return a block's arguments after the tokens that have no default."""
    parameters = parameters_of_block(block)
    return tuple(name for name, default in parameters.items() if default is inspect.Parameter.empty)
