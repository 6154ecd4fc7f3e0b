"""How well a causal language model predicts a text: by the top-k of whole windows, and token by token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmod.analysis import Trace, trace
from mmod.analysis.modes import in_mode
from mmod.data.stream import BatchStream
from mmod.io.progress import progress_bar
from mmod.methods.base import decided_alone, deciding_together, methods_of
from mmod.routing import Routing
from mmod.speculation import every_token
from mmod.training.engine.distributed import sum_over_processes
from mmod.training.engine.evaluate import RoutedResult
from mmod.training.engine.task import autocast
from mmod.training.text.model import logits_of
from mmod.values import check_value

__all__ = ["EvalResult", "evaluate", "judge_text"]

_PARTS = 8


@dataclass(frozen=True)
class EvalResult(RoutedResult):
    """The outcome of an evaluation on text; losses in nats a byte, each byte predicted from those before it.

    Args:
        loss: Loss with the decisions of training: the top-k of each window, which sees tokens to come, where the model
            is routed so.
        samples: Windows seen.
        kept: Name of each routed block, recursion or expert to its mean kept share of tokens with these decisions.
        causal_loss: Loss where each token is decided from the tokens before it alone, as in generation: that of a dense
            model, or of one that is routed by threshold, is `loss`. None where a token cannot be decided alone.
        causal_kept: Name of each routed block to its mean kept share then.
        agreement: Name of each routed block to the share of tokens that both ways decide alike, given the states that
            follow from the top-k; empty where there are not two ways.
        agreement_by_position: The same in each eighth of the window, mean over blocks.
        full_loss: Loss where all tokens run through all layers, of models that were trained for it.
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
        """Mean agreement over the routed blocks; None where there are not two ways."""
        return sum(self.agreement.values()) / len(self.agreement) if self.agreement else None

    def columns(self) -> dict[str, float]:
        """Return the figures as columns of the run's history."""
        single = {
            "loss": self.loss,
            "causal_loss": self.causal_loss,
            "full_loss": self.full_loss,
            "agreement": self.mean_agreement,
        }
        return {name: value for name, value in single.items() if value is not None} | self.kept_columns()

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


@torch.no_grad()
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

    With several processes each passes its own part of the data and all get the result of the whole.

    Args:
        model: A causal language model, on `device`; its mode is restored at the end.
        stream: The batches of tokens and of those that follow them.
        device: Where the model is.
        precision: "fp32", "bf16" or "fp16".
        elastic: Also measure the loss where all tokens run through all layers.
        progress: Show a bar.

    Returns:
        The figures.
    """
    device = torch.device(device)
    methods = methods_of(model)
    two_ways = any(method.two_ways for method in methods)
    trained, alone, full = (_Sums(model, device) for _ in range(3))
    agreement = _Agreement(device) if two_ways else None
    bar = progress_bar(stream.batches(0), total=stream.steps_per_epoch, desc="evaluate", shown=progress, leave=False)
    with in_mode(False, model), autocast(device, precision):
        for batch in bar:
            tokens, following = (part.to(device, non_blocking=True) for part in batch)
            with deciding_together(model):
                decisions = trained.add(tokens, following)
            if agreement is not None:
                agreement.add(decisions, decided_alone(model, decisions))
                alone.add(tokens, following)
            if elastic:
                with every_token(model):
                    full.add(tokens, following)
    loss, kept, samples = trained.means()
    causal_loss, causal_kept, _ = alone.means() if two_ways else (loss, {}, samples)
    shares = {} if agreement is None else agreement.means()
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
    """Return cross entropy in nats a byte and the share of bytes that are the most likely ones, of each window.

    Args:
        model: A causal language model of bytes.
        batch: Bytes (B, N) and the byte after each of them (B, N).
    """
    device = next(model.parameters()).device
    tokens_BN, following_BN = (part.to(device) for part in batch)
    logits = logits_of(model, tokens_BN).float()
    loss_BN = F.cross_entropy(logits.movedim(-1, 1), following_BN, reduction="none")
    return loss_BN.mean(1), (logits.argmax(-1) == following_BN).float().mean(1)


class _Sums:
    """Loss and kept shares of one way to decide, summed over batches."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._names = Trace(model).names
        # Samples, tokens and loss, then the sum of shares of each place.
        self._sums = torch.zeros(3 + len(self._names), dtype=torch.float64, device=device)

    def add(self, tokens: Tensor, following: Tensor) -> Mapping[str, Routing]:
        """Pass a batch through the model; return what was decided."""
        tracing: AbstractContextManager[Mapping[str, Routing]] = trace(self._model) if self._names else nullcontext({})
        with tracing as decisions:
            logits = logits_of(self._model, tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), following.flatten(), reduction="sum")
        kept = [decisions[name].keep_BN.double().mean(1).sum() for name in self._names]
        self._sums += torch.stack([loss.new_tensor(len(tokens)), loss.new_tensor(tokens.numel()), loss, *kept]).double()
        return decisions

    def means(self) -> tuple[float, dict[str, float], int]:
        """Return loss a token, kept share of each block, and samples; all processes must ask."""
        samples, tokens, loss, *kept = sum_over_processes(self._sums).tolist()
        check_value("the mean loss of an evaluation", loss / tokens, float)
        return loss / tokens, {name: share / samples for name, share in zip(self._names, kept)}, int(samples)


class _Agreement:
    """How many tokens are decided alike by the top-k and one by one, by block and place in the window."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Samples, then those decided alike at each position, by place.
        self._sums: dict[str, Tensor] = {}

    def add(self, decisions: Mapping[str, Routing], alone: Mapping[str, Tensor]) -> None:
        """Count the decisions on a batch.

        Args:
            decisions: Those of a pass that decided together, by place.
            alone: Which tokens would run if each were decided alone, by place.
        """
        for name, alone_BN in alone.items():
            same_N = (alone_BN == decisions[name].keep_BN).double().sum(0)
            counts = torch.cat([same_N.new_tensor([len(alone_BN)]), same_N]).to(self._device)
            self._sums[name] = self._sums.get(name, 0) + counts

    def means(self) -> dict[str, list[float]]:
        """Return the shares of each place by eighths of the window; all processes must ask."""
        shares = {}
        for name, sums in self._sums.items():
            samples, *_ = total = sum_over_processes(sums)
            shares[name] = [float(part.mean()) for part in (total[1:] / samples).tensor_split(_PARTS) if len(part)]
        return shares
