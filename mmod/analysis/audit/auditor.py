"""What an audit does with a batch: judge it as it was learned, then with every other choice of tokens.

Axes: B images, N tokens, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmod.analysis.audit.across import Counter
from mmod.analysis.audit.choices import Choice, Kept, Place
from mmod.analysis.audit.replace import free_tokens, keep_best, only_free, replaced_decisions
from mmod.analysis.audit.result import LEARNED
from mmod.analysis.audit.statistics import Values
from mmod.blocks import RoutedBlock
from mmod.model import routed_blocks
from mmod.routing import Routing

__all__ = ["Auditor", "Judge"]

Judge = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]
"""Runs a model on a batch, once, and returns the loss and the accuracy in [0, 1] of each image or sample, (B,) each."""


class Auditor:
    """Judges batches with one choice of tokens after another.

    Args:
        model: A routed model in evaluation.
        judge: Runs it on a batch.
        made: The choices by name.
        draws: Random choices for each image.
        grid: Rows and columns of the tokens that may be skipped, None to ask the model.

    Attributes:
        positions: What the model keeps at each position.
        across: How the decisions that were judged hang together.
    """

    def __init__(
        self, model: nn.Module, judge: Judge, made: Mapping[str, Choice], draws: int, grid: tuple[int, int] | None
    ) -> None:
        self.model = model
        self.judge = judge
        self.made = made
        self.draws = draws
        self.grid = grid or getattr(getattr(model, "patch_embed", None), "grid_size", None)
        self.blocks = routed_blocks(model)
        self.positions, self.across = Counter(list(self.blocks)), Counter(list(self.blocks))
        # Blocks that share scores, so that one draw serves all of them.
        spans = {name: _span(name, block) for name, block in self.blocks.items()}
        self._number = {name: list(dict.fromkeys(spans.values())).index(span) for name, span in spans.items()}
        self._last: dict[str, Kept] = {}
        self._images = 0
        self._loss: dict[str, list[Values]] = {name: [] for name in (LEARNED, *made)}
        self._accuracy: dict[str, list[Values]] = {name: [] for name in (LEARNED, *made)}

    def learn(self, batch: Any) -> None:
        """Count what the model keeps at each position.

        Args:
            batch: A batch.
        """
        _, _, learned = self._as_learned(batch)
        self.positions.add({name: routing.keep_BN for name, routing in learned.items()}, self._free(learned))

    def judge_batch(self, batch: Any) -> None:
        """Judge a batch with every choice of tokens.

        Args:
            batch: A batch.
        """
        loss_B, accuracy_B, learned = self._as_learned(batch)
        free = self._free(learned)
        self.across.add({name: routing.keep_BN for name, routing in learned.items()}, free)
        self._note(LEARNED, loss_B, accuracy_B)
        partners = self._partners(learned, free)
        images = range(self._images, self._images + len(loss_B))
        for name, choice in self.made.items():
            draws = range(self.draws if choice.family == "random" else 1)
            judged = [self._replaced(batch, choice, learned, free, partners, images, draw) for draw in draws]
            self._note(name, *(torch.stack(own).double().mean(0) for own in zip(*judged)))
        self._images = images.stop

    def outcomes(self) -> tuple[dict[str, Values], dict[str, Values]]:
        """Return accuracy and loss of each image, for each condition.

        Raises:
            ValueError: If there were fewer than two images.
        """
        if self._images < 2:
            raise ValueError(f"an audit needs two images or more, got {self._images}")
        accuracy = {name: np.concatenate(own) for name, own in self._accuracy.items()}
        return accuracy, {name: np.concatenate(own) for name, own in self._loss.items()}

    def _note(self, name: str, loss_B: Tensor, accuracy_B: Tensor) -> None:
        self._loss[name].append(loss_B.double().cpu().numpy())
        self._accuracy[name].append(accuracy_B.double().cpu().numpy())

    def _as_learned(self, batch: Any) -> tuple[Tensor, Tensor, dict[str, Routing]]:
        """Judge a batch as it was learned, and return the decision of each router that was asked."""
        learned: dict[str, Routing] = {}

        def record(name: str, x_BND: Tensor, routing: Routing) -> None:
            if name in learned:
                raise ValueError(f"{name} decided twice on a batch: `judge` must run the model once")
            learned[name] = routing

        with replaced_decisions(self.model, record):
            loss_B, accuracy_B = self.judge(self.model, batch)
        if not learned:
            raise ValueError(
                "no router of the model decided: `judge` runs another model, or a compiled one. Give the model itself"
            )
        for name, routing in learned.items():
            if not len(loss_B) == len(accuracy_B) == len(routing.index_BK):
                raise ValueError(
                    f"`judge` returned losses of {len(loss_B)} and accuracies of {len(accuracy_B)} images, and {name} "
                    f"decided on {len(routing.index_BK)}: each must have its own"
                )
        return loss_B, accuracy_B, learned

    def _free(self, learned: Mapping[str, Routing]) -> dict[str, Tensor]:
        return {name: free_tokens(routing, self.blocks[name].router.prefix) for name, routing in learned.items()}

    def _replaced(
        self, batch: Any, choice: Choice, learned: Mapping[str, Routing], free: Mapping[str, Tensor],
        partners: Mapping[str, Kept], images: range, draw: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Judge a batch with another choice of tokens."""

        def replace(name: str, x_BND: Tensor, routing: Routing) -> Routing:
            frequency_F = self.positions.frequency(name, x_BND.shape[1]).to(x_BND.device)
            place = Place(
                name, self._number[name], x_BND, learned[name], free[name], partners[name], images, frequency_F,
                self._grid(free[name]), draw,
            )  # fmt: skip
            return keep_best(choice.rank(place), learned[name], routing, self.blocks[name].router)

        with replaced_decisions(self.model, replace):
            return self.judge(self.model, batch)

    def _grid(self, free_BN: Tensor) -> tuple[int, int]:
        """Return rows and columns of the tokens that may be skipped; one row where nobody knows."""
        tokens = int(free_BN.sum(1).max())
        if self.grid is not None and self.grid[0] * self.grid[1] == tokens:
            return self.grid
        side = round(tokens**0.5)
        return (side, side) if side * side == tokens else (1, tokens)

    def _partners(self, learned: Mapping[str, Routing], free: Mapping[str, Tensor]) -> dict[str, Kept]:
        """Return what was decided on the image before each; the first image takes the one after it."""
        partners: dict[str, Kept] = {}
        for name, routing in learned.items():
            kept = Kept(only_free(routing.keep_BN, free[name]), only_free(routing.score_BN, free[name]))
            before = self._last.get(name, Kept(*(own[1:2] if len(own) > 1 else own for own in kept)))
            self._last[name] = Kept(*(own[-1:].clone() for own in kept))
            fits = before.keep_BF.shape[1] == kept.keep_BF.shape[1]
            partners[name] = Kept(*(torch.cat([b, k[:-1]]) for b, k in zip(before, kept))) if fits else before
        return partners


def _span(name: str, block: RoutedBlock) -> tuple[str, object]:
    """Return what blocks have in common that share a score."""
    state, router = block.mod_state, block.router
    shared = router.config.router.shared and state.span is not None
    return name.rpartition(".")[0], state.span if shared else name
