"""Mixtures of experts that tests of several files try: in blocks of images, and in decoders."""

from __future__ import annotations

from typing import Any

import mmod

WAYS: list[dict[str, Any]] = [
    {"choice": "topk"},
    {"choice": "tokens"},
    {"choice": "topk", "idle": 2, "capacity": 0.6},
    {"choice": "tokens", "idle": 1, "capacity": 0.5, "normalize": True},
    {"choice": "topk", "capacity": 2.5, "normalize": True},
    {"choice": "tokens", "idle": 1, "capacity": None},
]
DECODER_WAYS: list[dict[str, Any]] = [
    {"choice": "tokens", "capacity": None, "idle": 2},
    {"choice": "tokens", "capacity": None, "normalize": True},
    {"choice": "score", "capacity": 0.75, "idle": 1},
    {"choice": "predictor", "capacity": 1.5, "normalize": True},
]
# A routing that decides each token alone, so that experts in decoders may be staged behind it.
STAGED = mmod.RoutingConfig(
    router="linear",
    capacity=0.5,
    gate="sigmoid",
    language={"inference_threshold": 0.5, "predictor": True},
    losses={"membership": 0.1},
)
