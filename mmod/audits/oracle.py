"""What each single token is worth to a decision, by leaving it out, and whether scores agree with that.

Axes: B images, N tokens, F tokens of an image that may be skipped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmod.analysis.evaluations import joined
from mmod.analysis.statistics import Estimate, normal_mean
from mmod.analysis.table import Table
from mmod.audits.choices import LEARNED, ORACLE, RANDOM, Choice, DecisionContext, rank_first
from mmod.audits.tables import LOSS, BatchRows
from mmod.io.tables import MarkdownTable, table_of
from mmod.routing import Routing

# How much larger the loss of each image is with a choice of tokens than with the learned one (B,).
ChangeOf = Callable[[Choice], Tensor]


@dataclass(frozen=True)
class LeaveOneOut:
    """Effect of single tokens on the loss, on some of the images.

    The worth of a token in a decision is the loss with the best other token in its place, minus the loss with it kept;
    all other decisions, and the number of kept tokens, are as learned.

    Args:
        agreement: Rank correlation of scores and worth by decision, mean over images; `norm` that of norms and worth.
        oracle: Loss with the tokens of the highest worth, minus `loss`, that of the learned choice; `random` likewise.
    """

    images: int
    agreement: dict[str, Estimate]
    norm: dict[str, Estimate]
    loss: Estimate
    oracle: Estimate
    random: Estimate

    def table(self) -> MarkdownTable:
        """Return the correlations by decision."""
        columns = {"name": ("decision", ""), "score": ("score and worth of a token", ".2f"), "norm": ("norm", ".2f")}
        rows = [{"name": name, "score": score, "norm": self.norm[name]} for name, score in self.agreement.items()]
        caption = (
            f"Each token was left out once, on {self.images} images of loss {self.loss:.3f}. With the tokens that are "
            f"worth most it changes by {self.oracle:+.3f}, with random ones by {self.random:+.3f}. Agreement is the "
            "rank correlation within an image, with 95 % intervals over images."
        )
        return table_of(columns, rows, caption)


def worth_of(
    change_of: ChangeOf, learned: Mapping[str, Routing], free: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Leave out, or let in, each token of a batch; return its worth by decision, and what agrees with that."""
    worth: dict[str, Tensor] = {}
    agreement: dict[str, dict[str, Tensor]] = {}
    for name, routing in learned.items():
        # Tokens that an earlier block of the span dropped cannot be chosen.
        open_BN = free[name] & (routing.score_BN > -torch.inf)
        worth[name], norm_BN = _worth(change_of, name, routing, open_BN)
        agreement[name] = {}
        for what, value_BN in (("score", routing.score_BN), ("norm", norm_BN)):
            agreement[name][what] = rank_agreement(value_BN, worth[name], open_BN).cpu()
    return worth, agreement


def leave_one_out_of(table: Table, batches: Sequence[BatchRows]) -> LeaveOneOut | None:
    """Return the effect of single tokens, None where none was left out."""
    if ORACLE not in table.runs:
        return None
    # The first samples alone, with one draw of random tokens.
    losses = {name: torch.from_numpy(table.runs[name][0].outcomes[LOSS]) for name in (LEARNED, RANDOM, ORACLE)}
    images = len(losses[ORACLE])
    loss_I = losses[LEARNED][:images]
    agreement = {}
    norm = {}
    for name in batches[0].decisions:
        columns = joined([batch.decisions[name].worth for batch in batches if batch.decisions[name].worth])
        agreement[name] = normal_mean(columns["score"])
        norm[name] = normal_mean(columns["norm"])
    return LeaveOneOut(
        images,
        agreement,
        norm,
        loss=normal_mean(loss_I),
        oracle=normal_mean(losses[ORACLE] - loss_I),
        random=normal_mean(losses[RANDOM][:images] - loss_I),
    )


def _worth(change_of: ChangeOf, name: str, routing: Routing, free_BN: Tensor) -> tuple[Tensor, Tensor]:
    """Return the worth of each token that may be skipped, see `LeaveOneOut`, and its norm (B, N)."""
    order_BN = free_BN.cumsum(1) - 1
    # One column of images at a time: token number k of each image is flipped in the same pass.
    worth_BN = norm_BN = torch.zeros(free_BN.shape, dtype=torch.float64, device=free_BN.device)
    for token in range(int(free_BN.sum(1).max())):
        flipped_BN = (order_BN == token) & free_BN

        # Bound as a default, because a closure would see the last value of the loop.
        def rank(context: DecisionContext, flipped_BN: Tensor = flipped_BN) -> Tensor:
            nonlocal norm_BN
            rank_BN = rank_first(context.learned.keep_BN, context.learned.score_BN).double()
            if context.block != name:
                return rank_BN
            norm_BN = context.x_BND.float().norm(dim=-1)
            # A kept token falls below all others, a skipped one rises above them.
            turned_BN = torch.where(context.learned.keep_BN, -1.0, float(rank_BN.shape[1] * 2))
            return torch.where(flipped_BN, turned_BN, rank_BN)

        change_B = change_of(Choice("other", rank)).to(free_BN.device)
        # A kept token is worth what its absence costs, a skipped one what its presence saves.
        sign_BN = torch.where(routing.keep_BN, 1.0, -1.0).double()
        worth_BN = torch.where(flipped_BN, sign_BN * change_B[:, None], worth_BN)
    return worth_BN, norm_BN


def rank_agreement(one_BN: Tensor, other_BN: Tensor, free_BN: Tensor) -> Tensor:
    """Return the rank correlation of two values of the tokens of each image, NaN where either is all the same (B,).

    Source: Spearman, The American Journal of Psychology 15 (1904).
    """
    ranks = [_ranks(value_BN, free_BN) for value_BN in (one_BN, other_BN)]
    count_B1 = free_BN.sum(1, keepdim=True)
    centred = [torch.where(free_BN, rank_BN - rank_BN.sum(1, keepdim=True) / count_B1, 0.0) for rank_BN in ranks]
    lengths_B = centred[0].norm(dim=1) * centred[1].norm(dim=1)
    return (centred[0] * centred[1]).sum(1) / torch.where(lengths_B > 0, lengths_B, torch.nan)


def _ranks(value_BN: Tensor, free_BN: Tensor) -> Tensor:
    """Return ranks among the tokens that count, the mean of their positions for equal ones, and 0 elsewhere (B, N)."""
    # All pairs of an image: ranks of equal values are the mean of their positions, as `argsort` does not give.
    lower_BNN = (value_BN[:, None] < value_BN[:, :, None]) & free_BN[:, None]
    equal_BNN = (value_BN[:, None] == value_BN[:, :, None]) & free_BN[:, None]
    return torch.where(free_BN, lower_BNN.sum(2) + 0.5 * equal_BNN.sum(2), 0.0).double()
