"""The slow definition of a cycle of recursions: every token runs, and masks say who sees and keeps what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mmod.lab import Recursions

Attended = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
"""What a block makes of tokens (N, D) that see some tokens of a source (N, D), by a mask (N, N)."""


def cycle_by_masks(
    cycle: Any, config: Recursions, x_ND: Tensor, attended: Attended, prefix: int = 0, alone: bool = False
) -> Tensor:
    """Return what a cycle makes of a sequence.

    Args:
        prefix: Leading tokens, which always run.
        alone: Whether each token is decided by itself, as in evaluation of a decoder.
    """
    count, tokens = config.recursions, len(x_ND)
    first_ND = x_ND
    prob_NR = (x_ND @ cycle.routers[0].weight.T).softmax(-1)
    last_N = prob_NR.argmax(-1).index_fill(0, torch.arange(prefix), count - 1)
    runs_N = torch.ones(tokens, dtype=torch.bool)
    sources: list[Tensor] = []
    for recursion in range(count):
        if config.choice == "tokens":
            gate_N, runs_N = prob_NR[:, recursion], last_N >= recursion
        else:
            gate_N = 0.1 * torch.sigmoid(x_ND @ cycle.routers[recursion].weight[0])
            runs_N = chosen(cycle, config, x_ND, recursion, runs_N, prefix, alone)
        y_ND = x_ND
        for number, block in enumerate(cycle.shared):
            if config.keys == "first" and not recursion:
                sources.append(y_ND)
            source_ND, visible_N = (
                (sources[number], torch.ones_like(runs_N)) if config.keys == "first" else (y_ND, runs_N)
            )
            # Somebody must be seen by those whose result is thrown away.
            y_ND = attended(block, y_ND, source_ND, visible_N | ~runs_N[:, None])
        gate_N1 = gate_N[:, None]
        if config.adds == "change":
            new_ND = x_ND + gate_N1 * (y_ND - x_ND)
        elif config.choice == "tokens":
            new_ND = gate_N1 * y_ND + torch.where((last_N == recursion)[:, None], first_ND, 0.0)
        else:
            new_ND = x_ND + gate_N1 * y_ND
        x_ND = torch.where(runs_N[:, None], new_ND, x_ND)
    return x_ND


def chosen(
    cycle: Any, config: Recursions, x_ND: Tensor, recursion: int, ran_N: Tensor, prefix: int, alone: bool
) -> Tensor:
    """Choose the tokens of a recursion one by one (N), among those that ran before."""
    if not recursion:
        return ran_N
    scores = [float(token @ cycle.routers[recursion].weight[0]) for token in x_ND]
    if alone and config.choice == "predictor":
        scores = cycle.predictors[recursion - 1](x_ND[None])[0].tolist()
    free = [n for n in range(prefix, len(x_ND)) if ran_N[n]]
    if alone and config.choice in ("score", "predictor"):
        best = [n for n in free if scores[n] >= 0]
    else:
        room = max(1, prefix, len(x_ND) * (config.recursions - recursion) // config.recursions) - prefix
        best = sorted(free, key=lambda n: -scores[n])[:room]
    return torch.zeros_like(ran_N).index_fill(0, torch.tensor([*range(prefix), *best], dtype=torch.long), True)
