"""Losses of a causal language model: with joint decisions over a window, and token by token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.data.stream import BatchStream
from mmod.methods.base import decided_alone, deciding_together, methods_of
from mmod.routing import Routing
from mmod.speculation import every_token
from mmod.training.engine.distributed import sum_over_processes
from mmod.training.engine.evaluate import KeptShares, RoutedResult, evaluation_batches
from mmod.training.engine.task import autocast
from mmod.training.text.model import logits_of
from mmod.values import check_value

_PARTS = 8


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
        return sum(self.agreement.values()) / len(self.agreement) if self.agreement else None

    def columns(self) -> dict[str, float]:
        """Return the figures by name, with the mean agreement."""
        return super().columns() | ({} if self.mean_agreement is None else {"agreement": self.mean_agreement})

    def __str__(self) -> str:
        lines = [f"{self.loss:.4f} nats ({self.loss / math.log(2):.4f} bits) a byte, kept {self.mean_kept:.3f}"]
        if self.agreement and self.causal_loss is not None:
            gap = self.causal_loss - self.loss
            kept = sum(self.causal_kept.values()) / len(self.causal_kept)
            lines[0] += " by top-k"
            lines.append(f"token by token {self.causal_loss:.4f} nats ({gap:+.4f}), kept {kept:.3f}")
            parts = " ".join(f"{share:.3f}" for share in self.agreement_by_position)
            lines.append(f"both decide alike {self.mean_agreement:.4f} of tokens, by eighths of the window {parts}")
        if self.full_loss is not None:
            lines.append(f"all tokens in all layers {self.full_loss:.4f} nats")
        return f"{'; '.join(lines)} ({self.samples} windows)"


def evaluate(
    model: nn.Module,
    stream: BatchStream,
    device: torch.device | str = "cpu",
    precision: str = "fp32",
    *,
    elastic: bool = False,
    progress: bool = False,
) -> EvalResult:
    """Measure the loss of a model over one pass of a stream, in every way in which it can decide.

    With several processes, each evaluates its share of the data and all return the result of all data.

    Args:
        model: A causal language model, on `device`; its mode is restored at the end.
        elastic: Also measure the loss with all tokens in all layers.
    """
    device = torch.device(device)
    methods = methods_of(model)
    two_ways = any(method.two_ways for method in methods)
    together, alone, full = (_Losses(model, device) for _ in range(3))
    # By module: samples, then how many of them are decided alike at each position.
    agreement: dict[str, Tensor] = {}
    with evaluation_batches(model, stream, device, progress=progress) as batches, autocast(device, precision):
        for _, (tokens, following) in batches:
            with deciding_together(model):
                decisions = together.add(tokens, following)
            if two_ways:
                for name, alone_BN in decided_alone(model, decisions).items():
                    same_N = (alone_BN == decisions[name].keep_BN).double().sum(0)
                    counts = torch.cat([same_N.new_tensor([len(alone_BN)]), same_N])
                    agreement[name] = agreement.get(name, 0) + counts
                alone.add(tokens, following)
            if elastic:
                with every_token(model):
                    full.add(tokens, following)
    loss, kept, samples = together.means()
    causal_loss, causal_kept, _ = alone.means() if two_ways else (loss, {}, samples)
    shares = {name: _agreement_by_part(counts) for name, counts in agreement.items()}
    return EvalResult(
        loss=loss,
        samples=samples,
        kept=kept,
        causal_loss=causal_loss if all(method.causal for method in methods) else None,
        causal_kept=causal_kept,
        agreement={name: sum(parts) / len(parts) for name, parts in shares.items()},
        agreement_by_position=[sum(parts) / len(parts) for parts in zip(*shares.values())],
        full_loss=full.means()[0] if elastic else None,
    )


def judge_text(model: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return cross entropy in nats per byte and accuracy, of every window of bytes and the following bytes (B, N)."""
    device = next(model.parameters()).device
    tokens_BN, following_BN = (part.to(device) for part in batch)
    logits = logits_of(model, tokens_BN).float()
    loss_BN = F.cross_entropy(logits.movedim(-1, 1), following_BN, reduction="none")
    return loss_BN.mean(1), (logits.argmax(-1) == following_BN).float().mean(1)


class _Losses:
    """Loss and kept shares of one way to decide."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._shares = KeptShares(model, device)
        # Samples, tokens and loss.
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, tokens: Tensor, following: Tensor) -> Mapping[str, Routing]:
        """Evaluate a batch; return the decisions."""
        with self._shares.watch() as decisions:
            logits = logits_of(self._model, tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), following.flatten(), reduction="sum")
        self._sums += torch.stack([loss.new_tensor(len(tokens)), loss.new_tensor(tokens.numel()), loss]).double()
        return decisions

    def means(self) -> tuple[float, dict[str, float], int]:
        """Return loss per token, kept share by module, and samples; collective over processes."""
        samples, tokens, loss = sum_over_processes(self._sums).tolist()
        check_value("the mean loss of an evaluation", loss / tokens, float)
        return loss / tokens, self._shares.means(), int(samples)


def _agreement_by_part(counts: Tensor) -> list[float]:
    """Return the share of samples decided alike, by eighth of the window; collective over processes."""
    total = sum_over_processes(counts)
    return [float(part.mean()) for part in (total[1:] / total[0]).tensor_split(_PARTS) if len(part)]
