"""The router of a decoder layer, which chooses within groups of tokens.

Axes: B samples, N tokens, K slots per sample, D channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmod.config import RoutingConfig, Score, Threshold
from mmod.ops.gate import apply_gate, step_gate
from mmod.ops.select import Kept
from mmod.routing.added import Drawn
from mmod.routing.decision import KEPT, Routing, TokenGroups, TokenMasks
from mmod.routing.groups import kept_by_mask, select_within
from mmod.routing.router import Router
from mmod.routing.score.linear import LinearScore


class ExactLinear(Drawn, nn.Linear):
    """A linear layer that bitsandbytes and torch do not quantize, because they replace only `nn.Linear` itself."""

    weight: nn.Parameter

    def draw(self) -> None:
        """Draw the initial weights as torch does."""
        nn.Linear.reset_parameters(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        self.check_values(x)
        return super().forward(x)


class Predictor(nn.Module):
    """Predict from a token alone whether it will be kept; the token receives no gradient.

    Source: Raposo et al., arXiv 2404.02258, section 3.5 (a small network with a stopped gradient).
    """

    def __init__(self, dim: int, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.hidden = ExactLinear(dim, max(8, dim // 8), device=device, dtype=dtype)
        self.out = ExactLinear(max(8, dim // 8), 1, device=device, dtype=dtype)

    def forward(self, x_BND: Tensor) -> Tensor:
        """Return logits (B, N) for tokens (B, N, D)."""
        x_BND = x_BND.detach()
        # Tokens grow with depth: only their directions are read.
        scale = x_BND.float().square().mean(dim=-1, keepdim=True).clamp_min(1e-12).rsqrt()
        x_BND = (x_BND * scale).to(self.hidden.weight.dtype)
        return self.out(nn.functional.silu(self.hidden(x_BND))).squeeze(-1).float()


class DecoderRouter(Router):
    """A router that selects within groups of tokens; its capacity is the share kept of those that may be skipped."""

    def __init__(self, config: RoutingConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self.predictor = None
        if config.language.predictor:
            self.predictor = Predictor(options["dim"], options.get("device"), options.get("dtype"))

    @property
    def always_keeps(self) -> bool:
        """Whether some token runs at any capacity, as text does if only image tokens may be skipped."""
        return self.config.language.tokens != "all"

    def forward(
        self,
        x_BND: Tensor,
        importance_BN: Tensor | None = None,
        tokens: TokenMasks | TokenGroups | None = None,
        earlier: Routing | None = None,
    ) -> Routing:
        """Decide for a batch of tokens, see `Router.forward`; no tokens of texts are joined."""
        if not isinstance(tokens, TokenGroups):
            self._refuse_tokens(tokens, TokenGroups)
        groups = tokens
        importance_BN = self._importance(x_BND, importance_BN, groups)
        score_BN = self._score_groups(x_BND, self.config.router, importance_BN, groups)
        predicted_BN = None
        if self.predictor is not None:
            predicted_BN = self.predictor(x_BND)
        if self.shares_own_score:
            importance_BN = None
        gate = self.config.gate
        select = self.config.select
        if gate.name == "step" and isinstance(select, Threshold) and self.training:
            return self._run_all_of(score_BN, select.single, groups, importance_BN)
        kept = self._slots(score_BN, predicted_BN, groups)
        gate_BK = None
        skipped_BN = None
        weight_BN = apply_gate(score_BN, gate.name, gate.scale)
        if weight_BN is not None:
            # Where image tokens alone may be skipped, text runs at weight 1.
            gate_BK = torch.where(groups.gated_BN, weight_BN, 1.0).gather(1, kept.index_BK)
            if self.config.skipped == "scale":
                skipped_BN = torch.where(groups.free_BN, weight_BN, 1.0)
        return Routing(
            kept,
            score_BN,
            gate_BK,
            skipped_BN,
            tokens=groups,
            importance_BN=importance_BN,
            predicted_BN=predicted_BN,
            rule=self.rule,
        )

    def _importance(self, x_BND: Tensor, importance_BN: Tensor | None, groups: TokenGroups) -> Tensor | None:
        """Return importance by sample (B, N): that of the layer before, or else of the vision tower or of pixels."""
        if importance_BN is not None:
            if groups.segments is None or not self.config.reads_attention(self.training):
                return importance_BN
            # A mean over the queries of the row becomes one over those of the sample.
            return importance_BN / groups.segments.share_BN.to(importance_BN.device)
        wanted = self.config.wants_importance(self.training)
        if not groups.skips and (wanted or self.config.router.shared):
            # Without a choice no importance was computed, and scores have no effect.
            return x_BND.new_zeros(x_BND.shape[:2], dtype=torch.float32)
        if groups.importance is not None and (wanted or self.config.router.reads_pixels):
            return groups.importance().to(x_BND.device)
        return None

    def _score_groups(self, x_BND: Tensor, score: Score, importance_BN: Tensor | None, tokens: TokenGroups) -> Tensor:
        """Return raw scores (B, N), of packed samples as if each had a row of its own."""
        segments = tokens.segments
        is_shared = score.shared and importance_BN is not None
        if score.reads_frames and not is_shared:
            assert self.score is not None
            # In packed rows too, the frame before stands in the same row.
            return self.score(x_BND, tokens.free_BN, earlier_BN=tokens.earlier_BN)
        # Shared scores are ready, and a linear score reads each token alone.
        if segments is None or is_shared or isinstance(self.score, LinearScore):
            return self._score_rows(x_BND, score, importance_BN, tokens.free_BN)
        importance_SL = None
        if importance_BN is not None:
            importance_SL = segments.split(importance_BN)
        free_SL = segments.split(tokens.free_BN) & segments.valid_SL
        score_SL = self._score_rows(segments.split(x_BND), score, importance_SL, free_SL)
        return segments.pack(score_SL)

    def _score_rows(self, x_BND: Tensor, score: Score, importance_BN: Tensor | None, free_BN: Tensor) -> Tensor:
        """Return raw scores of rows (B, N) that hold one sample each."""
        score_BN = self._score(x_BND, score, importance_BN, free_BN)
        if score.positional and score_BN is not importance_BN:
            # By rank among the tokens that may be skipped, so that padding and text do not change the draw.
            rank_BN = (free_BN.cumsum(1) - 1).clamp(min=0)
            score_BN = score_BN.gather(1, rank_BN)
        return score_BN

    def _normalised(self, score_BN: Tensor, tokens: TokenGroups) -> Tensor:
        """Return the values that a threshold is compared with (B, N), relative to those of the same sample."""
        segments = tokens.segments
        normalised = self.config.router.normalised
        if segments is None:
            return normalised(score_BN, tokens.free_BN)
        free_SL = segments.split(tokens.free_BN) & segments.valid_SL
        return segments.pack(normalised(segments.split(score_BN), free_SL))

    def _run_all_of(
        self, score_BN: Tensor, threshold: float, tokens: TokenGroups, importance_BN: Tensor | None
    ) -> Routing:
        """Run all tokens, skipped ones at weight 0, so that the score learns from them too."""
        there_BN = tokens.group_BN >= KEPT
        passes_BN = step_gate(self._normalised(score_BN, tokens), threshold)
        gate_BN = torch.where(tokens.free_BN, passes_BN, 1.0)
        kept = kept_by_mask(there_BN)
        gate_BK = gate_BN.gather(1, kept.index_BK)
        # Torch 2.11 cannot rebuild what `_replace` makes, if the value outlives a compiled graph.
        kept = Kept(kept.index_BK, kept.valid_BK, kept.total, idle_BK=gate_BK == 0)
        return Routing(kept, score_BN, gate_BK, tokens=tokens, importance_BN=importance_BN, rule=self.rule)

    def _slots(self, score_BN: Tensor, predicted_BN: Tensor | None, tokens: TokenGroups) -> Kept:
        """Return the kept tokens."""
        select = self.config.select
        language = self.config.language
        threshold = None
        if isinstance(select, Threshold):
            threshold = select.single
        if not self.training and language.inference_threshold is not None:
            threshold = language.inference_threshold
            if predicted_BN is not None:
                score_BN = predicted_BN
        if threshold is None:
            return select_within(score_BN, self.capacity, tokens)
        free_BN = tokens.free_BN
        normalised_BN = self._normalised(score_BN.detach(), tokens)
        keep_BN = (tokens.group_BN == KEPT) | (free_BN & (normalised_BN >= threshold))
        if tokens.alone:
            return Kept(torch.zeros_like(keep_BN, dtype=torch.long), keep_BN)
        return kept_by_mask(keep_BN)
