"""All hostile inputs, by group."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.hostile import Case, configs, samples, weights

GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "configs": configs.config_cases,
    "command lines": configs.option_cases,
    "weights": weights.weight_cases,
    "saved models": weights.saved_model_cases,
    "plans": configs.plan_cases,
    "audits": weights.audit_cases,
    "notes": configs.note_cases,
    "images": samples.image_cases,
    "shards": samples.shard_cases,
    "captions and classes": samples.label_cases,
    "conversations": samples.conversation_cases,
    "tables": configs.table_cases,
}
"""Every case, by group."""
