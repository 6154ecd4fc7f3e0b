"""Routed folders in lmms-eval: it calls this entry point before it loads any model.

lmms_eval --model llava_hf --model_args pretrained=FOLDER --tasks mme
"""

from __future__ import annotations

from mmod.registry.transformers import open_routed_folders


def manifests() -> list[object]:
    """Let lmms-eval's models take routed folders, and return no further ones."""
    open_routed_folders()
    return []
