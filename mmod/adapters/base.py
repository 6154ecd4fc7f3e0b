"""The interface of an adapter to a host library, and its implementation for blocks with named arguments.

Axes: B images, N tokens, K slots per image, H heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from mmod.adapters.halves import Branches
from mmod.adapters.masks import (
    add_causal,
    hide_empty_slots,
    narrow_batch,
    narrow_pairs,
    narrow_queries,
    pack_batch,
    show_all_keys,
    weigh_groups,
    with_prefix,
)
from mmod.blocks import (
    KEY_BIAS,
    NO_SHELL,
    WINDOWS,
    Arguments,
    BlockCall,
    BlockOwner,
    CallForm,
    Deciding,
    GridSource,
    Halves,
    ModelHook,
    OwnerState,
    ReadBlocks,
    RowSource,
    SequenceImages,
    Shell,
    Span,
    StackCalls,
    attach,
    check_whole_batch,
    compare_grid,
    convert,
    is_converted,
    map_rows,
    name_arguments,
)
from mmod.config import RoutingConfig
from mmod.ops import Packing, attend_to_captured, keys_and_values
from mmod.ops.context import ProjectionName, known_projections
from mmod.ops.views import is_visible
from mmod.routing import Routing, TokenMasks
from mmod.threads import PerThread

# Implementations of attention that take a mask or bias of keys.
MASKED = ("sdpa", "eager")


class Wrapper(nn.Module):
    """A module that calls a model of a host in another way; methods are applied to the model inside.

    Args:
        inner: The model.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner: Any = inner


@dataclass(frozen=True, kw_only=True)
class Proof(CallForm, Branches):
    """How a stack of blocks is called, and what a trial showed of each of its blocks; saved with the model.

    Args:
        blocks: Name of the list of blocks in the model.
        projection: Name of the module that shows the grid of patches as a feature map; empty for none.
        prefix: Leading tokens that are no patches.
        dim: Channels of a token.
        patches: Patches of an image in the trial; 0 in models that were saved without.
        windows: Blocks attend within windows of images, and the model's grids say where these begin.
        read: Numbers of the blocks whose output the model reads itself, beside the next block.
        divides: In training, a branch runs on some of the images or tokens, or on none, as stochastic depth by parts of
            the batch does.
    """

    blocks: str
    projection: str
    prefix: int
    dim: int
    # Of the example, and nothing that a model is.
    patches: int = field(default=0, compare=False)
    windows: bool = False
    read: tuple[int, ...] = ()
    # The rate of stochastic depth may begin at zero.
    divides: bool = field(default=False, compare=False)

    @property
    def form(self) -> dict[str, Any]:
        """The fields of `CallForm`."""
        return {part.name: getattr(self, part.name) for part in fields(CallForm)}


@dataclass(frozen=True)
class BlockStack:
    """A stack of residual blocks in a supported model: the model's only one, or a part such as a tower.

    Args:
        block_list: Name of the list of blocks in the model.
        prefix: Number of tokens that are always kept: the leading ones, unless a block's `masks` says which.
        call_of: Returns a block's `BlockCall` from its config, or from None for a dense block; raises a ValueError that
            says why the block cannot be routed.
        calls: The calls of the module that holds the blocks, by thread.
        captions: Finds caption passes; a hook notes their padding, which only the model knows. None for other parts.
        text_tower: The module around the one that holds the blocks. In its calls, passes of captions begin at the
            embedding. None for other parts.
        sequence: Length of the token ids that the part reads, or None for images.
        reads_images: Image tokens stand among the text of a language part.
        language: The part is a language model, which supports `RoutingConfig.language`.
        class_token: The first token is a class token.
        hooks: Returns forward pre-hooks, as pairs of module and hook, for a config.
        host: Package whose code runs the blocks in sequence and reads nothing between them: blocks of a span then
            pass on kept rows only; empty if none does.
        read_blocks: See `StackCall`; None if the host's code reads nothing between blocks.
        grid: Where the host shows rows and columns of an image's patches; None for text, or if it does not.
        rows: Where a tower gets each patch of its images as a row of pixels; None if it does not.
        windows: Tells blocks the images if some attend within windows, else None.
        proof: What a trial showed of the blocks; None where the adapter knows them.
        keys: Names of the blocks in the list; none where they are their numbers.
    """

    block_list: str
    blocks: tuple[nn.Module, ...]
    prefix: int
    dim: int
    call_of: Callable[[nn.Module, RoutingConfig | None], BlockCall]
    calls: PerThread[StackCalls] = field(default_factory=lambda: PerThread(StackCalls))
    captions: Span | None = None
    text_tower: nn.Module | None = None
    sequence: int | None = None
    reads_images: bool = False
    language: bool = False
    class_token: bool = False
    hooks: Callable[[RoutingConfig], Sequence[tuple[nn.Module, ModelHook]]] = lambda routing: ()
    host: str = ""
    read_blocks: ReadBlocks | None = None
    grid: GridSource | None = None
    rows: RowSource | None = None
    windows: SequenceImages | None = None
    proof: Proof | None = None
    keys: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the blocks in the model, in order."""
        return tuple(f"{self.block_list}.{key}" for key in self.keys or range(len(self.blocks)))

    @property
    def owner(self) -> str:
        """Name of the module that holds this list and runs the blocks; empty for the model itself."""
        return self.block_list.rpartition(".")[0]

    @property
    def converted(self) -> dict[str, nn.Module]:
        """The converted blocks, by name."""
        return {name: block for name, block in zip(self.names, self.blocks) if is_converted(block)}

    def below(self, path: str) -> BlockStack:
        """Return the stack as part of an outer model whose submodule `path` is this model; empty for this model."""
        return replace(self, block_list=f"{path}.{self.block_list}".lstrip("."))

    def owner_in(self, model: nn.Module) -> nn.Module:
        """Return the module that begins and ends the calls of the blocks."""
        if self.text_tower is None:
            return model.get_submodule(self.owner)
        return self.text_tower

    def own_(self, owner: nn.Module, mixin: type[BlockOwner] = BlockOwner) -> None:
        """Let a module begin and end the calls of the blocks, after these were converted."""
        name = self.block_list.rpartition(".")[2]
        convert(owner, mixin, OwnerState(self.calls, name, tuple(self.blocks), self.host, self.read_blocks))

    def watch_losses(self, model: nn.Module) -> None:
        """Let a call that fails drop the losses of its pass; called after the blocks were converted."""
        owner = self.owner_in(model)
        losing = tuple(module for module in owner.modules() if isinstance(module, Deciding) and module.mod_has_loss)
        if losing and not isinstance(owner, BlockOwner):
            self.own_(owner)
        if isinstance(owner, BlockOwner):
            owner.mod_owner.losing = losing

    def refuse_divided(self, owner: nn.Module) -> None:
        """Refuse training in which a branch of a converted block runs on a part of the batch."""
        blocks = self.converted
        if blocks and self.proof is not None and self.proof.divides:
            attach(owner, ModelHook(partial(check_whole_batch, blocks)))

    def watch_grid(self, blocks: Mapping[str, nn.Module]) -> None:
        """Tell once if blocks whose prefix is always kept get further tokens that are no patches.

        Args:
            blocks: The blocks that a method changed, by name.
        """
        if self.grid is not None and not (self.proof is not None and self.proof.boundaries):
            name, block = next(iter(blocks.items()))
            compare = partial(compare_grid, self.grid.read, block, name, self.prefix)
            attach(self.grid.module, ModelHook(after=compare, once=True))


# Returns the blocks of a part, or raises a ValueError that says why the part cannot be routed.
Part = Callable[[], BlockStack]


def has_tensors(value: object) -> bool:
    """Return whether an argument is a tensor, or a list or mapping with one.

    A number, such as the Trainer's count of samples, is none, nor is what mmod itself passes to blocks.
    """
    leaves = [value]
    if type(value) in (tuple, list, dict):
        leaves = tree_leaves(value)
    return any(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves)


def by_name(names: Collection[str], args: tuple[object, ...], kwargs: Arguments) -> Arguments:
    """Return a block's arguments after the tokens by name."""
    if len(args) > len(names):
        raise TypeError(f"a routed block got {len(args)} arguments after the tokens, it takes {', '.join(names)}")
    if not args:
        return kwargs
    return name_arguments(names, args, kwargs)


def _behind_images(rows: Tensor) -> Tensor:
    """Return rows (B or 1, N, H or 1, E) from (N, E), (H, N, E) or (B, H or 1, N, E)."""
    return rows[(None,) * (4 - rows.ndim)].transpose(1, 2)


@dataclass(frozen=True, kw_only=True)
class NamedArguments(CallForm, BlockCall):
    """A `BlockCall` for blocks that take tokens and named arguments; it narrows each argument by its role.

    The first two arguments, and those of `CallForm`, are the same for all hosts. No trial shows the others, which an
    adapter may know.

    Args:
        parameters: Defaults of the block's parameters after the tokens, see `parameters_of_block`.
        attention_config: What names the implementation of attention, as configs of transformers do; None without.
        projections: The linear layers before attention, of which keys and values are the last features; None where it
            is not known that attention reads nothing else.
        draws_paths: Stochastic depth draws one Bernoulli number for each sequence of a batch.
        packs_prefix: Rows are one tensor, sines before cosines, so that a row that rotates nothing is known.
        sequence: Knows the images of a sequence of which blocks see windows; None where none do.
        narrows_always: See `BlockCall`; so are the following.
    """

    parameters: Mapping[str, object]
    attention_config: object = None
    projections: tuple[ProjectionName, ...] | None = None
    draws_paths: bool = False
    packs_prefix: bool = False
    sequence: SequenceImages | None = None
    narrows_always: bool = False
    fused_norm: str = ""
    operators: Mapping[str, str] = field(default_factory=dict)
    tuples: tuple[str, ...] = ()
    halves: Halves | None = None
    shell: Shell = NO_SHELL

    @property
    def names(self) -> tuple[str, ...]:
        """The block's parameters after the tokens, in order."""
        return tuple(self.parameters)

    @property
    def contexts(self) -> tuple[str, ...]:
        """What kept tokens can attend to in this block."""
        if self.fused and self.projections is not None:
            return ("kept", "all")
        return ("kept",)

    @property
    def weighs_keys(self) -> bool:
        """Whether the block takes a mask or bias of pairs of tokens, or its attention can be intercepted."""
        return self.mask in self.parameters or bool(self.shell.inner)

    @property
    def needs_prefix(self) -> bool:
        """Whether prefix tokens must stay first, because rotary positions leave them out."""
        return self.rope_prefix > 0 and bool(self.rows)

    @property
    def _implementation(self) -> str:
        """Name of the implementation of attention."""
        return getattr(self.attention_config, "_attn_implementation", MASKED[0])

    def _refused(self, reason: str) -> ValueError:
        """Return the error of an implementation of attention that cannot do what a block needs."""
        return ValueError(
            f"attention by {self._implementation!r} {reason}: load the model with attn_implementation='sdpa'"
        )

    def bind(self, args: tuple[object, ...], kwargs: Arguments) -> dict[str, object]:
        """Return arguments by name, without those that have their defaults."""
        named = by_name(self.parameters, args, kwargs)
        arguments = {name: value for name, value in named.items() if value is not self.parameters.get(name)}
        if arguments:
            self._check(arguments)
        return arguments

    def _check(self, arguments: Arguments) -> None:
        """Raise a ValueError for arguments that cannot be narrowed to kept tokens or images."""
        if self.boundaries and self._implementation != MASKED[0]:
            raise self._refused("cannot tell routed images in one sequence apart")
        mask = arguments.get(self.mask)
        if not isinstance(mask, Tensor | None):
            # As that of flex attention.
            raise ValueError(
                f"attention by {self._implementation!r} got a {type(mask).__name__} as {self.mask!r}, which cannot be "
                "narrowed to kept tokens: pass a tensor or None, in transformers by attn_implementation='sdpa'"
            )
        known = (*self.images, *self.shared)
        if not self.suffix:
            known = (*self.rows, *known, self.mask, self.index_argument)
        for name, value in arguments.items():
            if name not in known and has_tensors(value):
                listed = ", ".join(filter(None, known)) or "none"
                raise ValueError(
                    f"a block got {name!r}, of which no trial showed how it goes with the tokens or images that are "
                    f"kept; known are {listed}. Leave it out, or apply the method with "
                    "tokens=mmod.Tokens(example=...) that has it"
                )

    def masks(self, arguments: Arguments, x_BND: Tensor) -> TokenMasks:
        """Return padding from the attention mask: tokens that no query may attend to."""
        return TokenMasks(self.valid(arguments, x_BND))

    def valid(self, arguments: Arguments, x_BND: Tensor) -> Tensor | None:
        """Return which tokens some query may attend to (B, N); None for all."""
        mask = arguments.get(self.mask)
        # A bias of pairs that is no mask hides nothing.
        if mask is None or mask.ndim != 4 or self.mask == "shared_rel_pos_bias":
            return None
        return is_visible(mask).any(dim=1).any(dim=1).expand(x_BND.shape[0], -1)

    def can_pack(self, block: nn.Module, arguments: Arguments) -> bool:
        """Return whether the block can run on packed rows: not with masks, nor with per-batch stochastic depth."""
        if not self.fused or self.index_argument or self._implementation != MASKED[0] or WINDOWS in arguments:
            return False
        if self.rope_prefix and not self.packs_prefix:
            # Prefix tokens of the second image on need rows that rotate nothing, and which rows do is unknown.
            return False
        for name, value in arguments.items():
            if name in self.rows:
                continue
            # Values of an image belong to no row of the sequence.
            if isinstance(value, (tuple, list, Mapping)):
                return False
            if isinstance(value, Tensor) and value.ndim > 0:
                return False
        drops = block.training and any(getattr(module, "drop_prob", 0) for module in block.modules())
        return self.draws_paths or not drops

    def pack(self, arguments: Arguments, x_BND: Tensor, routing: Routing, packing: Packing) -> dict[str, object]:
        """Return the arguments for the packed rows of many images."""
        packed = dict(arguments)
        for name in self.rows:
            if name in packed:
                packed[name] = map_rows(self._pack_rows, packed[name], name, packing.row_T, x_BND.shape[1])
        return packed

    def _pack_rows(self, rows: Tensor, name: str, row_T: Tensor, tokens: int) -> Tensor:
        if self._begins_with_images(name, rows):
            return pack_batch(rows, row_T, tokens)
        rows = _behind_images(rows)
        if self.rope_prefix:
            # The host leaves out the prefix of the sequence, which is that of the first image.
            rows = with_prefix(rows, self.rope_prefix)
            row_T = row_T[self.rope_prefix :]
        packed = self._as_host(pack_batch(rows, row_T, tokens))
        if self.layout == "flat":
            return packed[0]
        return packed

    def _begins_with_images(self, name: str, rows: Tensor) -> bool:
        """Return whether the axis of rows is the second, behind that of images or of one for all."""
        return self.layout == "batch" and (rows.ndim > 2 or name in self.images)

    def _as_host(self, rows: Tensor) -> Tensor:
        """Return rows (B, K, H or 1, E) as the block takes those that differ by image."""
        if self.layout == "heads":
            return rows.transpose(1, 2)
        return rows.squeeze(2)

    def select_tokens(self, arguments: Arguments, x_BND: Tensor, routing: Routing | None) -> dict[str, Any]:
        """Return the arguments for the kept tokens, or for all tokens of the kept images."""
        assert routing is not None
        if routing.kept.image_S is not None:
            return self.narrow_images(arguments, routing.kept.image_S, x_BND.shape[0])
        narrowed = self.narrow_rows(arguments, routing.kept.index_BK)
        mask = narrowed.pop(self.mask, None)
        if mask is not None:
            mask = narrow_pairs(mask, routing.kept.index_BK, x_BND.shape[1])
        mask = hide_empty_slots(mask, routing.kept.valid_BK, x_BND.dtype)
        # Hosts take a mask or causal attention, not both.
        if routing.kept.valid_BK is not None and narrowed.pop("is_causal", False):
            mask = add_causal(mask, x_BND.dtype)
        # Last, because a bias turns a mask of truth values into numbers.
        return self.with_mask(narrowed, weigh_groups(mask, routing.joined.bias, x_BND.dtype))

    def narrow_images(self, arguments: Arguments, image_S: Tensor, images: int) -> dict[str, object]:
        """Return the arguments for some of the images; what is the same for all is unchanged."""

        def select(name: str, leaf: object) -> object:
            if not isinstance(leaf, Tensor) or not leaf.ndim or leaf.shape[0] != images:
                return leaf
            # Masks and rotary embeddings of each image have four axes, or three where they hide keys alone.
            of_keys = name == self.mask and leaf.ndim == 3 and leaf.shape[1] == 1
            if of_keys or name in self.images or leaf.ndim == 4:
                return leaf.index_select(0, image_S)
            return leaf

        return {name: tree_map(partial(select, name), value) for name, value in arguments.items()}

    def narrow_rows(self, arguments: Arguments, index_BK: Tensor) -> dict[str, Any]:
        """Return the arguments with the rows of some tokens, and their index if the block takes them."""
        narrowed = dict(arguments)
        for name in self.rows:
            if name in narrowed:
                narrowed[name] = map_rows(self._narrow_rows, narrowed[name], name, index_BK)
        if self.index_argument:
            before_BN = narrowed.get(self.index_argument)
            if before_BN is not None:
                # The tokens are some of those that the index says.
                index_BK = before_BN.gather(1, index_BK)
            narrowed[self.index_argument] = index_BK
        return narrowed

    def _narrow_rows(self, rows: Tensor, name: str, index_BK: Tensor) -> Tensor:
        if self._begins_with_images(name, rows):
            return narrow_batch(rows, index_BK, self.rope_prefix)
        return self._as_host(narrow_batch(_behind_images(rows), index_BK, self.rope_prefix))

    def with_mask(self, arguments: Arguments, mask: Tensor | None) -> dict[str, object]:
        """Return the arguments with a mask or bias of keys."""
        if mask is None:
            required = self.parameters.get(self.mask) is inspect.Parameter.empty
            return {**arguments, self.mask: None} if required else dict(arguments)
        if self._implementation not in MASKED:
            raise self._refused("takes no bias of keys, which this routing needs")
        return {**arguments, self.mask or KEY_BIAS: mask}

    def attend_to_all(
        self,
        block: nn.Module,
        forward: Callable[..., object],
        arguments: Arguments,
        x_BND: Tensor,
        z_BKD: Tensor,
        routing: Routing,
        keys: list[tuple[Tensor, Tensor]] | None = None,
    ) -> object:
        """Run the host's forward on kept tokens that attend to all tokens.

        Args:
            keys: Keys and values of an earlier run; an empty list gets those of this one. None is for a single run.
        """
        # Hosts may pass arguments that are None to attention.
        arguments = {name: value for name, value in arguments.items() if value is not None}
        projections = known_projections(block, self.projections or ())
        if keys is None:
            keys = []
        if not keys:
            keys += keys_and_values(lambda: forward(x_BND, **arguments), projections, self.attention_calls)
        with attend_to_captured(projections, keys):
            return forward(z_BKD, **self.narrow_queries(arguments, x_BND.shape[1], routing))

    def narrow_queries(self, arguments: Arguments, tokens: int, routing: Routing) -> dict[str, Any]:
        """Return the arguments for kept queries and all keys."""
        index_BK = routing.kept.index_BK
        narrowed = self.narrow_rows(arguments, index_BK)
        mask = narrowed.pop(self.mask, None)
        if narrowed.pop("is_causal", False):
            # As in the hosts, causal attention takes no further mask.
            position_N = torch.arange(tokens, device=index_BK.device)
            mask = (position_N <= index_BK.unsqueeze(-1)).unsqueeze(1)
        elif mask is not None:
            mask = narrow_queries(mask, index_BK, tokens)
            if routing.kept.valid_BK is not None:
                # An empty slot may point at padding, whose row may be masked completely: that gives NaN gradients.
                mask = show_all_keys(mask, routing.kept.valid_BK)
        if mask is not None:
            narrowed[self.mask] = mask
        return narrowed
