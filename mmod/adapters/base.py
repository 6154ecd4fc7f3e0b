"""What mmod must know of a host library, and the arguments that hosts of several libraries share.

Axes: B images, N tokens, K slots per image, H heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmod.adapters.masks import (
    add_causal,
    hide_empty_slots,
    narrow_pairs,
    narrow_queries,
    narrow_rope,
    pack_rope,
    weigh_groups,
)
from mmod.blocks import BlockCall, ForwardPass, Halves, ImportanceBlock, ModelHook, PassTracker, RoutedBlock
from mmod.config import Merged, RoutingConfig, spelled
from mmod.ops import Packing, Projection, attend_to_all, keys_and_values
from mmod.ops.views import is_visible
from mmod.routing import Router, Routing, TokenMarks


@dataclass(frozen=True)
class BlockStack:
    """One stack of blocks in a model of a supported library: the model itself, or a part such as a tower.

    Args:
        library: Name of the adapter.
        names: Module names of its residual blocks in the model, in order.
        blocks: The blocks.
        prefix: Tokens that are always kept: the leading ones, where the blocks' hosts do not say which.
        dim: Channels of a token.
        call_of: Returns how the library calls a block, given how it is routed, or None for a dense one; raises a
            ValueError that says why it cannot be routed.
        tracker: Carries what the modules of the stack share in a forward pass.
        companions: Modules outside the blocks that are converted with them, each with its mixin and the state it reads.
            One of those that have a state begins every forward pass, with what only the model knows, such as which
            tokens are padding.
        sequence: Length of the token ids the part reads, or None where it reads images.
        language: It takes `RoutingConfig.language`.
        class_token: Its first token is a class token.
        router: What decides in its routed blocks.
        mixins: What is put in front of the class of a routed block, and of one that computes importance.
        hooks: Returns the modules to call before the blocks and what to call, for a config that suits the part.
        hands_on: Package whose code runs the blocks one after another and looks at nothing between them, so that they
            may hand on kept rows alone; empty where there is none.
    """

    library: str
    names: tuple[str, ...]
    blocks: tuple[nn.Module, ...]
    prefix: int
    dim: int
    call_of: Callable[[nn.Module, RoutingConfig | None], BlockCall]
    tracker: PassTracker = field(default_factory=PassTracker)
    companions: tuple[tuple[nn.Module, type[nn.Module], object], ...] = ()
    sequence: int | None = None
    language: bool = False
    class_token: bool = False
    router: type[Router] = Router
    mixins: tuple[type[RoutedBlock], type[ImportanceBlock]] = (RoutedBlock, ImportanceBlock)
    hooks: Callable[[RoutingConfig], Sequence[tuple[nn.Module, ModelHook]]] = lambda routing: ()
    hands_on: str = ""

    def check_skipped(self, config: RoutingConfig, call: BlockCall, name: str) -> None:
        """Raise a ValueError where skipped tokens cannot take part in a block as a config has it.

        Args:
            config: The block's config.
            call: How the library calls the block.
            name: Name of the block.
        """
        skipped = config.skipped
        if skipped != "pass" and (self.language or self.sequence is not None):
            raise ValueError(
                f"skipped={spelled(skipped)!r} is for images: {name} reads text, where a token stands for itself"
            )
        if isinstance(skipped, Merged) and not call.weighs_keys:
            raise ValueError(
                f"skipped='merge' is not possible in {name}: attention there takes no bias for larger groups"
            )
        if config.merges_inside and call.halves is None:
            raise ValueError(
                f"skipped.before='mlp' is not possible in {name}: only timm's blocks with the MLP after attention run "
                "in two halves; use before='block'"
            )

    def check_importance(self, importance: str) -> None:
        """Raise a ValueError where importance cannot be taken as a config has it.

        Args:
            importance: See `mmod.config.WithImportance`.
        """
        if importance == "class_token" and not self.class_token:
            raise ValueError(
                f"router.importance='class_token': {self.names[0]} and those after it have no class token first"
            )
        if importance in ("last_token", "vision_tower") and not self.language:
            raise ValueError(
                f"router.importance={importance!r} is for language models: {self.names[0]} is no layer of one"
            )


# Finds the blocks of one part, or raises a ValueError that says why that part cannot be routed.
Part = Callable[[], BlockStack]


@dataclass(frozen=True)
class NamedArguments:
    """A block host that narrows a block's arguments by their names.

    Args:
        names: The block's parameters after the tokens, in order.
        rope_prefix: Leading tokens that rotary embeddings leave out.
        fused: The block's attention is a single call of `scaled_dot_product_attention` for each of its attentions.
        projections: Weights of the linear maps in front of attention, by name, each with how many of its leading
            features serve the token itself and not as key or value.
        attention_calls: Calls of `scaled_dot_product_attention` in one pass through the block.
        draws_paths: Stochastic depth draws one Bernoulli number for each sequence of a batch.
        fused_norm: Name of the norm that the block starts with and that can be fused with gathering rows, or empty.
        operators: Names of the block's residual branches by operator, of those that add nothing where they return zero.
        tuples: Operators whose branch returns a tuple, its output first.
        halves: The two halves of the block, or None where it can only be run as a whole.
    """

    names: tuple[str, ...]
    rope_prefix: int = 0
    fused: bool = False
    projections: tuple[tuple[str, int], ...] = ()
    attention_calls: int = 1
    draws_paths: bool = False
    fused_norm: str = ""
    operators: Mapping[str, str] = field(default_factory=dict)
    tuples: tuple[str, ...] = ()
    halves: Halves | None = None

    @property
    def contexts(self) -> tuple[str, ...]:
        """What kept tokens can attend to in this block."""
        return ("kept", "all") if self.fused and self.projections else ("kept",)

    @property
    def weighs_keys(self) -> bool:
        """Whether the block takes a mask or bias of pairs of tokens."""
        return "attn_mask" in self.names or "shared_rel_pos_bias" in self.names

    @property
    def needs_prefix(self) -> bool:
        """Whether the block leaves its first tokens out of rotary positions."""
        return "rope" in self.names

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the given arguments by name, without those that are off (None or False)."""
        if len(args) > len(self.names):
            raise TypeError(f"a routed block got {len(args)} arguments after the tokens, it takes {self.names}")
        named = {**dict(zip(self.names, args)), **kwargs}
        unknown = sorted(set(named) - set(self.names))
        if unknown:
            raise TypeError(f"a routed block got unknown arguments {unknown}, it takes {self.names}")
        return {name: value for name, value in named.items() if value is not None and value is not False}

    def marks(self, arguments: Mapping[str, Any], x_BND: Tensor, forward_pass: ForwardPass | None) -> TokenMarks:
        """Read padding off the attention mask: a token no query may attend to."""
        if (mask := arguments.get("attn_mask")) is None or mask.ndim != 4:
            return TokenMarks()
        valid_BN = is_visible(mask).any(dim=1).any(dim=1)
        return TokenMarks(valid_BN.expand(x_BND.shape[0], -1))

    def can_pack(self, block: nn.Module, arguments: Mapping[str, Any]) -> bool:
        """Masks have no packed form, nor has stochastic depth where packed rows cannot tell for which images it is."""
        if not self.fused or not arguments.keys() <= {"rope", "is_causal"}:
            return False
        drops = block.training and any(getattr(module, "drop_prob", 0) for module in block.modules())
        return self.draws_paths or not drops

    def pack(self, arguments: Mapping[str, Any], x_BND: Tensor, routing: Routing, packing: Packing) -> dict[str, Any]:
        """Return the arguments for the packed rows of many images."""
        packed = dict(arguments)
        if "rope" in packed:
            packed["rope"] = pack_rope(packed["rope"], packing.row_T, x_BND.shape[1], self.rope_prefix)
        return packed

    def select_tokens(self, arguments: Mapping[str, Any], x_BND: Tensor, routing: Routing) -> dict[str, Any]:
        """Return the arguments for the kept tokens alone, or for all tokens of the images that are kept."""
        if routing.image_S is not None:
            return {name: _of_images(value, routing.image_S) for name, value in arguments.items()}
        narrowed = dict(arguments)
        index_BK = routing.index_BK
        if "rope" in narrowed:
            narrowed["rope"] = narrow_rope(narrowed["rope"], index_BK, self.rope_prefix)
        if "shared_rel_pos_bias" in self.names:
            bias = narrowed.get("shared_rel_pos_bias")
            bias = None if bias is None else narrow_pairs(bias, index_BK, x_BND.shape[1])
            bias = hide_empty_slots(bias, routing.valid_BK, x_BND.dtype)
            narrowed["shared_rel_pos_bias"] = weigh_groups(bias, routing.size_BK, x_BND.dtype)
            return narrowed
        mask = narrowed.get("attn_mask")
        if mask is not None:
            mask = narrow_pairs(mask, index_BK, x_BND.shape[1])
        if routing.valid_BK is not None:
            mask = hide_empty_slots(mask, routing.valid_BK, x_BND.dtype)
            if narrowed.pop("is_causal", False):
                mask = add_causal(mask, x_BND.dtype)
        mask = weigh_groups(mask, routing.size_BK, x_BND.dtype)
        if mask is not None:
            narrowed["attn_mask"] = mask
        return narrowed

    def attend_to_all(
        self, block: nn.Module, forward: Callable[..., Any], arguments: Mapping[str, Any], x_BND: Tensor,
        z_BKD: Tensor, routing: Routing, taken: list[tuple[Tensor, Tensor]] | None = None,
    ) -> Any:  # fmt: skip
        """Let kept tokens attend to all tokens in the host's forward; `taken`, once filled, has keys and values."""
        # Attention is given those that are off, too.
        arguments = {name: value for name, value in arguments.items() if value is not None}
        projections = [
            Projection(functools.reduce(getattr, name.split("."), block), own)  # type: ignore[arg-type]
            for name, own in self.projections
        ]
        taken = [] if taken is None else taken
        if not taken:
            taken += keys_and_values(lambda: forward(x_BND, **arguments), projections, self.attention_calls)
        with attend_to_all(projections, taken):
            return forward(z_BKD, **self._narrow_queries(arguments, x_BND.shape[1], routing))

    def _narrow_queries(self, arguments: Mapping[str, Any], tokens: int, routing: Routing) -> dict[str, Any]:
        """Return the arguments for kept queries and all keys."""
        narrowed, index_BK = dict(arguments), routing.index_BK
        if "rope" in narrowed:
            narrowed["rope"] = narrow_rope(narrowed["rope"], index_BK, self.rope_prefix)
        for name in ("attn_mask", "shared_rel_pos_bias"):
            if name in narrowed:
                narrowed[name] = narrow_queries(narrowed[name], index_BK, tokens)
        if "attn_mask" in narrowed and routing.valid_BK is not None:
            # An empty slot may point at padding, whose own row can be hidden from everything: that gives NaN gradients.
            mask = narrowed["attn_mask"]
            everything = True if mask.dtype == torch.bool else 0.0
            narrowed["attn_mask"] = torch.where(routing.valid_BK[:, None, :, None], mask, everything)
        if narrowed.pop("is_causal", False):
            # As in the hosts themselves, causal attention takes no further mask.
            position = torch.arange(tokens, device=index_BK.device)
            narrowed["attn_mask"] = (position <= index_BK.unsqueeze(-1)).unsqueeze(1)
        return narrowed


def _of_images(value: Any, image_S: Tensor) -> Any:
    """Return what an argument is for some images of a batch; one without a row for each is that of all."""
    own = isinstance(value, Tensor) and value.ndim == 4 and len(value) > 1
    return value.index_select(0, image_S) if own else value
