"""Read a host's attention where it happens, without copying the host's forward.

While a `capture_importance` block is open, calls of `scaled_dot_product_attention` also yield importance. Hosts that
write attention out are read at their softmax. The mechanism is torch's own function mode: it is traced by compile and
export like any other code and leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mmod.ops.importance import attention_with_importance, importance_of_map

_SOFTMAX = (torch.softmax, torch.Tensor.softmax, F.softmax)


class capture_importance(TorchFunctionMode):
    """Context manager that computes importance in the attention calls made inside it.

    Args:
        valid_BN: False where a token is padding (B, N), or None.

    Attributes:
        importance_BN: Mean importance over the attention calls seen (B, N); None as long as there was none.

    Example:
        >>> q = k = v = torch.zeros(1, 1, 2, 8)
        >>> with capture_importance() as captured:
        ...     _ = F.scaled_dot_product_attention(q, k, v)
        >>> captured.importance_BN
        tensor([[0.5000, 0.5000]])
    """

    def __init__(self, valid_BN: Tensor | None = None) -> None:
        super().__init__()
        self.valid_BN = valid_BN
        self.calls = 0
        self.importance_BN: Tensor | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Add importance to attention and pass every other call through."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in _SOFTMAX and result.ndim == 4 and result.shape[-1] == result.shape[-2]:
            self._add(importance_of_map(result, self.valid_BN))
        return result

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        out, importance_BN = attention_with_importance(
            query, key, value, attn_mask, dropout=dropout_p, is_causal=is_causal, scale=scale, valid_BN=self.valid_BN
        )
        self._add(importance_BN)
        return out

    def _add(self, importance_BN: Tensor) -> None:
        self.calls += 1
        if self.importance_BN is None:
            self.importance_BN = importance_BN
        else:
            self.importance_BN = self.importance_BN + (importance_BN - self.importance_BN) / self.calls
