"""Losses of a causal language model: with joint decisions over a window, and token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch.nn.functional as F
from torch import Tensor, nn

from mmod.analysis import Trace
from mmod.methods.base import deciding_together, methods_of
from mmod.methods.route import every_token
from mmod.training.engine.evaluate import (
    KEPT,
    Columns,
    RoutedResult,
    decisions_of,
    kept_means,
    kept_rows,
    mean_share,
)
from mmod.training.engine.task import autocast
from mmod.training.text.task import logits_of
from mmod.values import check_value

_PARTS = 8
_AGREEMENT = "agreement/"
_CAUSAL = "causal_kept/"


@dataclass(frozen=True)
class EvalResult(RoutedResult):
    """The result of an evaluation on text; losses in nats per byte.

    Args:
        loss: Loss with the decisions of training; top-k routing compares all tokens of a window, later ones included.
        samples: Number of windows.
        kept: Mean kept share of tokens with these decisions, by routed block, recursion or expert.
        causal_loss: Loss if each token is decided from earlier tokens alone, as in generation; equal to `loss` for a
            dense model and for threshold routing. None if tokens cannot be decided alone.
        causal_kept: Mean kept share then, by routed block.
        agreement: Share of tokens that both ways decide alike, in the states of the joint decisions, by routed block;
            empty if there is only one way.
        agreement_by_position: The same by eighth of the window, mean over blocks.
        full_loss: Loss with all tokens in all layers, for models trained for it.
    """

    loss: float
    samples: int
    kept: dict[str, float]
    causal_loss: float | None
    causal_kept: dict[str, float] = field(default_factory=dict)
    agreement: dict[str, float] = field(default_factory=dict)
    agreement_by_position: list[float] = field(default_factory=list)
    full_loss: float | None = None

    @property
    def mean_agreement(self) -> float | None:
        """Mean agreement over the routed blocks; None if there is only one way."""
        if self.agreement:
            return sum(self.agreement.values()) / len(self.agreement)
        return None

    def columns(self) -> dict[str, float]:
        """Return the figures by name, with the mean agreement."""
        columns = super().columns()
        if self.mean_agreement is not None:
            columns["agreement"] = self.mean_agreement
        return columns

    def __str__(self) -> str:
        bits = self.loss / math.log(2)
        lines = [f"{self.loss:.4f} nats ({bits:.4f} bits) a byte{self.told_kept}"]
        if self.agreement and self.causal_loss is not None:
            gap = self.causal_loss - self.loss
            kept = mean_share(self.causal_kept)
            lines[0] += " by top-k"
            lines.append(f"token by token {self.causal_loss:.4f} nats ({gap:+.4f}), kept {kept:.3f}")
            parts = " ".join(f"{share:.3f}" for share in self.agreement_by_position)
            lines.append(f"both decide alike {self.mean_agreement:.4f} of tokens, by eighths of the window {parts}")
        if self.full_loss is not None:
            lines.append(f"all tokens in all layers {self.full_loss:.4f} nats")
        return f"{'; '.join(lines)} ({self.samples} windows)"


def evaluate_batch(model: nn.Module, batch: tuple[Tensor, Tensor], precision: str = "fp32") -> Columns:
    """Return the rows of a batch of windows, as the model decides in its mode, in one pass.

    These are "loss" in nats per byte, "outcome", the share of bytes that are right, and kept shares.

    Args:
        batch: Bytes (B, N) and the bytes after them.
    """
    tokens_BN, following_BN = batch
    with autocast(tokens_BN.device, precision), decisions_of(model) as decisions:
        logits_BNC = logits_of(model, tokens_BN).float()
    loss_BN = F.cross_entropy(logits_BNC.movedim(-1, 1), following_BN, reduction="none")
    right_BN = logits_BNC.argmax(-1) == following_BN
    return {"loss": loss_BN.double().mean(1), "outcome": right_BN.double().mean(1), **kept_rows(decisions)}


def evaluate_ways(
    model: nn.Module, batch: tuple[Tensor, Tensor], precision: str = "fp32", *, elastic: bool = False
) -> Columns:
    """Return the rows of a batch in every way in which the model can decide.

    Decisions as in training have the names of `evaluate_batch`. "causal_loss" and "causal_kept/" are for tokens that
    are decided one by one; "full_loss" is for all tokens in all layers. "agreement/" is True at tokens that both ways
    decide alike, by module (B, N).
    """
    # Together first: the decisions are compared with those of the second way.
    with deciding_together(model), decisions_of(model) as decisions:
        rows = evaluate_batch(model, batch, precision)
    if isinstance(decisions, Trace) and any(method.two_ways for method in methods_of(model)):
        with autocast(batch[0].device, precision):
            alone = decisions.decided_alone()
        for name, alone_BN in alone.items():
            rows[f"{_AGREEMENT}{name}"] = alone_BN == decisions[name].keep_BN
        causal = evaluate_batch(model, batch, precision)
        rows["causal_loss"] = causal["loss"]
        kept = {name.removeprefix(KEPT): value for name, value in causal.items() if name.startswith(KEPT)}
        rows |= {f"{_CAUSAL}{name}": value for name, value in kept.items()}
    if elastic:
        with every_token(model):
            rows["full_loss"] = evaluate_batch(model, batch, precision)["loss"]
    return rows


def score(rows: Columns, model: nn.Module) -> EvalResult:
    """Return the result of the rows of all windows of a model."""
    losses = {}
    for name in ("loss", "causal_loss", "full_loss"):
        if name not in rows:
            continue
        losses[name] = float(rows[name].mean())
        check_value("the mean loss of an evaluation", losses[name], float)
    shares = {}
    for name, same_BN in rows.items():
        if not name.startswith(_AGREEMENT):
            continue
        # In eight parts: agreement falls along the window.
        parts = same_BN.double().mean(0).tensor_split(_PARTS)
        shares[name.removeprefix(_AGREEMENT)] = [float(part.mean()) for part in parts if len(part)]
    causal_loss = None
    if all(method.causal for method in methods_of(model)):
        # A model that decides in one way has only the loss of this way.
        causal_loss = losses.get("causal_loss", losses["loss"])
    return EvalResult(
        loss=losses["loss"],
        samples=len(rows["loss"]),
        kept=kept_means(rows),
        causal_loss=causal_loss,
        causal_kept=kept_means(rows, _CAUSAL),
        agreement={name: sum(parts) / len(parts) for name, parts in shares.items()},
        agreement_by_position=[sum(parts) / len(parts) for parts in zip(*shares.values())],
        full_loss=losses.get("full_loss"),
    )
