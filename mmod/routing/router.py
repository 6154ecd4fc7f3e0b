"""The router of one block: score, select and gate, and the decision they return.

Axes: B images, N tokens, K kept slots per image, D channels.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from mmod.config import Merged, Placement, RoutingConfig, Threshold, rational, spelled
from mmod.ops import first_rows, nearest_rows, size_groups, unit_rows
from mmod.ops.gate import apply_gate, step_gate
from mmod.ops.select import kept_count, select_images, select_threshold, select_topk
from mmod.routing.decision import Evidence, Joined, Kept, Routing, TokenGroups, TokenMarks, Weights
from mmod.routing.grouping import Comparing, Grouping
from mmod.routing.rule import PerThread, Rule


class Router(nn.Module):
    """Decide which tokens of a block run: score, then select, then gate.

    Args:
        block: Index of the block in its model.
        capacity: Share of tokens kept.
        prefix: Number of tokens that are always kept: the leading ones, unless a call marks others.
        dtype: Dtype of the parameters; scores are fp32.
        grid: See `mmod.config.Placement`.

    Example:
        >>> router = Router(RoutingConfig(router="linear"), dim=8, block=1, capacity=0.5, prefix=1)
        >>> routing = router(torch.randn(2, 10, 8))
        >>> routing.kept.index_BK.shape, bool((routing.kept.index_BK[:, 0] == 0).all())
        (torch.Size([2, 5]), True)
    """

    chooses_among: type[TokenMarks] | type[TokenGroups] = TokenMarks

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
        grid: Callable[[], tuple[int, int] | None] | None = None,
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self._settings = Rule(config, rational(capacity))
        self._override: PerThread[Rule | None] = PerThread(type(None))
        place = Placement(dim, block, config.gate, prefix, device, dtype, grid)
        self.score: nn.Module | None = config.router.make(place)

    @property
    def rule(self) -> Rule:
        """The rule of this thread's passes: set by `override`, or else the router's settings."""
        return self._override.value or self._settings

    def override(self, rule: Rule | None) -> Rule | None:
        """Set the rule of this thread's passes, None for the router's settings; return the previous override."""
        previous, self._override.value = self._override.value, rule
        return previous

    @property
    def config(self) -> RoutingConfig:
        """How this thread's passes score, select and gate."""
        return self.rule.config

    @config.setter
    def config(self, config: RoutingConfig) -> None:
        self._settings = self._settings._replace(config=config)

    @property
    def capacity(self) -> Fraction:
        """Share of tokens that this thread's passes keep."""
        return self.rule.capacity

    @capacity.setter
    def capacity(self, capacity: Fraction) -> None:
        self._settings = self._settings._replace(capacity=capacity)

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
        tokens: TokenMarks | TokenGroups | None = None,
        earlier: Routing | None = None,
    ) -> Routing:
        """Decide for a batch of tokens.

        Args:
            x_BND: The tokens to score, the block's input or a norm of it (B, N, D).
            importance_BN: Importance in the preceding dense block (B, N), required by "attention"; or the scores that
                the first block of a span computed for all.
            tokens: `TokenMarks`, `TokenGroups` in a language model, or None for images without padding.
            earlier: The previous decision, if the router selects among the tokens that it keeps; `x_BND` are then its
                rows (B, K, D). Tokens merged into a token that is now dropped move with it.

        Raises:
            TypeError: `tokens` of a class that this router does not support.
            ValueError: Importance is missing or of a wrong shape, or the capacity keeps no token, or more than before.
        """
        if earlier is not None:
            return self._choose_among(x_BND, earlier)
        tokens = TokenMarks() if tokens is None else tokens
        if not isinstance(tokens, self.chooses_among):
            raise TypeError(
                f"a {type(self).__name__} needs {self.chooses_among.__name__}, got {type(tokens).__name__}: run the "
                "whole model, not a block of it"
            )
        if not self.config.joins:
            return self._select(x_BND, importance_BN, tokens)
        alike = self._alike(x_BND)
        score_BN = None if alike is None else self._score(x_BND, importance_BN, tokens, alike)
        return self.join(self._select(x_BND, importance_BN, tokens, score_BN), x_BND, alike=alike)

    def _alike(self, x_BND: Tensor) -> Tensor | None:
        """Return the rows of norm 1 that the score compares, to be compared again; None if it compares none."""
        return unit_rows(x_BND, self.config.router.channels) if isinstance(self.score, Comparing) else None

    def join(
        self, routing: Routing, rows: Tensor, earlier: Routing | None = None, alike: Tensor | None = None
    ) -> Routing:
        """Return a decision with the kept tokens that others join, from the scored rows; `earlier` as in `forward`.

        `alike` are the same rows at norm 1, if the score has computed them.
        """
        if not self.config.joins:
            return routing
        kept, marks = routing.kept, routing.evidence.tokens
        assert isinstance(marks, TokenMarks)
        everyone = kept.valid_BK is None and marks.valid_BN is None and marks.protect_BN is None
        if earlier is None:
            slot_BN = self._nearest(routing, rows, kept.index_BK, marks.valid_BN, alike)
        else:
            slot_BN = before_BN = earlier.joined.slot_BN
            assert before_BN is not None
            at_BN = before_BN if everyone else before_BN.clamp(min=0)
            next_BK = self._nearest(routing, rows, at_BN.gather(1, kept.index_BK), earlier.kept.valid_BK, alike)
            if next_BK is not None:
                slot_BN = next_BK.gather(1, at_BN)
                slot_BN = slot_BN if everyone else torch.where(before_BN >= 0, slot_BN, -1)
        if slot_BN is None:
            return routing
        size_BK, bias = None, None
        if isinstance(self.config.skipped, Merged):
            size_BK, bias = size_groups(slot_BN, kept.index_BK.shape[1], rows.dtype, all_join=everyone)
        return routing._replace(joined=Joined(slot_BN, size_BK, everyone, bias))

    def _choose_among(self, rows_BKD: Tensor, earlier: Routing) -> Routing:
        """Select among the tokens that an earlier decision keeps, from its rows."""
        tokens, rows = earlier.score_BN.shape[1], earlier.kept.index_BK.shape[1]
        if kept_count(tokens, self.capacity, self.prefix) > rows:
            raise ValueError(
                f"skipped={spelled(self.config.skipped)!r} lets capacity fall from block to block and not rise: {rows} "
                f"of {tokens} tokens are left for a capacity of {float(self.capacity)}"
            )
        if isinstance(self.score, Grouping):
            return self._choose_groups(rows_BKD, earlier)
        alike = None
        if self.config.router.draws:
            alike = self._alike(rows_BKD)
            score_BK = self._score(rows_BKD, None, TokenMarks(earlier.kept.valid_BK), alike)
            if earlier.kept.valid_BK is not None:
                score_BK = score_BK.masked_fill(~earlier.kept.valid_BK, -torch.inf)
            score_BN = torch.full_like(earlier.score_BN, -torch.inf).scatter(1, earlier.kept.index_BK, score_BK)
        else:
            score_BN = earlier.score_BN.masked_fill(~earlier.keep_BN, -torch.inf)
        marks, importance_BN = earlier.evidence.tokens, earlier.evidence.importance_BN
        routing = self._select(rows_BKD, importance_BN, TokenMarks(marks.valid_BN), score_BN)
        return self.join(routing, rows_BKD, earlier, alike)

    def _choose_groups(self, rows_BKD: Tensor, earlier: Routing) -> Routing:
        """Select among the rows of an earlier decision as if every token had the state of the row that it joined."""
        assert earlier.joined.slot_BN is not None
        x_BND = rows_BKD.gather(1, earlier.joined.slot_BN.unsqueeze(-1).expand(-1, -1, rows_BKD.shape[2]))
        score_BN = self._score(x_BND, None, TokenMarks()).masked_fill(~earlier.keep_BN, -torch.inf)
        return self.join(self._select(x_BND, None, TokenMarks(), score_BN), x_BND)

    def _nearest(
        self, routing: Routing, rows: Tensor, slot_BK: Tensor, real: Tensor | None, alike: Tensor | None
    ) -> Tensor | None:
        """Return the most similar kept row of every row; None if all are kept."""
        if slot_BK.shape[1] == rows.shape[1]:
            return None
        if slot_BK.shape[1] <= self.prefix:
            raise ValueError(
                f"skipped={spelled(self.config.skipped)!r} needs a kept token beside the {self.prefix} that are always "
                f"kept; capacity {float(self.capacity)} keeps {slot_BK.shape[1]} of {routing.score_BN.shape[1]}"
            )
        if isinstance(self.score, Grouping):
            groups = self.score.groups(rows.shape[1])
            if slot_BK.shape[1] < groups:
                raise ValueError(
                    f"router={self.config.router.name!r} keeps a token of each of {groups} groups; capacity "
                    f"{float(self.capacity)} keeps {slot_BK.shape[1]} of {rows.shape[1]}"
                )
            return first_rows(self.score.first(rows.shape[1], rows.device), slot_BK, routing.kept.valid_BK)
        alike = unit_rows(rows, self.config.router.channels) if alike is None else alike
        return nearest_rows(alike, slot_BK, self.prefix, routing.kept.valid_BK, real)

    def _select(
        self, x_BND: Tensor, importance_BN: Tensor | None, tokens: Any, score_BN: Tensor | None = None
    ) -> Routing:
        """Score tokens without scores (B, N); return the decision."""
        config, capacity, _ = self.rule
        if score_BN is None:
            score_BN = self._score(x_BND, importance_BN, tokens)
        select, gate = config.select, config.gate
        gate_BK, skipped_BN, inverse_BN, total, image_S = None, None, None, None, None
        tokens = tokens if self.prefix else TokenMarks(tokens.valid_BN)
        valid_BN, protect_BN = tokens
        if not isinstance(select, Threshold):
            index_BK, valid_BK, gate_BK, inverse_BN = select_topk(
                score_BN, capacity, self.prefix, valid_BN, protect_BN, gate=gate.name, scale=gate.scale
            )
        elif gate.name == "step" and self.training:
            return self._run_all(score_BN, select.threshold, tokens)
        elif config.router.per_image:
            level_B = config.router.squashed(score_BN.detach(), valid_BN)[:, 0]
            image_S, index_BK, valid_BK = select_images(level_B, select.threshold, score_BN.shape[1])
            if index_BK.shape[1]:
                gate_BK = apply_gate(score_BN, gate.name, gate.scale)
                if not image_S.shape[0]:
                    # Hosts take no empty batch: one image runs at weight 0, which gives all parameters a gradient.
                    image_S = image_S.new_zeros(1)
                    gate_BK = torch.zeros_like(score_BN) if gate_BK is None else 0 * gate_BK
        else:
            index_BK, valid_BK, total = select_threshold(
                config.router.squashed(score_BN.detach(), valid_BN),
                select.threshold,
                prefix=self.prefix,
                min_tokens=select.min_tokens,
                max_tokens=select.max_tokens,
                valid_BN=valid_BN,
                protect_BN=protect_BN,
            )
            if gate.name != "identity":
                gate_BK = apply_gate(score_BN.gather(1, index_BK), gate.name, gate.scale)
        if config.skipped == "scale":
            skipped_BN = apply_gate(score_BN, gate.name, gate.scale)
        evidence = Evidence(score_BN, tokens, None if config.router.draws else importance_BN)
        kept = Kept(index_BK, valid_BK, total, inverse_BN, image_S=image_S)
        return Routing(kept, evidence, Weights(gate_BK, skipped_BN))

    def _run_all(self, score_BN: Tensor, threshold: float, tokens: TokenMarks) -> Routing:
        """Run all tokens, skipped ones at weight 0, so that the score learns from them too."""
        gate_BN = step_gate(self.config.router.squashed(score_BN, tokens.valid_BN), threshold)
        if self.prefix:
            gate_BN = torch.where(tokens.protected(score_BN, self.prefix), 1.0, gate_BN)
        index_BN = torch.arange(score_BN.shape[1], device=score_BN.device).expand(score_BN.shape[0], -1)
        kept = Kept(index_BN, tokens.valid_BN, idle_BK=gate_BN == 0)
        return Routing(kept, Evidence(score_BN, tokens), Weights(gate_BN))

    def _score(self, x_BND: Tensor, importance_BN: Tensor | None, tokens: Any, alike: Tensor | None = None) -> Tensor:
        """Return raw scores (B, N)."""
        if importance_BN is not None and importance_BN.shape != x_BND.shape[:2]:
            raise ValueError(
                f"importance has shape {tuple(importance_BN.shape)}, but the block's input has "
                f"{tuple(x_BND.shape[:2])} (images, tokens): the sequence changed between the two blocks"
            )
        score = self.config.router
        if score.reads_importance and importance_BN is None:
            raise ValueError(
                f"{score.name} routing needs the importance of the preceding dense block: run the whole model"
            )
        if score.shared and importance_BN is not None:
            return importance_BN
        if self.score is None:
            raise ValueError("this block uses the score of a block before it: run the whole model")
        read = (importance_BN,) if score.reads_importance else ()
        options = {} if alike is None else {"unit_BNE": alike}
        return self.score(x_BND, tokens.valid_BN, *read, **options)
