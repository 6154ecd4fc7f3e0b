"""Rotary embeddings of compact positions, which count kept tokens only.

Axes: B samples, K slots per sample, E channels of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Frequencies of other rope types change with the length of the sequence.
_FIXED = ("default", "linear", "llama3", "yarn")


class CompactRotary:
    """Rotary embeddings of a language model by compact position, computed once for all layers and steps."""

    def __init__(self, rotary: nn.Module) -> None:
        self.rotary = rotary
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, ...]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave the tables out of copies and pickles."""
        return {"rotary": self.rotary, "_tables": {}}

    def __call__(self, x_BND: Tensor, before_B1: Tensor | int, slots: int, past: Tensor | int) -> tuple[Tensor, ...]:
        """Return cosine and sine (1 or B, K, E) of the next compact positions."""
        fixed = isinstance(past, int) and getattr(self.rotary, "rope_type", None) in _FIXED
        if fixed and isinstance(before_B1, int) and not torch.compiler.is_compiling():
            return tuple(table[:, before_B1 : before_B1 + slots] for table in self._table(x_BND, before_B1 + slots))
        place_BK = before_B1 + torch.arange(slots, device=x_BND.device).expand(len(x_BND), -1)
        if fixed and not torch.compiler.is_compiling():
            return tuple(table[0, place_BK] for table in self._table(x_BND, int(past) + slots))
        return self._computed(x_BND, place_BK)

    def _computed(self, like: Tensor, place_BK: Tensor) -> tuple[Tensor, ...]:
        # In a model on several devices, the module may be on another device than the layer.
        return tuple(value.to(like.device) for value in self.rotary(like, place_BK))

    def _table(self, like: Tensor, length: int) -> tuple[Tensor, ...]:
        """Return the embeddings of at least the first positions (1, length, E)."""
        key = like.device, like.dtype
        table = self._tables.get(key)
        if table is None or table[0].shape[1] < length:
            # Not as inference tensors, which could not be used in training.
            with torch.inference_mode(False), torch.no_grad():
                places = torch.arange(1 << (max(length, 1024) - 1).bit_length(), device=like.device).unsqueeze(0)
                table = self._computed(torch.empty(0, device=like.device, dtype=like.dtype), places)
            # Another thread may store a shorter table, so this call returns the local one.
            self._tables[key] = table
        return table
