"""The seam at a host's attention: read or replace the one call where tokens meet, and leave all others alone.

The host's forward runs as it is. The mechanism is torch's own function mode: it is traced by compile and export like
any other code and leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mmod.ops.multihead import multihead_attention


class AttentionSeam(TorchFunctionMode):
    """Context manager that hands every call of `scaled_dot_product_attention` inside it to `attend`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Divert attention and pass every other call through."""
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            return multihead_attention(self._divert, *args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        self.watch(func, result)
        return result

    def _divert(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.__torch_function__(func, (), args, kwargs)

    def attend(
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
        """Take the place of the call; arguments are those of `scaled_dot_product_attention`."""
        raise NotImplementedError

    def watch(self, func: Callable[..., Any], result: Any) -> None:
        """See the result of any other call."""
