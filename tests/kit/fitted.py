"""Candidates that are fitted to FLOPs once for all tests of a process: the same models have the same ones."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from mmod.planning import budgets, trials, untrained

_KNOWN: dict[str, tuple[list[Any], dict[str, str]]] = {}


def fit_roughly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let candidates have the first guess of their fit: tests ask which ones there are, not how near a budget."""
    monkeypatch.setattr(budgets, "_TOLERANCE", 3.0)


def fit_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `advise` fit the candidates of equal models once, and roughly."""
    fit_roughly(monkeypatch)

    def fitted(
        model: nn.Module, part: str, depth: int, image: Tensor, patch: Any, faster: float | None
    ) -> tuple[list[Any], dict[str, str]]:
        key = f"{model} {getattr(model, 'dynamic_img_size', None)} {part} {tuple(image.shape)} {faster}"
        if key not in _KNOWN:
            _KNOWN[key] = untrained.image_candidates(model, part, depth, image, patch, faster)
        candidates, refused = _KNOWN[key]
        return list(candidates), dict(refused)

    monkeypatch.setattr(trials, "image_candidates", fitted)
