"""Rotary embeddings of tokens whose positions are counted among the kept ones.

Axes: B samples, K slots per sample, E channels of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Frequencies of other kinds change with the length of the sequence.
_FIXED = ("default", "linear", "llama3", "yarn")


class CompactRotary:
    """Rotary embeddings by position, computed once for all layers and steps.

    Args:
        rotary: The language model's own module.
    """

    def __init__(self, rotary: nn.Module) -> None:
        self.rotary = rotary
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, ...]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave what was computed out of copies and pickles."""
        return {"rotary": self.rotary, "_tables": {}}

    def __call__(self, x_BND: Tensor, before_B1: Tensor | int, slots: int, seen: Tensor | int) -> tuple[Tensor, ...]:
        """Return cosine and sine (1 or B, K, E) of the positions that follow some kept tokens.

        Args:
            x_BND: Tokens, whose device and type they have.
            before_B1: Kept tokens before them, of each sample or of all.
            slots: The number of positions K.
            seen: Tokens before them, kept or not.
        """
        counted = isinstance(seen, int) and getattr(self.rotary, "rope_type", None) in _FIXED
        if counted and isinstance(before_B1, int) and not torch.compiler.is_compiling():
            return tuple(each[:, before_B1 : before_B1 + slots] for each in self._table(x_BND, before_B1 + slots))
        place_BK = before_B1 + torch.arange(slots, device=x_BND.device).expand(len(x_BND), -1)
        if counted and not torch.compiler.is_compiling():
            return tuple(each[0, place_BK] for each in self._table(x_BND, int(seen) + slots))
        return self._computed(x_BND, place_BK)

    def _computed(self, like: Tensor, place_BK: Tensor) -> tuple[Tensor, ...]:
        # Of a model on several devices, the module may lie on another one than the layer that asks.
        return tuple(each.to(like.device) for each in self.rotary(like, place_BK))

    def _table(self, like: Tensor, length: int) -> tuple[Tensor, ...]:
        """Return the embeddings of at least the first positions (1, length, E)."""
        key = like.device, like.dtype
        table = self._tables.get(key)
        if table is None or table[0].shape[1] < length:
            # As a constant: tensors of inference could not be used in training.
            with torch.inference_mode(False), torch.no_grad():
                places = torch.arange(1 << (max(length, 1024) - 1).bit_length(), device=like.device).unsqueeze(0)
                table = self._computed(torch.empty(0, device=like.device, dtype=like.dtype), places)
            # Another thread may put a shorter one there: this call returns its own.
            self._tables[key] = table
        return table
