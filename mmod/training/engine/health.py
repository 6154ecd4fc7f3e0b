"""The health of routers while they train: statistics of their decisions at logged steps.

Axes: B images or samples, N tokens, K slots, F tokens of an image that may be skipped.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmod.blocks import RoutedBlock
from mmod.config import RoutingConfig, Threshold
from mmod.io.tables import write_csv
from mmod.methods.route import is_routed, routed_blocks
from mmod.routing import Router, Routing, TokenGroups, only_free

RouterRow = dict[str, Any]


FIGURES = ("kept", "gradient", "same_positions", "spread", "gate", "gate_std")
"""The statistics in a row of `routers.csv`, in order; see `figures_of`."""


class RouterHealth:
    """Reads the routers of a model, if any, at logged steps, and warns of collapsed ones.

    The gradients of scores are `measured`, which is impossible in a compiled model.
    """

    def __init__(self, model: nn.Module, *, measured: bool = True) -> None:
        self._model = model
        self._blocks: dict[str, RoutedBlock] = {}
        self._measured = measured
        self._figures: dict[str, dict[str, float | None]] = {}
        self._gradients: dict[str, Tensor] = {}
        # Why a block counts as collapsed, the first logged step that shows it, and how many in a row do.
        self._streaks: dict[str, tuple[str | None, int, int]] = {}

    def read(self) -> None:
        """Read the decisions of the last forward pass, before its backward pass."""
        self._figures = {}
        self._gradients = {}
        # Methods for training alone may have been undone since.
        self._blocks = {}
        if is_routed(self._model):
            self._blocks = routed_blocks(self._model)
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

    def take(self, step: int) -> list[RouterRow]:
        """Return one row per routed block since the last `read`, once; warn of collapsed blocks."""
        rows = []
        for name, figures in self._figures.items():
            if name in self._gradients:
                figures["gradient"] = float(self._gradients[name])
            self._warn_of_collapse(name, figures, step)
            rows.append(_row(step, "train", name, figures))
        self._figures = {}
        self._gradients = {}
        return rows

    def _warn_of_collapse(self, block: str, figures: Mapping[str, float | None], step: int) -> None:
        """Warn of a collapsed router after three logged steps in a row that show it."""
        config = self._blocks[block].router.config
        reason = _reason(config, figures)
        around = self._model.get_submodule(block.rpartition(".")[0])
        blocks = list(around.children())
        if reason == "gradient" and config.gate.weighs and blocks[-1] is self._blocks[block]:
            # Often nothing reads what the last gate weighs, such as image tokens where the loss is that of the text.
            reason = None
        before, since, count = self._streaks.get(block, (None, step, 0))
        if reason != before:
            since, count = step, 0
        self._streaks[block] = reason, since, count + 1
        if reason is not None and count + 1 == _PATIENCE:
            says = f"the router of {block} has collapsed: since step {since} {_SAYS[reason]}"
            warnings.warn(f"{says}. {_advice(reason, config)}", stacklevel=3)


def _count_gradients(shares: dict[str, Tensor], block: str, free_BN: Tensor, gradient_BN: Tensor) -> None:
    is_reached_BN = (gradient_BN != 0) & free_BN
    shares[block] = is_reached_BN.sum() / free_BN.sum().clamp(min=1)


def evaluation_rows(step: int, data: str, kept: Mapping[str, float]) -> list[RouterRow]:
    """Return rows with the kept shares of an evaluation; `data` is "val", or "ema" for the moving average."""
    return [_row(step, data, name, {"kept": share}) for name, share in kept.items()]


def logged_figures(rows: Sequence[RouterRow]) -> dict[str, float]:
    """Return the figures of rows by their names in logs, `FIGURE/BLOCK`."""
    figures = {}
    for name, row in product(FIGURES, rows):
        if row[name] is not None:
            figures[f"{name}/{row['block']}"] = row[name]
    return figures


def rows_of_logs(logs: Sequence[Mapping[str, Any]]) -> list[RouterRow]:
    """Return the rows in the logs of transformers' Trainer; see `logged_figures`.

    Example:
        >>> rows_of_logs([{"step": 5, "loss": 1.0, "kept/layers.1": 0.5, "spread/layers.1": 0.2}])[0]["spread"]
        0.2
    """
    rows: dict[tuple[int, str], RouterRow] = {}
    for entry in logs:
        for name, value in entry.items():
            figure, _, block = name.partition("/")
            if block and figure in FIGURES:
                step = int(entry["step"])
                rows.setdefault((step, block), _row(step, "train", block, {}))[figure] = value
    return list(rows.values())


def write_rows(folder: Path, rows: Sequence[RouterRow]) -> None:
    """Write `routers.csv` into a run folder if there are rows."""
    if rows:
        write_csv(folder / "routers.csv", rows)


@torch.no_grad()
def figures_of(routing: Routing, router: Router) -> dict[str, float | None]:
    """Return the statistics of a decision on a batch; None where one is undefined.

    - "kept": share of tokens kept; in language models, of the tokens that may be skipped, as "load" is everywhere.
    - "same_positions": agreement of images on the kept positions beyond chance: 0 for independent choices, 1 for equal.
    - "spread": standard deviation of scores within an image, mean over images; over images if each has one score.
    - "level": root mean square of the scores.
    - "gate", "gate_std": mean and deviation of the gates of kept tokens.
    """
    keep_BN = routing.keep_BN
    free_BN = routing.free(router.prefix)
    per_image = router.config.router.per_image
    gate_S = _gates(routing)
    spread, level = _spread(routing.score_BN, free_BN, per_image=per_image)
    # One decision for all tokens of an image has no positions to compare.
    same_positions = None if per_image else _same_positions(keep_BN, free_BN)
    gate_mean = gate_std = None
    if len(gate_S):
        gate_mean = float(gate_S.mean())
        gate_std = float(gate_S.std(correction=0))
    return {
        "kept": _share(keep_BN, routing.counted_BN) or 0.0,
        "load": _share(keep_BN, free_BN),
        "same_positions": same_positions,
        "spread": spread,
        "level": level,
        "gate": gate_mean,
        "gate_std": gate_std,
    }


def _row(step: int, data: str, block: str, figures: Mapping[str, float | None]) -> RouterRow:
    rounded: dict[str, float | None] = {}
    for name in FIGURES:
        value = figures.get(name)
        if value is not None:
            value = float(f"{value:.6g}")
        rounded[name] = value
    return {"step": step, "data": data, "block": block, **rounded}


def _share(keep_BN: Tensor, among_BN: Tensor) -> float | None:
    total = int(among_BN.sum())
    if not total:
        return None
    return int((keep_BN & among_BN).sum()) / total


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
    score_BN = score_BN.double().masked_fill(~(free_BN & score_BN.isfinite()), torch.nan)
    if per_image:
        # One score for an image, in each of its tokens; the last is no prefix token. Transposed, images compete.
        score_BN = score_BN[:, -1:].T
    level = float(score_BN.square().nanmean().sqrt())
    score_BN = score_BN[(~score_BN.isnan()).sum(1) > 1]
    if not len(score_BN):
        return None, level
    variance_B = (score_BN - score_BN.nanmean(1, keepdim=True)).square().nanmean(1)
    return float(variance_B.sqrt().mean()), level


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
_SAYS = {
    "scores": "its scores are the same for all tokens, so that positions decide",
    "positions": "it keeps the same positions in every image of a batch, as a fixed pattern would",
    "all": "it keeps nearly all tokens that it may skip, so that little is saved",
    "nothing": "it keeps hardly any of the tokens that it may skip",
    "gradient": "no score has a gradient, so that it does not learn",
}


def _reason(config: RoutingConfig, figures: Mapping[str, float | None]) -> str | None:
    """Return the reason of a collapse, None for a healthy block; the first that applies explains the others."""
    load, spread, level, same = (figures[name] for name in ("load", "spread", "level", "same_positions"))
    reads = not config.router.positional
    if config.router.learns and load and figures.get("gradient") == 0:
        return "gradient"
    if reads and spread is not None and level is not None and spread <= _CONSTANT * level:
        return "scores"
    if isinstance(config.select, Threshold) and load is not None and not _NOTHING < load < _ALL:
        return "all" if load >= _ALL else "nothing"
    if reads and same is not None and same >= _SAME:
        return "positions"
    return None


def _advice(reason: str, config: RoutingConfig) -> str:
    """Return what to do about a collapse; only routers that learn take losses."""
    learns = config.router.learns
    if reason == "all":
        # MoDification (arXiv 2410.14268) ends there with its loss on the load alone.
        pull = ""
        if learns:
            pull = "; losses={'capacity': 1.0} pulls the share to the capacity, losses.load alone may not"
        return f"Raise select.threshold{pull}."
    if reason == "nothing":
        pull = ", or set losses={'capacity': 1.0}" if learns else ""
        return f"Lower select.threshold{pull}; select.min_tokens keeps a few in any case."
    if reason == "gradient":
        if config.gate.weighs:
            why = "Nothing reads what its gate weighs: leave the block out of blocks"
        else:
            gate = f"gate={config.gate.name!r} of scale {config.gate.scale:g}"
            why = f"{gate} sends none: set 'tanh', 'sigmoid' or 'linear' of another scale than 0"
        return f"{why}, or set losses such as {{'importance': 1.0}}."
    if not learns:
        return (
            f"router={config.router.name!r} does not tell these tokens apart: try another score, or router='stride', "
            "which keeps fixed positions at no cost."
        )
    lower = ""
    if "membership" in config.losses:
        lower = " A smaller losses.membership makes it less firm."
    return (
        "losses={'importance': 1.0} teaches it what attention finds, router='attention' needs no training, and "
        f"router='stride' keeps fixed positions at no cost.{lower}"
    )
