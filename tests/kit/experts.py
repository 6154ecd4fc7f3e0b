"""Mixtures of experts that tests of several files try, in blocks and in decoders, and their slow definition."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import mmod
from mmod.blocks import host_class
from mmod.lab import Experts

WAYS: list[dict[str, Any]] = [
    {"choice": "topk"},
    {"choice": "tokens"},
    {"choice": "topk", "idle": 2, "capacity": 0.6},
    {"choice": "tokens", "idle": 1, "capacity": 0.5, "normalize": True},
    {"choice": "topk", "capacity": 2.5, "normalize": True},
    {"choice": "tokens", "idle": 1, "capacity": None},
]
DECODER_WAYS: list[dict[str, Any]] = [
    {"choice": "tokens", "capacity": None, "idle": 2},
    {"choice": "tokens", "capacity": None, "normalize": True},
    {"choice": "score", "capacity": 0.75, "idle": 1},
    {"choice": "predictor", "capacity": 1.5, "normalize": True},
]
# A routing that decides each token alone, so that experts in decoders may be staged behind it.
STAGED = mmod.RoutingConfig(
    router="linear",
    capacity=0.5,
    gate="sigmoid",
    language={"inference_threshold": 0.5, "predictor": True},
    losses={"membership": 0.1},
)


def mixture_by_loop(mlp: Any, config: Experts, x_ND: Tensor, alone: bool = False) -> Tensor:
    """Return a mixture token by token, in a loop over experts; `alone` if each token is decided by itself."""
    hosts: list[Any] = [partial(host_class(mlp).forward, mlp), *mlp.others]
    logit = [mlp.router.weight @ token for token in x_ND]
    prob = [row.softmax(0) for row in logit]
    room = len(x_ND)
    if config.capacity is not None:
        room = max(1, int(config.capacity * room / config.experts + 1e-9))
    weights: dict[tuple[int, int], Tensor] = {}
    for expert in range(config.experts):
        if alone and config.choice == "score":
            mine = [n for n, row in enumerate(logit) if row[expert] >= 0]
        elif alone and config.choice == "predictor":
            mine = [n for n, score in enumerate(mlp.predictors[expert](x_ND[None])[0]) if score >= 0]
        else:
            free = [n for n, row in enumerate(prob) if config.choice != "tokens" or int(row.argmax()) == expert]
            mine = sorted(free, key=lambda n: -float(prob[n][expert]))[:room]
        weights |= {(n, expert): prob[n][expert] for n in mine}
    out_ND = torch.zeros_like(x_ND)
    for (n, expert), weight in weights.items():
        total = sum(other for (m, _), other in weights.items() if m == n)
        out_ND[n] += weight / (total if config.normalize else 1) * hosts[expert](x_ND[n][None, None])[0, 0]
    return out_ND
