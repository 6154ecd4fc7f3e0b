"""Decisions of a routed model replaced by others: which tokens are kept changes, how many does not.

Axes: B images, N tokens, K kept slots per image, D channels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmod.methods.route import routed_blocks, unreplaceable
from mmod.ops.gate import apply_gate
from mmod.routing import Router, Routing, TokenGroups

Replace = Callable[[str, Tensor, Routing, "Tensor | None"], "Routing | None"]
"""From the name of a block, the tokens' states (B, N, D), what its router decided, and where a token is left to choose
(B, N), None for all, to another decision, or None. Which kept tokens the others join is left to the router."""


@contextmanager
def replaced_decisions(model: nn.Module, replace: Replace) -> Iterator[None]:
    """Replace what routers decide, in forward passes inside the block.

    Blocks that share a decision have one router, so the decision is replaced once for all of them. Skipped tokens still
    join kept ones by the router's own rule. Later blocks of a span choose among the tokens that the replacement keeps.
    """
    blocks = routed_blocks(model)
    reason = unreplaceable(model)
    if reason:
        raise ValueError(reason)

    def hook(name: str, router: Router, args: tuple[Any, ...], routing: Routing) -> Routing | None:
        rows: Tensor = args[0]
        # A router that selects among the tokens of an earlier decision gets that as its fourth argument.
        earlier: Routing | None = args[3] if len(args) > 3 else None
        x_BND = rows
        left_BN = None
        if earlier is not None:
            # The rows are the groups that the earlier decision made: each token is shown the row that it joined.
            slot_BN = earlier.joined.slot_BN
            assert slot_BN is not None
            slot_BN1 = slot_BN.clamp(min=0).unsqueeze(-1)
            x_BND = rows.gather(1, slot_BN1.expand(-1, -1, rows.shape[2]))
            left_BN = earlier.keep_BN
        replaced = replace(name, x_BND, routing, left_BN)
        if replaced is None or router.joiner is None:
            return replaced
        return router.joiner.join(replaced, rows, router.rule, earlier)

    with ExitStack() as hooks:
        for name, block in blocks.items():
            hooks.enter_context(block.router.register_forward_hook(partial(hook, name)))
        yield


def keep_best(
    rank_BN: Tensor, learned: Routing, routing: Routing, router: Router, left_BN: Tensor | None = None
) -> Routing:
    """Return a decision that keeps the highest ranks, as many of each image and group as `learned` keeps.

    A kept token is weighed as its router weighs it, by its score and not by its rank. Ties go to the lowest index and
    NaN ranks last.
    """
    kept_BN = learned.keep_BN
    free_BN = learned.free(router.prefix)
    groups = learned.tokens
    group_BN = groups.group_BN if isinstance(groups, TokenGroups) else free_BN.long()
    least = torch.finfo(torch.float64).min
    # NaN and minus infinity rank last among those that may be chosen, but above what may not.
    level_BN = rank_BN.double().nan_to_num(nan=least, neginf=least)
    ascending_BN = torch.arange(kept_BN.shape[1], device=kept_BN.device).expand(kept_BN.shape)
    keep_BN = kept_BN & ~free_BN
    # Group 0 holds what may not be skipped.
    for group in range(1, int(group_BN.max()) + 1):
        among_BN = group_BN == group
        open_BN = among_BN if left_BN is None else among_BN & left_BN
        order_BN = level_BN.masked_fill(~open_BN, -torch.inf).argsort(dim=1, descending=True, stable=True)
        position_BN = torch.empty_like(order_BN).scatter_(1, order_BN, ascending_BN)
        count_B1 = (kept_BN & among_BN).sum(dim=1, keepdim=True)
        keep_BN = keep_BN | (among_BN & (position_BN < count_B1))
    slots = learned.kept.index_BK.shape[1]
    # The same trick: kept tokens first, in order.
    index_BK = (~keep_BN).to(torch.uint8).sort(dim=1, stable=True).indices[:, :slots]
    valid_BK = learned.kept.valid_BK
    if valid_BK is not None:
        # Fewer may be kept than there are slots where an image has padding.
        valid_BK = ascending_BN[:, :slots] < keep_BN.sum(dim=1, keepdim=True)
    # What the router's own sort tells of its tokens says nothing of these.
    kept = routing.kept._replace(
        index_BK=index_BK,
        valid_BK=valid_BK,
        total=learned.kept.total,
        inverse_BN=None,
        order_BN=None,
    )
    return routing._replace(kept=kept, gate_BK=_weights(routing, index_BK, router))


def _weights(routing: Routing, index_BK: Tensor, router: Router) -> Tensor | None:
    gate = router.config.gate
    weight_BN = apply_gate(routing.score_BN, gate.name, gate.scale)
    if weight_BN is None:
        return None
    if isinstance(routing.tokens, TokenGroups):
        weight_BN = torch.where(routing.tokens.gated_BN, weight_BN, 1.0)
    return weight_BN.gather(1, index_BK)
