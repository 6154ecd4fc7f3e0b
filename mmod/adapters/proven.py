"""How blocks of an unknown class are called, as a trial showed it.

Axes: B images, N tokens, K slots per image.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mmod.adapters.base import BlockStack, NamedArguments
from mmod.blocks import (
    BranchRunner,
    FlatBlock,
    GridSource,
    InterceptedBlock,
    Mixin,
    SegmentsBlock,
    Shell,
    SilencedHalves,
    SuffixBlock,
    TupleBlock,
    Unchanged,
    UntupledBlock,
    Zero,
    grid_of_map,
    host_class,
)

# Implementations of attention that take a mask or bias of keys.
MASKED = ("sdpa", "eager")


@dataclass(frozen=True)
class Proof:
    """How a stack of blocks is called, and what a trial showed of each of its blocks; saved with the model.

    Args:
        blocks: Name of the list of blocks in the model.
        projection: Name of the module that shows the grid of patches as a feature map; empty for none.
        prefix: Leading tokens that are no patches.
        suffix: Tokens at the end that are no patches.
        dim: Channels of a token.
        numbers: Numbers of the blocks that can be routed, where others attend within windows; empty for all.
        read: Numbers of the blocks whose output the model reads itself, beside the next block.
        mask: See `NamedArguments`; so are `rows`, `rope_prefix`, `layout`, `boundaries`, `places`, `fused`,
            `attention_calls`.
        in_tuple: The block returns a tuple that begins with the tokens.
        attention: Name of the attention branch; empty if no module is silent alone.
        attention_in_tuple: Number of values in the tuple that the attention branch returns; 0 for the update alone.
        mlp: Name of the MLP branch; empty for none.
        silent_attention: Modules that return zeros while the attention is silent.
        idle_attention: Modules whose output nothing reads then.
        silent_mlp: Modules that return zeros while the MLP is silent.
        idle_mlp: Modules whose output nothing reads then.
        halves: The block is its attention half followed by its MLP half.
        divides: In training, a branch runs on some of the images or tokens, or on none, as stochastic depth by parts of
            the batch does.
    """

    blocks: str
    projection: str
    prefix: int
    suffix: int
    dim: int
    numbers: tuple[int, ...] = ()
    read: tuple[int, ...] = ()
    mask: str = ""
    rows: tuple[str, ...] = ()
    rope_prefix: int = 0
    layout: str = "heads"
    boundaries: str = ""
    places: str = ""
    fused: bool = False
    attention_calls: int = 1
    in_tuple: bool = False
    attention: str = ""
    attention_in_tuple: int = 0
    mlp: str = ""
    silent_attention: tuple[str, ...] = ()
    idle_attention: tuple[str, ...] = ()
    silent_mlp: tuple[str, ...] = ()
    idle_mlp: tuple[str, ...] = ()
    halves: bool = False
    divides: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, from which `read_proof` makes the proof again."""
        values = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def read_proof(values: Any) -> Proof:
    """Return the proof of plain values from an untrusted file.

    Raises:
        ValueError: A field is missing, unknown, or of another type.
    """
    fields = typing.get_type_hints(Proof)
    if not isinstance(values, Mapping) or set(values) != set(fields):
        got = sorted(map(str, values)) if isinstance(values, Mapping) else repr(values)
        raise ValueError(f"the proof of a saved model must have the fields {', '.join(fields)}, got {got}")
    plain: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    for name, value in plain.items():
        wanted = tuple if isinstance(fields[name], types.GenericAlias) else fields[name]
        items = typing.get_args(fields[name])[:1]
        if type(value) is not wanted or (wanted is tuple and not all(type(item) in items for item in value)):
            raise ValueError(f"{name} in the proof of a saved model must be a {wanted.__name__}, got {value!r}")
    return Proof(**plain)


@dataclass(frozen=True)
class ProvenCall(NamedArguments):
    """How blocks of an unknown class are called.

    Args:
        required: The block's arguments without a default.
        suffix: Tokens at the end that are no patches, see `SuffixBlock`.
        attention_config: What names the implementation of attention, as configs of transformers do; None without.
    """

    required: tuple[str, ...] = ()
    suffix: int = 0
    attention_config: Any = None

    @property
    def narrows_always(self) -> bool:  # type: ignore[override]
        """Whether the block takes the places of kept tokens."""
        return bool(self.places)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments by name, without those that are None and not required; flags are passed on."""
        if len(args) > len(self.names):
            raise TypeError(f"a routed block got {len(args)} arguments after the tokens, it takes {self.names}")
        named = {**dict(zip(self.names, args)), **kwargs}
        if self.boundaries and self._implementation != MASKED[0]:
            raise ValueError(
                f"attention by {self._implementation!r} cannot tell routed images in one sequence apart: load the "
                "model with attn_implementation='sdpa'"
            )
        known = () if self.suffix else (*self.rows, self.mask, self.places)
        for name, value in named.items():
            # A number, such as the Trainer's count of samples, belongs to no token.
            if isinstance(value, Tensor) and value.ndim and name not in known:
                raise ValueError(
                    f"a routed block got the tensor {name!r}, which cannot be narrowed to the kept tokens; known are "
                    f"{', '.join(filter(None, known)) or 'none'}"
                )
        return {name: value for name, value in named.items() if value is not None or name in self.required}

    @property
    def _implementation(self) -> str:
        """Name of the implementation of attention."""
        name: str = getattr(self.attention_config, "_attn_implementation", MASKED[0])
        return name

    def can_pack(self, block: nn.Module, arguments: Mapping[str, Any]) -> bool:
        """Return whether the block can run on packed rows: its attention is fused, and nothing but rows is passed."""
        if self.attention_config is not None and self.attention_config._attn_implementation != "sdpa":
            return False
        if self.rope_prefix:
            # Prefix tokens of the second image on need rows that rotate nothing, and which rows do is unknown.
            return False
        of_tokens: dict[str, Any] = {}
        for name, value in arguments.items():
            if isinstance(value, (tuple, list)) or (isinstance(value, Tensor) and value.ndim):
                of_tokens[name] = value
        return super().can_pack(block, of_tokens)

    def with_mask(self, arguments: Mapping[str, Any], mask: Tensor | None) -> dict[str, Any]:
        """Return the arguments with a mask or bias of keys."""
        if mask is not None and self._implementation not in MASKED:
            raise ValueError(
                f"attention by {self._implementation!r} takes no bias of keys, which this routing needs: load the "
                "model with attn_implementation='sdpa'"
            )
        if mask is None and self.mask in self.required:
            return {**arguments, self.mask: None}
        return super().with_mask(arguments, mask)


def call_of(proof: Proof, block: nn.Module) -> ProvenCall:
    """Return how a proven block is called."""
    signature = list(inspect.signature(host_class(block).forward).parameters.values())[2:]
    named = [value for value in signature if value.kind is value.POSITIONAL_OR_KEYWORD]
    required = tuple(value.name for value in named if value.default is value.empty)
    configs = [getattr(module, "config", None) for module in block.modules()]
    silent_attention: dict[str, BranchRunner] = dict.fromkeys(proof.idle_attention, Unchanged())
    silent_mlp: dict[str, BranchRunner] = dict.fromkeys(proof.idle_mlp, Unchanged())
    others = proof.attention_in_tuple - 1 if proof.attention_in_tuple else None
    for name in proof.silent_attention:
        silent_attention[name] = Zero(proof.dim, others if name == proof.attention else None)
    for name in proof.silent_mlp:
        silent_mlp[name] = Zero(proof.dim)
    operators = {"attention": proof.attention, "mlp": proof.mlp}
    return ProvenCall(
        names=tuple(value.name for value in named),
        mask=proof.mask,
        rows=proof.rows,
        rope_prefix=proof.rope_prefix,
        layout=proof.layout,
        boundaries=proof.boundaries,
        places=proof.places,
        fused=proof.fused,
        attention_calls=proof.attention_calls,
        operators={operator: name for operator, name in operators.items() if name},
        tuples=("attention",) if proof.attention_in_tuple else (),
        halves=SilencedHalves(silent_attention, silent_mlp, required) if proof.halves else None,
        shell=Shell(_outer(proof), _inner(proof)),
        required=required,
        suffix=proof.suffix,
        attention_config=next((config for config in configs if hasattr(config, "_attn_implementation")), None),
    )


def _outer(proof: Proof) -> type[Mixin] | None:
    if proof.suffix:
        return SuffixBlock
    if proof.boundaries:
        return SegmentsBlock
    return TupleBlock if proof.in_tuple else None


def _inner(proof: Proof) -> type[Mixin]:
    if proof.layout in ("flat", "bare"):
        return FlatBlock
    return UntupledBlock if proof.in_tuple else InterceptedBlock


def stack_of(proof: Proof, model: nn.Module, library: str, host: str) -> BlockStack:
    """Return the proven blocks of a model.

    Args:
        library: Name of the model's library; empty for none.
        host: Package whose code runs the blocks, see `BlockStack`.
    """
    block_list: Any = model.get_submodule(proof.blocks)
    numbers = proof.numbers or range(len(block_list))
    grid = None
    if proof.projection:
        grid = GridSource(model.get_submodule(proof.projection), grid_of_map)
    return BlockStack(
        library=library,
        names=tuple(f"{proof.blocks}.{number}" for number in numbers),
        blocks=tuple(block_list[number] for number in numbers),
        prefix=proof.prefix + proof.suffix,
        dim=proof.dim,
        call_of=lambda block, config: call_of(proof, block),
        class_token=proof.prefix > 0,
        # Tokens at the end are brought to the front around each block, so blocks cannot pass on rows.
        host="" if proof.suffix else host,
        grid=grid,
        proof=proof,
    )
