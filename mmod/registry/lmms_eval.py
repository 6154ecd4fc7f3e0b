"""Routed vision-language models in lmms-eval: its entry point for models of other packages.

    lmms_eval --model llava_hf --model_args pretrained=FOLDER --tasks mme

judges a routed folder as it judges a dense one, since importing mmod lets every `from_pretrained` of transformers load
one. lmms-eval imports this module for its entry point, before it loads any model; no class of its own is needed.
"""

from __future__ import annotations

from typing import Any

import mmod  # noqa: F401  # what lets transformers load routed folders

__all__ = ["manifests"]


def manifests() -> list[Any]:
    """Return no model beside lmms-eval's own, each of which takes routed folders once this module is imported."""
    return []
