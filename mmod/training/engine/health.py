"""The health of routers while they train: statistics of their decisions at logged steps.

Axes: B images or samples, N tokens, K slots, F tokens of an image that may be skipped.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmod.blocks import RoutedBlock
from mmod.config import RoutingConfig, Threshold
from mmod.io.tables import write_csv
from mmod.methods.route import is_routed, routed_blocks
from mmod.routing import Router, Routing, TokenGroups, only_free

Row = dict[str, Any]


class Figures(NamedTuple):
    """Statistics of one decision on a batch; None where one is undefined.

    Args:
        kept: Share of tokens kept; in language models, of the tokens that may be skipped.
        load: Share kept of the tokens that may be skipped.
        same_positions: Agreement of images on the kept positions beyond chance: 0 for independent choices, 1 for equal.
        spread: Standard deviation of scores within an image, mean over images; over images if each has one score.
        level: Root mean square of the scores.
        gate: Mean gate of the kept tokens.
        gradient: Share of the tokens that may be skipped whose score receives a gradient.
    """

    kept: float
    load: float | None
    same_positions: float | None
    spread: float | None
    level: float
    gate: float | None
    gate_std: float | None
    gradient: float | None = None


FIGURES = ("kept", "gradient", "same_positions", "spread", "gate", "gate_std")
"""The statistics in a row of `routers.csv`, in order."""


class RouterHealth:
    """Reads the routers of a model, if any, at logged steps, and warns of collapsed ones.

    The gradients of scores are `measured`, which is impossible in a compiled model.
    """

    def __init__(self, model: nn.Module, *, measured: bool = True) -> None:
        self._model = model
        self._blocks: dict[str, RoutedBlock] = {}
        self._measured = measured
        self._figures: dict[str, Figures] = {}
        self._gradients: dict[str, Tensor] = {}
        # Logged steps in a row that show a collapse, by block and reason.
        self._since: dict[tuple[str, str], list[int]] = {}

    def read(self) -> None:
        """Read the decisions of the last forward pass, before its backward pass."""
        self._figures = {}
        self._gradients = {}
        # Methods for training alone may have been undone since.
        self._blocks = routed_blocks(self._model) if is_routed(self._model) else {}
        for name, block in self._blocks.items():
            routing = block.mod_state.routing
            if routing is None:
                continue
            self._figures[name] = figures_of(routing, block.router)
            if self._measured and routing.score_BN.requires_grad:
                self._gradients[name] = torch.zeros((), device=routing.score_BN.device)
                free_BN = routing.free(block.router.prefix)
                # A hook, because the gradient of a score exists during the backward pass alone.
                routing.score_BN.register_hook(partial(_count_gradients, self._gradients, name, free_BN))

    def take(self, step: int) -> list[Row]:
        """Return one row per routed block since the last `read`, once; warn of collapsed blocks."""
        rows = []
        for name, figures in self._figures.items():
            if name in self._gradients:
                figures = figures._replace(gradient=float(self._gradients[name]))
            self._warn_of_collapse(name, figures, step)
            rows.append(_row(step, "train", name, figures._asdict()))
        self._figures = {}
        self._gradients = {}
        return rows

    def _warn_of_collapse(self, block: str, figures: Figures, step: int) -> None:
        """Warn of a collapsed router: once per block and reason, after three logged steps in a row that show it."""
        config = self._blocks[block].router.config
        reason = _reason(config, figures)
        blocks = list(self._model.get_submodule(block.rpartition(".")[0]).children())
        if reason == "gradient" and config.gate.weighs and blocks[-1] is self._blocks[block]:
            # Often nothing reads what the last gate weighs, such as image tokens where the loss is that of the text.
            reason = None
        # Another reason, or none, starts the count anew.
        for key in [key for key in self._since if key[0] == block and key[1] != reason]:
            # A complete list stays: it was reported.
            if len(self._since[key]) < _PATIENCE:
                del self._since[key]
        steps = [] if reason is None else self._since.setdefault((block, reason), [])
        if reason is None or len(steps) >= _PATIENCE:
            return
        steps.append(step)
        if len(steps) == _PATIENCE:
            says = f"the router of {block} has collapsed: since step {steps[0]} {_SAYS[reason]}"
            warnings.warn(f"{says}. {_advice(reason, config)}", stacklevel=3)


def _count_gradients(shares: dict[str, Tensor], block: str, free_BN: Tensor, gradient_BN: Tensor) -> None:
    shares[block] = ((gradient_BN != 0) & free_BN).sum() / free_BN.sum().clamp(min=1)


def evaluation_rows(step: int, data: str, kept: Mapping[str, float]) -> list[Row]:
    """Return rows with the kept shares of an evaluation; `data` is "val", or "ema" for the moving average."""
    return [_row(step, data, name, {"kept": share}) for name, share in kept.items()]


def logged_figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return the figures of rows by their names in logs, `FIGURE/BLOCK`."""
    return {f"{name}/{row['block']}": row[name] for name, row in product(FIGURES, rows) if row[name] is not None}


def rows_of_logs(logs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the rows in the logs of transformers' Trainer; see `logged_figures`.

    Example:
        >>> rows_of_logs([{"step": 5, "loss": 1.0, "kept/layers.1": 0.5, "spread/layers.1": 0.2}])[0]["spread"]
        0.2
    """
    rows: dict[tuple[int, str], Row] = {}
    for entry in logs:
        for name, value in entry.items():
            figure, _, block = name.partition("/")
            if block and figure in FIGURES:
                step = int(entry["step"])
                rows.setdefault((step, block), _row(step, "train", block, {}))[figure] = value
    return list(rows.values())


def write_rows(folder: Path, rows: Sequence[Row]) -> None:
    """Write `routers.csv` into a run folder if there are rows."""
    if rows:
        write_csv(folder / "routers.csv", rows)


@torch.no_grad()
def figures_of(routing: Routing, router: Router) -> Figures:
    """Return the statistics of a decision."""
    keep_BN = routing.keep_BN
    free_BN = routing.free(router.prefix)
    per_image = router.config.router.per_image
    gate_S = _gates(routing)
    spread, level = _spread(routing.score_BN, free_BN, per_image=per_image)
    return Figures(
        kept=_share(keep_BN, routing.counted_BN) or 0.0,
        load=_share(keep_BN, free_BN),
        same_positions=None if per_image else _same_positions(keep_BN, free_BN),
        spread=spread,
        level=level,
        gate=float(gate_S.mean()) if len(gate_S) else None,
        gate_std=float(gate_S.std(correction=0)) if len(gate_S) else None,
    )


def _row(step: int, data: str, block: str, figures: Mapping[str, float | None]) -> Row:
    values = {name: figures.get(name) for name in FIGURES}
    rounded = {name: None if value is None else float(f"{value:.6g}") for name, value in values.items()}
    return {"step": step, "data": data, "block": block, **rounded}


def _share(keep_BN: Tensor, among_BN: Tensor) -> float | None:
    total = int(among_BN.sum())
    return int((keep_BN & among_BN).sum()) / total if total else None


def _gates(routing: Routing) -> Tensor:
    if routing.gate_BK is None:
        return routing.score_BN.new_empty(0)
    counts_BK = torch.ones_like(routing.kept.index_BK, dtype=torch.bool)
    if routing.kept.valid_BK is not None:
        counts_BK = counts_BK & routing.kept.valid_BK
    if routing.kept.idle_BK is not None:
        counts_BK = counts_BK & ~routing.kept.idle_BK
    if isinstance(routing.tokens, TokenGroups):
        counts_BK = counts_BK & routing.tokens.gated_BN.gather(1, routing.kept.index_BK)
    return routing.gate_BK[counts_BK].double()


def _spread(score_BN: Tensor, free_BN: Tensor, *, per_image: bool) -> tuple[float | None, float]:
    """Return standard deviation within an image, and root mean square, of the scores that compete."""
    counted_BN = free_BN & score_BN.isfinite()
    score_BN = torch.where(counted_BN, score_BN, 0.0).double()
    if per_image:
        # One score for an image, in each of its tokens; the last is no prefix token. Transposed, images compete.
        score_BN = score_BN[:, -1:].T
        counted_BN = counted_BN[:, -1:].T
    count_B = counted_BN.sum(1)
    several_B = count_B > 1
    level = math.sqrt(float(score_BN.square().sum()) / max(1, int(count_B.sum())))
    if not bool(several_B.any()):
        return None, level
    score_BN = score_BN[several_B]
    counted_BN = counted_BN[several_B]
    count_B1 = count_B[several_B, None]
    deviation_BN = torch.where(counted_BN, score_BN - score_BN.sum(1, keepdim=True) / count_B1, 0.0)
    return float((deviation_BN.square().sum(1, keepdim=True) / count_B1).sqrt().mean()), level


def _same_positions(keep_BN: Tensor, free_BN: Tensor) -> float | None:
    """Return how often two images keep the same position: 0 as by chance, 1 always; None where they cannot differ."""
    keep_BF = only_free(keep_BN, free_BN)
    exists_BF = only_free(free_BN, free_BN)
    kept_F = keep_BF.sum(0).double()
    images_F = exists_BF.sum(0).double()
    pairs = float((kept_F * (images_F - 1)).sum())
    chance = float(kept_F.sum() / images_F.sum().clamp(min=1))
    if not pairs or chance == 1:
        return None
    # As Cohen's kappa: agreement above chance, as a share of the most that is possible.
    return (float((kept_F * (kept_F - 1)).sum()) / pairs - chance) / (1 - chance)


# A single batch may look like a collapse, and routers start with equal scores.
_PATIENCE = 3
# Below this share of their size, scores differ by rounding alone.
_CONSTANT = 1e-5
_SAME = 0.95
_ALL = 0.95
_NOTHING = 0.01
_CONTENT = "'attention', 'norm' or 'linear'"
_SAYS = {
    "scores": "its scores are the same for all tokens, so that positions decide",
    "positions": "it keeps the same positions in every image of a batch, as a fixed pattern would",
    "all": "it keeps nearly all tokens that it may skip, so that little is saved",
    "nothing": "it keeps hardly any of the tokens that it may skip",
    "gradient": "no score has a gradient, so that it does not learn",
}


def _reason(config: RoutingConfig, figures: Figures) -> str | None:
    """Return the reason of a collapse, None for a healthy block; the first that applies explains the others."""
    load = figures.load
    spread = figures.spread
    same = figures.same_positions
    reads = not config.router.positional
    if config.router.learns and load and figures.gradient == 0:
        return "gradient"
    if reads and spread is not None and spread <= _CONSTANT * figures.level:
        return "scores"
    if isinstance(config.select, Threshold) and load is not None and not _NOTHING < load < _ALL:
        return "all" if load >= _ALL else "nothing"
    return "positions" if reads and same is not None and same >= _SAME else None


def _advice(reason: str, config: RoutingConfig) -> str:
    threshold = config.select.single if isinstance(config.select, Threshold) else None
    if reason == "all":
        # MoDification (arXiv 2410.14268) ends there with its loss on the load alone.
        pull = f"losses={{'capacity': 1.0}} pulls the share to capacity={config.capacity}"
        pull = f"the loss 'load' alone may leave it there, and {pull}" if "load" in config.losses else pull
        return f"Raise select.threshold above {threshold:g}" + (f"; {pull}." if config.router.learns else ".")
    if reason == "nothing":
        loss = " and, for a score that learns, losses={'capacity': 1.0}" if config.router.learns else ""
        return f"Lower select.threshold below {threshold:g}; select.min_tokens keeps a few in any case{loss}."
    if reason == "gradient":
        if config.gate.weighs:
            why = "Nothing reads what its gate weighs: leave the block out of blocks"
        else:
            gate = f"gate={config.gate.name!r} of scale {config.gate.scale:g}"
            why = f"{gate} sends none: set 'tanh', 'sigmoid' or 'linear'"
        return f"{why}, or set losses such as {{'importance': 1.0}}."
    if not config.router.learns:
        return f"router={config.router.name!r} does not tell these tokens apart: try another of {_CONTENT}."
    kept = ""
    if "membership" in config.losses:
        kept = f" losses.membership={config.losses['membership']:g} makes firm what is kept already: lower it."
    return (
        "losses={'importance': 1.0} teaches it what attention finds; router='attention' needs no training, and "
        f"router='stride' keeps fixed positions at no cost.{kept}"
    )
