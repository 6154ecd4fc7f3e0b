"""The health of routers while they train: what they decide at logged steps, read from what a forward pass leaves.

Axes: B images or samples, N tokens, K slots, F tokens of an image that may be skipped.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmod import Routing, is_routed, routed_blocks
from mmod.analysis.audit.replace import free_tokens, only_free
from mmod.routing import Router, TokenGroups
from mmod.training.engine.collapse import Collapse
from mmod.training.engine.logging import write_csv

__all__ = ["FIGURES", "Figures", "RouterHealth", "evaluated", "figures_of", "named", "rows_of_logs", "write_rows"]

Row = dict[str, Any]


class Figures(NamedTuple):
    """What can be read from one decision of a batch; None where a figure has no meaning.

    Args:
        kept: Share of an image's tokens that are kept; in language models of those that may be skipped.
        load: Share kept of the tokens that may be skipped, whatever the host.
        same_places: How often a token that one image keeps is kept at the same place in another, above what choices
            that do not depend on each other give: 0 for those, 1 where all images keep the same places.
        spread: Standard deviation of the scores among the tokens of an image, the mean over images; among images where
            each has one score.
        level: Root mean square of the scores.
        gate: Mean weight of the kept tokens' updates.
        gate_std: Its standard deviation.
        gradient: Share of the tokens that may be skipped whose score has a gradient.
    """

    kept: float
    load: float | None
    same_places: float | None
    spread: float | None
    level: float
    gate: float | None
    gate_std: float | None
    gradient: float | None = None


FIGURES = ("kept", "gradient", "same_places", "spread", "gate", "gate_std")
"""The figures of a row, in order."""


class RouterHealth:
    """Reads the routers of a model at logged steps and warns of those that have collapsed; idle in between.

    Args:
        model: The model that trains, routed or not.
        measured: Whether the gradients of scores are measured. They are not seen where the model is compiled.
    """

    def __init__(self, model: nn.Module, *, measured: bool = True) -> None:
        self._blocks = routed_blocks(model) if is_routed(model) else {}
        self._measured = measured
        self._collapse = Collapse({name: block.router.config for name, block in self._blocks.items()})
        self._found: dict[str, Figures] = {}
        self._gradients: dict[str, Tensor] = {}

    def read(self) -> None:
        """Read the decisions of the forward pass in training mode that was just made, before its backward pass."""
        self._found, self._gradients = {}, {}
        for name, block in self._blocks.items():
            routing = block.mod_state.routing
            if routing is None:
                continue
            self._found[name] = figures_of(routing, block.router)
            if self._measured and routing.score_BN.requires_grad:
                self._gradients[name] = torch.zeros((), device=routing.score_BN.device)
                routing.score_BN.register_hook(self._counter(name, free_tokens(routing, block.router.prefix)))

    def take(self, step: int) -> list[Row]:
        """Return what was read, a row for each routed block, once; warn of blocks that have collapsed.

        Args:
            step: Optimiser steps done.

        Returns:
            Rows of `step`, `data` ("train"), `block` and `FIGURES`; none where nothing was read.
        """
        found = {
            name: own._replace(gradient=float(self._gradients[name])) if name in self._gradients else own
            for name, own in self._found.items()
        }
        self._found, self._gradients = {}, {}
        for name, own in found.items():
            for told in self._collapse.told(name, own._asdict(), step):
                warnings.warn(told, stacklevel=2)
        return [_row(step, "train", name, own._asdict()) for name, own in found.items()]

    def _counter(self, name: str, free_BN: Tensor) -> Callable[[Tensor], None]:
        counts = self._gradients

        def count(gradient_BN: Tensor) -> None:
            counts[name] = ((gradient_BN != 0) & free_BN).sum() / free_BN.sum().clamp(min=1)

        return count


def evaluated(step: int, data: str, kept: Mapping[str, float]) -> list[Row]:
    """Return what blocks kept in an evaluation as rows beside those of training.

    Args:
        step: Optimiser steps done.
        data: "val", or "ema" for the moving average of the weights.
        kept: Name of each block to its share.
    """
    return [_row(step, data, name, {"kept": share}) for name, share in kept.items()]


def named(rows: Sequence[Row]) -> dict[str, float]:
    """Return the figures of rows under the names that they have in logs, `FIGURE/BLOCK`."""
    return {f"{name}/{row['block']}": row[name] for name in FIGURES for row in rows if row[name] is not None}


def rows_of_logs(logs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the rows that stand in the logs of transformers' Trainer, see `named`.

    Args:
        logs: Its entries.

    Example:
        >>> rows_of_logs([{"step": 5, "loss": 1.0, "kept/layers.1": 0.5, "spread/layers.1": 0.2}])[0]["spread"]
        0.2
    """
    found: dict[tuple[int, str], Row] = {}
    for entry in logs:
        for name, value in entry.items():
            figure, _, block = name.partition("/")
            if block and figure in FIGURES:
                step = int(entry["step"])
                found.setdefault((step, block), _row(step, "train", block, {}))[figure] = value
    return list(found.values())


def write_rows(folder: Path, rows: Sequence[Row]) -> None:
    """Write `routers.csv` into a run folder, where there are rows."""
    if rows:
        write_csv(folder / "routers.csv", rows)


@torch.no_grad()
def figures_of(routing: Routing, router: Router) -> Figures:
    """Return what a decision says of its router."""
    keep_BN, free_BN = routing.keep_BN, free_tokens(routing, router.prefix)
    tokens = routing.evidence.tokens
    counted_BN = free_BN if isinstance(tokens, TokenGroups) else tokens.valid_BN
    counted_BN = torch.ones_like(keep_BN) if counted_BN is None else counted_BN
    is_whole = router.config.router.whole
    gate_S = _gates(routing)
    spread, level = _spread(routing.score_BN, free_BN, is_whole=is_whole)
    return Figures(
        kept=_share(keep_BN, counted_BN) or 0.0,
        load=_share(keep_BN, free_BN),
        same_places=None if is_whole else _same_places(keep_BN, free_BN),
        spread=spread,
        level=level,
        gate=float(gate_S.mean()) if len(gate_S) else None,
        gate_std=float(gate_S.std(correction=0)) if len(gate_S) else None,
    )


def _row(step: int, data: str, block: str, figures: Mapping[str, float | None]) -> Row:
    own = {name: figures.get(name) for name in FIGURES}
    shown = {name: None if value is None else float(f"{value:.6g}") for name, value in own.items()}
    return {"step": step, "data": data, "block": block, **shown}


def _share(keep_BN: Tensor, among_BN: Tensor) -> float | None:
    total = int(among_BN.sum())
    return int((keep_BN & among_BN).sum()) / total if total else None


def _gates(routing: Routing) -> Tensor:
    """Return the weights of the updates that a gate weighs."""
    if routing.weights.gate_BK is None:
        return routing.score_BN.new_empty(0)
    counts_BK = torch.ones_like(routing.kept.index_BK, dtype=torch.bool)
    for own_BK in (routing.kept.valid_BK, None if routing.kept.idle_BK is None else ~routing.kept.idle_BK):
        counts_BK = counts_BK if own_BK is None else counts_BK & own_BK
    if isinstance(routing.evidence.tokens, TokenGroups):
        counts_BK = counts_BK & routing.evidence.tokens.gated_BN.gather(1, routing.kept.index_BK)
    return routing.weights.gate_BK[counts_BK].double()


def _spread(score_BN: Tensor, free_BN: Tensor, *, is_whole: bool) -> tuple[float | None, float]:
    """Return how far the scores that are compared with each other lie apart, and how large they are."""
    counted_BN = free_BN & score_BN.isfinite()
    score_BN = torch.where(counted_BN, score_BN, 0.0).double()
    if is_whole:
        score_BN, counted_BN = score_BN[:, -1:].T, counted_BN[:, -1:].T
    count_B = counted_BN.sum(1)
    some_B = count_B > 1
    level = math.sqrt(float(score_BN.square().sum()) / max(1, int(count_B.sum())))
    if not bool(some_B.any()):
        return None, level
    score_BN, counted_BN, count_B1 = score_BN[some_B], counted_BN[some_B], count_B[some_B, None]
    apart_BN = torch.where(counted_BN, score_BN - score_BN.sum(1, keepdim=True) / count_B1, 0.0)
    return float((apart_BN.square().sum(1, keepdim=True) / count_B1).sqrt().mean()), level


def _same_places(keep_BN: Tensor, free_BN: Tensor) -> float | None:
    """Return how much more often images agree on places than choices do that do not depend on each other."""
    keep_BF, there_BF = only_free(keep_BN, free_BN), only_free(free_BN, free_BN)
    kept_F, images_F = keep_BF.sum(0).double(), there_BF.sum(0).double()
    pairs = float((kept_F * (images_F - 1)).sum())
    chance = float(kept_F.sum() / images_F.sum().clamp(min=1))
    if not pairs or chance == 1:
        return None
    return (float((kept_F * (kept_F - 1)).sum()) / pairs - chance) / (1 - chance)
