"""Capture of importance from a host's attention calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmod.ops.casting import cast_alike
from mmod.ops.importance import attention_with_importance, class_token_importance, importance_of_map
from mmod.ops.intercept import AttentionCall, AttentionIntercept
from mmod.ops.views import views_of_scores

_SOFTMAX = (torch.softmax, torch.Tensor.softmax, F.softmax)


class capture_importance(AttentionIntercept):
    """Context manager that computes importance in the attention calls made inside it.

    Hosts that write attention out instead of calling `scaled_dot_product_attention` are read at their softmax.

    Args:
        valid_BN: False where a token is padding (B, N), or None.
        average: Which queries count: see `RoutingConfig.importance`.

    Attributes:
        importance_BN: Mean importance over the attention calls seen (B, N); None as long as there was none.

    Example:
        >>> q = k = v = torch.zeros(1, 1, 2, 8)
        >>> with capture_importance() as captured:
        ...     _ = F.scaled_dot_product_attention(q, k, v)
        >>> captured.importance_BN
        tensor([[0.5000, 0.5000]])
    """

    def __init__(self, valid_BN: Tensor | None = None, average: str = "mean") -> None:
        super().__init__()
        self.valid_BN = valid_BN
        self.average = average
        self.calls = 0
        self.importance_BN: Tensor | None = None

    def observe(self, func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
        """Read attention that a host writes out at its softmax."""
        if func in _SOFTMAX and result.ndim == 4 and result.shape[-1] == result.shape[-2]:
            self._add(self._of_map(args[0], result))

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend, and take importance on the way."""
        if self.average == "class_token":
            q, k, v = cast_alike(call.query, call.key, call.value)
            self._add(class_token_importance(q, k, call.attn_mask, scale=call.scale))
            return call._replace(query=q, key=k, value=v).run()
        out, importance_BN = attention_with_importance(
            call.query, call.key, call.value, call.attn_mask, dropout=call.dropout_p, is_causal=call.is_causal,
            scale=call.scale, valid_BN=self.valid_BN, per_viewer=self.average == "per_viewer",
        )  # fmt: skip
        self._add(importance_BN)
        return out

    def _of_map(self, score: Tensor, attention: Tensor) -> Tensor:
        if self.average == "class_token":
            return importance_of_map(attention[:, :, :1])
        views = views_of_scores(score, self.valid_BN) if self.average == "per_viewer" else None
        return importance_of_map(attention, self.valid_BN, views)

    def _add(self, importance_BN: Tensor) -> None:
        self.calls += 1
        if self.importance_BN is None:
            self.importance_BN = importance_BN
        else:
            self.importance_BN = self.importance_BN + (importance_BN - self.importance_BN) / self.calls
