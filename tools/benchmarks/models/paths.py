"""Execution paths that a routed model is timed against.

Free routing runs the same blocks on a fixed slice of the tokens: the speed that routing can reach at best. Controls
apply the same decisions image by image, or compute every token, or leave the routed blocks out.
Axes: B images, N tokens, K slots per image, D channels.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from mmod.adapters import find_stacks
from mmod.blocks import BlockCall, Execution, ImportanceBlock, Mixin, RoutedBlock, Rows, convert, make_dense
from mmod.blocks.execution import AllTokens
from mmod.blocks.rows import Host
from mmod.methods.route import routed_blocks
from mmod.ops import lerp_rows
from mmod.routing import Kept, Routing, kept_count
from mmod.values import one_of

CONTROLS = ("loop", "masked", "removed")


@dataclass(eq=False)
class FreeState:
    """The state of a freely routed block.

    Args:
        prefix: Tokens that it runs on at least.
        halves: Attention runs on all rows that the block gets, its MLP on the share.
        passes_rows: The next block is freely routed too, on no more rows, and gets the rows alone.
        left: Rows that this block and those before it left out; one list for all blocks of a model.
    """

    call: BlockCall
    capacity: Fraction
    prefix: int
    context: str
    halves: bool
    passes_rows: bool
    left: list[Tensor]


class FreeBlock(Mixin):
    """Mixin that runs a host block on the first K tokens: no score, no selection, no gate, no moving by index."""

    mod_state: FreeState

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the host block on the first K of tokens (B, N, D) and put the result in front of the others."""
        state = self.mod_state
        call = state.call
        left = state.left
        rows = x.shape[1]
        tokens = x.shape[1] + sum(others.shape[1] for others in left)
        count = kept_count(tokens, state.capacity, state.prefix)
        arguments = call.bind(args, kwargs)
        if state.context == "all":
            index_BK = torch.arange(count, device=x.device).expand(x.shape[0], -1)
            first = Routing(Kept(index_BK), x[..., 0])
            y = call.attend_to_all(self, super().forward, arguments, x, x[:, :count], first)
        elif state.halves:
            assert call.halves is not None
            x = call.halves.attend(self, x, first_tokens(arguments, tokens, rows))
            y = call.halves.feed(self, x[:, :count], first_tokens(arguments, tokens, count))
        else:
            y = super().forward(x[:, :count], **first_tokens(arguments, tokens, count))
        if count < rows:
            left.append(x[:, count:])
        if state.passes_rows:
            return y
        out = torch.cat([y, *reversed(left)], dim=1)
        left.clear()
        return out


def first_tokens(arguments: Mapping[str, Any], tokens: int, count: int) -> dict[str, Any]:
    """Cut a block's arguments after the tokens, by name, down to the first `count` of `tokens` tokens."""
    cut = dict(arguments)
    if "rope" in cut:
        # Rotary embeddings leave the prefix out, so the last N - K of them belong to the skipped tokens.
        rope = cut["rope"]
        cut["rope"] = rope[..., : rope.shape[-2] - (tokens - count), :]
    for name in ("attn_mask", "shared_rel_pos_bias"):
        if name in cut:
            cut[name] = cut[name][..., :count, :count]
    return cut


def free_routing(model: nn.Module) -> nn.Module:
    """Return a copy of a routed model, sharing its weights, whose routed blocks run on their first K tokens.

    It keeps as many tokens as the routed model and computes no importance, so the routed model's additional time is the
    overhead of routing. Consecutive routed blocks of falling capacity slice once. Its outputs are meaningless.

    Example:
        >>> import timm, mmod
        >>> free = free_routing(mmod.route_(timm.create_model("test_vit"), "a-mod"))
        >>> type(free.blocks[1]).__name__
        'FreeBlock'
    """
    for name, block in routed_blocks(model).items():
        if block.router.config.select != "topk":
            raise ValueError(f"{name} is routed by threshold: free routing needs a fixed number of tokens")
        if block.router.config.operator != "block":
            raise ValueError(f"{name} skips its {block.router.config.operator} alone: free routing skips whole blocks")
    free = sharing_copy(model)
    left = list[Tensor]()
    for module in list(free.modules()):
        if isinstance(module, ImportanceBlock):
            make_dense(module)
    for stack in find_stacks(free).values():
        for module, following in zip(stack.blocks, (*stack.blocks[1:], None)):
            if isinstance(module, RoutedBlock):
                _free(module, following, left)
    return free


def _free(block: RoutedBlock, following: nn.Module | None, left: list[Tensor]) -> None:
    """Convert a routed block to a freely routed one; the block that follows is not converted yet."""
    router = block.router
    call = block.mod_state.call
    context = str(router.config.context)
    passes_rows = (
        isinstance(following, RoutedBlock)
        and context == str(following.router.config.context) == "kept"
        and following.router.capacity <= router.capacity
    )
    state = FreeState(
        call, router.capacity, router.prefix, context, block.mod_state.execution.between_halves, passes_rows, left
    )
    make_dense(block)
    convert(block, FreeBlock, state)


def sharing_copy(model: nn.Module) -> nn.Module:
    """Return a deep copy of a model that shares its parameters and buffers."""
    # A deep copy takes from this mapping what it shall not copy.
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)


class OnAllTokens(Execution):
    """The block gets all tokens, and a control does its own with them."""

    def make_rows(self, block: Any, x: Tensor, arguments: Mapping[str, Any], routing: Routing) -> Rows:
        """Return all tokens."""
        return AllTokens(x, routing)


class Looped(OnAllTokens):
    """Image by image: one call of the host block for each."""

    def run(self, block: Any, host: Host, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Run the host block on the kept tokens of one image after the other."""
        routing = rows.routing
        gates = [None] * z.shape[0] if routing.gate_BK is None else routing.gate_BK
        out = []
        for tokens_ND, index_K, gate_K in zip(z, routing.kept.index_BK, gates):
            z_KD = tokens_ND[index_K]
            y_KD = host(z_KD[None], **arguments)[0]
            out.append(tokens_ND.index_copy(0, index_K, lerp_rows(z_KD, y_KD, gate_K)))
        return torch.stack(out)


class Masked(OnAllTokens):
    """Every token is computed, attending to kept ones only; results of skipped tokens are discarded."""

    def run(self, block: Any, host: Host, z: Tensor, arguments: Mapping[str, Any], rows: Rows) -> Tensor:
        """Run the host block on all tokens and take its result where a token is kept."""
        routing = rows.routing
        keep_BN = routing.keep_BN
        y = host(z, **{**arguments, "attn_mask": keep_BN[:, None, None, :]})
        gate_BN = None
        if routing.gate_BK is not None:
            gate_BN = torch.zeros_like(routing.score_BN).scatter(1, routing.kept.index_BK, routing.gate_BK)
        return torch.where(keep_BN.unsqueeze(-1), lerp_rows(z, y, gate_BN), z)


class RemovedBlock(Mixin):
    """Mixin that passes every token by."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the tokens unchanged."""
        return x


def control(model: nn.Module, path: str) -> nn.Module:
    """Return a copy of a routed model, sharing its weights, whose routed blocks run by another of the `CONTROLS`.

    The model is routed by top-k, and its blocks take a mask and no rotary embeddings. "loop" and "masked" compute the
    same outputs; "removed" leaves the routed blocks out.

    Example:
        >>> import timm, mmod
        >>> model = mmod.route_(timm.create_model("test_vit"), "a-mod")
        >>> type(control(model, "removed").blocks[1]).__name__
        'RemovedBlock'
    """
    executions: dict[str, type[Execution]] = {"loop": Looped, "masked": Masked}
    one_of("path", path, CONTROLS)
    copied = sharing_copy(model)
    for block in routed_blocks(copied).values():
        if path == "removed":
            make_dense(block)
            convert(block, RemovedBlock, None)
        else:
            block.mod_state.execution = executions[path](block.mod_state.call, block.router.config)
    return copied
