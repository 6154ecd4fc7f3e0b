"""The router of one block: score, select and gate, and the decision they return.

Axes: B images, N tokens, K kept slots per image, D channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import NoReturn

import torch
from torch import Tensor, nn

from mmod.config import Patches, Placement, RoutingConfig, Score, Threshold, rational, spelled
from mmod.ops import backend
from mmod.ops.gate import apply_gate, step_gate
from mmod.ops.select import (
    Kept,
    cannot_count,
    kept_count,
    select_images,
    select_threshold,
    select_topk,
    sort_topk,
)
from mmod.routing.decision import Routing, Rule, TokenGroups, TokenMasks
from mmod.routing.joiner import choose_joiner
from mmod.threads import PerThread


class Router(nn.Module):
    """Decide which tokens of a block run: score, then select, then gate.

    Args:
        block: Index of the block in its model.
        capacity: Share of tokens kept.
        prefix: Number of tokens that are always kept: the leading ones, unless a call marks others.
        dtype: Dtype of the parameters; scores are fp32.
        patches: See `mmod.config.Placement`.

    Example:
        >>> router = Router(RoutingConfig(router="linear"), dim=8, block=1, capacity=0.5, prefix=1)
        >>> routing = router(torch.randn(2, 10, 8))
        >>> routing.kept.index_BK.shape, bool((routing.kept.index_BK[:, 0] == 0).all())
        (torch.Size([2, 5]), True)
    """

    def __init__(
        self,
        config: RoutingConfig,
        *,
        dim: int,
        block: int,
        capacity: float,
        prefix: int = 0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        patches: Callable[[], Patches] | None = None,
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.shares_own_score = config.router.shares_own_score
        # Its capacity in the config, from which `mmod.set_capacity_` scales.
        self.planned = rational(capacity)
        self._settings = Rule(config, self.planned)
        self._override: PerThread[Rule | None] = PerThread(type(None))
        placement = Placement(dim, block, config.gate, prefix, device, dtype, patches)
        self.score: nn.Module | None = config.router.make(placement)
        # Whom skipped tokens join: the nearest kept token, the first of their group, or none.
        self.joiner = choose_joiner(config, self.score, prefix)

    @property
    def rule(self) -> Rule:
        """The rule of this thread's passes: set by `override`, or else the router's settings."""
        return self._override.value or self._settings

    def override(self, rule: Rule | None) -> Rule | None:
        """Set the rule of this thread's passes, None for the router's settings; return the previous override."""
        previous = self._override.value
        self._override.value = rule
        return previous

    @property
    def config(self) -> RoutingConfig:
        """How this thread's passes score, select and gate."""
        # As `rule`, in a call less.
        return (self._override.value or self._settings).config

    @config.setter
    def config(self, config: RoutingConfig) -> None:
        self._settings = replace(self._settings, config=config)

    @property
    def capacity(self) -> Fraction:
        """Share of tokens that this thread's passes keep."""
        return self.rule.capacity

    @capacity.setter
    def capacity(self, capacity: Fraction) -> None:
        self._settings = replace(self._settings, capacity=capacity)

    @property
    def always_keeps(self) -> bool:
        """Whether some token runs at any capacity."""
        return self.prefix > 0

    def extra_repr(self) -> str:
        """Describe the router in a printed model."""
        return f"router={self.config.router.name!r}, select={self.config.select!r}, capacity={float(self.capacity)}"

    def forward(
        self,
        x_BND: Tensor,
        importance_BN: Tensor | None = None,
        tokens: TokenMasks | TokenGroups | None = None,
        earlier: Routing | None = None,
    ) -> Routing:
        """Decide for a batch of tokens.

        Args:
            x_BND: The tokens to score, the block's input or a norm of it (B, N, D).
            importance_BN: Importance in the preceding dense block (B, N), required by "attention"; or the scores that
                the first block of a span computed for all its blocks.
            tokens: `TokenMasks`, `TokenGroups` in a language model, or None for images without padding.
            earlier: The previous decision, if the router selects among the tokens that it keeps; `x_BND` are then its
                rows (B, K, D). Tokens merged into a token that is now dropped move with it.

        Raises:
            TypeError: `tokens` of a class that this router does not support.
            ValueError: Importance is missing or of a wrong shape, or the capacity keeps no token, or more than before.
        """
        # As `rule`, in a call less.
        rule = self._override.value or self._settings
        config = rule.config
        joiner = self.joiner
        unit_BNE = None
        if joiner is not None:
            unit_BNE = joiner.unit_rows(x_BND, config)
        gate = config.gate
        if earlier is not None:
            masks = TokenMasks(earlier.tokens.valid_BN)
            importance_BN = earlier.importance_BN
            score_BN = self._score_kept(x_BND, earlier, unit_BNE)
        else:
            # By its exact type: `isinstance` is one more call in every block.
            masks = tokens if type(tokens) is TokenMasks else self._masks_of(tokens)
            score_BN = self._score(x_BND, config.router, importance_BN, masks.valid_BN, unit_BNE)
        if not self.prefix:
            # Nothing is always kept, whatever the host marks.
            masks = TokenMasks(masks.valid_BN)
        if config.select == "topk":
            # In every block, so the choice among kernels is skipped where there is none.
            select = select_topk if backend.forced or not score_BN.is_cpu else sort_topk
            kept, gate_BK = select(
                score_BN,
                rule.capacity,
                self.prefix,
                masks.valid_BN,
                masks.protect_BN,
                gate=gate.name,
                scale=gate.scale,
                ordered=joiner is not None,
            )
        else:
            assert isinstance(config.select, Threshold)
            among = masks
            if earlier is not None:
                # What joined another token before competes no more.
                among = TokenMasks(earlier.keep_BN)
            kept, gate_BK = self._select_by_threshold(score_BN, among, config.select)
        skipped_BN = None
        if config.skipped == "scale":
            skipped_BN = apply_gate(score_BN, gate.name, gate.scale)
        if self.shares_own_score:
            importance_BN = None
        routing = Routing(kept, score_BN, gate_BK, skipped_BN, tokens=masks, importance_BN=importance_BN, rule=rule)
        if joiner is None:
            return routing
        return joiner.join(routing, x_BND, rule, earlier, unit_BNE)

    def _masks_of(self, tokens: TokenMasks | TokenGroups | None) -> TokenMasks:
        if tokens is not None:
            self._refuse_tokens(tokens, TokenMasks)
        return TokenMasks()

    def _refuse_tokens(self, tokens: object, expected: type) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} needs {expected.__name__}, got {type(tokens).__name__}: run the whole model, not "
            "a block of it"
        )

    def _select_by_threshold(
        self, score_BN: Tensor, tokens: TokenMasks, select: Threshold
    ) -> tuple[Kept, Tensor | None]:
        """Return the tokens, or the images, whose normalised score reaches a threshold, and their gates (B, K)."""
        config = self.config
        gate = config.gate
        if gate.name == "step" and self.training:
            return self._run_all(score_BN, select.single, tokens)
        gate_BK = None
        # Where images cannot be counted, each has slots for its tokens, which all have the score of the image.
        if config.router.per_image and not cannot_count():
            level_B = config.router.normalised(score_BN.detach(), tokens.valid_BN)[:, 0]
            kept = select_images(level_B, select.single, score_BN.shape[1])
            assert kept.image_S is not None
            if kept.index_BK.shape[1]:
                gate_BK = apply_gate(score_BN, gate.name, gate.scale)
                if not kept.image_S.shape[0]:
                    # Hosts take no empty batch: one image runs at weight 0, which gives all parameters a gradient.
                    kept = kept._replace(image_S=kept.image_S.new_zeros(1))
                    if gate_BK is None:
                        gate_BK = torch.zeros_like(score_BN)
                    else:
                        gate_BK = 0 * gate_BK
            return kept, gate_BK
        fewest = select.min_tokens
        if self.joiner is not None:
            fewest = max(fewest, self.joiner.fewest(score_BN.shape[1]))
        kept = select_threshold(
            config.router.normalised(score_BN.detach(), tokens.valid_BN),
            select.single,
            prefix=self.prefix,
            min_tokens=fewest,
            max_tokens=select.max_tokens,
            valid_BN=tokens.valid_BN,
            protect_BN=tokens.protect_BN,
            ordered=self.joiner is not None,
        )
        if gate.name != "identity":
            gate_BK = apply_gate(score_BN.gather(1, kept.index_BK), gate.name, gate.scale)
        return kept, gate_BK

    def _score_kept(self, rows_BKD: Tensor, earlier: Routing, unit_BNE: Tensor | None) -> Tensor:
        """Return scores (B, N) from the rows that an earlier decision keeps, -inf at all other tokens."""
        config = self.rule.config
        tokens = earlier.score_BN.shape[1]
        rows = earlier.kept.index_BK.shape[1]
        if config.select == "topk" and kept_count(tokens, self.capacity, self.prefix) > rows:
            raise ValueError(
                f"skipped={spelled(config.skipped)!r} lets capacity fall from block to block and not rise: {rows} "
                f"of {tokens} tokens are left for a capacity of {float(self.capacity)}"
            )
        spread_BND = None
        if self.joiner is not None:
            # A score of groups reads all tokens, each with the state of the row that it joined.
            spread_BND = self.joiner.spread(rows_BKD, earlier)
        if spread_BND is None and self.shares_own_score:
            score_BK = self._score(rows_BKD, config.router, None, earlier.kept.valid_BK, unit_BNE)
            score_BK = _above_dropped(score_BK)
            if earlier.kept.valid_BK is not None:
                score_BK = score_BK.masked_fill(~earlier.kept.valid_BK, -torch.inf)
            return torch.full_like(earlier.score_BN, -torch.inf).scatter(1, earlier.kept.index_BK, score_BK)
        score_BN = earlier.score_BN
        if spread_BND is not None:
            score_BN = self._score(spread_BND, config.router, None, None)
        return _above_dropped(score_BN).masked_fill(~earlier.keep_BN, -torch.inf)

    def _run_all(self, score_BN: Tensor, threshold: float, tokens: TokenMasks) -> tuple[Kept, Tensor]:
        """Run all tokens, skipped ones at weight 0, so that the score learns from them too."""
        gate_BN = step_gate(self.config.router.normalised(score_BN, tokens.valid_BN), threshold)
        if self.prefix:
            gate_BN = torch.where(tokens.protected(score_BN, self.prefix), 1.0, gate_BN)
        index_BN = torch.arange(score_BN.shape[1], device=score_BN.device).expand(score_BN.shape[0], -1)
        return Kept(index_BN, tokens.valid_BN, idle_BK=gate_BN == 0), gate_BN

    def _score(
        self,
        x_BND: Tensor,
        score: Score,
        importance_BN: Tensor | None,
        valid_BN: Tensor | None,
        unit_BNE: Tensor | None = None,
    ) -> Tensor:
        """Return raw scores (B, N).

        Args:
            valid_BN: False where a token does not count, as at padding (B, N); None if all do.
            unit_BNE: The rows at norm 1, which a score that compares tokens takes.
        """
        if importance_BN is not None and importance_BN.shape != x_BND.shape[:2]:
            raise ValueError(
                f"importance has shape {tuple(importance_BN.shape)}, but the block's input has "
                f"{tuple(x_BND.shape[:2])} (images, tokens): the sequence changed between the two blocks"
            )
        # Importance of the dense block in front is the score as it stands; so is a score that a block before computed.
        if score.shared and importance_BN is not None:
            return importance_BN
        scorer = self.score
        if scorer is None or (score.reads_importance and importance_BN is None):
            raise ValueError(
                f"router {score.name!r} needs the scores or the importance of a block before this one: run the whole "
                "model, and route again where that block was cut out"
            )
        options: dict[str, Tensor] = {}
        # Scores that compare no tokens do not take them.
        if unit_BNE is not None:
            options["unit_BNE"] = unit_BNE
        if score.reads_importance:
            return scorer(x_BND, valid_BN, importance_BN, **options)
        return scorer(x_BND, valid_BN, **options)


def _above_dropped(score: Tensor) -> Tensor:
    """Return scores in the same order, all above the -inf of tokens that an earlier block dropped."""
    # NaN sorts last, so a token without a score would lose to those, and they must stay dropped.
    lowest = torch.finfo(score.dtype).min
    return score.nan_to_num(nan=lowest, posinf=torch.inf, neginf=lowest / 2)
