"""What is read from a host's attention calls, or added to them: importance, queries and keys, a bias of keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from mmod.ops.casting import cast_alike
from mmod.ops.importance import (
    attention_with_importance,
    class_token_importance,
    importance_of_map,
)
from mmod.ops.intercept import AttentionCall, AttentionIntercept, unseen_attention
from mmod.ops.views import count_views, mask_bias

_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.einsum)


class capture_importance(AttentionIntercept):
    """Context manager that computes importance in the attention calls made inside it.

    Where a host writes attention out instead of calling `scaled_dot_product_attention`, its softmax is read.

    Args:
        valid_BN: False where a token's query does not count, as at padding (B, N), or None.
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
        self.importance_BN: Tensor | None = None

    def read(self) -> Tensor:
        """Return the importance (B, N).

        Raises:
            RuntimeError: No attention was seen.
        """
        if self.importance_BN is None:
            raise unseen_attention("importance cannot be read from it")
        return self.importance_BN

    def observe(self, score: Tensor, attention: Tensor) -> None:
        """Read a square map from a host's softmax."""
        # Other softmaxes of a block, such as that of a gate, are no map of its tokens.
        if attention.shape[-1] == attention.shape[-2]:
            self._add(self._of_map(score, attention))

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend, and capture importance."""
        # One row is all that is read, and costs less than the map that others need.
        if self.average in ("class_token", "last_token"):
            q, k, v = cast_alike(call.query, call.key, call.value)
            query = q
            mask = call.attn_mask
            if self.average == "last_token":
                query, mask = self._last_query(q, mask)
            # It reads the first of the queries: the class token's, or the only one.
            with torch.no_grad():
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
            return importance_of_map(_row(attention, self._last_position(attention)))
        views = None
        if self.average == "per_viewer":
            views = count_views(score, False, score.shape[-2], self.valid_BN, score.device)
        return importance_of_map(attention, self.valid_BN, views)

    def _last_position(self, rows: Tensor) -> Tensor:
        """Return the index of each sample's last real token (B), from rows (B, H, N, E)."""
        tokens_N = torch.arange(rows.shape[-2], device=rows.device)
        if self.valid_BN is None:
            return tokens_N[-1:].expand(len(rows))
        # Positions that are not real count as 0, and the largest of the others is the last real one.
        return (tokens_N * self.valid_BN).amax(dim=1)

    def _last_query(self, q_BHNE: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the query of each sample's last real token, and its mask over keys (B, 1 or H, 1, N)."""
        tokens = q_BHNE.shape[2]
        position_B = self._last_position(q_BHNE)
        # A causal model's last real token sees itself and all before it.
        visible_BN = torch.arange(tokens, device=q_BHNE.device) <= position_B.unsqueeze(1)
        if self.valid_BN is not None:
            visible_BN = visible_BN & self.valid_BN
        visible = visible_BN[:, None, None]
        if mask is not None:
            row = _row(mask.expand(q_BHNE.shape[0], -1, tokens, -1), position_B)
            if row.dtype == torch.bool:
                visible = visible & row
            else:
                visible = row.masked_fill(~visible, -torch.inf)
        return _row(q_BHNE, position_B), visible

    def _add(self, importance_BN: Tensor) -> None:
        # A running mean: a block may attend several times.
        self.calls += 1
        if self.importance_BN is None:
            self.importance_BN = importance_BN
        else:
            self.importance_BN = self.importance_BN + (importance_BN - self.importance_BN) / self.calls


def _row(values: Tensor, position_B: Tensor) -> Tensor:
    """Return one row of each sample (B, H, 1, E) of values (B, H, N, E)."""
    index = position_B.view(-1, 1, 1, 1).expand(-1, values.shape[1], 1, values.shape[3])
    return values.gather(2, index)


class capture_inputs(AttentionIntercept):
    """Context manager that keeps what the last attention inside it reads: its keys, and the class token's attention.

    Where a host writes attention out, they are read from the product of queries and keys and from its softmax.

    Attributes:
        key: Keys of every head (B, H, N, E), after norms and rotary embeddings; None before an attention.

    Example:
        >>> q = k = v = torch.zeros(1, 1, 2, 8)
        >>> with capture_inputs() as captured:
        ...     _ = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        >>> captured.read_keys() is k, captured.read()
        (True, tensor([[0.5000, 0.5000]]))
    """

    def __init__(self) -> None:
        super().__init__()
        self.key: Tensor | None = None
        self._last: AttentionCall | None = None
        self._row: Tensor | None = None

    def read_keys(self) -> Tensor:
        """Return the keys.

        Raises:
            RuntimeError: No attention was seen.
        """
        if self.key is None:
            raise unseen_attention("tokens cannot be matched by its keys")
        return self.key

    def read(self) -> Tensor:
        """Return the attention of the first token to all tokens (B, N), averaged over heads, with its gradient."""
        if self._last is not None:
            call = self._last
            return class_token_importance(call.query, call.key, call.attn_mask, scale=call.scale)
        if self._row is None:
            raise unseen_attention("tokens cannot be ranked by it")
        return self._row

    def replace(self, func: Callable[..., object]) -> Callable[..., object] | None:
        """Read products of queries and keys too."""
        if func in _PRODUCTS:
            return partial(self._multiply, func)
        return super().replace(func)

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend, and keep what attention reads."""
        self._last = call
        # Grouped keys are repeated, since callers compare them head by head.
        self.key = call.key
        if call.key.shape[1] != call.query.shape[1]:
            self.key = call.key.repeat_interleave(call.query.shape[1] // call.key.shape[1], dim=1)
        return call.run()

    def observe(self, score: Tensor, attention: Tensor) -> None:
        """Keep the class token's row of a map."""
        self._row = attention[:, :, 0].mean(dim=1)

    def _multiply(self, func: Callable[..., Tensor], *args: object, **kwargs: object) -> object:
        """Keep the keys of a product (B, H, N, N) of queries (B, H, N, E) and keys, transposed except in `einsum`."""
        result = func(*args, **kwargs)
        # The equation of `einsum` is a string, and is left out.
        query, *others = [value for value in args if isinstance(value, Tensor)]
        if result.ndim == 4 and others and query.shape[2] == result.shape[2] == result.shape[3]:
            self.key = others[0]
            if func is not torch.einsum:
                self.key = self.key.transpose(-2, -1)
        return result


def add_key_bias(bias: Tensor) -> AttentionIntercept:
    """Return a context manager that adds a bias of keys in every attention inside it, also in a host's own softmax.

    Args:
        bias: Bias (B, 1 or H, 1 or N, N) of logits.

    Example:
        >>> q = k = torch.zeros(1, 1, 2, 8)
        >>> v = torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
        >>> with add_key_bias(torch.tensor([0.0, -torch.inf]).view(1, 1, 1, 2)):
        ...     torch.nn.functional.scaled_dot_product_attention(q, k, v).flatten()
        tensor([1., 1.])
    """
    unseen = "tokens cannot be hidden from its attention or weighed in it"
    return AttentionIntercept(partial(_attend_with_bias, bias), partial(_biased_score, bias), unseen=unseen)


def _attend_with_bias(bias: Tensor, call: AttentionCall) -> Tensor:
    mask = call.attn_mask
    # Fused attention takes a bias in the dtype of the queries alone.
    bias = bias.to(call.query.dtype)
    if mask is None:
        return call._replace(attn_mask=bias).run()
    if mask.dtype == torch.bool:
        # Half the lowest number, so that adding the bias to it does not overflow to minus infinity.
        mask = mask_bias(mask, torch.finfo(bias.dtype).min / 2, bias.dtype)
    return call._replace(attn_mask=mask + bias).run()


def _biased_score(bias: Tensor, score: Tensor) -> Tensor | None:
    # A softmax over other lengths, such as one over experts, is not the attention over these keys.
    if score.shape[-1] != bias.shape[-1]:
        return None
    return score + bias.to(score.dtype)
