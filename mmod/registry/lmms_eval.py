"""Routed vision-language models in lmms-eval: its entry point for models of other packages.

    lmms_eval --model llava_hf --model_args pretrained=FOLDER --tasks mme

judges a routed folder as it judges a dense one: before lmms-eval loads any model it calls the entry point, which lets
every `from_pretrained` of transformers load routed folders. No class of its own is needed.
"""

from __future__ import annotations

from typing import Any

from mmod.registry.transformers import open_routed_folders


def manifests() -> list[Any]:
    """Let lmms-eval's own models take routed folders, and return no further ones."""
    open_routed_folders()
    return []
