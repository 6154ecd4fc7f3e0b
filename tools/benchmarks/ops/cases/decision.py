"""Cases of a decision by similarity, timed against a step of ToMe that merges as many tokens.

Axes: B images, N tokens, D channels, H heads, E channels of a head.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from mmod.config import Merged, RoutingConfig, score
from mmod.methods.merge import merge_tokens
from mmod.ops import capture_inputs
from mmod.routing import Router
from tools.benchmarks.ops.case import Maker, OpCase, Work, register_case

PREFIX = 1


def _decide(x_BND: Tensor, key_BHNE: Tensor, router: Router) -> tuple[Tensor, ...]:
    """Return the kept tokens, and the slot that each token joins and the sizes of the groups, if any."""
    routing = router(x_BND)
    slot_BN, size_BK, *_ = routing.joined
    if slot_BN is None or size_BK is None:
        return (routing.kept.index_BK,)
    return routing.kept.index_BK, slot_BN, size_BK


def _merge_once(x_BND: Tensor, key_BHNE: Tensor, router: Router, merged: int) -> tuple[Tensor, ...]:
    """Run a step of ToMe; it groups other tokens, so nothing is returned that could be compared."""
    attention = capture_inputs()
    attention.key = key_BHNE
    merge_tokens(merged, PREFIX, x_BND, None, attention)
    return ()


def _decision_case(make: Maker, channels: int | None) -> OpCase:
    size = make.size
    config = RoutingConfig(
        router=score("redundancy", channels=channels), skipped=Merged(), capacity=size.capacity, blocks="all"
    )
    router = Router(config, dim=size.channels, block=1, capacity=size.capacity, prefix=PREFIX)
    compared = min(channels or size.channels, size.channels)
    return OpCase(
        op=_decide,
        inputs={"x_BND": make.rows(size.tokens), "key_BHNE": make.heads(size.tokens), "router": router},
        learns=(),
        exact=lambda x_BND, key_BHNE, router: _decide(x_BND.to(make.dtype), key_BHNE, router),
        baselines={"a step of ToMe": partial(_merge_once, merged=size.tokens - size.kept)},
        # Each token is compared with those before it, then each skipped one with those kept.
        forward=Work(
            make.row_bytes(size.tokens),
            size.images * compared * (size.tokens**2 + 2 * size.kept * (size.tokens - size.kept)),
        ),
        choice="redundancy_scores",
    )


register_case("decision")(partial(_decision_case, channels=None))
register_case("decision_64_channels")(partial(_decision_case, channels=64))
