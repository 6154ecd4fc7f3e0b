"""Capture of importance from a host's attention calls."""

from __future__ import annotations

import torch
from torch import Tensor

from mmod.ops.casting import cast_alike
from mmod.ops.importance import attention_with_importance, class_token_importance, importance_of_map
from mmod.ops.intercept import AttentionCall, AttentionIntercept
from mmod.ops.views import count_views


class capture_importance(AttentionIntercept):
    """Context manager that computes importance in the attention calls made inside it.

    Where a host writes attention out instead of calling `scaled_dot_product_attention`, its softmax is read.

    Args:
        valid_BN: False where a token is padding (B, N), or None.
        average: Which queries count: see `mmod.config.WithImportance`.

    Attributes:
        importance_BN: Mean importance over the attention calls so far (B, N); None before the first.

    Example:
        >>> q = k = v = torch.zeros(1, 1, 2, 8)
        >>> with capture_importance() as captured:
        ...     _ = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> captured.importance_BN
        tensor([[0.5000, 0.5000]])
    """

    def __init__(self, valid_BN: Tensor | None = None, average: str = "mean") -> None:
        super().__init__()
        self.valid_BN = valid_BN
        self.average = average
        self.calls = 0
        self.importance_BN: Tensor | None = None

    def observe(self, score: Tensor, attention: Tensor) -> None:
        """Read a square map from a host's softmax."""
        # Other softmaxes of a block, such as that of a gate, are no map of its tokens.
        if attention.shape[-1] == attention.shape[-2]:
            self._add(self._of_map(score, attention))

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend, and capture importance."""
        if self.average in ("class_token", "last_token"):
            q, k, v = cast_alike(call.query, call.key, call.value)
            query = q
            mask = call.attn_mask
            if self.average == "last_token":
                query, mask = self._last_query(q, mask)
            # It reads the first of the queries: the class token's, or the only one.
            self._add(class_token_importance(query, k, mask, scale=call.scale))
            return call._replace(query=q, key=k, value=v).run()
        # One op for both, because they share the product of queries and keys.
        out, importance_BN = attention_with_importance(
            call.query,
            call.key,
            call.value,
            call.attn_mask,
            dropout=call.dropout_p,
            is_causal=call.is_causal,
            scale=call.scale,
            valid_BN=self.valid_BN,
            per_viewer=self.average == "per_viewer",
        )
        self._add(importance_BN)
        return out

    def _of_map(self, score: Tensor, attention: Tensor) -> Tensor:
        if self.average == "class_token":
            return importance_of_map(attention[:, :, :1])
        if self.average == "last_token":
            return importance_of_map(_row(attention, self._last_place(attention)))
        views = None
        if self.average == "per_viewer":
            views = count_views(score, False, score.shape[-2], self.valid_BN, score.device)
        return importance_of_map(attention, self.valid_BN, views)

    def _last_place(self, rows: Tensor) -> Tensor:
        """Return the index of each sample's last real token (B), from rows (B, H, N, E)."""
        tokens_N = torch.arange(rows.shape[-2], device=rows.device)
        if self.valid_BN is None:
            return tokens_N[-1:].expand(len(rows))
        return (tokens_N * self.valid_BN).amax(dim=1)

    def _last_query(self, q_BHNE: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the query of each sample's last real token, and its mask over keys (B, 1 or H, 1, N)."""
        tokens = q_BHNE.shape[2]
        place_B = self._last_place(q_BHNE)
        visible_BN = torch.arange(tokens, device=q_BHNE.device) <= place_B.unsqueeze(1)
        if self.valid_BN is not None:
            visible_BN = visible_BN & self.valid_BN
        visible = visible_BN[:, None, None]
        if mask is not None:
            row = _row(mask.expand(q_BHNE.shape[0], -1, tokens, -1), place_B)
            visible = visible & row if row.dtype == torch.bool else row.masked_fill(~visible, -torch.inf)
        return _row(q_BHNE, place_B), visible

    def _add(self, importance_BN: Tensor) -> None:
        # A running mean: a block may attend several times.
        self.calls += 1
        if self.importance_BN is None:
            self.importance_BN = importance_BN
        else:
            self.importance_BN = self.importance_BN + (importance_BN - self.importance_BN) / self.calls


def _row(values: Tensor, place_B: Tensor) -> Tensor:
    """Return one row of each sample (B, H, 1, E) of values (B, H, N, E)."""
    index = place_B.view(-1, 1, 1, 1).expand(-1, values.shape[1], 1, values.shape[3])
    return values.gather(2, index)
